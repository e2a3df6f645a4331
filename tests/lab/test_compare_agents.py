"""Agents with different memory systems side by side: equal parameters, one table."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("gymnasium")

from expire_span.lab.compare.outcome import read_outcome
from expire_span.lab.compare.page import write_page
from expire_span.lab.compare.plan import Comparison, list_systems
from expire_span.lab.compare.prepare import describe_plan, prepare
from expire_span.lab.compare.table import as_markdown, write_table
from expire_span.lab.compare.worker import run_system, with_steps_for
from expire_span.runs import RunFolder
from tests.tiny_agents import tiny_agent

CORRIDOR = "ExpireSpan/Corridor-Easy-v0"


def test_agents_are_compared(tmp_path):
    """Two systems act in one corridor; the table has a row for each, with the bytes that one environment's memory holds."""
    base = tiny_agent(
        CORRIDOR, {"options": '{"max_length": 4}'}, steps=2, envs=4, window=6, eval_episodes=4, test_episodes=4
    )
    planned = prepare(tmp_path / "c", "agent", base, list_systems(["expire_span", "gru"], [], [0]))
    planned.write()
    assert "2 runs" in describe_plan(planned)
    comparison = Comparison.open(tmp_path / "c")
    assert comparison.config == planned.config and comparison.score == {"name": "success", "higher_is_better": True}
    counts = comparison.parameters.values()
    assert max(counts) <= 1.01 * min(counts)
    for name in comparison.runs:
        run_system(tmp_path / "c", name)
        run_system(tmp_path / "c", name)  # a finished run is left as it is
    outcome = read_outcome(comparison)
    rows = outcome.rows
    assert [row.kind for row in rows] == ["expire_span", "gru"]
    assert all(0 <= row.score <= 1 and row.bytes > 0 and row.peak_bytes >= row.bytes for row in rows)
    write_table(outcome)
    told = json.loads((tmp_path / "c" / "table.json").read_text())
    assert "2 updates of 4 x 6 steps each" in told["conditions"] and CORRIDOR in as_markdown(outcome)
    page = write_page(outcome).read_text()
    assert f"environment {CORRIDOR}" in page and "memory of the same agent, plays the same episodes" in page
    assert "Loss of policy and value together" in page and "decoder" not in page and "nats" not in page
    assert "no budget was given" in page and "budget controller" not in page


def test_the_score_is_named_as_it_was_measured(tmp_path):
    """Only playing shows that a foreign environment reports success; an agent none of whose episodes did so has none."""
    base = tiny_agent(task={"options": '{"tells": true}'}, steps=1, eval_episodes=1, test_episodes=20)
    planned = prepare(tmp_path / "c", "agent", base, list_systems(["expire_span", "gru"], [], [0]))
    planned.write()
    for name in planned.runs:
        run_system(tmp_path / "c", name)
    last = RunFolder.open(tmp_path / "c" / name)
    last.write_result({**(last.read_result() or {}), "score_name": "return", "score": 0.04})
    assert planned.score["name"] == "return"
    found = read_outcome(planned)
    success, none = found.rows
    assert found.score == "success" and 0 < success.score < 1 and none.score == 0
    assert "| success |" in as_markdown(found)


@pytest.mark.parametrize("env", ["Tiny/Echo-v0", "ExpireSpan/Instruction-Easy-v0"])
def test_agents_that_see_numbers_or_words_are_compared_too(env, tmp_path):
    """Their parameters are counted without building embeddings; those of each place and those common to all words."""
    planned = prepare(tmp_path / "c", "agent", tiny_agent(env), list_systems(["expire_span", "gru"], [], [0]))
    counts = planned.parameters.values()
    assert 0 < max(counts) <= 1.01 * min(counts)


def test_steps_of_agents_follow_the_time(tmp_path):
    base = tiny_agent(CORRIDOR, {"options": '{"max_length": 4}'}, steps=2, envs=4, window=2)
    planned = prepare(tmp_path / "c", "agent", base, list_systems(["expire_span"], [], [0]), 0.01)
    (_, config), *_ = planned.runs.values()
    assert with_steps_for(config, 0.01).train.steps >= 1
