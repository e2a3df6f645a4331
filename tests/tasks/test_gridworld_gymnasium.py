"""The Gymnasium interfaces: Gymnasium's checker on every id, autoreset in all modes, equal episodes, refusals."""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest

gym = pytest.importorskip("gymnasium")

from gymnasium.utils.env_checker import check_env  # noqa: E402

from expire_span.tasks.gridworlds import list_ids  # noqa: E402
from expire_span.tasks.gridworlds.gymnasium_api import GridWorldEnv, GridWorldVectorEnv, PreviousActionAndReward  # noqa: E402

MODES = ["SameStep", "NextStep", "Disabled"]


@pytest.mark.parametrize("name", list_ids())
def test_every_id_passes_the_checker_of_gymnasium(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make(name).unwrapped)
    vector = gym.make_vec(name, num_envs=3)
    assert isinstance(vector.unwrapped, GridWorldVectorEnv)
    observation, info = vector.reset(seed=1)
    assert vector.observation_space.contains(observation) and info["optimal_action"].shape == (3,)
    assert vector.step(vector.action_space.sample())[0]["image"].dtype == np.uint8


@pytest.mark.parametrize("world", ["Corridor", "Portal", "Instruction", "EndlessTMaze"])
def test_a_row_of_the_vector_plays_what_the_single_environment_plays(world):
    vector, single = GridWorldVectorEnv(4, world, autoreset_mode="SameStep"), GridWorldEnv(world, environment=2)
    (batch, info), (own, own_info) = vector.reset(seed=7), single.reset(seed=7)
    draw = np.random.default_rng(0)
    for _ in range(70):
        assert all(np.array_equal(batch[name][2], own[name]) for name in own)
        assert all(info[name][2] == own_info[name] for name in own_info)
        actions = np.where(draw.random(4) < 0.3, draw.integers(0, 4, 4), info["optimal_action"])
        batch, reward, terminated, truncated, info = vector.step(actions)
        own, *rest, own_info = single.step(int(actions[2]))
        assert rest == [reward[2], terminated[2], truncated[2]]
        if terminated[2] or truncated[2]:
            assert info["_final_obs"][2] and info["final_info"]["success"][2] == own_info["success"]
            assert all(np.array_equal(info["final_obs"][name][2], own[name]) for name in own)
            own, own_info = single.reset()


def test_autoreset_modes_give_the_same_episodes():
    """Next-step autoreset has one more step an episode, whose action is ignored; otherwise all modes agree."""
    rewards = {}
    for mode in MODES:
        env = GridWorldVectorEnv(1, "Corridor", "Easy", autoreset_mode=mode, max_length=6)
        _, info = env.reset(seed=3)
        rewards[mode], waiting = [], False
        while len(rewards[mode]) < 40:
            _, reward, terminated, truncated, info = env.step(info["optimal_action"])
            if waiting:
                assert reward[0] == 0 and not terminated[0] and info["needed_until"][0] > 0
            else:
                rewards[mode].append(float(reward[0]))
            over = bool(terminated[0] or truncated[0])
            waiting = mode == "NextStep" and over
            if mode == "Disabled" and over:
                with pytest.raises(ValueError, match="environment 0 has ended; reset it with options reset_mask"):
                    env.step([0])
                _, info = env.reset(options={"reset_mask": np.array([True])})
    assert rewards["SameStep"] == rewards["NextStep"] == rewards["Disabled"]


def test_a_list_of_seeds_gives_every_row_its_own():
    vector = GridWorldVectorEnv(2, "Portal", "Medium")
    _, info = vector.reset(seed=[5, 9])
    for row, seed in enumerate((5, 9)):
        assert GridWorldEnv("Portal", "Medium").reset(seed=seed)[1]["oracle_steps"] == info["oracle_steps"][row]


def test_faces_refuse_what_cannot_be_done():
    env = GridWorldEnv("Corridor", "Easy", min_length=3, max_length=3)
    with pytest.raises(ValueError, match="before reset"):
        env.step(0)
    _, info = env.reset(seed=0)
    with pytest.raises(ValueError, match=r"integer in 0..3, got 9"):
        env.step(9)
    for _ in range(3):
        *_, info = env.step(info["optimal_action"])
    with pytest.raises(ValueError, match="ended after 3 steps; call reset before step"):
        env.step(0)
    with pytest.raises(ValueError, match="render_mode must be one of ansi, rgb_array or None, got 'human'"):
        GridWorldEnv(render_mode="human")
    vector = GridWorldVectorEnv(2)
    with pytest.raises(ValueError, match=r"must hold 2 integers, got \[1\]"):
        vector.reset(seed=[1])
    with pytest.raises(ValueError, match=r"reset_mask must be a bool array of shape \(2,\)"):
        vector.reset(options={"reset_mask": [True, False]})


def test_pictures_of_the_faces():
    env = GridWorldEnv("Portal", render_mode="rgb_array")
    env.reset(seed=0)
    assert env.render().shape == (80, 80, 3)
    vector = GridWorldVectorEnv(2, "Portal", render_mode="ansi")
    vector.reset(seed=0)
    assert len(vector.render()) == 2 and "@" in vector.render()[0]


def test_previous_action_and_reward_only_through_the_wrapper():
    plain = GridWorldEnv("Corridor", "Easy")
    assert set(plain.observation_space.spaces) == {"image"}
    env = PreviousActionAndReward(plain)
    observation, _ = env.reset(seed=0)
    assert observation["action"] == 4 and env.observation_space.contains(observation)
    observation, *_ = env.step(1)
    assert observation["action"] == 1 and observation["reward"] == np.float32(-0.005)


# Imports


def test_engines_need_no_gymnasium_and_the_package_registers_nothing():
    code = (
        "import sys; sys.modules['gymnasium'] = None\n"
        "from importlib.machinery import PathFinder; import importlib.util as u\n"
        "u.find_spec = (lambda old: lambda name, *a: None if name == 'gymnasium' else old(name, *a))(u.find_spec)\n"
        "from expire_span.tasks.gridworlds import build_engine, level_config\n"
        "print(build_engine(level_config('Portal', 'Easy'), 2).oracle_steps().shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "(2,)", done.stderr
    code = "import gymnasium, expire_span, expire_span.recipes; print([i for i in gymnasium.registry if 'Expire' in i])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
