"""Endless T-Maze: cues, turns and rewards, the limit, and how long a cue is needed."""

from __future__ import annotations

import numpy as np

from expire_span.settings.tasks import TMazeTask
from expire_span.tasks.gridworlds.engine import BALL, RIGHT, UP
from expire_span.tasks.gridworlds.levels import build_engine


def test_a_tmaze_goes_on_with_a_new_cue_after_every_turn():
    """Rewards of right and wrong turns and of steps, the new corridor's cue in view, and success only without a wrong turn."""
    engine = build_engine(TMazeTask(min_length=4, max_length=4, mazes=3), 64)
    engine.reset(seed=1)
    wrong = np.zeros(64, bool)
    wrong[::2] = True
    for maze in range(3):
        cues = engine.cues[:, maze]
        image = engine.observe()["image"]
        assert (image[:, 1, 2, 0] == BALL).all() and np.array_equal(image[:, 1, 2, 1], cues)
        for _ in range(3):
            assert (engine.step(np.full(64, RIGHT)).reward == np.float32(-0.01)).all()
        assert not (engine.observe()["image"][:, :, :, 0] == BALL).any()  # out of sight three cells on
        missed = wrong & (maze == 1)
        turned = engine.step(np.where(missed, UP + 1 - cues, UP + cues))
        assert np.array_equal(turned.reward, np.where(missed, -1, 1))
        assert np.array_equal(turned.terminated, np.full(64, maze == 2)) and not turned.truncated.any()
        assert (engine.position == 0).all()
    assert np.array_equal(engine.success, ~wrong)
    assert abs(engine.cues.mean() - 0.5) < 5 * 0.5 / np.sqrt(engine.cues.size)


def test_turns_that_do_nothing_and_the_limit_of_a_tmaze():
    engine = build_engine(TMazeTask(min_length=5, max_length=5, mazes=2), 3)
    for _ in range(2 * (2 * 5 + 10)):
        assert not engine.over.any() and (engine.position == 0).all()
        out = engine.step(np.full(3, UP))
    assert out.truncated.all() and not engine.success.any()


def test_a_cue_of_a_tmaze_is_needed_until_its_own_turn():
    engine = build_engine(TMazeTask(min_length=4, max_length=9, mazes=4), 50)
    engine.reset(seed=3)
    promised, turned = {}, {}
    while not engine.over.all():
        info, actions = engine.info(), engine.optimal_action()
        for row in np.flatnonzero(~engine.over):
            maze, step = int(engine.maze[row]), int(engine.steps[row])
            if actions[row] >= UP:
                turned[row, maze] = step
            if info["fact"][row] >= 0:
                assert info["fact"][row] == maze
                promised.setdefault((row, maze), []).append(int(info["needed_until"][row]))
        engine.step(actions)
    assert promised.keys() == turned.keys() and len(turned) == 200
    assert all(set(steps) == {turned[key]} for key, steps in promised.items())
