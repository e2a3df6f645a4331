"""Two real processes share an agent's environments, and agree on its weights."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("gymnasium")

from expire_span.errors import RunError
from expire_span.settings.agent import EnvTask
from expire_span.train.gymnasium_environments import GymnasiumEnvironments
from tests.train.test_ddp import call

SMALL = ["--train.steps", "3", "--train.envs", "4", "--train.window", "6", "--train.log-every", "1"]
SMALL += ["--train.eval-episodes", "4", "--train.test-episodes", "4", "--train.device", "cpu", "--model.dim", "16"]


@pytest.mark.long
def test_two_processes_train_one_agent(tmp_path):
    """Both play all of each evaluation's episodes with the same weights, so that the run has one result."""
    env = [
        "--task.env",
        "ExpireSpan/Corridor-Easy-v0",
        "--task.options",
        '{"max_length": 4}',
        "--train.budget.live",
        "3",
    ]
    code, output = call("ddp", "train", "agent", *env, *SMALL, "--runs-dir", str(tmp_path), "--name", "two")
    assert code == 0, output
    lines = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert [line["env_steps"] for line in lines if line["split"] == "train"] == [24, 48, 72]
    assert json.loads((tmp_path / "two" / "result.json").read_text())["episodes"] == 4


def test_a_killed_environment_is_told():
    """Its pipe breaks, which must not be taken for a reader of the output that went away."""
    environments = GymnasiumEnvironments(EnvTask(env="CartPole-v1", processes=True), 2, torch.device("cpu"), 0)
    environments.begin(0)
    for process in environments.vector.processes:
        process.kill()
        process.join()
    with pytest.raises(RunError, match=r"a process of environment CartPole-v1 was killed, .* fewer --train.envs"):
        environments.step(torch.zeros(2, 1, dtype=torch.int64))
    environments.vector.close(terminate=True)
