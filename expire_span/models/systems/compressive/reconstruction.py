"""The attention-reconstruction loss: queries should read the same from pooled memories as from raw ones. Trains the pooling
only."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from expire_span.models.kit.attention import share_heads
from expire_span.store import NEVER


class Pooled(Protocol):
    """What the loss needs of a compressive layer."""

    raw: int
    rate: int
    key: nn.Linear
    value: nn.Linear

    def pool_groups(self, groups: Tensor) -> Tensor: ...

    def norm_and_rotate(self, x: Tensor, pos: Tensor) -> Tensor: ...

    def split_heads(self, x: Tensor) -> Tensor: ...


def reconstruction_loss(layer: Pooled, q: Tensor, raw: dict[str, Tensor], hidden: Tensor, block: int) -> Tensor:
    """Mean squared difference [B] between what a block's queries read from its complete groups unpooled and pooled.

    q [B, length, H, D] and hidden [B, length, C] are aligned to groups. Only the pooling gets gradients.
    """
    pos = raw["pos"][:, layer.raw :]
    whole = (pos.unflatten(1, (-1, layer.rate)) != NEVER).all(-1)  # [B, groups]: which are finished
    h = layer.pool_groups(hidden.detach().unflatten(1, (-1, layer.rate)))
    places = pos[:, layer.rate - 1 :: layer.rate].clamp_min(0)
    keys = layer.norm_and_rotate(layer.split_heads(F.linear(h, layer.key.weight.detach())), places)
    values = layer.split_heads(F.linear(h, layer.value.weight.detach()))
    given = (raw["k"][:, layer.raw :].detach(), raw["v"][:, layer.raw :].detach())
    of_tokens = whole.repeat_interleave(layer.rate, 1)
    pooled = _read_blocks(q.detach(), keys.transpose(1, 2), values.transpose(1, 2), whole, block, block // layer.rate)
    exact = _read_blocks(q.detach(), *given, of_tokens, block, block)
    finished = whole.unflatten(1, (-1, block // layer.rate)).any(-1)  # [B, blocks]
    answered = (finished[:, :, None] & (pos != NEVER).unflatten(1, (-1, block))).flatten(1)  # queries with an answer
    error = (pooled - exact).square().mean((2, 3)) * answered
    return error.sum(1) / answered.sum(1).clamp_min(1)


def _read_blocks(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, block: int, width: int) -> Tensor:
    """Each block of queries reads the `width` valid entries of its own block; [B, length, H, D]."""
    q = q.unflatten(1, (-1, block)).flatten(0, 1).transpose(1, 2)
    k, v = (share_heads(x.unflatten(1, (-1, width)).flatten(0, 1).transpose(1, 2), q.shape[1]) for x in (k, v))
    seen = valid.unflatten(1, (-1, width)).flatten(0, 1)[:, None, None]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen | ~seen.any(-1, keepdim=True))
    return y.transpose(1, 2).unflatten(0, (valid.shape[0], -1)).flatten(1, 2)
