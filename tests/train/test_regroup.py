"""A run goes on with another number of processes: nothing that they held is lost. test_context.py compares losses."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expire_span import checkpoint
from expire_span.recipes import text_tiny
from expire_span.runs import RunFolder
from expire_span.store import NEVER, HiddenMemory
from expire_span.train.regroup import Layout, regroup
from expire_span.train.supervised import resume, train
from tests.tiny import as_options, tiny_config, write_text
from tests.train.test_context import without_bytes
from tests.train.test_ddp import call, check_same

LAYERS, MICRO, BATCH = 2, 2, 24
LAYOUTS = [Layout(n, sharing) for n in (1, 2, 3, 4, 6) for sharing in (1, 2, 3) if n % sharing == 0]


def store(draw: random.Random, rows: list[list[int]]) -> HiddenMemory:
    """Memories at the given positions of each row, whose hidden state repeats row and position; with empty slots in front."""
    width = max(map(len, rows), default=0) + draw.randrange(3)
    pos = torch.tensor([[NEVER] * (width - len(row)) + row for row in rows]).view(len(rows), width)
    hidden = torch.where(pos == NEVER, 0, pos).double()[..., None].expand(-1, -1, 3).contiguous()
    return HiddenMemory(hidden, pos, torch.zeros(len(rows), dtype=torch.int64))


def held(workers: list[dict[str, Any]], layout: Layout) -> dict[tuple[int, int], list[tuple[int, float]]]:
    """For each row of the batch and layer, all memories that any process holds: positions and hidden states, sorted."""
    found: dict[tuple[int, int], list[tuple[int, float]]] = {}
    size = BATCH // (layout.groups * MICRO)
    for place, worker in enumerate(workers):
        for n, state in enumerate(worker["states"]):
            first = (place // layout.sharing * MICRO + n) * size
            for layer, part in enumerate(state):
                memory = part["memory"]
                assert part["position"] == 0 and len(memory.pos) == size
                for row in range(size):
                    pairs = zip(memory.pos[row].tolist(), memory.hidden[row, :, 0].tolist())
                    found.setdefault((first + row, layer), []).extend(x for x in pairs if x[0] != NEVER)
    return {key: sorted(pairs) for key, pairs in found.items()}


def workers_of(layout: Layout, draw: random.Random) -> list[dict[str, Any]]:
    size = BATCH // (layout.groups * MICRO)
    found = []
    for _ in range(layout.processes):
        states = [
            [{"memory": store(draw, [_positions(draw) for _ in range(size)]), "position": 0} for _ in range(LAYERS)]
            for _ in range(MICRO)
        ]
        rows = torch.rand(3, 5 + 2 * LAYERS + MICRO)
        found.append(
            {"states": states, "window": {"rows": rows, "counts": [1, 2, 3], "units": [1, 2, 3]}, "random": {}}
        )
    return found


def _positions(draw: random.Random) -> list[int]:
    return sorted(draw.sample(range(-500, 0), draw.randrange(6)))


@settings(max_examples=25, deadline=None)
@given(old=st.sampled_from(LAYOUTS), new=st.sampled_from(LAYOUTS), seed=st.integers(0, 10**6))
def test_other_processes_hold_what_the_first_ones_held(old, new, seed):
    before = workers_of(old, random.Random(seed))
    after = [regroup(before, old, new, place, LAYERS) for place in range(new.processes)]
    assert held(after, new) == held(before, old)
    for worker in after:
        for memory in (part["memory"] for state in worker["states"] for part in state):
            assert bool((memory.pos.diff() >= 0).all()) and torch.equal(memory.living, (memory.pos != NEVER).sum(1))
    sums, means = [0, 1, *range(5 + 2 * LAYERS, 5 + 2 * LAYERS + MICRO)], [2, 3, 4, *range(5, 5 + 2 * LAYERS)]
    a, b = (torch.stack([worker["window"]["rows"] for worker in workers]) for workers in (before, after))
    torch.testing.assert_close(a[..., sums].sum(0), b[..., sums].sum(0))
    torch.testing.assert_close(a[..., means].mean(0), b[..., means].mean(0))


def test_runs_without_memory_have_none_afterwards():
    before = [{"states": [None, None], "window": {"rows": None, "counts": [], "units": []}, "random": {}}] * 2
    assert regroup(before, Layout(2, 1), Layout(4, 2), 3, LAYERS)["states"] == [None, None]


def options_of_run(steps: int, every: int) -> dict[str, Any]:
    """A checkpoint lies in the middle of the steps that one line of metrics sums up."""
    options: dict[str, Any] = dict(steps=steps, log_every=2, eval_every=steps, checkpoint_every=every, block=16)
    return options | dict(accumulate=2, span_weight=0.1)


def test_a_checkpoint_of_two_processes_is_read_by_one(tmp_path):
    """The checkpoint of one process is written again as two processes that shared its rows would have written it."""
    config = tiny_config(write_text(tmp_path), **options_of_run(4, 3))
    run = train(config, tmp_path / "run", shown=False)
    before = without_bytes(run)
    forget_after(run, 3)
    found = checkpoint.load(run)
    assert found is not None
    state = found.state | {"processes": 2, "context_parallel": 2}
    workers = [regroup([found.worker], Layout(1, 1), Layout(2, 2), n, 2) for n in range(2)]
    first, second = (replace(found, state=state, worker=worker) for worker in workers)
    shutil.rmtree(checkpoint.folder_of(run, 3))
    checkpoint.save(run, first, keep=2, barrier=lambda: checkpoint.save(run, second, keep=2, rank=1) and None)
    resume(RunFolder.open(run.path), shown=False)
    check_same(before, without_bytes(run))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_run_changes_its_number_of_processes(tmp_path, kind):
    """Two processes, then one, then two again. The short twins are the two tests above."""
    config = tiny_config(write_text(tmp_path), **options_of_run(10, 4))
    one = train(config, tmp_path / "one", shown=False)
    args = ["--runs-dir", str(tmp_path), "--name", "two", *as_options(config, text_tiny())]
    code, output = call(kind, "train", "text_tiny", *args, "--train.context-parallel", "2")
    assert code == 0, output
    two = RunFolder.open(tmp_path / "two")
    forget_after(two, 4)
    resume(two, context_parallel=1, shown=False)
    check_same(without_bytes(one), without_bytes(two))
    forget_after(two, 8)
    code, output = call(kind, "resume", str(two.path), "--context-parallel", "2")
    assert code == 0, output
    check_same(without_bytes(one), without_bytes(two))


def forget_after(run: RunFolder, step: int) -> None:
    (run.path / "result.json").unlink()
    for folder in run.checkpoints.glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
