"""Comparisons: which runs, equal parameters, budgets for every system, interruptions, refusals, the page."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from expire_span.cli import main
from expire_span.compare import plan
from expire_span.compare.budgets import default_memories, has_knob, learns_spans, with_budget
from expire_span.compare.conduct import Pace
from expire_span.compare.matched import count_parameters, match_parameters
from expire_span.compare.page import points_of, write_page
from expire_span.compare.plan import Comparison, System, list_systems, parse_budgets
from expire_span.compare.prepare import check_memory
from expire_span.compare.table import Row, as_markdown, collect_rows, find_front
from expire_span.compare.worker import with_steps_for
from expire_span.config import BudgetConfig, DecoderConfig
from expire_span.models.decoder import Decoder
from expire_span.models.mixer import build_mixer
from expire_span.models.systems import SYSTEMS
from expire_span.recipes import RECIPES, text_small
from expire_span.runs import RunFolder, UserError
from tests.tiny import as_options, noisy_config, spawn, tiny_config, write_text

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
@pytest.mark.parametrize("recipe", ["recall", "enwik8_small"])
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
    pace = Pace(total=4, finished=[10.0], done=1)
    assert pace.left(elapsed=5, share=0.25) == pytest.approx(15 + 2 * 15)
    assert Pace(total=4).left(elapsed=5, share=0.0) is None


def test_seconds_become_steps(tmp_path):
    config = with_steps_for(tiny_config(write_text(tmp_path), steps=10_000), 2.0)
    assert 10 < config.train.steps < 5000 and config == replace(config, train=replace(config.train))


# Refusals


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, str, str]:
        code = main(["compare", *args])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


BAD = [
    ([], "compare needs a recipe"),
    (["recal", "--mixers", "full"], "did you mean recall"),
    (["recall"], "at least one memory system, got none"),
    (["recall", "--mixers", ","], "at least one memory system, got none"),
    (["recall", "--mixers", "full,fulll"], "unknown mixer 'fulll', did you mean full?; known are: expire_span, full"),
    (["recall", "--mixers", "full,gru,full"], "got full 2 times"),
    (["recall", "--mixers", "gru+full+lstm"], "a hybrid is of two systems, like 3xgated_deltanet+expire_span"),
    (["recall", "--mixers", "2xfull"], "a hybrid is of two systems"),
    (["recall", "--mixers", "0xgru+full"], "at least one layer of each system, got 0 of gru"),
    (["recall", "--mixers", "full", "--budgets", "0"], "at least 1 memory, got 0"),
    (["recall", "--mixers", "full", "--budgets", "8,8"], "got 8 2 times"),
    (["recall", "--mixers", "full", "--budgets", "8;9"], "got '8;9'"),
    (["recall", "--mixers", "full", "--seeds", "0"], "--seeds must lie between 1 and 1,000, got 0"),
    (
        ["recall", "--mixers", "full", "--seeds", "999999999999"],
        "--seeds must lie between 1 and 1,000, got 999,999,999,999",
    ),
    (["recall", "--mixers", "full", "--train-seconds", "-1"], "must be greater than 0 and finite, got -1"),
    (
        ["recall", "--mixers", "expire_span", "--budgets", "2"],
        "its shortest spans and the ramp of 3 keep 3 alive",
    ),
    (["recall", "--mixers", "adaptive_span", "--budgets", "2000"], "max_span 1024 and ramp 3 allow 1027"),
    (["recall", "--mixers", "full", "--name", "a/b"], "a/b"),
    (["recall", "--mixers", "full", "--train.stepz", "1"], "did you mean --train.steps"),
    (["text_small", "--mixers", "full"], "--task.path"),
    (["recall", "--mixers", "routing", "--model.mixer.ramp", "0"], "ramp must be greater than 0"),
]


@pytest.mark.parametrize(("args", "words"), BAD, ids=lambda x: " ".join(x)[:50] if isinstance(x, list) else None)
def test_bad_input_is_one_sentence_and_leaves_nothing(call, tmp_path, args, words):
    code, _, err = call(*args)
    assert code == 2 and words in err and len(err.strip().splitlines()) == 1, err
    assert list(tmp_path.iterdir()) == []


# A whole comparison


def options(tmp_path: Path, **train) -> list[str]:
    config = noisy_config(write_text(tmp_path), steps=24, checkpoint_every=3, eval_every=12, **train)
    return [*as_options(config, text_small()), "--runs-dir", str(tmp_path / "runs")]


def start(tmp_path: Path, name: str) -> subprocess.Popen[str]:
    return spawn("compare", "text_small", "--mixers", "gru_torch,expire_span", "--name", name, *options(tmp_path))


def finished(tmp_path: Path, name: str) -> dict[str, bytes]:
    """Everything deterministic that the runs of a comparison left."""
    files = [p for p in (tmp_path / "runs" / name).rglob("*") if p.name in ("metrics.jsonl", "result.json")]
    return {str(p.relative_to(tmp_path / "runs" / name)): p.read_bytes() for p in files}


def wait_until(condition, process, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def child_of(name: str) -> list[int]:
    """Process ids of workers on a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(b"expire_span.compare.worker" in word for word in words) and name.encode() in b" ".join(words):
            found.append(int(path.parent.name))
    return found


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    """A comparison of two systems that nothing disturbed."""
    folder = tmp_path_factory.mktemp("compare")
    process = start(folder, "whole")
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    (folder / "out.txt").write_text(out)
    return folder


