"""Times the operator and its alternatives in one run: `python -m benchmarks.attention [--out DIR] [--seconds N]`.

The alternatives are cuDNN's and flash causal attention, FlexAttention with the same learned expiry, and the dense definition
where it fits. Each is first compared with float64; a wrong one is not timed. Times are medians of calls on random bf16 inputs.
`forward` runs as in training and stores what the backward pass needs; `graph` replays the same work as one CUDA graph, so that
the time of the host's launches can be told apart. Real TFLOP/s count living pairs only; dense-equivalent ones all causal pairs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expire_span.ops.live import live_queries

from .record import save
from .systems import EXPIRES, SYSTEMS, Flex, Inputs, System, inputs_of
from .timing import Deadline, device_times, guarded, measure_ms, peak_gib, replay_ms
from .workloads import ANCHORS, RAMP, Workload

FORWARD_KERNEL = "_forward"
TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-4}
"""Largest relative error in norm: a few roundings of bf16, or of float32 sums."""
CHECK_LENGTH = (1000, 1024)
"""Number of queries in the check: not a multiple of a block, except for FlexAttention, which is compiled for whole blocks."""
REFERENCE_PAIRS = 2**29
"""Largest number of scores (B x H x T x T) for which the dense definition is timed."""
LINEAR = [Workload(1, 8, 2**n, 64, 0.02, 128.0) for n in (16, 18, 20)]
LENGTHS = [
    Workload(1, 8, 2**n, 64, *spans) for n in range(12, 19) for spans in ((1.0, 0.0), (0.02, 128.0), (0.2, 256.0))
]
SHARES = [Workload(1, 8, 32768, 64, s, 128.0) for s in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)]


@dataclass
class Session:
    """The state of one benchmark run: device, time limit, results."""

    deadline: Deadline
    out: Path
    smoke: bool = False
    flex: Flex = field(default_factory=Flex)
    result: dict[str, Any] = field(default_factory=lambda: {"errors": {}, "notes": [], "checks": {}})

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def fit(self, w: Workload) -> Workload:
        """The workload itself; in a smoke run, one of the same kind that takes milliseconds."""
        return replace(w, batch=1, heads=2, queries=max(w.queries // 256, 128), dim=w.dim // 2) if self.smoke else w

    def fits(self, workloads: list[Workload]) -> list[Workload]:
        if not self.smoke:
            return workloads
        return list(dict.fromkeys(self.fit(w) for w in workloads[::2] if w.queries <= 65536))[:3]

    def measure(self, run: Callable[[], object]) -> dict[str, float]:
        return measure_ms(run, 1.0 if self.smoke else 200.0)

    def save(self) -> Path:
        return save("attention", {"smoke": self.smoke, "ramp": RAMP, **self.result}, self.out)


def pairs(w: Workload, span: Tensor) -> tuple[int, int]:
    """Living and causal pairs of queries and memories, per head, over the batch."""
    length = span.shape[-1]
    alive = live_queries(
        span.detach().double(), torch.arange(length, device=span.device), 0, length - 1, ramp=RAMP, include_self=True
    )
    return int(alive.sum()), w.batch * length * (length + 1) // 2


# Correctness


def gradients(run: System, x: Inputs, wanted: list[Tensor], dy: Tensor) -> list[Tensor]:
    y = run(x)
    return [y.detach(), *torch.autograd.grad(y, wanted, dy.to(y.dtype))]


def learning(x: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    """Copies that require gradients; positions stay as they are."""
    return {
        n: t.detach().to(dtype or t.dtype).clone().requires_grad_() if t.is_floating_point() else t
        for n, t in x.items()
    }


def errors_of(session: Session, name: str, w: Workload, run: Callable[[Inputs], System]) -> dict[str, float]:
    """Relative error of the output and of each gradient against the float64 definition of the same function."""
    small = replace(w, batch=min(w.batch, 2), heads=2, queries=min(w.queries, CHECK_LENGTH[name == "flex"]))
    x = learning(small.tensors(session.device, session.dtype))
    dy = torch.randn_like(x["q"])
    exact = learning(x, torch.float64)
    if name not in EXPIRES:  # dense attention is the same definition with nothing expiring
        exact["span"] = torch.full_like(exact["span"], 2.0 * small.queries)
    learn_span = name != "flex" or session.flex.learn_span
    got = gradients(run(x), x, inputs_of(name, x, learn_span), dy)
    want = gradients(SYSTEMS["reference"], exact, inputs_of(name, exact, learn_span), dy)
    return {
        n: float((a.double() - b).norm() / b.norm().clamp_min(1e-30))
        for n, a, b in zip(("y", "dq", "dk", "dv", "dspan"), got, want)
        if n != "dspan" or bool(b.any())  # if no memory is on its ramp, spans have no gradient to compare
    }


def is_correct(session: Session, name: str, w: Workload, run: Callable[[Inputs], System]) -> bool:
    key = f"{name}, {w.name}"
    found = guarded(session.result["errors"], f"check {key}", lambda: errors_of(session, name, w, run))
    if found is None:
        return False
    session.result["checks"][key] = found
    good = all(error < TOLERANCE[session.dtype] for error in found.values())  # false for NaN, too
    if not good:
        session.result["errors"][f"check {key}"] = f"wrong, not timed: relative errors {found}"
    return good


# Timing


def time_system(
    session: Session, name: str, w: Workload, run: Callable[[Inputs], System], full: bool
) -> dict[str, Any]:
    """One row of the table. full: CUDA-graph replay and the share of list building as well."""
    x = learning(w.tensors(session.device, session.dtype))
    wanted = inputs_of(name, x, name != "flex" or session.flex.learn_span)
    dy = torch.randn_like(x["q"])
    system = run(x)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(system(x), wanted, dy)

    living, causal = pairs(w, x["span"])
    row: dict[str, Any] = {"workload": w.name, "system": name, "queries": w.queries, "share": w.share, "short": w.short}
    row |= {"shape": [w.batch, w.heads, w.queries, w.dim], "alive": living / causal}
    row["forward"] = session.measure(lambda: system(x))
    row["both"] = session.measure(both)
    row |= peak_gib(both)
    if full and session.device == "cuda":
        errors = session.result["errors"]
        if not any(
            key.startswith(f"graph {name}") for key in errors
        ):  # a system that could not be captured is not tried again
            row["graph"] = guarded(errors, f"graph {name}, {w.name}", lambda: replay_ms(both))
        if name == "ours":
            profile = guarded(
                errors, f"profile {w.name}", lambda: list_building(device_times(lambda: system(x)), device_times(both))
            )
            row |= profile or {}
    return row | rates(row, name, w, living, causal)


def list_building(forward: dict[str, float], both: dict[str, float]) -> dict[str, Any]:
    """Share of the device's time for building the plan: all of the forward pass except its attention kernel."""
    attending = sum(us for kernel, us in forward.items() if kernel.startswith(FORWARD_KERNEL))
    if not attending:
        raise ValueError(f"no kernel named {FORWARD_KERNEL} among {sorted(forward)}; name the forward kernel here")
    building, total = sum(forward.values()) - attending, sum(both.values())
    return {"plan_share": building / total, "kernels_us": {kernel[:60]: round(us, 1) for kernel, us in both.items()}}


