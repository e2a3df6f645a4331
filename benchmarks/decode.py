"""Tokens per second of streams, compared with plain decoders of the same size: `python -m benchmarks.decode`.

On a GPU the model is the enwik8 recipe's (12 layers of 512, bfloat16, learned reach): a trained one with --run and --text, else
one with random weights and spans that differ between heads. On a CPU it has 6 layers of 256. In one run, at each batch size:

- ours: `Stream`, with one CUDA graph per step, whose tokens the host reads one step late;
- ring: a plain decoder with a ring cache of as many tokens as our mean live count, rounded up to 64: eager, recorded, compiled;
- full: a plain decoder with 1k, 8k and 64k tokens of context, recorded.

Before anything is timed, small models of every kind are streamed and compared with a computation without deletion. Far into a
stream, time and bytes per token are compared with those at its beginning.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from expire_span.recipes import enwik8
from expire_span.settings.run import DecoderConfig, ExpireSpanConfig

from .exact_streams import largest_differences
from .record import save
from .stream_timing import (
    Source,
    build,
    compare_on_cpu,
    time_marks,
    time_ours,
    time_plain,
    time_prompt,
    trained,
    tune,
)
from .timing import Deadline, guarded

BATCHES = (1, 16, 256)
CONTEXTS = (1024, 8192, 65_536)
MARKS = (10_000, 100_000, 1_000_000, 10_000_000)
GOALS = {
    "ring": 1.3,
    "tokens_per_s_256": 400_000,
    "full_64k_16": 10.0,
    "bytes_64k_16": 0.01,
    "flat": 1.05,
    "prompt": 0.6,
}


def gpu_config() -> DecoderConfig:
    return replace(enwik8().model, dropout=0.0)


def cpu_config() -> DecoderConfig:
    return DecoderConfig.modern(dim=256, layers=6, heads=4, ff_dim=1024, mixer=ExpireSpanConfig(max_span=900, ramp=64))


def smoke_config() -> DecoderConfig:
    return DecoderConfig.modern(dim=16, layers=1, heads=2, ff_dim=16, mixer=ExpireSpanConfig(max_span=24, ramp=4))


def verdicts(
    rows: list[dict[str, Any]], marks: list[dict[str, Any]], prompt: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """Each figure with its goal and whether it was met."""
    found = [*compare_with_others(rows), *compare_marks(marks)]
    if prompt:
        found.append(at_least("prompt over forward pass, tokens/s", prompt["share"], GOALS["prompt"]))
    return found


def at_most(name: str, value: float, goal: float) -> dict[str, Any]:
    return {"figure": name, "value": value, "goal": goal, "won": value <= goal}


def at_least(name: str, value: float, goal: float) -> dict[str, Any]:
    return {"figure": name, "value": value, "goal": goal, "won": value >= goal}


def compare_with_others(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare our decoding with a ring of as many memories, and with full attention at 64k tokens."""

    def find(start: str, batch: int, slots: int | None = None) -> dict[str, Any] | None:
        wanted = (r for r in rows if r["system"].startswith(start) and r["batch"] == batch)
        return next((r for r in wanted if slots is None or r.get("slots") == slots), None)

    found = []
    for batch in BATCHES:
        ours, ring = find("ours", batch), find("ring, compiled", batch) or find("ring, graph", batch)
        if ours and ring:
            name = f"batch {batch}: time over {ring['system']}"
            found.append(at_most(name, time_over(ours, ring), GOALS["ring"]))
    if ours := find("ours", 256):
        found.append(at_least("batch 256: tokens/s", ours["tokens_per_s"], GOALS["tokens_per_s_256"]))
    ours, full = find("ours", 16), find("full", 16, 65_536)
    if ours and full:
        held = ours["bytes_held"] / full["bytes_held"]
        found.append(at_least("batch 16, 64k: full over ours, time", time_over(full, ours), GOALS["full_64k_16"]))
        found.append(at_most("batch 16, 64k: ours over full, bytes", held, GOALS["bytes_64k_16"]))
    return found