def interrupt(folder: Path, name: str, signum: int) -> tuple[int, str, Path]:
    """Send a signal to a comparison whose second system is in training, and wait until no process of it is left."""
    process = start(folder, name)
    second = folder / "runs" / name / "expire_span-seed0"
    wait_until(lambda: (second / "metrics.jsonl").exists() and (second / "metrics.jsonl").stat().st_size > 900, process)
    process.send_signal(signum)
    _, err = process.communicate(timeout=200)
    wait_until(lambda: not child_of(str(folder / "runs" / name)), None, seconds=120)
    assert not (second / "result.json").exists()
    return process.returncode, err, second


def goes_on_as_if_nothing_had_happened(unbroken: Path, name: str) -> None:
    """The finished system is not run again, and all metrics equal the undisturbed ones."""
    first = unbroken / "runs" / name / "gru_torch-seed0"
    before = {p: p.stat().st_mtime_ns for p in first.rglob("*")}
    process = start(unbroken, name)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert {p: p.stat().st_mtime_ns for p in first.rglob("*")} == before
    assert finished(unbroken, name) == finished(unbroken, "whole") and len(finished(unbroken, name)) == 4


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_killed_then_resumed(unbroken):
    """No process stays behind. The short twin of this test sends Ctrl-C; a killed worker is told of in test_errors.py."""
    interrupt(unbroken, "killed", signal.SIGKILL)
    goes_on_as_if_nothing_had_happened(unbroken, "killed")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_ctrl_c_saves_and_goes_on(unbroken):
    code, err, second = interrupt(unbroken, "asked", signal.SIGINT)
    assert code == 130 and "1 of 2 systems finished; the same command goes on" in err and "Traceback" not in err, err
    newest = max(p.name for p in (second / "checkpoints").iterdir())
    steps = [json.loads(line)["step"] for line in (second / "metrics.jsonl").read_text().splitlines()]
    assert int(newest.removeprefix("step-")) >= max(steps), "what was trained when the signal came is saved"
    goes_on_as_if_nothing_had_happened(unbroken, "asked")


@pytest.mark.slow
def test_outcome_is_measured(unbroken):
    comparison = Comparison.open(unbroken / "runs" / "whole")
    rows = {row.label: row for row in collect_rows(comparison)}
    run = RunFolder.open(comparison.path / "expire_span-seed0")
    result = run.read_result()
    row = rows["expire_span"]
    assert (
        row.score == result["score"] and row.live == sum(result["live"]) / 2 and row.bytes == result["mean_bytes"] / 4
    )
    assert row.steps == 24 and row.ms_per_step > 0 and row.tokens_per_second > 0 and row.device_bytes > 1e7
    assert row.parameters == sum(p.numel() for p in Decoder(run.config.model).parameters())
    assert rows["gru_torch"].live == 1 and abs(rows["gru_torch"].parameters / row.parameters - 1) < 0.01
    table = json.loads((comparison.path / "table.json").read_text())
    assert [r["label"] for r in table["rows"]] == ["gru_torch", "expire_span"]
    assert as_markdown(comparison, list(rows.values())) == (comparison.path / "table.md").read_text()
    said = (unbroken / "out.txt").read_text()
    assert f"{row.parameters:,} parameters" in said and "1/2 gru_torch-seed0: bpb" in said and "compare.html" in said