def rates(row: dict[str, Any], name: str, w: Workload, living: int, causal: int) -> dict[str, float]:
    """TFLOP/s of two products forward and five backward; a dense system computes every pair, so both counts agree."""
    per_second = 14 * w.dim * w.heads / (row["both"]["median"] * 1e-3) / 1e12
    real = living if name in EXPIRES else causal
    return {"real_tflops": real * per_second, "dense_equivalent_tflops": causal * per_second}


def plain(name: str) -> Callable[[Inputs], System]:
    return lambda x: SYSTEMS[name]


def add_rows(
    session: Session, key: str, work: list[tuple[str, Workload]], deadline: Deadline, full: bool = False
) -> None:
    rows = session.result.setdefault(key, [])
    dense: dict[tuple, dict[str, Any]] = {}
    for name, w in work:
        shape = (name, w.batch, w.heads, w.queries, w.dim)
        if name not in EXPIRES and shape in dense:  # dense attention costs the same whatever the spans
            alive = next((row["alive"] for row in rows if row["workload"] == w.name), None)
            rows.append(dense[shape] | {"workload": w.name, "share": w.share, "short": w.short, "alive": alive})
            continue
        if key == "anchors" and not is_correct(session, name, w, plain(name)):
            continue
        row = guarded(
            session.result["errors"],
            f"{key}: {name}, {w.name}",
            lambda name=name, w=w: time_system(session, name, w, plain(name), full),
            deadline,
        )
        if row is not None:
            rows.append(row)
            dense[shape] = row
            print(line(row), flush=True)


def add_flex(session: Session, anchors: list[Workload]) -> None:
    """Time FlexAttention, shape after shape while there is time: it compiles for each shape, which is slow."""
    errors = session.result["errors"]
    for dim in dict.fromkeys(w.dim for w in anchors):
        probe = next(w for w in anchors if w.dim == dim and 0 < w.share < 1)
        if not guarded(errors, f"flex, head dim {dim}", lambda p=probe: flex_works(session, p), session.deadline):
            errors.setdefault(f"flex, head dim {dim}", "not timed: the check did not pass")
            continue
        for w in (w for w in anchors if w.dim == dim):
            row = guarded(
                errors,
                f"anchors: flex, {w.name}",
                lambda w=w: time_system(session, "flex", w, session.flex.prepare, False),
                session.deadline,
            )
            if row is not None:
                session.result["anchors"].append(row | {"learns_spans": session.flex.learn_span})
                print(line(row), flush=True)
        session.save()