def compare_marks(marks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare time and bytes late in a long stream with those early in it."""
    if len(marks) < 2:
        return []
    first, last = marks[0], marks[-1]
    where = f"{last['mark']:,} over {first['mark']:,} tokens"
    held = last["bytes_held"] / first["bytes_held"]
    return [
        at_most(f"{where}: time", time_over(last, first), GOALS["flat"]),
        at_most(f"{where}: bytes", held, GOALS["flat"]),
    ]


def time_over(row: dict[str, Any], other: dict[str, Any]) -> float:
    return row["ms"]["median"] / other["ms"]["median"]


def run_gpu(result: dict[str, Any], whole: Deadline, asked: argparse.Namespace) -> None:
    device, errors, quick, out = torch.device("cuda"), result["errors"], asked.quick, asked.out
    steps, fill = (200 if quick else 1000), 4096
    decoder = trained(asked.run, device) if asked.run else build(gpu_config(), device, asked.live)
    config, source = decoder.config, Source(asked.text)

    def attempt(name: str, call: Callable[[], Any], into: str = "rows") -> Any:
        found = guarded(errors, name, call, whole)
        if name in errors:
            print(f"{name}: {errors[name][:300]}", flush=True)
        if found is not None:
            result[into] += found if isinstance(found, list) else [found]
        save("decode", result, out)
        return found

    def plain(batch: int, slots: int, mode: str, count: int = steps) -> None:
        attempt(f"plain {batch} {slots} {mode}", lambda: time_plain(config, batch, slots, mode, device, count))

    if asked.tune:
        attempt("tiles", lambda: tune(decoder, source, 1024), "tiles")
    rings = {}
    for batch in BATCHES:
        ours = attempt(f"ours {batch}", lambda b=batch: time_ours(decoder, source, b, fill=fill, steps=steps))
        rings[batch] = -(-int(ours["live"] + 1) // 64) * 64 if ours else 256
        plain(batch, rings[batch], "graph")
        plain(batch, rings[batch], "compiled")
    plain(16, 65_536, "graph", 20)
    marks = (10_000, 1_000_000, 10_000_000) if quick else MARKS
    attempt("marks", lambda: time_marks(decoder, source, marks, steps if quick else 5000, whole), "marks")
    attempt("prompt", lambda: time_prompt(decoder, source, 1_000_000, 8192), "prompts")
    if quick:
        return
    for batch in BATCHES:
        plain(batch, rings[batch], "eager", 50)
        for context in CONTEXTS:
            if (batch, context) != (16, 65_536) and (batch < 256 or context <= 8192):
                plain(batch, context, "graph", 50)


def parse_counts(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    parser.add_argument("--seconds", type=float, default=None, help="no further figure is begun after this")
    parser.add_argument("--quick", action="store_true", help="the main figures only, in less than 150 seconds on a GPU")
    parser.add_argument("--run", type=Path, default=None, help="a trained run folder; it reads --text")
    parser.add_argument("--text", default=None, help="a file whose bytes the streams read, instead of random ones")
    parser.add_argument(
        "--live", type=parse_counts, default=(), help="without --run: live memories of each layer, like 31,158"
    )
    parser.add_argument("--tune", action="store_true", help="try other tiles of the kernels first")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU; with more than one, the wall clock is read")
    parser.add_argument("--smoke", action="store_true", help="tiny models, on any machine: tests the benchmark itself")
    args = parser.parse_args(argv)
    whole = Deadline(args.seconds or (130.0 if args.quick else 900.0))
    gpu = torch.cuda.is_available() and not args.smoke
    device = torch.device("cuda" if gpu else "cpu")
    result: dict[str, Any] = {
        "smoke": args.smoke,
        "run": args.run,
        "rows": [],
        "marks": [],
        "prompts": [],
        "tiles": [],
        "errors": {},
    }
    result["exact"] = guarded(result["errors"], "exact", lambda: largest_differences(device, short=args.smoke), whole)
    try:
        with torch.inference_mode():
            if gpu:
                run_gpu(result, whole, args)
            else:
                config, fill, rounds = (smoke_config(), 40, 2) if args.smoke else (cpu_config(), 1200, 12)
                torch.set_num_threads(args.threads)
                result["cpu"] = guarded(result["errors"], "cpu", lambda: compare_on_cpu(config, fill, rounds), whole)
    finally:
        prompt = result["prompts"][0] if result["prompts"] else None
        result["verdicts"] = verdicts(result["rows"], result["marks"], prompt)
        show(result)
        print("written to", save("decode", result, args.out))


def show(result: dict[str, Any]) -> None:
    for found in result["verdicts"]:
        outcome = "won" if found["won"] else "missed"
        print(f"{found['figure']:50} {found['value']:12,.4g}  goal {found['goal']:g}: {outcome}")
    for name, error in result["errors"].items():
        print(f"{name}: {error[:300]}")


if __name__ == "__main__":
    main()
