"""The contract and the registry of tasks: samples, a user's own task, refusals."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch

from expire_span.errors import UserError
from expire_span.recipes import RECIPES
from expire_span.settings.agent import EnvTask
from expire_span.settings.run import RunConfig, from_dict, to_dict
from expire_span.settings.tasks import OUTSIDE_TASKS, BooksTask, EntrancesTask, RecallTask, TextTask, WordsTask
from expire_span.tasks import registry
from expire_span.tasks.contract import Batch, Score, Symbols, Task
from expire_span.tasks.registry import build_codec, build_task, register_task, text_codec
from expire_span.train.supervised import train
from expire_span.view.sample import sample_of


@dataclass(frozen=True)
class ParityTask:
    """Whether the number of ones so far is odd."""

    kind: Literal["parity"] = "parity"
    length: int = 8


class Parity:
    score = Score("success", higher_is_better=True)
    codec = Symbols(4, str)
    longest = 8

    def __init__(self, config: ParityTask) -> None:
        self.config = config

    def stream(self, split, *, batch, block, seed):
        return ParityStream(batch, block, limit=None if split == "train" else 3)

    def score_of(self, nll, correct, count):
        return correct / max(count, 1)


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


SAMPLED = [TextTask(path="README.md"), RecallTask(max_length=60, blank_prob=0.5), EntrancesTask(), WordsTask(tales=50)]
UNITS = {"text": "byte", "words": "word"}


@pytest.mark.parametrize("config", SAMPLED, ids=lambda c: c.kind)
def test_every_task_has_a_sample_and_a_codec(config):
    built: Task = build_task(config)
    tokens, answers = sample_of(built, seed=3)
    codec = build_codec(config)
    assert codec.unit == built.codec.unit == UNITS.get(config.kind, "symbol") and codec.size == built.codec.size
    labels = codec.show(tokens)
    assert tokens.dim() == 1 and 4 < len(labels) <= built.longest and all(labels)
    assert bool(answers) == (codec.unit == "symbol") and all(codec.label(token) for token in range(codec.size))


def test_sample_of_recall_has_a_cue_and_asks_for_it():
    built = build_task(RecallTask(max_length=60, blank_prob=0.5))
    tokens, answers = sample_of(built, seed=1)
    assert built.codec.label(int(tokens[0])).startswith("cue") and answers == {len(tokens) - 1: int(tokens[0])}


def test_text_is_given_back_by_the_codec_and_symbols_refuse_it(tmp_path):
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text("Är ei§\n" * 20)
    text = "Är ei§\n".encode()
    for config in (TextTask(), BooksTask(path=str(tmp_path))):
        codec = text_codec(config, "generate")
        tokens = codec.encode(text)
        assert codec.decode(tokens.tolist()) == text == b"".join(map(codec.writer([]), tokens.tolist()))
    words = text_codec(WordsTask(tales=50), "generate")
    assert words.decode(words.encode(b"She said zebra the").tolist()) == b"she said <unknown> the "
    with pytest.raises(UserError, match="generate needs a run of text, got a run of task recall"):
        text_codec(RecallTask(), "generate")
    with pytest.raises(UserError, match="generate needs a run of text, got a run of task env"):
        text_codec(EnvTask(), "generate")
    with pytest.raises(UserError, match="reads no text"):
        build_codec(RecallTask()).encode(text)
