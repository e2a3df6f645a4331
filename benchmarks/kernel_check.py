"""Check the fused kernels on a GPU, then time candidate block sizes: `python -m benchmarks.kernel_check OUT [seconds]`.
`python -m benchmarks.kernel_check --host` prints the host's microseconds per call instead, with and without quick launches.

Every candidate is first compared with the float64 definition; only correct ones are timed. A candidate that fails to compile
or run is logged with its error and left out. Worker processes compile ahead into Triton's cache. Writes
OUT/kernel_check.json and prints a summary.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.candidates import PLAN_N, Candidate, candidates
from benchmarks.timing import host_us
from benchmarks.workloads import ANCHORS, RAMP, Workload, milliseconds
from expire_span.ops import expire_attention
from expire_span.ops.reference import reference_attention
from expire_span.ops.triton import launch, tuning
from expire_span.ops.triton.backward import Backward
from expire_span.ops.triton.forward import run_forward
from expire_span.ops.triton.lists import Plan, build_plan
from expire_span.ops.triton.tuning import Launch, Tuning

START = time.monotonic()
DEVICE = "cuda"
SPLITS = (1, 2, 4, 8)
SWEEP = {
    64: [
        Workload(4, 8, 16384, 64),
        Workload(4, 8, 16384, 64, 0.02, 128.0),
        Workload(1, 8, 65536, 64, 0.02, 128.0),
        Workload(1, 8, 65536, 64, 0.2, 256.0),
    ],
    128: [Workload(4, 8, 16384, 128), Workload(4, 8, 16384, 128, 0.02, 128.0)],
}


@dataclass
class Problem:
    """One workload as the kernels' arguments, with a cache of plans by block sizes."""

    q: Tensor
    k: Tensor
    v: Tensor
    span: Tensor
    q_pos: Tensor
    k_pos: Tensor
    dy: Tensor
    ramp: float
    plans: dict[tuple[int, int], tuple[Plan, Tensor, Tensor]]

    @classmethod
    def of(cls, x: dict[str, Tensor], ramp: float) -> Problem:
        batch = x["q"].shape[0]
        pos = {n: x[n].expand(batch, -1).unsqueeze(1) for n in ("q_pos", "k_pos")}
        dy = torch.randn_like(x["q"])
        return cls(x["q"], x["k"], x["v"], x["span"].unsqueeze(1), pos["q_pos"], pos["k_pos"], dy, ramp, {})

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def plan(self, t: Tuning) -> Plan:
        return build_plan(
            self.k, self.v, self.span, self.q_pos, self.k_pos, None, None, ramp=self.ramp, include_self=True,
            block_m=t.forward.block_m, block_n=t.block_n,
        )  # fmt: skip

    def forward(self, t: Tuning, plan: Plan) -> tuple[Tensor, Tensor]:
        return run_forward(self.q, plan, ramp=self.ramp, scale=self.scale, has_docs=False, tuning=t, precision="ieee")

    def prepared(self, t: Tuning) -> tuple[Plan, Tensor, Tensor]:
        """Plan, y and lse at these block sizes, from a plain forward pass."""
        key = (t.forward.block_m, t.block_n)
        if key not in self.plans:
            plain = Tuning(t.block_n, Launch(key[0], 4, 2), Launch(key[0]), Launch(min(key[0], 64)))
            plan = self.plan(plain)
            self.plans[key] = (plan, *self.forward(plain, plan))
        return self.plans[key]

    def runner(self, c: Candidate, splits: int = 1) -> Any:
        """A function that runs just this candidate's kernel and returns its results by name."""
        t = c.tuning
        plan, y, lse = self.prepared(t)
        if c.kernel == "forward":
            return lambda: {"y": self.forward(t, plan)[0]}
        work = Backward(self.dy, self.q, y, lse, plan, self.k.shape[2], self.ramp, self.scale, False, t, "ieee")
        if c.kernel == "dq":
            return lambda: {"dq": work.query_gradient()[0]}
        delta = work.query_gradient()[1]

        def run() -> dict[str, Tensor]:
            dk, dv, dspan = work.memory_gradients(delta, splits)
            return {"dk": dk, "dv": dv, "dspan": dspan.sum(1, keepdim=True)}

        return run


def small_problem(dim: int) -> Problem:
    """1008 queries over 1120 memories of mixed spans: no multiples of a block size, and quick in float64."""
    g = torch.Generator(DEVICE).manual_seed(1)
    like = dict(device=DEVICE, dtype=torch.bfloat16, generator=g)
    q = torch.randn(2, 8, 1008, dim, **like)
    k, v = (torch.randn(2, 8, 1120, dim, **like) for _ in range(2))
    span = (torch.rand(2, 1120, device=DEVICE, generator=g) ** 4 * 1500 * 64).round() / 64  # off the edges of the ramp
    pos = torch.arange(1120, device=DEVICE)
    return Problem.of(dict(q=q, k=k, v=v, span=span, q_pos=pos[112:], k_pos=pos), 16.0)


