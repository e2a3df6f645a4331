"""Lower bounds of the bytes that a run needs, so that impossible sizes are refused before anything is built or written."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache

import torch

from expire_span.agent_configs import PolicyConfig
from expire_span.config import DecoderConfig, RunConfig
from expire_span.models.decoder import Decoder
from expire_span.models.policy import Policy
from expire_span.runs import UserError
from expire_span.sizes import show_bytes

WEIGHT_BYTES = 16
"""Bytes per parameter in training: its value, its gradient and two running means of Adam, each in float32."""
TOKEN_BYTES = 17
"""Bytes per position of a batch: two int64 tokens and a mask."""


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


def check_fits(need: int, what: str, settings: str, device: torch.device) -> None:
    have = device_bytes(device)
    if need > have:
        raise UserError(
            f"{what} ({settings}) needs at least {show_bytes(need)}, and {device} has {show_bytes(have)}; "
            "give smaller sizes"
        )


def _model_words(model: DecoderConfig) -> str:
    return f"dim {model.dim:,}, layers {model.layers:,}, ff_dim {model.ff_dim:,}, vocab {model.vocab:,}"


def device_bytes(device: torch.device) -> int:
    """Total bytes of memory of a GPU, or of the host."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@cache
def count_parameters(model: DecoderConfig | PolicyConfig) -> int:
    """Number of parameters of a decoder or a policy, counted on the meta device. Settings that do not fit together are
    refused."""
    if model.layers > 2 and not model.pattern:  # every further layer has as many parameters as the second
        one, two = (count_parameters(replace(model, layers=n)) for n in (1, 2))
        return one + (model.layers - 1) * (two - one)
    with torch.device("meta"):
        made = Policy(model) if isinstance(model, PolicyConfig) else Decoder(model)
        return sum(p.numel() for p in made.parameters())
