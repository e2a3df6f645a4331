"""Tokens per second of the server's scheduler against the number of requests at a time: `python -m benchmarks.serve`.

The model has the shape of a small Llama (--layers, --dim) and random weights and spans, since time does not depend on what was
learned; the requests differ in the length of their prompts. `one by one` is the same number of requests with one row, so that
each waits for the one before.
"""

from __future__ import annotations

import argparse
import queue
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from expire_span.hf import RetrofitConfig, retrofit
from expire_span.sampling import Sampling
from expire_span.serve.requests import Request
from expire_span.serve.scheduler import Scheduler
from expire_span.serve.text import TextModel

from .record import save

VOCAB = 32_000


class _Numbers:
    """A tokenizer whose text is the tokens' numbers: decoding of text is not what is measured."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"{token}," for token in tokens)


def build(layers: int, dim: int, device: str) -> Any:
    """A random model with spans of up to 1,024 tokens, of which most are much shorter."""
    torch.manual_seed(0)
    shape = dict(num_hidden_layers=layers, hidden_size=dim, intermediate_size=dim * 8 // 3, vocab_size=VOCAB)
    heads = dict(num_attention_heads=dim // 64, num_key_value_heads=max(1, dim // 192))
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape, **heads))
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()
    handle = retrofit(model, RetrofitConfig(max_span=1024, ramp=32))
    with torch.no_grad():
        for predictor in handle.predictors.values():
            predictor.weight.normal_()
            predictor.bias.fill_(-2.0)
    return handle


def measure(handle: Any, requests: int, rows: int, tokens: int) -> dict[str, Any]:
    """Seconds until all requests are answered, after one round that warms up and records."""
    scheduler = Scheduler(TextModel(handle, _Numbers()), rows=rows)
    for count in (80, tokens):
        begin, done = time.perf_counter(), queue.Queue()
        for n in range(requests):
            prompt = torch.randint(3, VOCAB, (32 + 7 * n % 64,), generator=torch.Generator().manual_seed(n)).tolist()
            scheduler.submit(Request(prompt, count, Sampling(temperature=0.8, seed=n), (), done.put))
        ended = 0
        while ended < requests:
            piece = done.get(timeout=600)
            if isinstance(piece, Exception):
                raise piece
            ended += piece is None
        seconds = time.perf_counter() - begin
    scheduler.close()
    return {"requests": requests, "rows": rows, "seconds": seconds, "tokens_per_second": requests * tokens / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--dim", type=int, default=576)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--requests", default="1,8,32", help="numbers of requests at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default="benchmarks/out")
    args = parser.parse_args()
    handle, lines = build(args.layers, args.dim, args.device), []
    for requests in map(int, args.requests.split(",")):
        for name, rows in {"one by one": 1, "together": requests}.items():
            lines.append({"how": name, **measure(handle, requests, rows, args.tokens)})
            line = lines[-1]
            print(f"{requests:4d} requests {name:10s} {line['tokens_per_second']:10.0f} tokens/s", flush=True)
    print(save("serve", {"settings": vars(args), "lines": lines}, args.out))


if __name__ == "__main__":
    main()
