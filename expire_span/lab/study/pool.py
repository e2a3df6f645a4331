"""A process pool for a study's cells, one thread per process, with a progress bar.

A worker writes its result into the study's folder itself, so that an interrupted study loses only unfinished cells. It is not
the job runner of `compare`, whose workers are one training run each: a study has many small cells that are not runs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from expire_span.errors import RunError

from .folder import StudyFolder

_done: Any = None
"""In a worker process: the shared counter of the cost of all work done so far."""


class Job(Protocol):
    """A piece of work that can be sent to a process: a frozen dataclass with a name and an estimated cost."""

    @property
    def name(self) -> str: ...
    @property
    def cost(self) -> float: ...


Work = Callable[[Any, StudyFolder, Callable[[float], None]], dict[str, Any]]
"""A module-level function (job, folder, tick) -> result; `tick` is called with the cost of the work just done."""


def run_jobs(work: Work, jobs: Sequence[Job], folder: StudyFolder, processes: int) -> dict[str, dict[str, Any]]:
    """Run the jobs that are not finished, the most expensive first; returns the results of all jobs, by name.

    processes: how many to use; 0 runs the jobs in this process.
    """
    left = sorted((job for job in jobs if folder.read_cell(job.name) is None), key=lambda job: -job.cost)
    if processes == 0:
        for job in left:
            _report(job, _run_one(work, job, folder))
    elif left:
        context = multiprocessing.get_context("spawn")
        done = context.Value("d", 0.0)
        pool = ProcessPoolExecutor(min(processes, len(left)), context, _start_worker, (done, os.getpid()))
        try:
            futures = {pool.submit(_run_one, work, job, folder): job for job in left}
            _watch(futures, done, len(jobs) - len(left))
        except BrokenProcessPool as error:
            raise RunError(
                "a process of the study was killed, as the system does when memory runs out; what is finished stays, and the "
                f"same command goes on with the rest (--jobs below {processes} needs less memory)"
            ) from error
        except BaseException:  # Ctrl-C, or a job that failed: do not wait for the others
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return {job.name: folder.read_cell(job.name) or {} for job in jobs}


def _watch(futures: dict[Future[float], Any], done: Any, finished: int) -> None:
    """Show the progress until all jobs are done; the first failure is raised."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TaskProgressColumn())
    shown = sys.stdout.isatty()
    bar = Progress(
        *columns,
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(),
        speed_estimate_period=300,
    )
    if finished:
        print(f"{finished} of {finished + len(futures)} cells were finished already", flush=True)
    task = bar.add_task("starting", total=sum(job.cost for job in futures.values()))
    with bar if shown else contextlib.nullcontext():
        waiting = set(futures)
        while waiting:
            ended, waiting = wait(waiting, timeout=0.3, return_when=FIRST_COMPLETED)
            bar.update(task, completed=done.value, description=f"{len(futures) - len(waiting)}/{len(futures)} cells")
            for future in ended:
                seconds = future.result()
                if not shown:
                    _report(futures[future], seconds)


def _report(job: Job, seconds: float) -> None:
    print(f"{job.name}  {seconds:.1f} s", flush=True)


def _run_one(work: Work, job: Job, folder: StudyFolder) -> float:
    found = work(job, folder, _tick)
    folder.write_cell(job.name, found)
    return float(found.get("seconds", 0.0))


def _tick(cost: float) -> None:
    if _done is not None:
        with _done.get_lock():
            _done.value += cost


def _start_worker(done: Any, parent: int) -> None:
    """Set a worker up: one thread, Ctrl-C ignored (the parent handles it), and an exit when the parent has ended."""
    global _done
    _done = done
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
    os._exit(1)
