"""Averaged weights are what is evaluated and kept for use; training goes on from the newest. Weight decay may dip."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from expire_span import checkpoint
from expire_span.runs import RunFolder
from expire_span.train.optimizers import build_optimizers, dip_decay
from expire_span.train.supervised import SupervisedLearner, check_averaging, resume, train
from tests.tiny import noisy_config, tiny_config, write_text

OPTIONS: dict[str, Any] = dict(steps=6, log_every=2, eval_every=3, checkpoint_every=3, keep_checkpoints=9)


def averaged(text: Path, share: float, **options: Any) -> Any:
    return tiny_config(text, **{**OPTIONS, **options, "averaging": share})


def test_the_average_is_evaluated_and_kept_and_does_not_change_training(tmp_path, monkeypatch):
    text, seen = write_text(tmp_path), []
    plain = train(averaged(text, 0.0), tmp_path / "plain", shown=False)
    update = SupervisedLearner._update_weights

    def record(self: SupervisedLearner) -> Any:
        norm = update(self)
        seen.append({name: x.clone() for name, x in self.trained.state_dict().items()})
        return norm

    monkeypatch.setattr(SupervisedLearner, "_update_weights", record)
    run = train(averaged(text, 0.6), tmp_path / "averaged", shown=False)
    mean = seen[0]
    for weights in seen[1:]:
        mean = {name: 0.6 * mean[name] + 0.4 * x for name, x in weights.items()}
    kept, newest = (checkpoint.load_decoder(of.path).state_dict() for of in (run, plain))
    for name, x in kept.items():
        torch.testing.assert_close(x, mean[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(newest[name], seen[-1][name], rtol=0, atol=0)
    ours, theirs = (of.read_metrics() for of in (run, plain))
    for a, b in zip(ours, theirs, strict=True):
        assert (a == b) is (a["split"] == "train"), (a, b)
    assert run.read_result() != plain.read_result()


def test_an_averaged_run_resumes_exactly(tmp_path, monkeypatch):
    """With everything that is random, a dip of weight decay, and shuffled blocks."""
    text = write_text(tmp_path)
    config = noisy_config(text, **OPTIONS, averaging=0.7, decay_dip=0.9, weight_decay=0.1)
    config = replace(config, task=replace(config.task, shuffle=True))
    whole = train(config, tmp_path / "whole", shown=False)
    real = SupervisedLearner.step

    def stop(self: SupervisedLearner, index: int) -> int:
        if index == 4:
            raise KeyboardInterrupt
        return real(self, index)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SupervisedLearner, "step", stop)
        train(config, tmp_path / "broken", shown=False)
    again = resume(RunFolder.open(tmp_path / "broken"), shown=False)
    for name in ("metrics.jsonl", "result.json"):
        assert (again.path / name).read_bytes() == (whole.path / name).read_bytes()


def test_weight_decay_dips_in_the_middle_of_groups_that_have_it(tmp_path):
    config = tiny_config(tmp_path, weight_decay=0.2, optimizer="muon").train
    model = torch.nn.ModuleDict({"blocks": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 4)})
    optimizers = build_optimizers(model, config)
    decays = lambda: [group["weight_decay"] for one in optimizers for group in one.param_groups]  # noqa: E731
    before = decays()
    assert sorted(set(before)) == [0.0, 0.2]
    for progress, factor in ((0.0, 1.0), (0.25, 0.6), (0.5, 0.2), (0.75, 0.6), (1.0, 1.0), (1.7, 1.0)):
        dip_decay(optimizers, 0.2, 0.8, progress)
        assert decays() == pytest.approx([x * factor for x in before])
    dip_decay(optimizers, math.nan, 0.0, 0.5)  # off: nothing is touched
    assert decays() == pytest.approx(before)


def test_what_averaging_cannot_do_is_refused(tmp_path):
    train = tiny_config(tmp_path, averaging=0.9).train
    check_averaging(train, sharded=False)
    with pytest.raises(ValueError, match=r"averaging keeps whole weights, but FSDP shards them, got 0\.9; use DDP"):
        check_averaging(train, sharded=True)
    with pytest.raises(ValueError, match=r"decay_dip must lie in \[0, 1\), got 1"):
        tiny_config(tmp_path, decay_dip=1.0)
