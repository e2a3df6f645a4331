"""Tokens per second of the server's scheduler against the number of requests at a time: `python -m benchmarks.serve`.

Beside it, the longest time between two tokens of a running answer while a long prompt is read, for several sizes of the chunks
in which it is read, and the time to the first token of the turns of a chat, with sessions and without.

The model has the shape of a small Llama (--layers, --dim) and random weights and spans, since time does not depend on what was
learned; the requests differ in the length of their prompts. `one by one` is the same number of requests with one row, so that
each waits for the one before.
"""

from __future__ import annotations

import argparse
import queue
import time
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from expire_span.hf import RetrofitConfig, retrofit
from expire_span.sampling import Sampling
from expire_span.serve import scheduler as scheduler_module
from expire_span.serve.requests import Request
from expire_span.serve.scheduler import Scheduler
from expire_span.serve.sessions import Sessions
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


def measure_pause(handle: Any, prompt: int, chunk: int) -> dict[str, Any]:
    """The longest time between two tokens of an answer while a prompt of so many tokens is read beside it."""
    scheduler_module.SHARED_CHUNK = chunk
    scheduler, arrived, joined = Scheduler(TextModel(handle, _Numbers()), rows=2), [], queue.Queue()
    running = Request([5] * 40, 10**9, Sampling(), (), lambda piece: arrived.append(time.perf_counter()))
    scheduler.submit(running)
    while len(arrived) < 60:
        time.sleep(0.01)
    draws = torch.Generator().manual_seed(0)
    begin, alone = time.perf_counter(), len(arrived)
    long = Request(torch.randint(3, VOCAB, (prompt,), generator=draws).tolist(), 1, Sampling(), (), joined.put)
    scheduler.submit(long)
    joined.get(timeout=600)
    end = time.perf_counter()
    running.cancelled = True
    scheduler.close()
    gaps = [b - a for a, b in pairwise(arrived)]
    usual = sorted(gaps[20 : alone - 1])[len(gaps[20 : alone - 1]) // 2]
    longest = max(gap for gap, at in zip(gaps, arrived) if begin <= at + gap and at <= end)
    return {"prompt": prompt, "chunk": chunk, "usual_gap": usual, "longest_gap": longest, "first_token": end - begin}


def measure_chat(handle: Any, turns: int, sessions: bool) -> dict[str, Any]:
    """Seconds to the first token of every turn of a chat, by the clock and of processor time, which other programs on the
    machine do not lengthen; each turn has 40 new tokens and an answer of 8."""
    pool = Sessions(handle, 2 * 10**9) if sessions else None
    scheduler, prompt = Scheduler(TextModel(handle, _Numbers()), rows=1, sessions=pool), []
    seconds, processor = [], []
    draws = torch.Generator().manual_seed(0)
    for _ in range(turns):
        prompt += torch.randint(3, VOCAB, (40,), generator=draws).tolist()
        pieces: queue.Queue[Any] = queue.Queue()
        begin, used = time.perf_counter(), time.process_time()
        scheduler.submit(Request(prompt, 8, Sampling(temperature=0), (), pieces.put))
        text = pieces.get(timeout=600)
        seconds.append(time.perf_counter() - begin)
        processor.append(time.process_time() - used)
        while (piece := pieces.get(timeout=600)) is not None:
            text += piece
        prompt += [int(x) for x in text.split(",")[:-1]]
    scheduler.close()
    return {
        "sessions": sessions,
        "turns": turns,
        "seconds": seconds,
        "processor": processor,
        "held": 0 if pool is None else pool.bytes_held()[0],
    }


def _show_chat(line: dict[str, Any]) -> str:
    """The median time to the first token of the turns around the tenth and of the last ones."""
    kind, told = "with sessions" if line["sessions"] else "without", []
    for name in ("seconds", "processor"):
        early, late = (sorted(part)[len(part) // 2] for part in (line[name][5:15], line[name][-10:]))
        told.append(f"{name} {early:.3f} around turn 10, {late:.3f} at the end")
    return f"chat of {line['turns']} turns {kind:13s} first token: {'; '.join(told)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--dim", type=int, default=576)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--requests", default="1,8,32", help="numbers of requests at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--chunks", default="64,256", help="sizes of chunks while answers run; empty measures none")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt that joins")
    parser.add_argument("--turns", type=int, default=0, help="turns of a chat; 0 measures none")
    parser.add_argument("--out", default="benchmarks/out")
    args = parser.parse_args()
    handle, lines = build(args.layers, args.dim, args.device), []
    for requests in map(int, args.requests.split(",")):
        for name, rows in {"one by one": 1, "together": requests}.items():
            lines.append({"how": name, **measure(handle, requests, rows, args.tokens)})
            line = lines[-1]
            print(f"{requests:4d} requests {name:10s} {line['tokens_per_second']:10.0f} tokens/s", flush=True)
    for chunk in map(int, filter(None, args.chunks.split(","))):
        lines.append({"how": "joining", **measure_pause(handle, args.prompt, chunk)})
        print(", ".join(f"{name} {x:.4g}" for name, x in lines[-1].items() if name != "how"), flush=True)
    for sessions in (True, False) if args.turns else ():
        lines.append({"how": "chat", **measure_chat(handle, args.turns if sessions else min(args.turns, 30), sessions)})
        print(_show_chat(lines[-1]), flush=True)
    print(save("serve", {"settings": vars(args), "lines": lines}, args.out))


if __name__ == "__main__":
    main()
