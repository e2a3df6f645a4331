"""Time per token and bytes held of a streaming decoder, 1k to 1M tokens into its stream: `python -m benchmarks.decode`.

The spans are fixed by the span predictor's weights: most memories live briefly, some long, so that equally many are alive at
every mark the memory has had time to fill by. The stream is fed in blocks up to each mark; there, single tokens are timed
one by one, each waited for, as a generator must. The GPU's own time for a token is kept apart, lest the host's hide growth.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from expire_span.config import DecoderConfig, ExpireSpanConfig
from expire_span.models.decoder import Decoder

from .record import save
from .timing import GIB, Deadline, device_times, guarded, spread, synchronize

MARKS = (1_000, 10_000, 100_000, 1_000_000)
GOAL = 1.1
"""Most that a token at the last mark may take, against one at 10k tokens, when as many memories are alive."""
SAME_LIVE = 0.05
"""Live counts that differ by a larger share than this are not equal."""
CHUNK = 8192


@dataclass(frozen=True)
class Case:
    name: str
    max_span: int
    ramp: int = 64
    dim: int = 512
    layers: int = 12
    heads: int = 8
    marks: tuple[int, ...] = MARKS
    tokens: int = 200
    """Single tokens timed at each mark."""

    @property
    def filled_at(self) -> int:
        """From this many tokens on, the memory is as full as it gets."""
        return self.max_span + self.ramp


CASES = [Case("short lives", 900), Case("long lives", 9000)]
SMOKE = [Case("short lives", 24, 4, 16, 1, 2, (40, 80), 4)]


def build(case: Case, device: torch.device) -> Decoder:
    """A decoder in bf16 on a GPU, whose spans spread over 0..max_span and lie mostly near its lower end."""
    torch.manual_seed(0)
    mixer = ExpireSpanConfig(max_span=case.max_span, ramp=case.ramp)
    config = DecoderConfig.modern(dim=case.dim, ff_dim=4 * case.dim, layers=case.layers, heads=case.heads, mixer=mixer)
    decoder = Decoder(config).to(device).eval()
    if device.type == "cuda":
        decoder = decoder.to(torch.bfloat16)
    for block in decoder.layers():
        predictor: Any = block.mixer.span_predictor
        predictor.float()  # a span needs more digits than bf16 has
        torch.nn.init.normal_(predictor.weight, std=2 / case.dim**0.5)
        torch.nn.init.constant_(predictor.bias, -2.0)
    return decoder


class Stream:
    """A decoder in the middle of random bytes."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.decoder, self.device = build(case, device), device
        self.draw = torch.Generator(device).manual_seed(1)
        self.state: Any = None
        self.position, self.bytes_held = 0, 0

    def feed(self, count: int) -> None:
        tokens = torch.randint(0, 256, (1, count), device=self.device, generator=self.draw)
        _, self.state, aux = self.decoder(tokens, self.state)
        self.position, self.bytes_held = self.position + count, aux.bytes_held

    def advance(self, mark: int) -> None:
        """Read on to the mark, then squeeze all stores, so that every mark begins alike."""
        while self.position < mark:
            self.feed(min(CHUNK, mark - self.position))
        self.state = [{**part, "memory": part["memory"].compact()} for part in self.state]

    def live(self) -> float:
        """Memories alive for the next token, mean over the layers."""
        counts = [part["memory"].live(part["position"]).float().mean() for part in self.state]
        return torch.stack(counts).mean().item()


def time_tokens(stream: Stream, count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        stream.feed(1)
        synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times


@torch.inference_mode()
def run_case(case: Case, device: torch.device, deadline: Deadline) -> list[dict[str, Any]]:
    stream, rows = Stream(case, device), []
    for mark in case.marks:
        if deadline.left <= 0:
            break
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        stream.advance(mark)
        time_tokens(stream, 1 + case.tokens // 10)  # the first single tokens load the decode kernels
        stream.advance(stream.position)
        held, live = stream.bytes_held, stream.live()
        times = time_tokens(stream, case.tokens)
        peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None
        row = {"case": case.name, "mark": mark, "filled": mark >= case.filled_at, "live": live}
        row |= {"ms": spread(times), "mean_ms": sum(times) / len(times), "peak_gib": peak}
        row["bytes_held"] = max(held, stream.bytes_held)
        row["device_us"] = sum(device_times(lambda: stream.feed(1)).values())
        rows.append(row)
        print(line(row), flush=True)
    return rows


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Time at the last mark against that at the first filled mark from 10k on (any filled mark in a smoke run)."""
    filled = [row for row in rows if row["filled"]]
    first = next((row for row in filled if row["mark"] >= 10_000), filled[0] if filled else None)
    if first is None or first is filled[-1]:
        return None
    last = filled[-1]
    ratio = last["ms"]["median"] / first["ms"]["median"]
    found = {"case": last["case"], "from": first["mark"], "to": last["mark"], "ratio": ratio, "goal": GOAL}
    found |= {"mean_ratio": last["mean_ms"] / first["mean_ms"], "live_ratio": last["live"] / max(first["live"], 1e-9)}
    found["bytes_ratio"] = last["bytes_held"] / first["bytes_held"]
    if last["device_us"]:
        found["device_ratio"] = last["device_us"] / first["device_us"]
    if abs(found["live_ratio"] - 1) > SAME_LIVE:
        return found | {"verdict": f"not comparable: {last['live']:.0f} memories alive against {first['live']:.0f}"}
    return found | {"verdict": "won" if max(ratio, found.get("device_ratio", 0)) <= GOAL else "missed"}


def line(row: dict[str, Any]) -> str:
    note = "" if row["filled"] else "  (memory still filling)"
    note = f", GPU {row['device_us']:.0f} us a token" * bool(row["device_us"]) + note
    return (
        f"{row['case']:12} at {row['mark']:>9,} tokens: {row['ms']['median']:7.3f} ms a token (mean {row['mean_ms']:.3f}), "
        f"live {row['live']:7.1f} a layer, holds {row['bytes_held'] / 2**20:.1f} MiB{note}"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    parser.add_argument("--seconds", type=float, default=120.0, help="no further mark is begun after this")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny stream, on any machine: tests the benchmark itself"
    )
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    whole, errors = Deadline(args.seconds), {}
    result: dict[str, Any] = {"smoke": args.smoke, "rows": [], "ratios": [], "errors": errors}
    for case in SMOKE if args.smoke else CASES:
        rows = guarded(errors, case.name, lambda c=case: run_case(c, device, whole), whole) or []
        missing = [mark for mark in case.marks if mark not in [row["mark"] for row in rows]]
        if missing:
            errors.setdefault(case.name, f"no time left of {whole.seconds:.0f} s for the marks {missing}")
        result["rows"] += rows
        if (found := verdict(rows)) is not None:
            result["ratios"].append(found)
            print(f"{found['to']:,} against {found['from']:,}: {found['ratio']:.3f}x, goal {GOAL}x: {found['verdict']}")
    for name, error in errors.items():
        print(f"{name}: {error[:200]}")
    print("written to", save("decode", result, args.out))


if __name__ == "__main__":
    main()
