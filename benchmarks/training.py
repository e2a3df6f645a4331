"""Tokens per second and peak memory of whole training steps: `python -m benchmarks.training [--profile] [--only NAME]`.

The paper's two enwik8 models with their initial spans and a full memory are compared with figures of the authors' released
code; and modern models of the same size are trained in blocks and in parallel on long sequences. A step includes forward,
backward, clipping, optimizer and deletion of memories. Steps are timed ten at a time, since memory is compacted only every few
steps and the host runs ahead of the device.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from expire_span.models.decoder import Decoder
from expire_span.models.systems.expire_span import PaperDetails
from expire_span.ops import resolve_impl
from expire_span.settings.run import DecoderConfig, ExpireSpanConfig, TrainConfig
from expire_span.train.optimizers import build_optimizers, rate_factor, set_rates
from expire_span.train.scorer import Scorer
from expire_span.train.step import Pass, TrainStep

from .record import save
from .timing import GIB, Deadline, guarded, spread, synchronize

RELEASED = {
    "12 layers": {"tokens_per_second": 36_400.0, "peak_gib": 38.3},
    "small": {"tokens_per_second": 248_000.0, "peak_gib": 8.9},
}
"""The authors' transformer-sequential on one H200 (torch 2.11), bf16 autocast + TF32, the better of its two settings, with the
same models, batches and initial spans. Unmodified apart from the training loop around it."""
GOAL_SPEED, GOAL_MEMORY = 10.0, 8.0


@dataclass(frozen=True)
class Case:
    """One model and one way to train it."""

    name: str
    size: str
    """The size of the released model with whose figure it is compared."""
    model: DecoderConfig
    train: TrainConfig

    @property
    def same_model(self) -> bool:
        """Whether it is the released model itself, for which the goals hold."""
        return self.name.startswith("paper")

    @property
    def fill(self) -> int:
        """Number of steps until the memory is full."""
        if not self.train.carry:
            return 3
        life = self.model.mixer.initial_span * self.model.mixer.max_span + self.model.mixer.ramp
        return -(-int(life) // self.train.block) + 8  # and its shapes are recorded


def sizes() -> dict[str, tuple[dict[str, Any], dict[str, Any], int, int]]:
    """Model fields, memory fields, batch and block of the paper's two enwik8 recipes."""
    large = dict(dim=512, ff_dim=2048, layers=12, heads=8, dropout=0.3)
    small = dict(dim=256, ff_dim=1024, layers=8, heads=4, dropout=0.3)
    return {
        "12 layers": (large, dict(max_span=16384, ramp=128, initial_span=0.1), 16, 512),
        "small": (small, dict(max_span=4096, ramp=64, initial_span=0.1, temperature=64.0), 64, 256),
    }


