"""Time of a token in `generate` as people call it: transformers' static cache, a retrofitted model's own, and `Stream`.

    python -m benchmarks.hf_generate                                   # sizes of SmolLM2-135M, random weights, bf16 on a GPU
    python -m benchmarks.hf_generate --device cpu --context 64 --rows 1 8

The tokens of the retrofitted model are first compared with those of `Stream`. A prompt's reading is left out: the time of a
call with few new tokens is taken from that of a call with many.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from expire_span import Sampling, Stream
from expire_span.hf import RetrofitConfig, retrofit

from .record import save

FEW, VOCAB = 8, 49152


def build(layers: int, dim: int, device: str) -> Any:
    """A random Llama with heads of 64, three queries to a key; in bf16 on a GPU."""
    sizes = dict(hidden_size=dim, intermediate_size=8 * dim // 3, num_hidden_layers=layers, vocab_size=VOCAB)
    heads = dict(num_attention_heads=dim // 64, num_key_value_heads=dim // 192, max_position_embeddings=16384)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads)).eval()
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)


def callers(handle: Any, ids: Tensor) -> dict[str, Callable[[int], Tensor]]:
    """For each way, a function that generates so many tokens, [B, new]."""
    plain: Any = dict(do_sample=False, eos_token_id=None, pad_token_id=0)

    def generate(count: int, **options: Any) -> Tensor:
        return handle.model.generate(ids, max_new_tokens=count, **plain, **options)[:, ids.shape[1] :]

    def static(count: int) -> Tensor:
        with handle.paused():
            return generate(count, cache_implementation="static")

    def stream(count: int) -> Tensor:
        rows = Stream(handle, rows=len(ids))
        rows.read(list(ids))
        return torch.stack([step.tokens for step in rows.generate(Sampling(temperature=0), max_tokens=count)], 1)

    return {"generate, static cache": static, "generate, own cache": generate, "Stream": stream}


def seconds_per_token(call: Callable[[int], Tensor], new: int, repeats: int) -> list[float]:
    call(FEW + new)  # the longest first: what is compiled or recorded then serves all
    call(FEW)

    def timed(count: int) -> float:
        began = time.perf_counter()
        call(count).cpu()
        return time.perf_counter() - began

    return [(timed(FEW + new) - timed(FEW)) / new for _ in range(repeats)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--dim", type=int, default=576)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    model, lines = build(given.layers, given.dim, given.device), []
    handle = retrofit(model, RetrofitConfig(max_span=max(given.context // 8, 32), ramp=16, keep_first=4))
    for rows in given.rows:
        ids = torch.randint(VOCAB, (rows, given.context), generator=torch.Generator().manual_seed(1)).to(given.device)
        ways = callers(handle, ids)
        own, wanted = ways["generate, own cache"](FEW).cpu(), ways["Stream"](FEW).cpu()
        equal = float((own == wanted).float().mean())
        for name, call in ways.items():
            found = seconds_per_token(call, given.new, given.repeats)
            lines.append({"way": name, "rows": rows, "ms": [1000 * x for x in found], "equal_to_stream": equal})
            print(f"{rows:>3} rows  {name:<24} {1000 * statistics.median(found):8.2f} ms a token", flush=True)
        print(f"{rows:>3} rows  {equal:.0%} of {FEW * rows} tokens are those of Stream", flush=True)
    save("hf_generate", {"settings": vars(given), "lines": lines})


if __name__ == "__main__":
    main()
