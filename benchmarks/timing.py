"""Timing for the benchmarks: medians with their spread, peak memory, CUDA-graph replay, and a time limit for the whole run.

Everything also works without a GPU, on the host's clock, so that the benchmarks themselves can be tested anywhere.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
GIB = 2**30


class Deadline:
    """The time limit of a run."""

    def __init__(self, seconds: float) -> None:
        self.start, self.seconds = time.monotonic(), seconds

    @property
    def spent(self) -> float:
        return time.monotonic() - self.start

    def part(self, share: float) -> Deadline:
        """A deadline with the same start that ends after this share of the whole time."""
        part = Deadline(self.seconds * share)
        part.start = self.start
        return part

    @property
    def left(self) -> float:
        return self.seconds - self.spent


def guarded(errors: dict[str, str], name: str, run: Callable[[], T], deadline: Deadline | None = None) -> T | None:
    """The result of `run`, or None with the reason in `errors`, so that one failure does not stop the other measurements."""
    if deadline is not None and deadline.left <= 0:
        errors[name] = f"skipped: no time left of {deadline.seconds:.0f} s"
        return None
    try:
        return run()
    except Exception as error:  # other libraries fail with errors of their own; the message is recorded
        errors[name] = f"{type(error).__name__}: {str(error)[:400]}"
        return None
    finally:
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def one_ms(run: Callable[[], object]) -> float:
    """One call: between two events on a GPU, else on the host's clock."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


def measure_ms(run: Callable[[], object], budget_ms: float = 200.0, most: int = 30) -> dict[str, float]:
    """Median time of a call after two warm-up calls, with the fastest and the slowest of all that were timed."""
    run()
    synchronize()
    first = one_ms(run)
    count = max(3, min(most, int(budget_ms / max(first, 1e-3))))
    return spread([one_ms(run) for _ in range(count)])


def host_us(run: Callable[[], object], count: int = 50) -> float:
    """Median time in microseconds that the host needs to launch one call on an idle device."""
    times = []
    for _ in range(count + 5):
        synchronize()
        start = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - start))
    synchronize()
    return statistics.median(times[5:])


def spread(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "min": min(times), "max": max(times), "runs": len(times)}


def replay_ms(run: Callable[[], object]) -> dict[str, float]:
    """Time of the same work replayed as one CUDA graph: that of the device, without the host's launches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    found = measure_ms(graph.replay)
    del kept
    return found


def peak_gib(run: Callable[[], object]) -> dict[str, float | None]:
    """Peak GPU memory while `run` ran, in total and beyond what was allocated before it; None without a GPU."""
    if not torch.cuda.is_available():
        run()
        return {"peak_gib": None, "extra_gib": None}
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    synchronize()
    peak = torch.cuda.max_memory_allocated()
    return {"peak_gib": peak / GIB, "extra_gib": (peak - before) / GIB}


def device_times(run: Callable[[], object]) -> dict[str, float]:
    """Microseconds on the GPU of each kernel of one call, largest first; empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        synchronize()
    rows: list[Any] = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    return {e.key: e.self_device_time_total for e in rows if e.self_device_time_total > 0}
