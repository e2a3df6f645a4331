"""The training loop with any kind of learner: run folder, checkpoints, stop requests, time limits, trackers, display."""

from __future__ import annotations

import io
import sys
import types
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from rich.console import Console

from expire_span.checkpoint import Snapshot
from expire_span.recipes import recall
from expire_span.runs import RunFolder, UserError
from expire_span.train import session, supervised
from expire_span.train.loop import Fault, NonFinite
from expire_span.train.progress import Clock, Display, Speed, fit
from expire_span.train.trackers import build_tracker
from tests.tiny import tiny_config, write_text


class Counter:
    """Learns to count: no task, no decoder. A stand-in for a trainer of another kind."""

    impl, warmup = "none", 0

    def __init__(self, stop_at: int | None = None, fault_at: int | None = None) -> None:
        self.accelerator, self.weight = Accelerator(cpu=True), torch.zeros(1)
        self.stop_at, self.fault_at, self.since = stop_at, fault_at, 0

    def fingerprint(self):
        return {"sha256": "one two three", "bytes": 3}

    def step(self, index):
        if index == self.stop_at:
            raise KeyboardInterrupt
        self.weight += index + 1
        self.since += 1
        return 10

    def metrics(self):
        steps, self.since = self.since, 0
        return {"loss": float(self.weight), "steps": steps}

    def find_fault(self):
        if self.fault_at is None or self.weight < self.fault_at:
            return None
        return Fault(0, "the count became too large", "everywhere", "count less")

    def evaluate(self):
        return {"loss": -float(self.weight)}

    def final_result(self):
        return {"count": float(self.weight)}

    def describe(self, line):
        return [f"count {line['loss']:.0f}"]

    def snapshot(self, step):
        return Snapshot(step, {"since": self.since}, None, {"count": self.weight.clone()}, {})

    def load(self, snapshot):
        self.weight, self.since = snapshot.model["count"].clone(), snapshot.state["since"]


SETTINGS = replace(recall().train, steps=10, log_every=4, eval_every=5, checkpoint_every=3, device="cpu")
CONFIG = replace(recall(), train=SETTINGS)


def test_another_kind_of_learner_trains_stops_and_goes_on(tmp_path, monkeypatch):
    told: list[dict] = []
    with monkeypatch.context() as patch:
        patch.setattr(session, "build_tracker", lambda *_, **__: types.SimpleNamespace(add=told.append, close=list))
        whole = session.begin(Counter(), CONFIG, tmp_path / "whole", shown=False)
    assert told == whole.read_metrics()  # the tracker gets every line, of training and of evaluations
    assert whole.read_result() == {"step": 10, "count": 55.0}
    train = [(line["step"], line["steps"]) for line in whole.read_metrics() if line["split"] == "train"]
    assert train == [(4, 4), (8, 4), (10, 2)] and whole.data["bytes"] == 3
    with pytest.raises(KeyboardInterrupt):
        session.begin(Counter(stop_at=7), CONFIG, tmp_path / "broken", shown=False)
    broken = session.go_on(lambda config: Counter(), RunFolder.open(tmp_path / "broken"), shown=False)
    for name in ("metrics.jsonl", "result.json"):
        assert (broken.path / name).read_bytes() == (whole.path / name).read_bytes()


def test_a_time_limit_ends_the_run_at_the_end_of_its_schedule(tmp_path, monkeypatch):
    """A second a step and ten seconds for a hundred steps: ten are made, spread over the whole schedule."""
    learner, places = Counter(), []
    step = learner.step
    monkeypatch.setattr(learner, "step", lambda index: places.append(index) or step(index))
    monkeypatch.setattr(Clock, "elapsed", property(lambda clock: float(len(places))))
    config = replace(CONFIG, train=replace(SETTINGS, steps=100, seconds=10.0))
    learner.warmup = 3
    run = session.begin(learner, config, tmp_path / "a", shown=False)
    assert places == [0, 1, 2, *range(30, 100, 10)], "warm-up counts steps"
    assert run.read_result()["step"] == 10
    learner.warmup = 0
    slack = replace(CONFIG, train=replace(SETTINGS, steps=10, seconds=1000.0))
    places.clear()
    assert session.begin(learner, slack, tmp_path / "b", shown=False).read_result()["step"] == 10
    assert places == list(range(10))
    with pytest.raises(ValueError, match="seconds must be greater than 0 and finite, got 0"):
        replace(SETTINGS, seconds=0)


