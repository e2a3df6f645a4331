"""Requests to the server, and the responses that are being generated for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from expire_span.models.state import move
from expire_span.sampling import Sampling
from expire_span.stream import Prefilled
from expire_span.stream.prompts import part_size

from .detokenizer import TextWriter
from .sessions import Snapshot
from .text import TextModel
from .turns import Prompt


class Chunk(NamedTuple):
    """A part of a prompt that is read in one call, and the lifetimes of its tokens."""

    tokens: torch.Tensor
    marks: torch.Tensor | None


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
    chat: Prompt = field(default_factory=lambda: Prompt([]))
    """What is known about the prompt: lifetimes of its tokens, places of its messages, where later prompts may leave it."""
    owner: str = ""
    """Whose sessions it may go on from."""
    begun: Snapshot | None = None
    """The longest known beginning of the prompt, as far as it has been looked for."""
    cached: int = 0
    """Number of tokens of the prompt that did not have to be read."""
    session: str | None = None
    """The key of the snapshot that was taken at the end of the answer."""


class Response:
    """One running request: its prompt is read in chunks, then tokens are drawn one by one and their text is delivered."""

    def __init__(self, text: TextModel, request: Request, device: torch.device) -> None:
        self.request, self.ends = request, text.ends
        self.prompt: Prefilled | None = None
        """What has been read of the prompt, until the response joins the batch."""
        self.begun = False
        """Whether it is known where to begin to read."""
        self.read = 0
        """Number of tokens of the prompt that have been read, or need not be."""
        self.fed: list[int] = []
        """Tokens of the answer that the row has read."""
        self.generator = torch.Generator(device).manual_seed(request.sampling.seed)
        self.row: int | None = None
        """Its row of the batch."""
        self.token = 0
        """The token that was drawn last."""
        self.done = False
        self._writer = TextWriter(text.tokenizer, request.stop, request.prompt if request.continues else ())

    @property
    def waits(self) -> bool:
        """Whether its prompt has not been read to the end."""
        return self.row is None and not self.done

    def begin(self, found: Snapshot | None, device: torch.device) -> None:
        """Begin to read the prompt, after a beginning that is known."""
        self.begun = True
        if found is not None and found.read is not None:
            self.read = self.request.cached = found.length
            self.prompt = Prefilled(found.read.logits.to(device), move(found.read.state, device))

    def next_chunk(self, most: int) -> Chunk | None:
        """What to read next: one of equal parts, of at most so many tokens, of what is left up to the next point of interest;
        None at the prompt's end."""
        point = next((x for x in self.points if x > self.read), None)
        if point is None:
            return None
        part = slice(self.read, self.read + part_size(point - self.read, most))
        marks = self.request.chat.marks
        return Chunk(torch.tensor(self.request.prompt[part]), None if marks is None else torch.tensor(marks[part]))

    def reads_plainly(self, size: int, most: int) -> bool:
        """Whether its first chunk, of at most `most` tokens, has so many tokens and no marks."""
        return self.request.chat.marks is None and part_size(self.points[0], most) == size

    @property
    def is_read(self) -> bool:
        """Whether its prompt has been read to the end."""
        return self.read == len(self.request.prompt)

    @property
    def points(self) -> list[int]:
        """Numbers of tokens of the prompt after which a snapshot is taken."""
        whole = len(self.request.prompt)
        return sorted({*(x for x in self.request.chat.points if x < whole), whole})

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
