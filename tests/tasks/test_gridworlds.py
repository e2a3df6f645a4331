"""Grid worlds: one episode everywhere, experts that reach their oracle, reference scores, Gymnasium's rules, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from expire_span.settings.tasks import CorridorTask, InstructionTask, PortalTask, TMazeTask
from expire_span.tasks.gridworlds.arrays import Arrays, below, chance, ranks
from expire_span.tasks.gridworlds.engine import BALL, BOX, DOOR, DOWN, RIGHT, UP
from expire_span.tasks.gridworlds.levels import LEVELS, build_engine, level_config
from expire_span.tasks.gridworlds.render import render_ansi, render_rgb, save_gif
from expire_span.tasks.hashing import mix, mix_signed

ALL = [(name, level) for name, levels in LEVELS.items() for level in levels]
QUICK = [
    CorridorTask(max_length=9, recue_prob=0.5),
    CorridorTask(max_length=12, colours=4, shuffled=True, passive=True, view=3, recue_prob=0.3),
    PortalTask(rooms=4, laps=2, max_steps=200),
    PortalTask(rooms=3, width=5, marked=False, view=7),
    InstructionTask(instructions=3, talk=12),
    InstructionTask(instructions=9, talk=30, cancel_prob=0.5, pairs="all"),
    TMazeTask(min_length=2, max_length=6, mazes=3, view=3),
]
IDS = [f"{c.kind}-{n}" for n, c in enumerate(QUICK)]


def play(engine, choose, limit=3000):
    """Play one episode in every environment; returns steps and summed rewards."""
    steps, total = np.zeros(engine.num_envs, int), np.zeros(engine.num_envs)
    for _ in range(limit):
        if engine.over.all():
            break
        running = ~engine.over
        out = engine.step(choose(engine))
        steps, total = steps + running, total + out.reward
    return steps, total


# Draws


def test_draws_agree_between_the_backends_and_are_uniform():
    import torch

    numbers = np.arange(-3000, 3000) * 7919
    draws = mix_signed(numbers)
    assert np.array_equal(draws, mix_signed(torch.from_numpy(numbers)).numpy())
    assert np.array_equal(draws.view(np.uint64), mix(numbers.view(np.uint64)))
    counts = np.bincount(below(mix_signed(np.arange(60_000)), 6), minlength=6)
    assert (abs(counts - 10_000) < 5 * 92).all()  # five standard deviations of a binomial
    assert abs(chance(mix_signed(np.arange(60_000)), 0.3).mean() - 0.3) < 5 * 0.00187
    order = ranks(mix_signed(np.arange(6000).reshape(-1, 3)))
    assert (np.sort(order, 1) == np.arange(3)).all()
    assert (abs(np.unique(order @ [9, 3, 1], return_counts=True)[1] - 2000 / 6) < 5 * 17).all()
    assert ranks(np.array([[5, 5, 1]])).tolist() == [[1, 2, 0]]


def test_backends_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="numpy or torch, got 'jax'"):
        Arrays("jax")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cpu only, got device 'cuda'"):
        Arrays("numpy", "cuda")


# One episode everywhere


@pytest.mark.parametrize("config", QUICK, ids=IDS)
def test_torch_and_numpy_play_the_same_episodes(config):
    engines = build_engine(config, 16), build_engine(config, 16, backend="torch")
    draw = np.random.default_rng(0)
    for engine in engines:
        engine.reset(seed=5)
    for _ in range(30):
        seen = [{**engine.observe(), **engine.info()} for engine in engines]
        for name in seen[0]:
            assert np.array_equal(seen[0][name], seen[1][name].numpy()), name
        actions = np.where(
            draw.random(16) < 0.3, draw.integers(0, engines[0].num_actions, 16), seen[0]["optimal_action"]
        )
        left, right = (engine.step(actions) for engine in engines)
        assert np.array_equal(left.reward, right.reward.numpy())
        for engine in engines:
            engine.begin(engine.over)


@pytest.mark.parametrize("config", QUICK, ids=IDS)
def test_an_episode_does_not_depend_on_the_batch_it_runs_in(config):
    batch, single = build_engine(config, 7), build_engine(config, 1)
    draw = np.random.default_rng(1)
    batch.reset(seed=9)
    single.reset(seed=9, environments=[3])
    for _ in range(40):
        for name, value in batch.observe().items():
            assert np.array_equal(value[3], single.observe()[name][0])
        info, own = batch.info(), single.info()
        assert all(np.array_equal(info[name][3], own[name][0]) for name in info)
        actions = np.where(draw.random(7) < 0.3, draw.integers(0, batch.num_actions, 7), batch.optimal_action())
        out = batch.step(actions)
        assert out.reward[3] == single.step(actions[3:4]).reward[0]
        batch.begin(batch.over)
        single.begin(single.over)
    assert (batch.episodes > 0).any()


def test_seeds_environments_and_episodes_differ():
    engine = build_engine(CorridorTask(min_length=3, max_length=5000), 64)
    seen = []
    for seed in (0, 1, 2**63 + 5):
        engine.reset(seed=seed)
        for _ in range(3):
            seen.append(engine.length.copy())
            engine.reset()
    assert len(np.unique(np.concatenate(seen))) > 0.9 * 9 * 64


# Experts


@pytest.mark.parametrize(("name", "level"), ALL)
def test_expert_always_succeeds_in_the_oracle_steps(name, level):
    count = 32 if (name, level) == ("Instruction", "Hard") else 300
    engine = build_engine(level_config(name, level), count)
    engine.reset(seed=1)
    oracle = engine.oracle_steps().copy()
    steps, _ = play(engine, lambda e: e.optimal_action())
    assert engine.success.all() and np.array_equal(steps, oracle)


@pytest.mark.parametrize("config", QUICK, ids=IDS)
def test_expert_succeeds_after_any_detour(config):
    if config.kind == "corridor" and config.passive:
        return  # there nothing leads back to a door that was passed
    engine = build_engine(config, 100)
    engine.reset(seed=2)
    draw = np.random.default_rng(0)
    moves = 2 if config.kind in ("corridor", "tmaze") else 4
    for _ in range(30):  # left and right never end a corridor; in the other worlds moves are harmless too
        engine.step(draw.integers(0, moves, 100))
    limited = engine.over.copy()
    play(engine, lambda e: e.optimal_action())
    assert (engine.success | limited).mean() > 0.95


def random_doors(draw):
    """A policy for Portal that draws a door at every entrance and walks there."""
    wanted = {}

    def choose(engine):
        fresh = (engine.y == 1) & (engine.x == engine.config.width // 2)
        wanted["side"] = np.where(fresh, draw.integers(0, 2, engine.num_envs), wanted.get("side", 0))
        column = wanted["side"] * (engine.config.width - 1)
        return np.where(engine.x < column, RIGHT, np.where(engine.x > column, 0, UP))

    return choose


def test_portal_references_are_those_that_were_sketched():
    """At N = 8 and 300 steps: random doors 16.5% in 277 steps, perfect memory 100% in 78."""
    engine = build_engine(level_config("Portal", "Medium"), 2000)
    engine.reset(seed=0)
    steps, _ = play(engine, random_doors(np.random.default_rng(0)))
    assert abs(engine.success.mean() - 0.165) < 5 * 0.0083 and abs(steps.mean() - 277) < 5
    engine.reset(seed=0)
    assert abs(engine.oracle_steps().mean() - 78) < 2


RANDOM = {"Corridor-Easy": 0.117, "CorridorPassive-Easy": 0.5, "CorridorPassive-Hard": 0.25, "Portal-Easy": 0.204}
"""Success of uniformly random actions; the table in docs/tasks.md has all."""


@pytest.mark.parametrize("name", RANDOM)
def test_random_actions_are_at_their_reference(name):
    engine = build_engine(level_config(*name.split("-")), 1000)
    engine.reset(seed=4)
    draw = np.random.default_rng(3)
    play(engine, lambda e: draw.integers(0, e.num_actions, 1000))
    share = RANDOM[name]
    assert abs(engine.success.mean() - share) < 5 * np.sqrt(share * (1 - share) / 1000)


# Corridor


def test_corridor_shows_the_cue_at_the_start_only_and_doors_at_the_end_only():
    engine = build_engine(CorridorTask(min_length=12, max_length=30), 200)
    engine.reset(seed=0)
    while not engine.over.all():
        image, half = engine.observe()["image"], engine.view // 2
        kinds = image[..., 0]
        running = ~engine.over
        assert ((kinds == BALL).any((1, 2)) == (engine.position <= half))[running].all()
        doors = (kinds == DOOR).any((1, 2))
        assert (doors == (engine.length - 1 - engine.position <= half))[running].all()
        engine.step(engine.optimal_action())
    assert (engine.observe()["image"][..., 1] <= 5).all()


def test_corridor_statistics():
    engine = build_engine(CorridorTask(min_length=3, max_length=20, colours=4, shuffled=True, niche_prob=0.4), 4000)
    engine.reset(seed=0)
    for values, size in ((engine.length - 3, 18), (engine.first_cue, 4), (engine.target_slot, 4)):
        counts = np.bincount(values, minlength=size)
        assert len(counts) == size and (abs(counts - 4000 / size) < 5 * np.sqrt(4000 / size)).all()
    for _ in range(4):
        engine.step(np.full(4000, RIGHT))
    far = engine.length > 10
    kinds, colours = engine.observe()["image"][far][..., 0], engine.observe()["image"][far][..., 1]
    walls = kinds[:, [1, 3]]
    assert abs((walls == BOX).mean() - 0.4) < 0.02
    assert (abs(np.bincount(colours[kinds == BOX], minlength=4) / (kinds == BOX).sum() - 0.25) < 0.02).all()


def test_corridor_rewards_and_wrong_door():
    engine = build_engine(CorridorTask(min_length=3, max_length=3), 2)
    engine.reset(seed=0)
    for _ in range(2):
        assert np.allclose(engine.step(np.full(2, RIGHT)).reward, -0.005)
    right = engine.optimal_action()
    out = engine.step(np.where([True, False], right, UP + DOWN - right))
    assert np.allclose(out.reward, [0.995, -0.005]) and out.terminated.all()
    assert engine.success.tolist() == [True, False]
    still = engine.step([UP, UP])
    assert still.reward.tolist() == [0, 0] and not still.terminated.any()


def test_corridor_is_truncated_at_its_limit():
    engine = build_engine(CorridorTask(min_length=5, max_length=5), 1)
    engine.reset(seed=0)
    ends = [engine.step([0]) for _ in range(40)]
    assert ends[-1].truncated.all() and not any(out.truncated.any() for out in ends[:-1])


def test_second_cue_decides_where_there_is_one():
    engine = build_engine(CorridorTask(min_length=8, max_length=20, recue_prob=0.5), 2000)
    engine.reset(seed=0)
    assert abs(engine.recued.mean() - 0.5) < 0.06
    assert np.array_equal(engine.target, np.where(engine.recued, engine.second_cue, engine.first_cue))
    for _ in range(4):
        engine.step(np.full(2000, RIGHT))
    seen = (engine.observe()["image"][..., 0] == BALL).any((1, 2))
    assert np.array_equal(seen & (engine.length < 13), engine.recued & (engine.length < 13))


# needed_until, against what the expert really does


def test_needed_until_is_the_step_of_the_last_decision():
    """Corridor and Portal: replay the expert and compare with the step at which the fact is used for the last time."""
    engine = build_engine(PortalTask(rooms=5, laps=2), 100)
    engine.reset(seed=3)
    promised, last_used = {}, {}
    while not engine.over.all():
        info = engine.info()
        for row in np.flatnonzero(~engine.over):
            room, step = int(engine.room[row]), int(engine.steps[row])
            if engine.y[row] == 1 and engine.x[row] == 1 and engine.known[row, room]:
                last_used[row, room] = step
            if info["fact"][row] >= 0:
                assert info["fact"][row] == room
                promised.setdefault((row, room), []).append(int(info["needed_until"][row]))
            else:
                assert info["needed_until"][row] == step
        engine.step(engine.optimal_action())
    assert promised.keys() == last_used.keys() and len(promised) > 300
    assert all(set(steps) == {last_used[key]} for key, steps in promised.items())
    engine = build_engine(CorridorTask(max_length=30), 100)
    engine.reset(seed=3)
    first, oracle = engine.info(), engine.oracle_steps()
    assert (first["fact"] == 0).all() and np.array_equal(first["needed_until"], oracle - 1)


def test_needed_until_of_instructions():
    engine = build_engine(InstructionTask(instructions=3, talk=30, cancel_prob=0.4, replace_prob=0.3), 200)
    engine.reset(seed=3)
    told, done = {}, {}
    while not engine.over.all():
        info, before = engine.info(), engine.done.copy()
        for row in np.flatnonzero(info["fact"] >= 0):
            told.setdefault((row, int(info["fact"][row])), []).append(int(info["needed_until"][row]))
        step = engine.steps.copy()
        engine.step(engine.optimal_action())
        for row, m in zip(*np.nonzero(engine.done & ~before)):
            done[row, m] = int(step[row])
    assert len(told) == 600
    for (row, m), until in told.items():
        change = engine.change[row, m]
        if change:
            assert until[0] == engine.changed_at[row, m]
        assert until[-1] == (engine.whole_route[row] - 1 if change == 1 else done[row, m])


# Refusals


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: CorridorTask(min_length=0), "min_length must be at least 2 .* got 0"),
        (lambda: CorridorTask(colours=6), r"colours must lie in 2..5.* got 6"),
        (lambda: CorridorTask(min_length=9, max_length=5), "got 5 and 9"),
        (lambda: CorridorTask(view=4), "view must be one of 3, 5, 7, got 4"),
        (lambda: PortalTask(rooms=0), r"rooms must lie in 1..60.* got 0"),
        (lambda: PortalTask(width=4), "odd and at least 3, got 4"),
        (lambda: InstructionTask(instructions=10), r"1..9, the number of places, got 10"),
        (lambda: InstructionTask(instructions=3, talk=5), "at least 6 steps for 3 instructions .* got 5"),
        (lambda: InstructionTask(cancel_prob=0.7, replace_prob=0.7), "at most 1, got 1.4"),
        (lambda: level_config("Maze", "Easy"), "unknown grid world 'Maze', known are: Corridor"),
        (lambda: level_config("Portal", "Mild"), "unknown difficulty 'Mild' of Portal"),
        (lambda: build_engine(CorridorTask(), 0), "num_envs must be at least 1, got 0"),
        (lambda: build_engine(CorridorTask(), 2).step([0, 7]), r"corridor lies in 0..3, got 7"),
        (lambda: build_engine(CorridorTask(), 2).step([0]), r"shape \(2,\), got \(1,\)"),
        (lambda: build_engine(CorridorTask(), 2).step([0.5, 1]), "must be integers, got numbers of type float64"),
        (
            lambda: build_engine(CorridorTask(), 1, backend="torch").step([float("nan")]),
            "integers, got .* torch.float32",
        ),
    ],
)
def test_impossible_worlds_are_refused_in_one_sentence(build, words):
    with pytest.raises(ValueError, match=words):
        build()


# Pictures


@pytest.mark.parametrize("config", QUICK, ids=IDS)
def test_renderings(config, tmp_path):
    engine = build_engine(config, 2)
    engine.reset(seed=0)
    text = render_ansi(engine, 1, colour=False, debug=True, memories=[3, 5])
    assert text.splitlines()[config.view // 2][2 * (config.view // 2)] == "@" and "remembered steps: 3 5" in text
    assert "\x1b[" in render_ansi(engine, 1)
    frames = []
    for _ in range(3):
        frames.append(render_rgb(engine, 1))
        engine.step(engine.optimal_action())
    side = config.view * 16
    assert frames[0].shape == (side, side, 3) and frames[0].dtype == np.uint8
    assert save_gif(tmp_path / "a.gif", frames).read_bytes()[:3] == b"GIF"
    with pytest.raises(ValueError, match="at least 1 frame, got 0"):
        save_gif(tmp_path / "b.gif", [])