def flex_works(session: Session, probe: Workload) -> bool:
    """Whether it is correct, with gradients to the spans or else without them, in which case a note says so."""
    good = is_correct(session, "flex", probe, session.flex.prepare)
    if good or not session.flex.learn_span:
        return good
    reason = session.result["errors"].get(f"check flex, {probe.name}")
    session.result["notes"].append(f"FlexAttention is timed without gradients to the spans: {reason}")
    session.flex.learn_span = False
    return is_correct(session, "flex", probe, session.flex.prepare)


# Evaluation of the figures


def goals(w: dict[str, Any]) -> dict[str, float]:
    """Least ratio of each rival's time to ours, by the workload's kind."""
    long = w["queries"] >= 65536
    cudnn = {(1.0, 0.0): 0.65, (0.02, 128.0): 12.0 if long else 4.0, (0.2, 256.0): 4.0 if long else 2.0}
    found = {"flex": 20.0 if 0 < w["share"] < 1 else 2.5}
    if (kind := (w["share"], w["short"])) in cudnn:
        found["cudnn"] = cudnn[kind]
    return found


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times faster ours is than each other system on the same workload, against the goals."""
    table = {(row["workload"], row["system"]): row for row in rows}
    found = []
    for (workload, system), other in table.items():
        ours = table.get((workload, "ours"))
        if system == "ours" or ours is None:
            continue
        ratio = other["both"]["median"] / ours["both"]["median"]
        entry: dict[str, Any] = {"workload": workload, "against": system, "ratio": ratio}
        if ours.get("graph") and other.get("graph"):
            entry["graph_ratio"] = other["graph"]["median"] / ours["graph"]["median"]
        if (goal := goals(ours).get(system)) is not None:
            entry |= {"goal": goal, "verdict": "won" if ratio >= goal else "missed"}
        found.append(entry)
    return found


def growth(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Memory and time per token at the longest length divided by those at the shortest; 1 means linear growth."""
    if len(rows) < 2 or rows[0]["extra_gib"] is None:
        return None
    first, last = rows[0], rows[-1]
    tokens = last["queries"] / first["queries"]
    memory = last["extra_gib"] / first["extra_gib"] / tokens
    time = last["both"]["median"] / first["both"]["median"] / tokens
    verdict = "won" if memory <= 1.1 else "missed"
    return {"from": first["queries"], "to": last["queries"], "memory": memory, "time": time, "verdict": verdict}


def line(row: dict[str, Any]) -> str:
    graph = f" graph {row['graph']['median']:8.3f}" if row.get("graph") else ""
    peak = f" extra {row['extra_gib']:6.2f} GiB" if row.get("extra_gib") is not None else ""
    plan = f" plan {row['plan_share']:.1%}" if row.get("plan_share") is not None else ""
    both, forward = row["both"], row["forward"]
    return (
        f"{row['workload']:26} {row['alive']:6.1%} {row['system']:9} {both['median']:9.3f} ms "
        f"[{both['min']:.3f}-{both['max']:.3f}] ({forward['median']:.3f}){graph}{peak}{plan} "
        f"real {row['real_tflops']:.0f} dense-equivalent {row['dense_equivalent_tflops']:.0f} TFLOP/s"
    )


def run(session: Session) -> Path:
    deadline, anchors = session.deadline, session.fits(ANCHORS)
    work = [(name, w) for w in anchors for name in ("ours", "cudnn", "flash")]
    add_rows(session, "anchors", work, deadline.part(0.4), full=True)
    session.save()
    add_rows(session, "linear", [("ours", w) for w in session.fits(LINEAR)], deadline.part(0.5))
    session.result["linear_growth"] = growth(session.result["linear"])
    shares = session.fits(SHARES)
    work = [("ours", w) for w in shares] + [(name, shares[0]) for name in ("cudnn", "flash")]
    add_rows(session, "shares", work, deadline.part(0.6))
    lengths = session.fits(LENGTHS)
    work = [("ours", w) for w in lengths] + [(n, w) for w in lengths if w.share == 1 for n in ("cudnn", "reference")]
    work = [(n, w) for n, w in work if n != "reference" or w.batch * w.heads * w.queries**2 <= REFERENCE_PAIRS]
    work.sort(key=lambda item: item[1].queries)
    add_rows(session, "lengths", work, deadline.part(0.7))
    session.save()
    add_flex(session, anchors)
    session.result["ratios"] = ratios(session.result["anchors"])
    return session.save()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="what is not begun by then is skipped, and said so"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on any machine: tests the benchmark itself")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() and not args.smoke:
        raise SystemExit(
            "benchmarks.attention needs a CUDA GPU and found none; on a CPU use benchmarks.cpu, or --smoke"
        )
    session = Session(Deadline(args.seconds), args.out, args.smoke, Flex(compiled=not args.smoke))
    path = run(session)
    for entry in session.result["ratios"]:
        goal = f"goal {entry['goal']:5.2f}x {entry['verdict']}" if "goal" in entry else ""
        print(f"{entry['workload']:26} against {entry['against']:9} {entry['ratio']:7.2f}x {goal}")
    for name, error in session.result["errors"].items():
        print(f"{name}: {error[:160]}")
    print("written to", path)


if __name__ == "__main__":
    main()
