"""Recipes with several stages: a run folder for each, trained in turn, gone on with after an interruption."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from expire_span.checkpoint import load_model
from expire_span.recipes import LESSONS, RECIPES, stages_of
from expire_span.runs import RunFolder, find_run
from expire_span.train import supervised
from tests.cli.test_cli import call, check_refused
from tests.tiny_agents import tiny_agent

__all__ = ["call"]  # a fixture

SMALL = {"dim": 16, "ff_dim": 16, "layers": 1, "heads": 2}


@pytest.fixture
def curriculum(monkeypatch):
    """The recipe copy_tiny, and its lesson, of a size that takes a second."""

    def shrink(recipe):
        base = recipe()
        train = replace(base.train, steps=3, batch=2, block=64, eval_every=3, checkpoint_every=1, eval_batches=1)
        train = replace(train, test_batches=1, device="cpu", budget=replace(base.train.budget, live=None))
        task = replace(base.task, max_length=16 if recipe in LESSONS["copy_tiny"] else 32)
        small = replace(base, task=task, model=replace(base.model, **SMALL), train=train)

        def build():
            return small

        build.__doc__ = recipe.__doc__
        return build

    first, last = map(shrink, stages_of("copy_tiny"))
    monkeypatch.setitem(RECIPES, "copy_tiny", last)
    monkeypatch.setitem(LESSONS, "copy_tiny", (first,))
    return first(), last()


def weights_of(folder):
    return load_model(RunFolder.open(folder))[0].state_dict()


def test_stages_are_trained_in_turn_as_two_commands_would(call, curriculum, tmp_path):
    code, out, err = call("train", "copy_tiny", "--seed", "3")
    assert code == 0 and "stage 1 of 2, copy_tiny-stage1: Count a few tokens" in out, out + err
    last = find_run("copy_tiny", tmp_path / "runs")
    assert last.finished and last.recipe == "copy_tiny" and last.config.seed == 3
    first = supervised.train(replace(curriculum[0], seed=3), tmp_path / "first", shown=False)
    second = supervised.train(replace(curriculum[1], seed=3), tmp_path / "second", init_from=first, shown=False)
    for ours, by_hand in (("copy_tiny-stage1", first.path), ("copy_tiny", second.path)):
        found, wanted = weights_of(tmp_path / "runs" / ours), weights_of(by_hand)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), ours
    check_refused(call("train", "copy_tiny", "--seed", "3"), "runs/copy_tiny already exists")


class Crash(BaseException):
    """Stands for a power cut."""


def test_the_same_command_goes_on_after_a_crash(call, curriculum, tmp_path, monkeypatch):
    assert call("train", "copy_tiny", "--name", "unbroken")[0] == 0
    real = supervised.SupervisedLearner.step

    def step(self, index):
        if index == 2:
            raise Crash
        return real(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(supervised.SupervisedLearner, "step", step)
        with pytest.raises(Crash):
            call("train", "copy_tiny", "--name", "broken")
    assert not find_run("broken-stage1", tmp_path / "runs").finished
    assert call("train", "copy_tiny", "--name", "broken")[0] == 0
    for stage in ("-stage1", ""):
        found, wanted = (weights_of(tmp_path / f"runs/{name}{stage}") for name in ("broken", "unbroken"))
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_single_stages_and_stages_that_are_there(call, curriculum, tmp_path):
    assert call("train", "copy_tiny", "--stage", "1", "--name", "whole")[0] == 0
    assert not (tmp_path / "runs/whole").exists()
    code, out, err = call("train", "copy_tiny", "--name", "whole")
    assert code == 0 and "whole-stage1: Count a few tokens among up to 64. (trained already)" in out, out + err
    assert find_run("whole", tmp_path / "runs").finished

    check_refused(call("train", "copy_tiny", "--name", "whole", "--stage", "3"), "between 1 and 2", "got 3")
    (tmp_path / "runs/whole").rename(tmp_path / "runs/aside")
    check_refused(call("train", "copy_tiny", "--name", "whole", "--seed", "9"), "trained with another seed")
    options = ("--name", "whole", "--stage", "2", "--init-from", "whole-stage1")
    assert call("train", "copy_tiny", *options)[0] == 0
    again, once = weights_of(tmp_path / "runs/whole"), weights_of(tmp_path / "runs/aside")
    assert all(torch.equal(again[name], once[name]) for name in once)


def test_agents_have_stages_too(call, tmp_path, monkeypatch):
    def lesson():
        """A lesson."""
        return tiny_agent(steps=1)

    def last():
        """The recipe."""
        return tiny_agent(steps=2)

    monkeypatch.setitem(RECIPES, "agent_corridor_hard", last)
    monkeypatch.setitem(LESSONS, "agent_corridor_hard", (lesson,))
    code, out, err = call("train", "agent_corridor_hard", "--name", "a")
    assert code == 0 and "stage 1 of 2, a-stage1: A lesson.\n" in out and "stage 2 of 2, a: The recipe.\n" in out, (
        out + err
    )
    first, second = (find_run(name, tmp_path / "runs") for name in ("a-stage1", "a"))
    assert (first.config.train.steps, second.config.train.steps) == (1, 2) and second.finished
    assert second.origin["run"].endswith("a-stage1")
