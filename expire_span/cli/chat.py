"""`expire-span chat`: a conversation in the terminal without a limit on the context."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from expire_span.checks import Count
from expire_span.errors import UserError

from .parsing import PROGRAM, parse

if TYPE_CHECKING:
    from expire_span.sampling import Sampling
    from expire_span.serve.text import TextModel
    from expire_span.stream import Stream


@dataclass(frozen=True)
class ChatCommand:
    """Chat with a retrofitted model in bounded memory; an empty line or the end of input stops."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder, .gguf file or hub name of a causal language model."""
    adapter: Path | None = None
    """Adapter folder."""
    max_tokens: Count = 256
    """Most tokens of one answer."""
    temperature: float = 0.7
    """Below 1 sharpens the distribution; 0 takes the likeliest token."""
    top_p: float | None = 0.95
    """Draw from the smallest set of tokens that holds this much of the probability."""
    seed: int = 0
    """Seed of the draws."""
    dtype: Literal["fp32", "bf16", "fp16", "int8", "nf4"] = "fp32"
    """Precision of the model; int8 and nf4 need bitsandbytes."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N, or spread: layers on all GPUs, and the rest in the memory beside them."""


def run_chat(args: list[str]) -> int:
    command = parse(ChatCommand, args, f"{PROGRAM} chat")
    if command.adapter is None:
        raise UserError(
            f"chat needs a model that knows turns, with its --adapter; a run such as {command.model} has learned plain text: "
            "go on from one with expire-span generate"
        )
    from expire_span.sampling import Sampling
    from expire_span.serve.text import open_retrofit
    from expire_span.stream import Stream

    sampling = Sampling(command.temperature, None, command.top_p, command.seed)
    text = open_retrofit(command.model, command.adapter, command.dtype, command.device)
    if not getattr(text.tokenizer, "chat_template", None):
        raise UserError(
            f"{command.model} has no chat template, so it has learned no turns; go on from a text with: {PROGRAM} generate "
            f"{command.model} --adapter {command.adapter}"
        )
    chat = _Chat(text, Stream(text.model, rows=1), sampling, command.max_tokens)
    _tell("Ctrl-C ends an answer, an empty line the chat.")
    for line in _lines():
        chat.answer(line)
        _tell(f"[{chat.tokens_read} tokens read, {float(chat.stream.live.mean()):.0f} remembered per head]")
    return 0


def _tell(words: str, end: str = "\n") -> None:
    print(words, end=end, file=sys.stderr, flush=True)


def _lines() -> Iterator[str]:
    while True:
        _tell("> ", end="")
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line.encode(errors="surrogateescape").decode(errors="replace")  # bytes that are no UTF-8


class _Chat:
    """A conversation in one row of a stream."""

    def __init__(self, text: TextModel, stream: Stream, sampling: Sampling, limit: int) -> None:
        import torch

        self.text, self.stream, self.sampling, self.limit = text, stream, sampling, limit
        self.generator = torch.Generator(stream.device).manual_seed(sampling.seed)
        self.tokens_read = 0

    def answer(self, line: str) -> None:
        """Read a turn and print the answer as it is generated; Ctrl-C ends it after the token that is being computed."""
        from expire_span.sampling import draw
        from expire_span.serve.detokenizer import TextWriter

        writer = TextWriter(self.text.tokenizer)
        with _interruptible() as interrupted:
            self._read(line)
            for _ in range(self.limit):
                token = int(draw(self.stream.logits, self.sampling, self.generator))
                if token in self.text.ends or interrupted:
                    break
                print(writer.add(token), end="", flush=True)
                self.stream.feed([token])
                self.tokens_read += 1
        print()

    def _read(self, line: str) -> None:
        import torch

        assert self.text.turn_tokens is not None
        first = self.tokens_read == 0
        said = self.text.turn_tokens(line, first=first)
        self.stream.read([said]) if first else self.stream.feed(torch.tensor([said]))
        self.tokens_read += len(said)


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """A context in which Ctrl-C is noted in the list that it yields, so that no forward pass stops half way."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted  # signals belong to the main thread
        return
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
