"""Lower bounds of the bytes that a run needs, so that impossible sizes are refused before anything is built or written."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from expire_span.settings.agent import PolicyConfig
from expire_span.settings.kinds import build_model
from expire_span.settings.retrofit import DistillConfig
from expire_span.settings.run import DecoderConfig, RunConfig
from expire_span.store.device_memory import check_fits

WEIGHT_BYTES = 16
"""Bytes per parameter in training: its value, its gradient and two running means of Adam, each in float32."""
TOKEN_BYTES = 17
"""Bytes per position of a batch: two int64 tokens and a mask."""
ID_BYTES = 8
"""Bytes of a token."""


def check_arithmetic(config: RunConfig, device: torch.device) -> None:
    """Refuse sizes that cannot fit, by arithmetic on the settings alone: nothing is built, however large they are."""
    model, train = config.model, config.train
    least = 2 * model.vocab * model.dim + model.layers * (model.dim**2 + 2 * model.dim * model.ff_dim)
    check_fits(least * WEIGHT_BYTES, f"a model of at least {least:,} parameters", _model_words(model), device)
    rows, block = train.eval_batch or train.batch, train.eval_block or train.block
    tokens = max(train.batch * train.block, rows * block)
    words = f"batch {train.batch:,} and block {train.block:,}"
    check_fits(tokens * TOKEN_BYTES, f"a batch of {tokens:,} tokens", words, torch.device("cpu"))


def check_size(config: RunConfig, device: torch.device, processes: int = 1, shards: int = 1) -> None:
    """Refuse a run whose parameters, or whose logits of one step, are more than the device can hold.

    Args:
        processes: number of processes among which the rows of a batch are split.
        shards: number of processes among which the parameters are sharded.
    """
    model, train = config.model, config.train
    count = count_parameters(model)
    check_fits(count * WEIGHT_BYTES // shards, f"a model of {count:,} parameters", _model_words(model), device)
    rows = train.batch // (train.accumulate * processes)
    floats = rows * train.block * (model.vocab + model.layers * model.dim)
    what = f"a step of {rows:,} rows of {train.block:,} tokens"
    check_fits(4 * floats, what, f"batch {train.batch:,}, block {train.block:,} and {_model_words(model)}", device)


def check_retrofit_batch(config: DistillConfig, device: torch.device) -> None:
    """Refuse a retrofit whose tokens cannot fit: a batch, and the contexts of the calibration."""
    for name, rows in (("batch", config.batch), ("calibrate", config.calibrate)):
        what, words = f"{rows:,} contexts of {config.context:,} tokens", f"{name} {rows:,}, context {config.context:,}"
        check_fits(rows * config.context * ID_BYTES, what, words, device)


def _model_words(model: DecoderConfig) -> str:
    return f"dim {model.dim:,}, layers {model.layers:,}, ff_dim {model.ff_dim:,}, vocab {model.vocab:,}"


@cache
def count_parameters(model: DecoderConfig | PolicyConfig) -> int:
    """Number of parameters of a decoder or a policy, counted on the meta device. Settings that do not fit together are
    refused."""
    if model.layers > 2 and not model.pattern:  # every further layer has as many parameters as the second
        one, two = (count_parameters(replace(model, layers=n)) for n in (1, 2))
        return one + (model.layers - 1) * (two - one)
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(model).parameters())
