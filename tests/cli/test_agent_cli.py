"""Agents on the command line: trained, resumed, evaluated, reported; refused in one sentence."""

from __future__ import annotations

import json
import re

import pytest

gymnasium = pytest.importorskip("gymnasium")

from expire_span.cli import main  # noqa: E402

SMALL = ["--train.steps", "2", "--train.envs", "4", "--train.window", "4", "--train.minibatches", "1"]
SMALL += ["--train.eval-episodes", "4", "--train.test-episodes", "4", "--model.dim", "16", "--train.device", "cpu"]
ENV = ["--task.env", "ExpireSpan/Corridor-Easy-v0", "--task.options", '{"max_length": 3}']


@pytest.fixture
def call(tmp_path, capfd):
    def run(*args: str) -> tuple[int, str, str]:
        code = main([*args, "--runs-dir", str(tmp_path)])
        return code, *capfd.readouterr()

    return run


class Speaks(gymnasium.Env):
    """An environment whose actions are words."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Text(5)


def refused(answer: tuple[int, str, str], *words: str) -> None:
    code, _, err = answer
    assert code == 2 and err.count("\n") == 1, err
    for word in words:
        assert word in err, err


def test_an_agent_from_training_to_report(call, tmp_path):
    code, out, err = call("train", "agent", *ENV, *SMALL, "--name", "mine")
    assert code == 0 and "success" in out and ", mean return " in out and "fresh episodes after 32 steps" in out, err
    refused(call("resume", "mine"), "is finished (2 steps)")
    refused(
        call("resume", "mine", "--context-parallel", "2"), "shares no rows among processes, got --context-parallel 2"
    )
    code, out, _ = call("eval", "mine", "--episodes", "8", "--options", '{"min_length": 8, "max_length": 12}')
    result = json.loads(out)
    assert code == 0 and result["episodes"] == 8 and [band["first"] for band in result["bands"]] in ([1, 11], [1], [11])
    assert result["retention"]["recall"] is not None and result["low"] <= result["score"] <= result["high"]
    code, out, _ = call("eval", "mine", "--episodes", "4", "--control", "forget", "--greedy", "True")
    assert code == 0 and json.loads(out)["peak_live"] == [1]
    refused(call("generate", "mine"), "needs a run of text")
    code, out, _ = call("report", "mine")
    page = (tmp_path / "mine" / "report.html").read_text()
    assert code == 0 and "agent" in page and re.search(r"It scores .* memories alive in each layer, at most \d+", page)


def test_other_memory_systems_act_too(call):
    code, _, err = call("train", "agent", "--mixer", "gru", *ENV, *SMALL)
    assert code == 0, err


def test_bad_agents_are_refused(call):
    refused(call("compare", "agent", "--mixers", "gru"), "compare agent needs an environment; give --task.env")
    refused(call("train", "agent"), "needs an environment", "--task.env")
    refused(call("train", "agent", "--task.env", "Nothing-v0"), "environment 'Nothing-v0' cannot be made")
    gymnasium.register("Speaks-v0", lambda: Speaks())
    refused(call("train", "agent", "--task.env", "Speaks-v0"), "actions must be Discrete, MultiDiscrete, ", "got Text")
    refused(call("train", "agent", "--task.env", "no_such:Thing-v0"), "cannot be imported")
    refused(call("train", "agent", *ENV, "--task.options", "{"), "must be a JSON table of arguments")
    refused(call("train", "agent", *ENV, "--train.minibatches", "3"), "minibatches must divide envs")
    refused(call("train", "agent", *ENV, "--model.dropout", "0.1"), "dropout of a policy must be 0")


def test_popgym_is_found_by_its_module(call):
    pytest.importorskip("popgym")
    code, out, err = call("train", "agent_repeat_previous_tiny", *SMALL)
    assert code == 0 and "success" in out, err