def test_the_time_left_is_that_of_the_limit_if_it_comes_first(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("expire_span.train.progress.time.perf_counter", lambda: now[0])
    free, limited = Clock(0), Clock(0, 30.0)
    now[0] = 110.0
    assert free.read(5, 1, 105).left == pytest.approx(200) and limited.read(5, 1, 105).left == pytest.approx(20)
    now[0] = 140.0
    assert limited.read(6, 1, 105).left == 0 and limited.read(104, 1, 105).left == 0


def test_a_fault_stops_before_a_checkpoint_is_written(tmp_path):
    words = r"count became too large at step 8 \(everywhere\); the last checkpoint is .*step-00000006; count less"
    with pytest.raises(NonFinite, match=words):
        session.begin(Counter(fault_at=30), CONFIG, tmp_path / "a", shown=False)


def test_training_starts_from_the_weights_of_another_run(tmp_path):
    text = write_text(tmp_path)
    first = supervised.train(tiny_config(text, steps=6), tmp_path / "first", shown=False)
    config = tiny_config(text, steps=2, log_every=1, lr=1e-8, warmup=0)
    second = supervised.train(config, tmp_path / "second", init_from=first, shown=False)
    assert second.origin == {"run": str(first.path), "step": 6}
    before, after = first.read_metrics()[-1]["loss"], second.read_result()["loss"]
    # With this rate two steps move no weight by more than 2e-8: the loss is that of the weights it began from. Weights drawn
    # anew would have another one by far.
    assert after == pytest.approx(first.read_result()["loss"], rel=1e-3) and before > 0
    # Killed before the first checkpoint of its own, it still starts from those weights.
    (second.path / "result.json").unlink()
    for folder in second.checkpoints.iterdir():
        if folder.name != "step-00000000":
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    again = supervised.resume(second, shown=False)
    assert again.read_result()["loss"] == after
    other = tiny_config(text, {"dim": 8}, steps=2)
    with pytest.raises(UserError, match=r"weight \S+ of run .*first has the shape .* give the settings"):
        supervised.train(other, tmp_path / "third", init_from=first, shown=False)
    other = tiny_config(text, {"heads": 4}, steps=2)  # of the same shapes, but another function of the weights
    with pytest.raises(
        UserError, match=r"first was trained with model.heads 2, and this model has 4; .*--model.heads 2"
    ):
        supervised.train(other, tmp_path / "third", init_from=first, shown=False)
    assert not (tmp_path / "third").exists()


# Trackers


def test_a_missing_tracker_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = tiny_config(write_text(tmp_path), steps=2, tracker="wandb")
    with pytest.raises((UserError, ValueError), match="wandb"):
        supervised.train(config, tmp_path / "a", shown=False)
    assert not (tmp_path / "a").exists()


def test_metrics_reach_a_tracker_through_accelerate(tmp_path, monkeypatch):
    """A stand-in for the library notes what accelerate's own tracker gives it."""
    logged, told = [], {}
    run_of = types.SimpleNamespace(log=lambda values, step=None: logged.append((step, values)), finish=lambda: None)
    fake = types.ModuleType("wandb")
    fake.init = lambda project, **options: told.update(project=project, **options) or run_of  # type: ignore[attr-defined]
    fake.config = types.SimpleNamespace(update=lambda values, **_: told.update(config=values))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = replace(CONFIG, train=replace(SETTINGS, tracker="wandb"))
    run = RunFolder.create(tmp_path / "a", config, recipe="", environment={})
    Accelerator(cpu=True)
    tracker = build_tracker(run, 0)
    tracker.add({"step": 4, "split": "train", "loss": 1.5, "live": [2.0, 3.0]})
    tracker.close()
    assert logged == [(4, {"train/loss": 1.5, "train/live/0": 2.0, "train/live/1": 3.0})]
    assert told["name"] == "a" and told["config"]["train"]["steps"] == 10
    silent = replace(run, config=replace(CONFIG, train=replace(SETTINGS, tracker="none")))
    build_tracker(silent, 0).add({"step": 1, "split": "train", "loss": 1.0})
    assert not (run.path / "tensorboard").exists()


# What people see


def show(width: int) -> str:
    """The last lines of a display on a terminal of so many columns, resumed at step 600 of 1000 and one step on."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    display = Display(1000, console=console)
    with display:
        display.start(600)
        first = display.bar.tasks[0].completed
        display.advance(601)
        parts = ["loss 1.2345", "bpb 2.3456", "live " + " ".join(["123.4"] * 12), "memory 1.2 MB per row"]
        display.train(601, parts, Speed(1.0, 12345.0, 3700.0, 8.0))
        assert first == 600 and display.bar.tasks[0].completed == 601
        shown = io.StringIO()
        Console(file=shown, width=width, color_system=None).print(display.bar.get_renderable())
    assert "  0/1000" not in console.file.getvalue(), "a resumed run must not show step 0 first"
    return shown.getvalue().rstrip("\n")


@pytest.mark.parametrize("width", [56, 80, 120, 200])
def test_the_counter_and_the_bar_stay_and_metrics_go_first(width):
    text = show(width)
    assert "\n" not in text and len(text.rstrip()) <= width, text
    assert " 601/1000" in text and "━" * 10 in text and "left 1:01:40" in text
    assert ("loss 1.2345" in text) == (width >= 80) and ("tokens/s" in text) == (width >= 200)


def test_parts_fit_from_the_first_on():
    assert fit(["one", "three", "x"], 10) == "one  three" and fit(["one"], 2) == ""
