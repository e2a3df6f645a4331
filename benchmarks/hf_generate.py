"""Time of a token in `generate` as people call it: transformers' static cache, a retrofitted model's own, and `Stream`.

    python -m benchmarks.hf_generate                                   # sizes of SmolLM2-135M, random weights, bf16 on a GPU
    python -m benchmarks.hf_generate --device cpu --context 64 --rows 1 8

The tokens of the retrofitted model are first compared with those of `Stream`. A prompt's reading and the first tokens are left
out: a token's time is that between the eighth and the last token of one call, after a call of the same length that compiled and
recorded everything. Compiling takes most of the minutes: run one process for each number of rows at once, with one
`--lock FILE`, which a process holds while it times.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, StoppingCriteria, StoppingCriteriaList

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


class Clock(StoppingCriteria):
    """Notes when the first `FEW` tokens, and when all, have been computed; ends nothing."""

    def __init__(self, context: int, count: int) -> None:
        self.context, self.count = context, count
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.note(input_ids.shape[1] - self.context, input_ids.device)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def note(self, written: int, device: torch.device) -> None:
        if written in (FEW, self.count):
            if device.type == "cuda":
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Seconds a token after the first few."""
        return (self.times[1] - self.times[0]) / (self.count - FEW)


Caller = Callable[[Clock], Tensor]


def callers(retrofitted: Any, ids: Tensor) -> dict[str, Caller]:
    """For each way, a function that generates as many tokens as its clock counts, [B, new]."""
    plain: Any = dict(do_sample=False, eos_token_id=None, pad_token_id=0)

    def generate(clock: Clock, **options: Any) -> Tensor:
        options["stopping_criteria"] = StoppingCriteriaList([clock])
        return retrofitted.model.generate(ids, max_new_tokens=clock.count, **plain, **options)[:, ids.shape[1] :]

    def static(clock: Clock) -> Tensor:
        with retrofitted.paused():
            return generate(clock, cache_implementation="static")

    def stream(clock: Clock) -> Tensor:
        rows, written = Stream(retrofitted, rows=len(ids)), []
        rows.read(list(ids))
        for step in rows.generate(Sampling(temperature=0), max_tokens=clock.count):
            written.append(step.tokens)
            clock.note(len(written), ids.device)
        return torch.stack(written, 1)

    return {"Stream": stream, "generate, own cache": generate, "generate, static cache": static}


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """While this lasts, no other process is in here with the same lock file."""
    if lock is None:
        yield
        return
    with open(lock, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--dim", type=int, default=576)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lock", type=Path, help="a file to lock while timing")
    given = parser.parse_args()
    model, lines, began = build(given.layers, given.dim, given.device), [], time.perf_counter()
    retrofitted = retrofit(model, RetrofitConfig(max_span=max(given.context // 8, 32), ramp=16, keep_first=4))
    for rows in given.rows:
        ids = torch.randint(VOCAB, (rows, given.context), generator=torch.Generator().manual_seed(1)).to(given.device)
        written: dict[str, Tensor] = {}
        for name, call in callers(retrofitted, ids).items():
            written[name] = call(Clock(given.context, FEW + given.new)).cpu()
            print(f"{time.perf_counter() - began:6.1f} s  {rows:>3} rows  {name:<24} warm", flush=True)
            clocks = [Clock(given.context, FEW + given.new) for _ in range(given.repeats)]
            with alone(given.lock):
                for clock in clocks:
                    call(clock)
            found = [1000 * clock.seconds for clock in clocks]
            line: dict[str, Any] = {"way": name, "rows": rows, "ms": found}
            told = f"{statistics.median(found):8.2f} ms a token"
            if "own" in name:  # with its full cache the model writes other tokens
                line["equal_to_stream"] = float((written[name] == written["Stream"]).float().mean())
                told += f", {line['equal_to_stream']:.1%} of the tokens as Stream's"
            lines.append(line)
            print(f"{time.perf_counter() - began:6.1f} s  {rows:>3} rows  {name:<24} {told}", flush=True)
        save(f"hf_generate_{'_'.join(map(str, given.rows))}", {"settings": vars(given), "lines": lines})


if __name__ == "__main__":
    main()
