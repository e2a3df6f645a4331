"""The contract and the registry of tasks: samples, a user's own task, refusals."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch

from expire_span.config import RunConfig, from_dict, to_dict
from expire_span.recipes import RECIPES
from expire_span.task_configs import OUTSIDE_TASKS, EntrancesTask, RecallTask, TextTask, WordsTask
from expire_span.tasks import registry, task
from expire_span.tasks.contract import Batch, Score, Task, TaskSample, sample_stretch
from expire_span.tasks.registry import build_task, register_task
from expire_span.train.supervised import train


@dataclass(frozen=True)
class ParityTask:
    """Whether the number of ones so far is odd."""

    kind: Literal["parity"] = "parity"
    length: int = 8


class Parity:
    vocab = 4
    score = Score("success", higher_is_better=True)

    def __init__(self, config: ParityTask) -> None:
        self.config = config

    def stream(self, split, *, batch, block, seed):
        return ParityStream(batch, block, limit=None if split == "train" else 3)

    def score_of(self, nll, correct, count):
        return correct / max(count, 1)

    def show(self, tokens):
        return [str(token) for token in tokens.tolist()]

    def sample(self, *, seed):
        return sample_stretch(self, self.config.length, seed=seed)


class ParityStream:
    def __init__(self, batch, block, limit):
        self.batch, self.block, self.limit, self.place = batch, block, limit, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == self.limit:
            raise StopIteration
        self.place += 1
        x = torch.randint(2, (self.batch, self.block), generator=torch.Generator().manual_seed(self.place))
        return Batch(x, 2 + x.cumsum(1) % 2, torch.ones_like(x, dtype=torch.bool), torch.ones(self.batch).bool())

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.fixture
def parity():
    register_task(ParityTask, Parity)
    yield ParityTask()
    registry._outside.pop("parity")
    OUTSIDE_TASKS.pop("parity")


def test_a_task_from_outside_is_trained_saved_and_loaded(parity, tmp_path):
    base = RECIPES["recall"]()
    small = replace(base.train, steps=2, batch=2, block=8, eval_batches=1, device="cpu")
    config = replace(base, task=parity, model=replace(base.model, dim=16, heads=2, ff_dim=16), train=small)
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(config)))) == config
    run = train(config, tmp_path / "run", recipe="parity", shown=False)
    assert run.finished and run.config.task == parity
    assert isinstance(build_task(run.config.task), Parity)


def test_registration_refuses_what_it_cannot_find_again():
    with pytest.raises(ValueError, match="'recall' of RecallTask is a task of the package"):
        register_task(RecallTask, Parity)
    with pytest.raises(ValueError, match="int must have a field kind with a default string, got None"):
        register_task(int, Parity)
    with pytest.raises(ValueError, match=r"unknown task 'parity', known are: text, .*register_task"):
        build_task(ParityTask())


def test_old_name_of_the_contract_still_works():
    assert task.build_task is build_task and task.Batch is Batch


SAMPLED = [TextTask(path="README.md"), RecallTask(max_length=60, blank_prob=0.5), EntrancesTask(), WordsTask(tales=50)]


@pytest.mark.parametrize("config", SAMPLED, ids=lambda c: c.kind)
def test_every_task_shows_a_sample_of_its_own(config):
    built: Task = build_task(config)
    sample = built.sample(seed=3)
    assert isinstance(sample, TaskSample) and sample.tokens.dim() == 1
    assert sample.labels == built.show(sample.tokens) and len(sample.labels) > 4
    assert all(sample.labels[place] == word for place, word in sample.marks.items())
    assert sample.is_text == (config.kind == "text")


def test_sample_of_recall_has_a_cue_and_marks_it():
    sample = build_task(RecallTask(max_length=60, blank_prob=0.5)).sample(seed=1)
    assert sample.labels[0].startswith("cue") and sorted(sample.marks) == [0, len(sample.labels) - 1]
