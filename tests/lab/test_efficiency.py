"""The efficiency table: its runs can be made, its cells are right, and in the long tests it is trained."""

import json

import pytest

from benchmarks import efficiency
from expire_span.lab.compare.plan import list_systems
from expire_span.lab.compare.prepare import prepare
from expire_span.train.estimate import count_parameters
from expire_span.view.efficiency import Row


def row(kind: str, score: float) -> Row:
    return Row(kind, kind, None, 1, score, None, 103.0, 110.0, 2.73e6, 3e6, 18.7e9, 63.4, 1e6, 38_000_000, 4844, 307)


def test_every_task_can_be_prepared_in_its_tiny_form(tmp_path):
    paths = efficiency.write_sample(tmp_path)
    for task in efficiency.TASKS:
        config = efficiency.with_one_evaluation(efficiency.shrink(task, paths[task]), 2, 2)
        systems = list_systems(["expire_span", "adaptive_span", "compressive", "full"], [], [0])
        comparison = prepare(tmp_path / task, task, config, systems, 1.0)
        counts = list(comparison.parameters.values())
        assert max(counts) < 1.01 * min(counts)


def test_the_real_runs_are_of_the_papers_size():
    sizes = {task: count_parameters(build("x").model) for task, build in efficiency.TASKS.items()}
    assert 37e6 < sizes["enwik8"] < 39e6 and sizes["books"] == sizes["enwik8"]
    assert efficiency.collision_run("").model.mixer.max_span == efficiency.collision_run("").train.block == 16_384
    config = efficiency.with_one_evaluation(efficiency.enwik8_run("x"))
    assert config.train.test_batches * config.train.eval_block == config.train.block


def test_cells_of_the_table():
    result = {"task": "enwik8", "score": {"name": "bpb"}, "rows": [row("expire_span", 1.0872), row("full", 1.16)]}
    table = efficiency.as_markdown([{**result, "left_out": {"gru": "it failed"}}])
    first, second = table.splitlines()[2:4]
    assert first == "| enwik8 | expire_span | bpb 1.0872 | 18.7 | 63.4 | 2.73 MB | 103 | 4,844 | 1.03, 15, 408 |"
    assert second.endswith("|  |") and table.endswith("enwik8, gru: it failed\n")


def test_unknown_tasks_and_missing_data_are_said(tmp_path, capsys):
    with pytest.raises(SystemExit, match="--tasks takes enwik8, books, collision, got 'wiki'"):
        efficiency.main(["--tasks", "wiki"])
    out = ["--out", str(tmp_path), "--runs-dir", str(tmp_path / "runs")]
    efficiency.main(["--tasks", "books", "--books", str(tmp_path / "nowhere"), "--mixers", "full", *out])
    assert "books, full: " in (tmp_path / "efficiency.md").read_text()


@pytest.mark.long
def test_the_table_is_trained(tmp_path, capsys):
    args = ["--tiny", "--seconds", "0.2", "--tasks", "collision,books", "--mixers", "expire_span,full"]
    args += ["--runs-dir", str(tmp_path / "runs"), "--out", str(tmp_path)]
    efficiency.main(args)
    told = json.loads((tmp_path / "efficiency.json").read_text())
    assert [len(task["rows"]) for task in told["tasks"]] == [2, 2] and told["environment"]["torch"]
    assert all(row["ms_per_step"] > 0 for task in told["tasks"] for row in task["rows"])
