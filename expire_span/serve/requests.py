"""Requests to the server, and the responses that are being generated for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from expire_span.sampling import Sampling
from expire_span.stream import Prefilled

from .detokenizer import TextWriter
from .text import TextModel

CHUNK = 256
"""Tokens of a prompt that are read between two decode steps."""


@dataclass(eq=False)
class Request:
    """A prompt, how to continue it, and the function that its text is given to piece by piece."""

    prompt: list[int]
    limit: int
    sampling: Sampling
    stop: tuple[str, ...]
    deliver: Callable[[str | Exception | None], None]
    """Called by the scheduler's thread with pieces of text; at last with None, or with the exception that ended the request."""
    continues: bool = False
    """Whether the text goes on within the prompt's text, as a completion does; the response to a chat begins anew."""
    cancelled: bool = False
    """Set by the caller if nobody waits for the text any more."""
    written: int = 0
    """Number of tokens drawn so far."""
    reason: str = "length"
    """Why it ended, in OpenAI's words: "stop" or "length"."""


class Response:
    """One running request: its prompt is read in chunks, then tokens are drawn one by one and their text is delivered."""

    def __init__(self, text: TextModel, request: Request, device: torch.device) -> None:
        self.request, self.ends = request, text.ends
        self.prompt: Prefilled | None = None
        """What has been read of the prompt, until the response joins the batch."""
        self.chunks = list(torch.tensor(request.prompt).split(CHUNK))
        """Those that have not been read yet."""
        self.generator = torch.Generator(device).manual_seed(request.sampling.seed)
        self.row: int | None = None
        """Its row of the batch."""
        self.token = 0
        """The token that was drawn last."""
        self.done = False
        self._writer = TextWriter(text.tokenizer, request.stop, request.prompt if request.continues else ())

    def take(self, token: int) -> bool:
        """Deliver the text of a token that was drawn; returns False if the response is complete."""
        request, writer = self.request, self._writer
        if token in self.ends:
            request.reason = "stop"
            self._deliver(writer.finish())
            return False
        request.written += 1
        self._deliver(writer.add(token))
        if writer.stopped:
            request.reason = "stop"
            return False
        if request.written < request.limit:
            return True
        self._deliver(writer.finish())
        return False

    def _deliver(self, text: str) -> None:
        if text:
            self.request.deliver(text)