def cases() -> list[Case]:
    found = []
    for size, (fields, memory, batch, block) in sizes().items():
        paper_memory = ExpireSpanConfig(
            **memory, paper=PaperDetails(False, initial_memories=block, normalizer_eps=1e-8)
        )
        paper = DecoderConfig.paper(**fields, relative_window=block, mixer=paper_memory)
        modern = DecoderConfig.modern(**fields, mixer=ExpireSpanConfig(**memory))
        train = TrainConfig(batch=batch, block=block, lr=7e-4, warmup=8000, clip=0.3, precision="bf16", steps=100_000)
        long = replace(train, batch=max(batch // 4, 8), block=8192, carry=False, optimizer="muon", compile=True)
        found += [
            Case(f"paper, {size}", size, paper, train),
            Case(f"paper, {size}, compiled", size, paper, replace(train, compile=True)),
            Case(f"modern, {size}, blocks", size, modern, train),
            Case(f"modern, {size}, blocks, compiled", size, modern, replace(train, compile=True)),
            Case(f"modern, {size}, parallel, compiled", size, modern, long),
        ]
    return sorted(found, key=lambda case: not case.same_model)


def shrink(case: Case) -> Case:
    """A case of the same kind that takes a fraction of a second on any computer."""
    paper = case.model.mixer.paper
    paper = replace(paper, initial_memories=paper.initial_memories and 8)
    mixer = replace(case.model.mixer, max_span=64, ramp=4, paper=paper)
    model = replace(case.model, dim=16, ff_dim=16, layers=1, heads=2, relative_window=8, mixer=mixer)
    return replace(case, model=model, train=replace(case.train, batch=2, block=8, compile=False, precision="fp32"))


class Bench:
    """A model in training, one step at a time."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(0)
        self.case, self.config = case, case.train
        decoder = Decoder(case.model).to(device)
        if case.train.compile:
            decoder.compile_blocks(carry=case.train.carry)
        self.scorer = Scorer(decoder, case.train.precision).train()
        self.optimizers = build_optimizers(self.scorer, case.train)
        self.state: Any = None
        graphs = device.type == "cuda" and case.train.graphs and case.train.carry
        self.run_pass = TrainStep(self.scorer, torch.Tensor.backward, graphs=graphs)
        tokens = torch.randint(0, 256, (case.train.batch, case.train.block + 1), device=device)
        self.x, self.y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.mask = torch.ones_like(self.y, dtype=torch.bool)
        self.scale = torch.tensor(1 / self.y.numel(), device=device)
        self.weight = torch.tensor(case.train.span_weight, device=device)
        self.done, self.live = 0, None

    def step(self) -> None:
        set_rates(self.optimizers, rate_factor(self.done, self.config))
        given = Pass(self.x, self.y, self.mask, self.state, None, self.scale, self.weight, self.config.carry)
        sums, self.state, _ = self.run_pass(given)
        torch.nn.utils.clip_grad_norm_(self.scorer.parameters(), self.config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.live = sums["live"]
        self.done += 1


def time_steps(bench: Bench, count: int) -> float:
    """Mean milliseconds per step when the host does not wait for each step, as in training."""
    start = time.perf_counter()
    for _ in range(count):
        bench.step()
    synchronize()
    return 1e3 * (time.perf_counter() - start) / count


def time_case(case: Case, device: torch.device, deadline: Deadline, together: int = 10) -> dict[str, Any]:
    """Up to six groups of steps; the speed is their median."""
    bench = Bench(case, device)
    for _ in range(case.fill):
        bench.step()
    synchronize()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    while len(times) < 2 or (len(times) < 6 and deadline.left > 0):
        times.append(time_steps(bench, together))
    seconds = 1e-3 * spread(times)["median"]
    peak = torch.cuda.max_memory_reserved() / GIB if device.type == "cuda" else None  # a graph's memory is reserved
    tokens = case.train.batch * case.train.block
    row = {"case": case.name, "tokens_per_step": tokens, "batch": case.train.batch, "block": case.train.block}
    row |= {"parameters": sum(p.numel() for p in bench.scorer.parameters()), "impl": impl_of(case, device)}
    row |= {"step_ms": spread(times), "steps_timed_together": together, "tokens_per_second": tokens / seconds}
    return (
        row
        | {"peak_gib": peak, "live": bench.live.tolist() if bench.live is not None else None}
        | against(case, tokens / seconds, peak)
    )


def impl_of(case: Case, device: torch.device) -> str:
    """Which implementation of the operator this case runs."""
    model = case.model
    dtype = torch.bfloat16 if case.train.precision == "bf16" else torch.float32
    return resolve_impl(model.mixer.impl, device, head_dim=model.head_dim, dtype=dtype)


def against(case: Case, speed: float, peak: float | None) -> dict[str, Any]:
    """Ratios to the released code; a verdict only where the model is the same."""
    released = RELEASED[case.size]
    found: dict[str, Any] = {"speed_ratio": speed / released["tokens_per_second"], "same_model": case.same_model}
    less = released["peak_gib"] / peak if peak else None
    found["memory_ratio"] = less
    if case.same_model and less is not None:
        found["speed_verdict"] = "won" if found["speed_ratio"] >= GOAL_SPEED else "missed"
        found["memory_verdict"] = "won" if less >= GOAL_MEMORY else "missed"
    return found


def profile_case(case: Case, device: torch.device, folder: Path) -> str:
    """A table of what three steady steps spend their time on, by device time and by host time."""
    bench = Bench(case, device)
    for _ in range(case.fill):
        bench.step()
    synchronize()
    with torch.profiler.profile() as profile:
        for _ in range(3):
            bench.step()
        synchronize()
    averages = profile.key_averages()
    keys = (["self_cuda_time_total"] if device.type == "cuda" else []) + ["self_cpu_time_total"]
    path = folder / f"training_{case.name.replace(', ', '_').replace(' ', '_')}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(averages.table(sort_by=key, row_limit=30, max_name_column_width=70) for key in keys))
    return path.name


def line(row: dict[str, Any]) -> str:
    peak = f"{row['peak_gib']:6.2f} GiB, {row['memory_ratio']:5.2f}x less" if row["peak_gib"] else ""
    live = sum(row["live"]) / len(row["live"])
    return (
        f"{row['case']:36} {row['step_ms']['median']:8.2f} ms {row['tokens_per_second']:12,.0f} tok/s "
        f"{row['speed_ratio']:6.2f}x released  {peak}  live {live:.0f}  {row['impl']} {row.get('speed_verdict', '')}"
    )


def run(chosen: list[Case], device: torch.device, seconds: float, folder: Path, profile: bool, smoke: bool) -> Path:
    errors: dict[str, str] = {}
    result: dict[str, Any] = {"smoke": smoke, "released": RELEASED, "rows": [], "profiles": [], "errors": errors}
    whole, together = Deadline(seconds), 2 if smoke else 10
    for n, case in enumerate(chosen):
        box = Deadline(max(whole.left, 0) / (len(chosen) - n) * 0.8)
        torch._dynamo.reset()  # graphs of other models count towards the recompile limit
        row = guarded(errors, case.name, lambda c=case, b=box: time_case(c, device, b, together), whole)
        if row is not None:
            result["rows"].append(row)
            print(line(row), flush=True)
        if profile and row is not None:
            where = guarded(errors, f"profile {case.name}", lambda c=case: profile_case(c, device, folder), whole)
            result["profiles"] += [where] if where else []
        path = save("training", result, folder)
    for name, error in errors.items():
        print(f"{name}: {error[:200]}")
    return path


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--profile", action="store_true", help="also write tables of the slowest kernels")
    parser.add_argument("--smoke", action="store_true", help="tiny models, on any machine: tests the benchmark itself")
    args = parser.parse_args(argv)
    chosen = [case for case in cases() if args.only in case.name]
    if not chosen:
        raise SystemExit(
            f"no case's name contains {args.only!r}; there are: {'; '.join(case.name for case in cases())}"
        )
    if not torch.cuda.is_available() and not args.smoke:
        raise SystemExit("benchmarks.training needs a CUDA GPU and found none; --smoke runs tiny models anywhere")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as the released code's better figures were taken: with TF32
    chosen = [shrink(case) for case in chosen] if args.smoke else chosen
    print("written to", run(chosen, device, args.seconds, args.out, args.profile, args.smoke))


if __name__ == "__main__":
    main()
