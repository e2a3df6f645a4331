"""Two real processes share an agent's environments, and agree on its weights."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("gymnasium")

from tests.test_ddp import call

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
