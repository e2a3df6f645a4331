"""Episodes of the grid worlds stay what they were: digests of everything that some of them show, on both backends.

The digests were written by the first engines, which drew all rows anew whenever one began and painted every view cell by cell.
A change that is meant to change episodes must write them again; one that makes engines faster must not.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from expire_span.settings.tasks import CorridorTask, InstructionTask, PortalTask, TMazeTask
from expire_span.tasks.gridworlds.arrays import Arrays, below
from expire_span.tasks.gridworlds.levels import LEVELS, build_engine
from expire_span.tasks.hashing import mix_signed

CONFIGS = {
    **{f"{name}-{level}": config for name, levels in LEVELS.items() for level, config in levels.items()},
    "short-instructions": InstructionTask(instructions=6, talk=13, size=4, cancel_prob=0.4, replace_prob=0.4),
    "two-cues": CorridorTask(max_length=9, recue_prob=0.5),
    "narrow-view": CorridorTask(min_length=4, max_length=12, colours=5, shuffled=True, recue_prob=0.3, view=3),
    "wide-view": CorridorTask(min_length=3, max_length=8, colours=3, niche_prob=0.9, view=7),
    "laps": PortalTask(rooms=4, laps=2, max_steps=60),
    "unmarked": PortalTask(rooms=3, width=5, marked=False, view=7, max_steps=50),
    "nine-places": InstructionTask(instructions=9, talk=30, cancel_prob=0.5, pairs="all"),
    "odd-talk": replace(InstructionTask(), instructions=2, talk=7, pairs="held_out", view=5),
    "short-mazes": TMazeTask(min_length=2, max_length=4, mazes=2, view=7),
}
DIGESTS = {
    "Corridor-Easy": "690e1446eb9a1e10",
    "Corridor-Medium": "dfcb5dce3e53b683",
    "Corridor-Hard": "0c4addb6c8942dc5",
    "CorridorPassive-Easy": "21864ab133d9510c",
    "CorridorPassive-Medium": "3590af1c733e0891",
    "CorridorPassive-Hard": "9c58c5647c4677b8",
    "Portal-Easy": "dc9d123f8d93aad5",
    "Portal-Medium": "4a480d9d67459df5",
    "Portal-Hard": "5729210b08613643",
    "Instruction-Easy": "a352ee14e19922e7",
    "Instruction-Medium": "70c5d5f6c699b62f",
    "Instruction-Hard": "da489c291cbd322d",
    "EndlessTMaze-Easy": "fd4b70bcc10f8399",
    "EndlessTMaze-Medium": "7ed2894686cdf56c",
    "EndlessTMaze-Hard": "656a17af7b148c3f",
    "short-instructions": "e33b505e465f798e",
    "two-cues": "974f83e38c54eaec",
    "narrow-view": "24ed4d8da8a834c5",
    "wide-view": "ade9c82714fac81e",
    "laps": "11864f5b342990d7",
    "unmarked": "f9b14a299c25f7f9",
    "nine-places": "0439aa0a04c66470",
    "odd-talk": "9ff8cbcf8b80a067",
    "short-mazes": "cb811fdf16252f6f",
}
KINDS = {"bool": "u1", "uint8": "u1", "int32": "<i4", "int64": "<i8", "float32": "<f4"}


def digest(config, backend, *, rows=11, steps=75):
    """A hash of all observations, rewards, ends and infos of some episodes, half of whose actions are the expert's."""
    engine, seen = build_engine(config, rows, backend=backend), hashlib.sha256()
    to_numpy = engine.arrays.to_numpy
    engine.reset(seed=5)
    for t in range(steps):
        info = {name: to_numpy(x) for name, x in engine.info().items()}
        draws = mix_signed(np.arange(rows) + 1000 * t)
        actions = np.where(draws & 1, below(draws, engine.num_actions), info["optimal_action"])
        out = engine.step(actions)
        parts = {**{n: to_numpy(x) for n, x in out.observation.items()}, **info}
        parts |= {name: to_numpy(getattr(out, name)) for name in ("reward", "terminated", "truncated")}
        if t % 3 == 2:  # between, some rows stand still
            engine.begin_ended()
            parts |= {f"begun_{n}": to_numpy(x) for n, x in engine.observe().items()}
        for name in sorted(parts):
            seen.update(np.ascontiguousarray(parts[name].astype(KINDS[str(parts[name].dtype)])).tobytes())
    return seen.hexdigest()[:16]


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("name", CONFIGS)
def test_episodes_stay_what_they_were(name, backend):
    assert digest(CONFIGS[name], backend) == DIGESTS[name]


@pytest.mark.parametrize("name", ["narrow-view", "laps", "short-instructions", "odd-talk", "short-mazes"])
def test_episodes_are_the_same_where_all_rows_are_drawn(name, monkeypatch):
    """As on a GPU, where asking which rows begin would wait for the device."""
    monkeypatch.setattr(Arrays, "positions", lambda self, rows: None)
    assert digest(CONFIGS[name], "torch") == DIGESTS[name]


@pytest.mark.parametrize("name", ["Corridor-Hard", "two-cues", "laps", "nine-places", "short-mazes"])
def test_an_engine_goes_on_from_its_snapshot(name):
    """What a snapshot leaves out follows from the episodes' numbers; the rows of the other engine are elsewhere before."""
    first, second = (build_engine(CONFIGS[name], 5) for _ in range(2))
    first.reset(seed=3)
    second.reset(seed=8)
    for _ in range(25):
        first.step(first.optimal_action())
        first.begin(first.over)
    second.restore({**first.snapshot(), "of another version": np.zeros(5)})
    for _ in range(25):
        assert all(np.array_equal(x, second.info()[n]) for n, x in first.info().items())
        assert all(np.array_equal(x, second.observe()[n]) for n, x in first.observe().items())
        actions = first.optimal_action()
        for engine in (first, second):
            engine.step(actions)
            engine.begin(engine.over)


def test_arrays_that_were_given_out_do_not_change():
    """Training holds what an engine told at a step while the engine goes on."""
    engine = build_engine(CONFIGS["two-cues"], 4)
    told, kept = [], []
    for _ in range(30):
        out = engine.step(engine.optimal_action())
        told.append([out.reward, out.terminated, *out.observation.values(), *engine.info().values()])
        kept.append([x.copy() for x in told[-1]])
        engine.begin(engine.over)
    assert (engine.episodes > 0).all()
    assert all(np.array_equal(x, y) for a, b in zip(told, kept) for x, y in zip(a, b))
