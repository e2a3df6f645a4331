"""Values that can never work are refused where they are given, in one sentence with the value, before anything is written."""

from __future__ import annotations

import math

import pytest

from expire_span import Lifetimes, Sampling
from expire_span.cli import main
from expire_span.lab.study.entrances import EntrancesSettings
from expire_span.lab.study.questions.study import QuestionsSettings
from expire_span.lab.study.word_rnn import WordSettings
from expire_span.models.systems import mixer_config
from expire_span.models.systems.contract import LayerShape
from expire_span.models.systems.expire_span import ExpireSpanConfig
from expire_span.settings.retrofit import BaseModel, DistillConfig
from expire_span.settings.run import BudgetConfig
from expire_span.train.budget import BudgetController


def distil(**fields):
    return DistillConfig(**({} if {"budget_tokens", "budget_bytes"} & fields.keys() else {"budget": 0.5}), **fields)


def control(layers=1, bytes_per_memory=8, loss_memory=20.0, **fields):
    config = BudgetConfig(**{"live": 4.0, **fields})
    return BudgetController(config, layers=layers, bytes_per_memory=bytes_per_memory, loss_memory=loss_memory)


def predict(dim=8, kv_heads=1):
    return Lifetimes(dim, kv_heads, ExpireSpanConfig())


POSITIVE = ("budget_tokens", "seconds", "lr", "bias_lr", "lora_lr", "gain", "initial_weight", "clip")
BUILDERS = [
    *((distil, {name: value}, f"{name} must be greater than 0, got {value}") for name in POSITIVE for value in (-1.0, 0.0)),
    *((distil, {name: -1}, f"{name} must be at least 1, got -1") for name in ("budget_bytes", "context", "batch")),
    *((distil, {name: -1}, f"{name} must be at least 0, got -1") for name in ("calibrate", "lora_rank")),
    (distil, {"lr": math.nan}, "lr must be a finite number or None, got nan"),
    (distil, {"clip": math.inf}, "clip must be a finite number, got inf"),
    *((BaseModel, {name: 0}, f"{name} must be at least 1, got 0") for name in ("dim", "layers", "kv_heads", "head_dim")),
    (LayerShape, {"depth": -1}, "depth must be at least 0, got -1"),
    (Sampling, {"seed": -1}, "seed must lie between 0 and 2**63 - 1, got -1"),
    (Sampling, {"seed": 2**64}, f"seed must lie between 0 and 2**63 - 1, got {2**64}"),
    *((lambda kind, **f: mixer_config(kind, **f), {"kind": kind, "seed": -1}, "seed must be at least 0, got -1")
      for kind in ("performer", "reformer", "bigbird")),
    (EntrancesSettings, {"units": (4, 0)}, "units must be at least 1, got (4, 0)"),
    (EntrancesSettings, {"steps": math.nan}, "steps must be a whole number, got nan"),
    (QuestionsSettings, {"budgets": (-3,)}, "budgets must be at least 1, got (-3,)"),
    (QuestionsSettings, {"seeds": 0}, "seeds must be at least 1, got 0"),
    (WordSettings, {"steps": -5}, "steps must be at least 1, got -5"),
    (control, {"live": math.inf}, "live must be a finite number or None, got inf"),
    (control, {"start_loss": math.nan}, "start_loss must be a finite number or None, got nan"),
    (control, {"layers": 0}, "layers must be a whole number of at least 1, got 0"),
    (control, {"bytes_per_memory": -8}, "bytes_per_memory must be a whole number of at least 1, got -8"),
    (control, {"loss_memory": 0.5}, "loss_memory must be at least 1 step, got 0.5"),
    (predict, {"dim": 0}, "dim must be a whole number of at least 1, got 0"),
    (predict, {"kv_heads": -1}, "kv_heads must be a whole number of at least 1, got -1"),
]  # fmt: skip
COMMANDS = [
    ("serve m --adapter a --rows 0", "--rows must be at least 1, got 0"),
    ("serve m --adapter a --pause 0", "--pause must be at least 0.01, got 0"),
    ("serve m --adapter a --port 65536", "--port must lie between 1 and 65535, got 65536"),
    ("view --port 0", "--port must lie between 1 and 65535, got 0"),
    ("chat m --adapter a --max-tokens 0", "--max-tokens must be at least 1, got 0"),
    ("chat m --adapter a --seed -1", "seed must lie between 0 and 2**63 - 1, got -1"),
    ("evaluate-cache m --data d --adapter a --context 0", "--context must be at least 1, got 0"),
    ("evaluate-cache m --data d --adapter a --documents 0", "--documents must be at least 1, got 0"),
    ("evaluate-cache m --data d --adapter a --chunk -1", "--chunk must be at least 1, got -1"),
    ("evaluate-cache m --data d --adapter a --questions -1", "--questions must lie between 0 and 100,000, got -1"),
    ("evaluate-cache m --data d --adapter a --budgets nan", "--budgets are shares in (0, 1], got nan"),
    ("play corridor --seed -1", "--seed must lie between 0 and 2**63 - 1, got -1"),
    ("retrofit m --data d --seed -1", "--seed must lie between 0 and 2**63 - 1, got -1"),
    ("retrofit m --data d --budget-bytes -1", "budget_bytes must be at least 1, got -1"),
    ("retrofit m --data d --budget-tokens -1", "budget_tokens must be greater than 0, got -1.0"),
    (f"verify wikibooks --tokens {10**21}", f"--tokens must be less than 2**63 in size, got {10**21}"),
    (f"evaluate-cache m --data d --context {2**63}", f"--context must be less than 2**63 in size, got {2**63}"),
    (f"retrofit m --data d --context {10**30}", f"--context must be less than 2**63 in size, got {10**30}"),
    (
        "evaluate-cache m --data d --adapter a --questions 1000000",
        "--questions must lie between 0 and 100,000, got 1000000",
    ),
    ("retrofit m --data d --lr -0.1", "lr must be greater than 0, got -0.1"),
]


@pytest.mark.parametrize(("build", "fields", "words"), BUILDERS, ids=lambda x: x[:60] if isinstance(x, str) else "")
def test_settings_and_objects(build, fields, words):
    with pytest.raises(ValueError) as caught:
        build(**fields)
    assert str(caught.value) == words


@pytest.mark.parametrize(("command", "words"), COMMANDS, ids=lambda x: x[:60])
def test_commands(tmp_path, monkeypatch, capsys, command, words):
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("expire-span: ") and words in said[0], said
    assert list(tmp_path.iterdir()) == []
