"""A closed reach drops a gradient that points outward by the sum over all parts of a row, not by each part's own."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from expire_span.models.decoder import Decoder
from expire_span.ops.context import ContextGroup, backward_in_pieces, context_parallel
from tests.ranks import Ranks
from tests.train.test_context import blocks, build

BLOCKS = range(6)


def closed() -> Decoder:
    """Every head's reach lies at its lower limit, where the gradients of tokens point both ways."""
    decoder = build("spans of each head, learned reach")
    for block in decoder.layers():
        torch.nn.init.zeros_(block.mixer.span_predictor.reach)  # type: ignore[union-attr, arg-type]
    return decoder


def loss_of(decoder: Decoder, x: Tensor, y: Tensor, parts: int) -> Tensor:
    logits, _, aux = decoder(x, keep="nothing")
    return (F.cross_entropy(logits.flatten(0, 1), y.flatten()) + 1e-4 * aux.loss) / parts


def gradients(decoder: Decoder) -> dict[str, Tensor]:
    return {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}


def reach_of(found: dict[str, Tensor]) -> Tensor:
    return torch.stack([x for name, x in found.items() if name.endswith("reach")])


def of_one(index: int) -> dict[str, Tensor]:
    block, decoder = blocks(index + 1)[index], closed()
    loss_of(decoder, block[:, :-1], block[:, 1:], 1).backward()
    return gradients(decoder)


def of_ranks(group: Any, index: int) -> dict[str, Tensor]:
    context, block, decoder = ContextGroup(group), blocks(index + 1)[index], closed()
    with context_parallel(context) if context.size > 1 else nullcontext():
        loss_of(decoder, context.shard(block[:, :-1]), context.shard(block[:, 1:]), context.size).backward()
    for x in gradients(decoder).values():
        dist.all_reduce(x, group=group)
    return gradients(decoder)


def check(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-9)


def test_some_gradients_are_dropped_and_others_are_not():
    given = torch.cat([reach_of(of_one(n)) != 0 for n in BLOCKS])
    assert given.any() and not given.all()


@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("index", BLOCKS)
def test_pieces_drop_by_their_sum(index, pieces):
    block, decoder = blocks(index + 1)[index], closed()
    parts = [block[:, :-1].chunk(pieces, 1), block[:, 1:].chunk(pieces, 1)]
    backward_in_pieces(lambda n: loss_of(decoder, parts[0][n], parts[1][n], pieces), pieces)
    check(gradients(decoder), of_one(index))


def test_gradients_of_pieces_are_added_to_those_before():
    """As a second block of an accumulated step does."""
    block, decoder = blocks(1)[0], closed()
    for _ in range(2):
        backward_in_pieces(lambda n: loss_of(decoder, block[:, :-1].chunk(2, 1)[n], block[:, 1:].chunk(2, 1)[n], 2), 2)
    check(gradients(decoder), {name: 2 * x for name, x in of_one(0).items()})


def test_ranks_drop_by_their_sum():
    with Ranks(3) as ranks:
        for index in BLOCKS:
            for size in (2, 3):
                for found in ranks.call(of_ranks, size, index):
                    check(found, of_one(index))