def exact(p: Problem) -> dict[str, Tensor]:
    inputs = [x.double().requires_grad_() for x in (p.q, p.k, p.v, p.span)]
    q, k, v, span = inputs
    heads = k.shape[1]
    rows = (x.expand(-1, heads, -1) for x in (span, p.q_pos, p.k_pos))
    y = reference_attention(q, k, v, *rows, ramp=p.ramp, causal=True, include_self=True, scale=p.scale)
    grads = torch.autograd.grad(y, inputs, p.dy.double())
    return dict(zip(("y", "dq", "dk", "dv", "dspan"), (y.detach(), *grads)))


def worst_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    return max(float((x.double() - want[n]).norm() / want[n].norm()) for n, x in got.items())


def guarded(log: dict[str, str], name: str, run: Any) -> Any:
    """The result of `run`, or None with the error in the log, so that one failing candidate does not stop the others."""
    try:
        return run()
    except Exception as error:
        log[name] = f"{type(error).__name__}: {str(error)[:300]}"
        torch.cuda.synchronize()
        return None


def warm(part: int, parts: int) -> None:
    """Compile this worker's share of the candidates by running them on the small problem."""
    log: dict[str, str] = {}
    problems: dict[int, Problem] = {}
    for c in candidates()[part::parts]:
        p = problems.get(c.dim) or problems.setdefault(c.dim, small_problem(c.dim))
        for splits in (1, 4) if c.kernel.startswith("dkv") else (1,):
            guarded(log, c.name, lambda c=c, p=p, splits=splits: p.runner(c, splits)())


def warm_all(seconds: float) -> None:
    parts = max(1, min(14, (os.cpu_count() or 2) - 1))
    command = [sys.executable, "-m", "benchmarks.kernel_check", "--warm"]
    workers = [subprocess.Popen([*command, str(i), str(parts)]) for i in range(parts)]
    end = time.monotonic() + seconds
    for worker in workers:
        try:
            worker.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()


def check_all(report: dict, deadline: float) -> list[Candidate]:
    """Candidates whose results agree with float64 to bfloat16's rounding."""
    good = []
    for dim in SWEEP:
        p = small_problem(dim)
        want = exact(p)
        for c in (c for c in candidates() if c.dim == dim):
            if time.monotonic() > deadline:
                report["errors"][c.name] = "no time left"
                continue
            counts = (1, 4) if c.kernel.startswith("dkv") else (1,)
            error = guarded(
                report["errors"],
                c.name,
                lambda c=c, p=p, want=want, counts=counts: max(worst_error(p.runner(c, n)(), want) for n in counts),
            )
            report["accuracy"][c.name] = error
            if error is not None and error < 0.02:
                good.append(c)
            elif error is not None:
                report["errors"][c.name] = f"wrong: relative error {error:.3g}"
    return good


def time_all(report: dict, good: list[Candidate], deadline: float) -> None:
    for dim, workloads in SWEEP.items():
        for w in workloads:
            p = Problem.of(w.tensors(DEVICE), RAMP)
            for c in (c for c in good if c.dim == dim and time.monotonic() < deadline):
                counts = SPLITS if c.kernel.startswith("dkv") else (1,)
                for n in counts:
                    ms = guarded(report["errors"], c.name, lambda c=c, p=p, n=n: milliseconds(p.runner(c, n), 25, 6))
                    key = f"{c.name} x{n}" if c.kernel.startswith("dkv") else c.name
                    report["times"].setdefault(w.name, {})[key] = ms
            t = tuning.choose(dim, torch.bfloat16)
            report["plan_ms"][w.name] = guarded(
                report["errors"], "plan", lambda p=p, t=t: milliseconds(lambda: p.plan(t))
            )
            del p


def relative_cost(c: Candidate, workloads: list[dict[str, float | None]]) -> float:
    """The candidate's time over the fastest time, summed over workloads; huge where it has none."""
    total = 0.0
    for times in workloads:
        best = min((v for v in times.values() if v), default=1.0)
        found = [v for k, v in times.items() if v and (k == c.name or k.startswith(c.name + " x"))]
        total += min(found, default=1e9) / best
    return total


def pick(report: dict, dim: int) -> Tuning:
    """The fastest combination over the sweep's workloads, which have equal weights."""
    names = [w.name for w in SWEEP[dim]]
    times = report["times"]
    totals: dict[tuple, tuple[float, list[Candidate]]] = {}
    by_kernel = {k: [c for c in candidates() if c.dim == dim and c.kernel == k] for k in ("forward", "dq", "dkv")}

    for tma in (True, False):
        pool = {k: [c for c in cs if c.tma == tma] for k, cs in by_kernel.items()}
        for f in pool["forward"]:
            split = [d for d in pool["dq"] if f.block_m % d.block_m == 0]
            for parts in ([f, d, m] for d in split for m in pool["dkv"]):
                cost = sum(relative_cost(c, [times[n] for n in names]) for c in parts)
                totals[tuple(c.name for c in parts)] = (cost, parts)
    _, parts = min(totals.values(), key=lambda item: item[0])
    made = {c.kernel: Launch(c.block_m, c.warps, c.stages) for c in parts}
    split_at = tuning.choose(dim, torch.bfloat16).split_at
    return Tuning(PLAN_N, *made.values(), parts[-1].block_n // PLAN_N, parts[0].tma, split_at)


def dense_ms(w: Workload) -> dict[str, float]:
    x = w.tensors(DEVICE)
    q, k, v = (x[n].requires_grad_() for n in ("q", "k", "v"))
    dy = torch.randn_like(q)

    def both() -> None:
        torch.autograd.grad(scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), dy)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        forward = milliseconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
        return {"forward": forward, "both": milliseconds(both)}


