"""Comparisons: which runs, equal parameters, budgets for every system, refusals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expire_span.lab.compare import conduct, plan, worker
from expire_span.lab.compare.budgets import default_memories, has_knob, learns_spans, with_budget
from expire_span.lab.compare.matched import count_parameters, match_parameters
from expire_span.lab.compare.outcome import read_outcome
from expire_span.lab.compare.page import points_of
from expire_span.lab.compare.plan import Comparison, System, list_systems, parse_budgets
from expire_span.lab.compare.supervised import check_memory
from expire_span.lab.compare.table import as_markdown, print_table
from expire_span.lab.compare.worker import with_steps_for
from expire_span.models.decoder import Decoder
from expire_span.models.mixer import build_mixer
from expire_span.models.systems import SYSTEMS
from expire_span.recipes import RECIPES, text_tiny
from expire_span.runs import UserError
from expire_span.settings.run import BudgetConfig, DecoderConfig
from expire_span.train.supervised import SupervisedLearner
from expire_span.view.efficiency import Row
from tests.tiny import tiny_config, write_text

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


# Budgets and parameters


@pytest.mark.parametrize("kind", [kind for kind in SYSTEMS if has_knob(kind)])
@pytest.mark.parametrize("memories", [4, 37, 900])
def test_a_budget_sets_what_a_query_reads(kind, memories):
    """Built and run: no system with a fixed memory reads, or holds, more than it was given."""
    base = RECIPES["recall"]()
    config = with_budget(base, kind, memories)
    if learns_spans(kind):
        assert config.train.budget.live == memories and config.model.mixer.max_span == 1024
        return
    assert config.train.budget == BudgetConfig() and config.train.span_weight == 0
    if kind == "performer":
        assert config.model.mixer.features == 2 * memories
        return
    model = Decoder(replace(config.model, vocab=9, dim=16, heads=2, ff_dim=8)).eval()
    with torch.no_grad():
        _, _, aux = model(torch.randint(0, 9, (1, min(2 * memories, 100))))
    slack = {"compressive": 4, "bigbird": 6, "reformer": 4}.get(kind, 0)  # groups and blocks are kept whole
    assert float(aux.live.mean()) <= memories + slack


def test_what_a_recipe_says_about_spans_stays_with_spans():
    base = RECIPES["recall"]()
    assert with_budget(base, "expire_span", None) == base
    adaptive = with_budget(base, "adaptive_span", None)
    assert adaptive.train == base.train and adaptive.model.mixer.initial_span == base.model.mixer.initial_span
    assert with_budget(base, "adaptive_span", 64).model.mixer.initial_span == 64 / 1024
    assert default_memories(base) == 10 and with_budget(base, "transformer_xl", None).model.mixer.span == 10
    assert default_memories(RECIPES["enwik8"]()) == 512


def test_a_hybrid_has_layers_of_both_in_turn():
    base = RECIPES["enwik8"]()
    name = "3xgated_deltanet+expire_span"
    assert plan.parse_mixers(f"full,{name}") == ["full", name] and has_knob(name) and learns_spans(name)
    config = with_budget(base, name, None)
    assert [m.kind for m in config.model.mixers] == 3 * (3 * ["gated_deltanet"] + ["expire_span"])
    assert config.model.mixer == base.model.mixer and config.train == base.train
    assert with_budget(config, "expire_span", None).model == base.model  # one system alone has no partner left
    assert with_budget(base, name, 64).train.budget.live == 64
    target = count_parameters(base.model)
    assert abs(count_parameters(match_parameters(config.model, target)) / target - 1) < 0.005
    plain = with_budget(base, "gru+full", None)
    assert plain.model.pattern == "pm" and plain.train.span_weight == 0
    with pytest.raises(UserError, match="full never forgets"):
        check_memory(plain, 5_000_000, torch.device("cpu"))


def test_the_least_budget_is_what_closed_heads_keep_alive():
    """Two heads of eight live for the ramp of 48 at least, and six for 8 steps: 18 on average."""
    base = RECIPES["enwik8"]()
    mixer = build_mixer(base.model.shape(0), with_budget(base, "expire_span", 18).model.mixer)
    torch.nn.init.constant_(mixer.span_predictor.reach, -1.0)
    spans = mixer.span_predictor(torch.randn(1, 3, 512)).detach()
    assert float(spans.mean()) + base.model.mixer.ramp == 18
    with pytest.raises(UserError, match=r"expire_span cannot hold 17 memories: .* keep 18 alive"):
        with_budget(base, "expire_span", 17)
    with pytest.raises(UserError, match=r"adaptive_span cannot hold 47 memories: .* keep 48 alive"):
        with_budget(base, "adaptive_span", 47)


@pytest.mark.parametrize("kind", SYSTEMS)
@pytest.mark.parametrize("recipe", ["recall", "enwik8_paper_8l"])
def test_parameters_match_within_one_percent(kind, recipe):
    base = RECIPES[recipe]().model
    target = count_parameters(base)
    model = match_parameters(with_budget(RECIPES[recipe](), kind, 64).model, target)
    assert abs(count_parameters(model) / target - 1) < 0.005


def test_parameters_are_counted_right():
    model = replace(DecoderConfig(dim=32, heads=2, ff_dim=48), layers=5)
    assert count_parameters(model) == sum(p.numel() for p in Decoder(model).parameters())
    hybrid = replace(model, partner=SYSTEMS["gru"].settings(), pattern="ppm")
    assert count_parameters(hybrid) == sum(p.numel() for p in Decoder(hybrid).parameters()) != count_parameters(model)


def test_parameters_that_cannot_match_are_refused():
    model = replace(RECIPES["recall"]().model, ff_dim=1)
    target = count_parameters(replace(model, dim=32, heads=2))
    with pytest.raises(UserError, match=r"cannot have the recipe's [\d,]+ parameters: with ff_dim 1 it has"):
        match_parameters(replace(model, mixer=with_budget(RECIPES["recall"](), "full", None).model.mixer), target)


def test_systems_and_names():
    systems = list_systems(["full", "gru", "transformer_xl"], [8, 32], [3, 4])
    names = [system.name for system in systems]
    assert names[:4] == ["full-seed3", "gru-seed3", "transformer_xl-8-seed3", "transformer_xl-32-seed3"]
    assert len(names) == len(set(names)) == 8
    assert parse_budgets(None, True, RECIPES["recall"]()) == [5, 10, 40, 160]
    assert parse_budgets(None, False, RECIPES["recall"]()) == []


def test_a_memory_that_outgrows_the_device_is_refused():
    config = with_budget(RECIPES["enwik8"](), "full", None)
    with pytest.raises(UserError, match=r"full never forgets: .* 625,000 steps .* --train.test-batches"):
        check_memory(config, 625_000, torch.device("cpu"))
    check_memory(with_budget(RECIPES["enwik8"](), "sliding_window", None), 625_000, torch.device("cpu"))


def test_time_left():
    """Of four runs one took 10 s, and one is a quarter done at a pace of 20 s: 2.75 of 15 s are left, of two at once half."""
    for jobs in (1, 2):
        waiting = SimpleNamespace(run_of=lambda _: None)
        runs: Any = {str(n): (waiting, str(n)) for n in range(4)}
        conductor = conduct.Conductor(runs, jobs, lambda *_: "")
        assert conductor.left() is None
        del conductor.waiting[0]
        conductor.spent.append(10.0)
        assert conductor.left(0.25, [20.0]) == pytest.approx(2.75 * 15 / jobs)


def test_all_that_a_failed_system_said_is_kept(tmp_path, monkeypatch):
    """Its reason is the line that names the error, whatever advice follows; a later success removes the file."""
    comparison, log = SimpleNamespace(path=tmp_path, runs=["a"], run_of=lambda _: None), tmp_path / "a.error.txt"

    def run(code: str) -> str | None:
        start = lambda folder, name, said, *_: subprocess.Popen([sys.executable, "-c", code], stderr=said)  # noqa: E731
        monkeypatch.setattr(conduct, "start_child", start)
        return conduct.conduct(comparison, lambda _: "done").get("a")  # type: ignore[arg-type]

    advice = "try again with\\nmore words"
    found = run(f"class OddError(Exception): pass\nraise OddError('no room\\n\\n{advice}')")
    assert found == f"OddError: no room; all it said is in {log}" and "Traceback" in log.read_text()
    assert run("import sys; sys.exit('one sentence')") == "one sentence" and not log.exists()
    log.write_text("old")
    assert run("pass") is None and not log.exists()


def test_seconds_become_steps(tmp_path, monkeypatch):
    """By a clock of its own, which goes on by 4 ms at every step after the slow ones that warm up: those do not count."""
    clock, real, made = [0.0], SupervisedLearner.step, []

    def step(self, index):
        made.append(index)
        clock[0] += 0.004 if len(made) > worker.WARM_STEPS else 0.02
        return real(self, index)

    monkeypatch.setattr(SupervisedLearner, "step", step)
    monkeypatch.setattr(worker, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    config = with_steps_for(tiny_config(write_text(tmp_path), steps=10_000), 2.0)
    assert config.train.steps == 500 and made == list(range(len(made)))


# Refusals


BAD = [
    ([], "compare needs a recipe"),
    (["recal", "--mixers", "full"], "did you mean recall"),
    (["recall"], "at least one memory system, got none"),
    (["recall", "--mixers", ","], "at least one memory system, got none"),
    (["recall", "--mixers", "full,fulll"], "unknown mixer 'fulll', did you mean full?; known are: expire_span, full"),
    (["recall", "--mixers", "full,gru,full"], "got full 2 times"),
    (["recall", "--mixers", "gru+full+lstm"], "a hybrid is of two systems, like 3xgated_deltanet+expire_span"),
    (["recall", "--mixers", "2xfull"], "a hybrid is of two systems"),
    (["recall", "--mixers", "a\nb"], "unknown mixer 'a\\nb'"),
    (["recall", "--mixers", "9999999999xgru+full"], "unknown mixer '9999999999xgru'"),
    (["recall", "--mixers", "3xgru+full"], "3 layers of gru and the model has 1, so that full would get none"),
    (["recall", "--mixers", "0xgru+full"], "at least one layer of each system, got 0 of gru"),
    (["recall", "--mixers", "full", "--budgets", "0"], "at least 1 memory, got 0"),
    (["recall", "--mixers", "full", "--budgets", "8,8"], "got 8 2 times"),
    (["recall", "--mixers", "full", "--budgets", "8;9"], "got '8;9'"),
    (["recall", "--mixers", "full", "--seeds", "0"], "--seeds must lie between 1 and 1,000, got 0"),
    (
        ["recall", "--mixers", "full", "--seeds", "999999999999"],
        "--seeds must lie between 1 and 1,000, got 999999999999",
    ),
    (["recall", "--mixers", "full", "--train-seconds", "-1"], "must be greater than 0 and finite, got -1"),
    (
        ["recall", "--mixers", "expire_span", "--budgets", "2"],
        "its shortest spans and the ramp of 3 keep 3 alive",
    ),
    (["recall", "--mixers", "adaptive_span", "--budgets", "2000"], "max_span 1024 and ramp 3 allow 1027"),
    (["recall", "--mixers", "full", "--name", "a/b"], "a/b"),
    (["recall", "--mixers", "full", "--train.stepz", "1"], "did you mean --train.steps"),
    (["text_tiny", "--mixers", "full"], "--task.path"),
    (["recall", "--mixers", "routing", "--model.mixer.ramp", "0"], "ramp must be greater than 0"),
]


@pytest.mark.parametrize(("args", "words"), BAD, ids=lambda x: " ".join(x)[:50] if isinstance(x, list) else None)
def test_bad_input_is_one_sentence_and_leaves_nothing(call_compare, tmp_path, args, words):
    code, _, err = call_compare(*args)
    assert code == 2 and words in err and len(err.strip().splitlines()) == 1, err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_of_the_page_is_found_before_anything_is_written(call_compare, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "expire_span.lab.compare.page", None)  # as if matplotlib were not installed
    with pytest.raises(ModuleNotFoundError):
        call_compare("recall", "--mixers", "gru")
    assert list(tmp_path.iterdir()) == []


# The page


def row(kind: str, live: int, score: float, **numbers: float) -> Row:
    filled = dict.fromkeys(("peak_live", "bytes", "peak_bytes", "device_bytes", "ms_per_step"), 1.0) | numbers
    rest = dict(tokens_per_second=1.0, parameters=1, steps=1, train_seconds=1.0)
    return Row(f"{kind}-{live}", kind, live, 1, score, None, float(live), **filled, **rest)


@pytest.mark.parametrize(("higher", "best"), [(True, ["a-1", "b-2"]), (False, ["a-1", "d-4"])])
def test_systems_that_are_best_for_their_bytes(higher, best):
    """a has the fewest bytes; of the others, only those that score better than all smaller ones are named."""
    rows = [
        row("a", 1, 0.5, bytes=10),
        row("b", 2, 0.7, bytes=20),
        row("c", 3, 0.6, bytes=30),
        row("d", 4, 0.4, bytes=20),
    ]
    comparison = Comparison(
        Path(), "", text_tiny(), None, {"name": "x", "higher_is_better": higher}, {"reference": 1}, {}
    )
    outcome = replace(read_outcome(comparison), rows=rows)
    assert [r.label for r in outcome.front] == best
    assert f"{', '.join(best)}." in as_markdown(outcome)


def test_a_narrow_terminal_shows_every_figure_whole(monkeypatch, capsys):
    """Names and headings may be broken over lines, figures not, and nothing is cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    numbers = dict(bytes=27.0e6, device_bytes=490e6, ms_per_step=1234.0)
    rows = [row("3xgated_deltanet+expire_span", 5001, 8.1108, **numbers), row("gru", 1, 8.0737, **numbers)]
    comparison = Comparison(
        Path(), "", text_tiny(), None, {"name": "bpb", "higher_is_better": False}, {"reference": 1}, {}
    )
    print_table(replace(read_outcome(comparison), rows=rows))
    out = capsys.readouterr().out
    assert all(figure in out for figure in ("8.1108", "8.0737", "5,001", "27.0 MB", "490 MB")) and "\u2026" not in out


def test_curves_join_the_budgets_of_a_system():
    rows = [row("a", 8, 0.5), row("b", 9, 0.4), row("a", 32, 0.7)]
    assert points_of(rows, lambda r: r.live) == {"a": [(8.0, 0.5), (32.0, 0.7)], "b": [(9.0, 0.4)]}


def test_plan_reads_back_what_it_wrote(tmp_path):
    base = RECIPES["recall"]()
    system = System("full", None, 0)
    runs = {system.name: (system, with_budget(base, "full", None))}
    comparison = Comparison(tmp_path / "c", "recall", base, 3.0, {"name": "s", "higher_is_better": True}, {}, runs)
    comparison.write()
    assert Comparison.open(tmp_path / "c") == comparison
    assert plan.find_change({"a": {"b": (1, 2)}}, {"a": {"b": [1, 3]}}) == "a.b (1, 2), got [1, 3]"
    assert os.listdir(tmp_path / "c") == ["compare.json"]
