"""Shared rows with the settings of training crossed in: bf16, dropout, compiled blocks, a mesh of data x context."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from expire_span.ops.context import ContextGroup, context_parallel
from expire_span.recipes import text_tiny
from expire_span.train.context import seed_shards
from expire_span.train.supervised import train
from tests.error_budget import DOUBLE, assert_within_budget
from tests.ranks import Ranks
from tests.tiny import as_options, tiny_config, write_text
from tests.train.test_context import LAYERS, blocks, build, loss_of, without_bytes
from tests.train.test_ddp import SAME, call, check_same

SEED = 5


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as found:
        yield found


def gradients(group: Any, layer: str, kind: str) -> Tensor:
    """All gradients of one block, side by side, summed over the ranks of a group. kind: double, single, bf16, dropout or
    compiled."""
    context = None if group is None else ContextGroup(group)
    decoder = build(layer, dropout=0.2 if kind == "dropout" else 0.0)
    if kind in ("single", "bf16"):
        decoder.float()
    (block,) = blocks(1)
    x, y = (part if context is None else context.shard(part) for part in (block[:, :-1], block[:, 1:]))
    seed_shards(SEED, context)
    if kind == "compiled":
        with patch("torch.compile", partial(torch.compile, backend="aot_eager")):
            decoder.compile_blocks(carry=False, attention=context is None)
    low = torch.autocast("cpu", torch.bfloat16) if kind == "bf16" else nullcontext()
    with nullcontext() if context is None else context_parallel(context), low:
        loss = loss_of(decoder, x, y, None, "nothing", 1)[1] / (1 if context is None else context.size)
        loss.backward()
    found = torch.cat([p.grad.flatten() for p in decoder.parameters()])  # type: ignore[union-attr]
    if group is not None:
        dist.all_reduce(found, group=group)
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_half_precision_errs_no_more_than_in_one_process(ranks, layer):
    exact, rounded = gradients(None, layer, "double"), gradients(None, layer, "bf16")
    assert (rounded - gradients(None, layer, "single")).abs().max() > 1e-4, "nothing was rounded"
    for found in ranks.call(gradients, 2, layer, "bf16"):
        assert_within_budget(found, exact, rounded)


class ByShard:
    """Dropout in one process that draws, for each shard, what the rank with this shard draws."""

    def __init__(self, size: int) -> None:
        self.draws, self.dropout = [], F.dropout
        for rank in range(size):
            torch.manual_seed(SEED * size + rank + 1)
            self.draws.append(torch.get_rng_state())

    def __call__(self, x: Tensor, p: float, training: bool, inplace: bool = False) -> Tensor:
        parts = []
        for n, part in enumerate(x.chunk(len(self.draws), 1)):
            torch.set_rng_state(self.draws[n])
            parts.append(self.dropout(part.contiguous(), p, training))
            self.draws[n] = torch.get_rng_state()
        return torch.cat(parts, 1)


def test_dropout_is_drawn_anew_for_each_shard(ranks):
    (layer, *_) = LAYERS
    with patch.object(F, "dropout", ByShard(2)):
        want = gradients(None, layer, "dropout")
    assert float((want - gradients(None, layer, "double")).abs().max()) > 1e-3
    for found in ranks.call(gradients, 2, layer, "dropout"):
        assert float((found - want).abs().max()) < DOUBLE


@pytest.mark.parametrize("layer", LAYERS)
def test_compiled_blocks_give_the_same_gradients(ranks, layer):
    """Traced and differentiated by torch.compile; the long twin below also compiles what that gives."""
    want = gradients(None, layer, "double")
    for found in ranks.call(gradients, 2, layer, "compiled"):
        assert float((found - want).abs().max()) < DOUBLE


def check_run(folder: Path, processes: int, **settings: Any) -> None:
    """Forked processes, two for each row, write the metrics of one."""
    options: dict[str, Any] = dict(steps=4, log_every=1, eval_every=2, block=16, accumulate=2, span_weight=0.1)
    config = tiny_config(write_text(folder), **options, **settings)
    one = train(config, folder / "one", shown=False)
    shared = replace(config, train=replace(config.train, context_parallel=2))
    args = ["train", "text_tiny", "--runs-dir", str(folder), "--name", "more", *as_options(shared, text_tiny())]
    code, output = call("forked", *args, processes=processes)
    assert code == 0, output
    more = type(one).open(folder / "more")
    assert more.environment["processes"] == processes
    check_same(without_bytes(one), without_bytes(more))
    assert more.read_result()["loss"] == pytest.approx(one.read_result()["loss"], rel=SAME)  # type: ignore[index]


@pytest.mark.slow
def test_two_groups_of_two_learn_what_one_process_learns(tmp_path):
    """Four processes: the rows are divided among two groups, each of which shares them."""
    check_run(tmp_path, 4)


@pytest.mark.long
def test_compiled_training_through_the_command_line(tmp_path):
    check_run(tmp_path, 2, compile=True)