def ours_ms(w: Workload, chosen: Tuning) -> dict[str, Any]:
    tuning.override(chosen)
    x = w.tensors(DEVICE)
    names = ("q", "k", "v", "span")
    dy = torch.randn_like(x["q"])

    def forward() -> Tensor:
        return expire_attention(**x, ramp=RAMP, impl="triton")

    found: dict[str, Any] = {"forward": milliseconds(forward)}
    for n in names:
        x[n].requires_grad_()

    def both() -> None:
        torch.autograd.grad(forward(), [x[n] for n in names], dy)

    found["both"] = milliseconds(both)
    torch.cuda.reset_peak_memory_stats()
    both()
    found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        both()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda e: -e.device_time_total)[:12]
    found["kernels_us"] = {e.key[:60]: round(e.device_time_total, 1) for e in rows}
    tuning.override(None)
    return found


def host(w: Workload) -> None:
    """Print the host's time for a forward and a backward call, and the wall time of both, with plain and with quick
    launches."""
    x = w.tensors(DEVICE)
    leaves = [x[n].requires_grad_() for n in ("q", "k", "v", "span")]
    dy = torch.randn_like(x["q"])

    def forward() -> Tensor:
        return expire_attention(**x, ramp=RAMP, impl="triton")

    y = forward()
    for quick in (False, True):
        launch.switch(quick)
        both = milliseconds(lambda: torch.autograd.grad(forward(), leaves, dy))
        there, back = host_us(forward), host_us(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True))
        way = "quick" if quick else "plain"
        print(f"{w.name:24s} {way}: host forward {there:.0f} us, backward {back:.0f} us; by the wall {both:.3f} ms")


def compare(report: dict, deadline: float) -> None:
    dense: dict[tuple, dict[str, float]] = {}
    for w in ANCHORS:
        if time.monotonic() > deadline:
            report["errors"][f"compare {w.name}"] = "no time left"
            continue
        shape = (w.batch, w.heads, w.queries, w.dim)
        if shape not in dense:
            dense[shape] = guarded(report["errors"], f"dense {w.name}", lambda w=w: dense_ms(w)) or {}
        ours = guarded(report["errors"], f"ours {w.name}", lambda w=w: ours_ms(w, report["picked"][w.dim])) or {}
        report["compare"][w.name] = {"dense": dense[shape], "ours": ours}
        if ours and dense[shape]:
            report["compare"][w.name]["ratio"] = dense[shape]["both"] / ours["both"]


def summarise(report: dict) -> None:
    for name, times in report["times"].items():
        print(f"\n{name} (plan {report['plan_ms'].get(name)} ms)")
        for kernel in ("forward", "dq", "dkv"):
            rows = sorted((v, k) for k, v in times.items() if v and k.split()[0] == kernel)
            print("\n".join(f"  {v:8.3f} {k}" for v, k in rows[:6]))
    print("\npicked:", report["picked"])
    for name, row in report["compare"].items():
        ours, dense = row["ours"], row["dense"]
        print(f"{name:28s} ours {ours.get('both')} ({ours.get('forward')}) dense {dense} ratio {row.get('ratio')}")
        print("   ", ours.get("kernels_us"))
    print("\nerrors:", json.dumps(report["errors"], indent=0)[:2500])


def main(out: Path, seconds: float) -> None:
    report: dict[str, Any] = {n: {} for n in ("accuracy", "times", "plan_ms", "picked", "compare", "errors", "spent")}
    report["device"] = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    out.mkdir(parents=True, exist_ok=True)
    phases = {
        "compile": lambda: warm_all(0.4 * seconds),
        "check and time": lambda: time_all(report, check_all(report, START + 0.6 * seconds), START + 0.8 * seconds),
        "pick": lambda: report["picked"].update({dim: pick(report, dim) for dim in SWEEP}),
        "compare": lambda: compare(report, START + seconds),
    }
    for name, phase in phases.items():
        guarded(report["errors"], name, phase)
        report["spent"][name] = round(time.monotonic() - START, 1)
        plain = {**report, "picked": {d: asdict(t) for d, t in report["picked"].items()}}
        (out / "kernel_check.json").write_text(json.dumps(plain, indent=1))
    print(report["device"], report["spent"])
    summarise(report)


if __name__ == "__main__":
    if sys.argv[1] == "--warm":
        warm(int(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "--host":
        for workload in (SWEEP[64][1], SWEEP[64][2], SWEEP[128][1]):
            host(workload)
    else:
        main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 290.0)
