"""The operator on the CPU against dense attention: time and peak memory of forward + backward, as ratios in one run.

    python -m benchmarks.cpu [--length 8192] [--rounds 3]

Each measurement runs in a process of its own, so that its peak memory can be measured. `dense` is PyTorch's
scaled_dot_product_attention with is_causal; `dense, learned mask` is the same with the expiry as a differentiable mask, which
is what learned expiry costs without this library: PyTorch then stores all T x T scores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.ops import expire_attention
from expire_span.ops.live import live_queries

from .record import save

HEADS, DIM, RAMP = 8, 64, 64
WORKLOADS = ("all alive", "1% on a ramp", "under 5% alive")
"""Nothing ever fades; one memory of a hundred fades somewhere in the sequence; 2% live long, all others for 32 steps."""


def problem(length: int, workload: str) -> tuple[list[Tensor], Tensor]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, DIM, generator=g).requires_grad_() for _ in range(3))
    chosen, place = torch.rand(1, length, generator=g), torch.rand(1, length, generator=g)
    span = torch.full((1, length), 1e6)
    if workload == "1% on a ramp":
        left = torch.arange(length - 1, -1, -1.0)  # steps of the sequence after each memory's birth
        span = torch.where(chosen < 0.01, place * left, span)
    elif workload == "under 5% alive":
        # The long-lived memories expire too, so that the share of living pairs stays under 5%.
        span = torch.where(chosen < 0.02, length / 2, 32.0)
    return [q, k, v], span.requires_grad_()


def live_share(span: Tensor, length: int) -> float:
    """Living pairs of query and memory divided by all causal pairs."""
    alive = live_queries(span.detach(), torch.arange(length), 0, length - 1, ramp=RAMP, include_self=True)
    return float(alive.sum()) / (length * (length + 1) / 2)


def learned_mask(span: Tensor, length: int) -> Tensor:
    pos = torch.arange(length)
    age = pos[:, None] - pos[None]
    mask = (1 + (span[:, None] - age) / RAMP).clamp(0, 1)
    return torch.where(age >= 0, mask, 0).log().unsqueeze(1)


def systems(length: int, workload: str) -> dict[str, Callable[[], Tensor]]:
    (q, k, v), span = problem(length, workload)
    pos = torch.arange(length)
    return {
        "chunked": lambda: expire_attention(q, k, v, span, pos, pos, ramp=RAMP, impl="chunked"),
        "dense": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "dense, learned mask": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=learned_mask(span, length)),
    }


def measure_here(length: int, workload: str, system: str, rounds: int) -> dict:
    """Median seconds of forward + backward, and the peak resident memory beyond that of the inputs and PyTorch itself."""
    run = systems(length, workload)[system]
    systems(256, workload)[system]().sum().backward()  # load the libraries before the baseline is read
    before = peak_resident()
    run().sum().backward()  # a warm-up round, which also allocates memory
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run().sum().backward()
        seconds.append(time.perf_counter() - start)
    peak = peak_resident() - before
    return {"seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "peak_mib": peak}


def peak_resident() -> float:
    """The most memory this process has had resident so far, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def check(length: int = 600) -> None:
    """Time only what is correct: the result against the definition in float64."""
    for workload in WORKLOADS:
        (q, k, v), span = problem(length, workload)
        pos = torch.arange(length)
        got = expire_attention(q, k, v, span, pos, pos, ramp=RAMP, impl="chunked")
        exact = (x.double() for x in (q, k, v, span))
        want = expire_attention(*exact, pos, pos, ramp=RAMP, impl="reference")
        error = ((got.double() - want).norm() / want.norm()).item()
        if not error < 1e-5:
            raise SystemExit(f"chunked is wrong on {workload!r}: relative error {error:.2g}; nothing was timed")


def measure(length: int, workload: str, system: str, rounds: int) -> dict:
    command = [sys.executable, "-m", "benchmarks.cpu", "--length", str(length), "--rounds", str(rounds)]
    done = subprocess.run([*command, "--only", workload, system], capture_output=True, text=True, check=False)
    if done.returncode:  # the dense learned mask can be too large for a small machine
        return {"failed": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}"}
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    parser.add_argument("--only", nargs=2, metavar=("WORKLOAD", "SYSTEM"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure_here(args.length, *args.only, args.rounds)))
        return
    check()
    rows = []
    for workload in WORKLOADS:
        share = live_share(problem(args.length, workload)[1], args.length)
        for system in systems(1, workload):
            row = {"workload": workload, "alive": share, "system": system}
            rows.append(row | measure(args.length, workload, system, args.rounds))
            print(_line(row | rows[-1]), flush=True)
    ratios = _ratios(rows)
    for name, value in ratios.items():
        print(f"{name:55} {value:6.2f}x")
    print(
        "written to",
        save("cpu", {"length": args.length, "heads": HEADS, "dim": DIM, "rows": rows, "ratios": ratios}, args.out),
    )


def _line(row: dict) -> str:
    head = f"{row['workload']:15} alive {row['alive']:6.1%}  {row['system']:20}"
    if "failed" in row:
        return f"{head} failed: {row['failed']}"
    return f"{head} {row['seconds']:7.2f} s [{row['min']:.2f}-{row['max']:.2f}]  peak {row['peak_mib']:7.0f} MiB"


def _ratios(rows: list[dict]) -> dict[str, float]:
    found = {(row["workload"], row["system"]): row for row in rows if "failed" not in row}
    out = {}
    for workload in WORKLOADS:
        ours = found[workload, "chunked"]
        for system in ("dense", "dense, learned mask"):
            if other := found.get((workload, system)):
                out[f"{workload}: faster than {system}"] = other["seconds"] / ours["seconds"]
                out[f"{workload}: less memory than {system}"] = other["peak_mib"] / ours["peak_mib"]
    return out


if __name__ == "__main__":
    main()
