"""Requests to the server, and the answers that are being written to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from expire_span.sampling import Sampling, draw

from .handle import Retrofit
from .streams import CHUNK, Stream
from .writing import TextWriter


@dataclass(eq=False)
class Request:
    """A prompt, how to continue it, and the function that its text is given to piece by piece."""

    prompt: list[int]
    limit: int
    sampling: Sampling
    stop: tuple[str, ...]
    deliver: Callable[[str | Exception | None], None]
    """Called by the engine's thread with pieces of text; at last with None, or with the exception that ended the request."""
    continues: bool = False
    """Whether the text goes on within the prompt's text, as a completion does; the answer of a chat begins anew."""
    cancelled: bool = False
    """Set by the caller if nobody waits for the text any more."""
    written: int = 0
    """Number of tokens drawn so far."""
    reason: str = "length"
    """Why it ended, in OpenAI's words: "stop" or "length"."""


class Answer:
    """One running request: its prompt is read in parts, then tokens are drawn one by one and their text is delivered."""

    def __init__(self, handle: Retrofit, tokenizer: Any, ends: set[int], request: Request) -> None:
        self.request, self.ends = request, ends
        self.stream = Stream(handle, slots=False)
        """The prompt's memories, until the answer joins the rows that are computed together."""
        self.generator = torch.Generator(self.stream.device).manual_seed(request.sampling.seed)
        self.row: int | None = None
        """Its row among those computed together."""
        self.token = 0
        """The token that was drawn last there."""
        self.done = False
        self._parts = list(torch.tensor([request.prompt]).split(CHUNK, dim=1))
        self._writer = TextWriter(tokenizer, request.stop, request.prompt if request.continues else ())

    @property
    def reading(self) -> bool:
        """Whether some of the prompt has not been read yet."""
        return bool(self._parts)

    def read(self) -> None:
        """Read the next part of the prompt."""
        self.stream.read(self._parts.pop(0))

    def write(self) -> bool:
        """Draw a token and read it, by a pass of its own; returns False if the answer is complete."""
        assert self.stream.logits is not None
        token = draw(self.stream.logits.float(), self.request.sampling, self.generator)
        goes_on = self.take(int(token))
        if goes_on:
            self.stream.read(token.unsqueeze(1))
        return goes_on

    def take(self, token: int) -> bool:
        """Deliver the text of a token that was drawn; returns False if the answer is complete."""
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
