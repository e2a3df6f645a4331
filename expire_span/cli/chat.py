"""`expire-span chat`: a conversation in the terminal without a limit on the context."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from .parsing import PROGRAM, options_at_least, parse


@dataclass(frozen=True)
class ChatCommand:
    """Chat with a retrofitted model in bounded memory; an empty line or the end of input stops."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder, .gguf file or hub name of a causal language model."""
    adapter: Path
    """Adapter folder."""
    max_tokens: int = 256
    """Most tokens of one answer."""
    temperature: float = 0.7
    """Below 1 sharpens the distribution; 0 takes the likeliest token."""
    top_p: float | None = 0.95
    """Draw from the smallest set of tokens that holds this share of the probability."""
    seed: int = 0
    """Seed of the draws."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of the model."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""


def run_chat(args: list[str]) -> int:
    command = parse(ChatCommand, args, f"{PROGRAM} chat")
    options_at_least(command, 1, "max_tokens")
    from expire_span.hf.adapter import read_head
    from expire_span.hf.handle import load_adapter
    from expire_span.hf.loading import end_tokens, open_model, turn_tokens
    from expire_span.hf.streams import Stream
    from expire_span.sampling import Sampling

    sampling = Sampling(command.temperature, None, command.top_p, command.seed)
    read_head(command.adapter)  # before the model is loaded, which takes a while
    model, tokenizer = open_model(command.model, command.dtype, command.device)
    stream = Stream(load_adapter(model, command.adapter))
    ends = end_tokens(model, tokenizer)
    _tell("Ctrl-C ends an answer, an empty line the chat.")
    for turn, line in enumerate(_lines()):
        said = turn_tokens(tokenizer, line, first=turn == 0)
        _answer(stream, said, tokenizer, ends, sampling, command.max_tokens)
        live = sum(float(x.float().mean()) for x in stream.cache.live()) / len(stream.cache.layers)
        _tell(f"[{stream.read_tokens} tokens read, {live:.0f} remembered per head]")
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


def _answer(stream: Any, said: list[int], tokenizer: Any, ends: set[int], sampling: Any, limit: int) -> None:
    """Read a turn and print the answer as it is written; Ctrl-C ends it after the token that is being computed."""
    import torch

    from expire_span.hf.writing import TextWriter

    writer = TextWriter(tokenizer)
    with _interruptible() as interrupted:
        stream.read(torch.tensor([said]))
        for (token,) in stream.write(limit, sampling):
            if int(token) in ends or interrupted:
                break
            print(writer.add(int(token)), end="", flush=True)
    print()


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