@pytest.mark.slow
def test_other_settings_are_refused_and_more_systems_are_added(unbroken, call, monkeypatch):
    shutil.copytree(unbroken / "runs" / "whole", unbroken / "runs" / "grown")
    base = ["text_small", "--mixers", "gru_torch,expire_span", "--name", "grown", *options(unbroken)]
    before = finished(unbroken, "grown")
    for change, words in (
        (["--train.steps", "9"], "train.steps 24, got 9"),
        (["--train-seconds", "9"], "train seconds None, got 9.0"),
        (["--model.mixer.max-span", "32"], "model.mixer.max_span 64, got 32"),
    ):
        code, _, err = call(*base, *change)
        assert code == 2 and words in err and "another --name" in err, err
    code, _, err = call("recall", "--mixers", "full", "--name", "grown", "--runs-dir", str(unbroken / "runs"))
    assert code == 2 and "is of recipe text_small, got recall" in err
    made = []
    monkeypatch.setattr("expire_span.compare.conduct._run_child", lambda c, name, *_: made.append(name) or "no time")
    code, _, err = call(*base, "--mixers", "gru_torch,expire_span,full", "--seeds", "2")
    assert code == 1 and "the same command tries again" in err
    assert made == ["full-seed0", "gru_torch-seed1", "expire_span-seed1", "full-seed1"]
    assert finished(unbroken, "grown") == before


@pytest.mark.slow
def test_folders_of_something_else_are_refused(unbroken, call):
    runs = ["--runs-dir", str(unbroken / "runs" / "whole")]
    code, _, err = call("recall", "--mixers", "full", "--name", "gru_torch-seed0", *runs)
    assert code == 2 and "is the folder of a run, not of a comparison" in err
    (unbroken / "runs" / "other").mkdir()
    (unbroken / "runs" / "other" / "notes.txt").write_text("mine")
    code, _, err = call("recall", "--mixers", "full", "--name", "other", "--runs-dir", str(unbroken / "runs"))
    assert code == 2 and "is no comparison" in err
    shutil.copytree(unbroken / "runs" / "whole", unbroken / "runs" / "mixed")
    shutil.rmtree(unbroken / "runs" / "mixed" / "gru_torch-seed0")
    shutil.copytree(unbroken / "runs/mixed/expire_span-seed0", unbroken / "runs/mixed/gru_torch-seed0")
    base = ["text_small", "--mixers", "gru_torch", "--name", "mixed", *options(unbroken)]
    code, _, err = call(*base)
    assert code == 2 and "belongs to another run: it has" in err, err
    told = unbroken / "runs/mixed/compare.json"
    told.write_text(told.read_text().replace('"format": 2', '"format": 9', 1))
    code, _, err = call(*base)
    assert code == 2 and "has format 9" in err


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
    comparison = Comparison(Path(), "", text_small(), None, {"name": "x", "higher_is_better": higher}, {}, {})
    assert [r.label for r in find_front(comparison, rows)] == best
    assert f"{', '.join(best)}." in as_markdown(comparison, rows)


def test_curves_join_the_budgets_of_a_system():
    rows = [row("a", 8, 0.5), row("b", 9, 0.4), row("a", 32, 0.7)]
    assert points_of(rows, lambda r: r.live) == {"a": [(8.0, 0.5), (32.0, 0.7)], "b": [(9.0, 0.4)]}


@pytest.mark.slow
def test_page_is_self_contained(unbroken):
    comparison = Comparison.open(unbroken / "runs" / "whole")
    page = (comparison.path / "compare.html").read_text()
    assert "http" not in page and "prefers-color-scheme: dark" in page and page.count("<svg") == 5
    assert 'data-value="expire_span"' in page and "memories alive" in page
    assert (comparison.path / "curve.png").read_bytes().startswith(b"\x89PNG")
    empty = replace(comparison, path=unbroken / "empty", runs=comparison.runs)
    (unbroken / "empty").mkdir()
    assert "No run is finished yet" in write_page(empty, []).read_text()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")
def test_page_sorts_in_a_browser(unbroken, tmp_path):
    page = (unbroken / "runs" / "whole" / "compare.html").read_text()
    click = "<script>for (let n = 0; n < CLICKS; n++) headings[0].click();</script></body>"
    orders = []
    for clicks in (1, 2):
        path = tmp_path / f"{clicks}.html"
        path.write_text(page.replace("</body>", click.replace("CLICKS", str(clicks))))
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", path.as_uri()]
        dom = subprocess.run(command, capture_output=True, text=True, timeout=90).stdout
        assert "<svg" in dom
        orders.append(dom.index('data-value="expire_span"') < dom.index('data-value="gru_torch"'))
    assert orders == [True, False]


def test_plan_reads_back_what_it_wrote(tmp_path):
    base = RECIPES["recall"]()
    system = System("full", None, 0)
    runs = {system.name: (system, with_budget(base, "full", None))}
    comparison = Comparison(tmp_path / "c", "recall", base, 3.0, {"name": "s", "higher_is_better": True}, {}, runs)
    comparison.write()
    assert Comparison.open(tmp_path / "c") == comparison
    assert plan.find_change({"a": {"b": (1, 2)}}, {"a": {"b": [1, 3]}}) == "a.b (1, 2), got [1, 3]"
    assert os.listdir(tmp_path / "c") == ["compare.json"]
