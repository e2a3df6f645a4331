"""`expire-span chat`: a conversation in the terminal without a limit on the context."""

from __future__ import annotations

import sys
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
    from expire_span.hf.handle import load_adapter
    from expire_span.hf.loading import open_model
    from expire_span.hf.streams import Stream
    from expire_span.sampling import Sampling

    sampling = Sampling(command.temperature, None, command.top_p, command.seed)
    model, tokenizer = open_model(command.model, command.dtype, command.device)
    stream = Stream(load_adapter(model, command.adapter))
    for turn, line in enumerate(_lines()):
        stream.read(_turn_tokens(tokenizer, line, first=turn == 0))
        _answer(stream, tokenizer, sampling, command.max_tokens)
        live = sum(float(x.float().mean()) for x in stream.cache.live()) / len(stream.cache.layers)
        print(f"[{stream.read_tokens} tokens read, {live:.0f} remembered per head]", file=sys.stderr, flush=True)
    return 0


def _lines():
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line.strip():
            return
        yield line.strip()


def _turn_tokens(tokenizer: Any, line: str, first: bool) -> Any:
    """The tokens of the new turn only, since earlier turns are in the memory."""
    import torch

    from expire_span.hf.loading import chat_tokens

    ids = chat_tokens(tokenizer, [{"role": "user", "content": line}])
    if not first and tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id:
        ids = ids[1:]
    return torch.tensor([ids])


def _answer(stream: Any, tokenizer: Any, sampling: Any, limit: int) -> None:
    written, shown = [], ""
    for (token,) in stream.write(limit, sampling):
        if int(token) == tokenizer.eos_token_id:
            break
        written.append(int(token))
        text = tokenizer.decode(written, skip_special_tokens=True).removesuffix("\ufffd")
        print(text[len(shown) :], end="", flush=True)
        shown = max(shown, text, key=len)
    print()
