"""Compressive memory: a window of raw memories, and older groups of c pooled to one in a second queue.

A row's tokens form groups of c, counted from its first token. A query reads every group that overlaps its window of W tokens
unpooled ("raw"), and the N groups before those pooled. Once a group is complete, its hidden states are pooled (mean, maximum or
a convolution), and the key and value of the result are stored with the position of the group's last token. So a query reads
each token once, raw or pooled.

Streaming in pieces of any size is exact. Differences from the original: the border between raw and pooled moves with the query
instead of the block, and carried keys and values are stored detached instead of being recomputed from hidden states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expire_span.models.kit.alignment import place_rows, take_rows
from expire_span.models.kit.attention import AttentionMixer, attend, empty_rows, share_heads
from expire_span.models.kit.banded import LEAST_BLOCK
from expire_span.models.mixer import Keep, MixerAux, MixerOutput
from expire_span.models.state import bytes_of
from expire_span.models.systems.compressive import CompressiveConfig
from expire_span.models.systems.compressive.reconstruction import reconstruction_loss
from expire_span.store import NEVER


class ConvPool(nn.Module):
    """A learned convolution over each group, initialised as the mean."""

    def __init__(self, dim: int, rate: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.eye(dim).repeat(1, rate) / rate)

    def forward(self, groups: Tensor) -> Tensor:
        """[B, N, c, C] -> [B, N, C]."""
        return F.linear(groups.flatten(2), self.taps)


class Compressive(AttentionMixer):
    """State: "raw" and "pooled" {"k", "v" [B, S, Hkv, D], "pos" [B, S]}, "hidden" states of the unfinished group, and "seen",
    the number of each row's tokens so far [B]."""

    settings_class = CompressiveConfig
    settings: CompressiveConfig
    recordable_alone = True

    def __init__(self, *shape: Any, **options: Any) -> None:
        super().__init__(*shape, **options)
        m = self.settings
        self.window, self.rate, self.compressed = m.window, m.rate, m.compressed
        self.raw = m.rate * -(-(m.window + m.rate - 1) // m.rate)  # raw slots before the current group
        # A group is pooled as soon as it is complete, but read only once its tokens have left the window.
        self.pooled = m.compressed + self.raw // m.rate
        self.pooling, self.reconstruction = m.pooling, m.reconstruction
        self.pool = ConvPool(self.shape.dim, m.rate) if m.pooling == "conv" else None

    def initial_state(self, batch: int, keep: Keep = "kv", *, empty: Tensor | None = None) -> dict[str, Any]:
        like = self.query.weight.detach()
        hidden = like.new_zeros(batch, self.rate - 1, self.shape.dim)
        seen = torch.zeros(batch, dtype=torch.int64, device=like.device)
        stores = {"raw": self._store(batch, self.raw + self.rate - 1), "pooled": self._store(batch, self.pooled)}
        return {**stores, "hidden": hidden, "seen": seen, "position": 0}

    def _store(self, batch: int, slots: int) -> dict[str, Tensor]:
        like = self.query.weight.detach()
        keys = like.new_zeros(batch, slots, self.shape.num_kv_heads, self.shape.head_dim)
        pos = torch.full((batch, slots), NEVER, dtype=torch.int64, device=like.device)
        return {"k": keys, "v": keys.clone(), "pos": pos}

    def reset_rows(self, state: dict[str, Any], fresh: Tensor, *, empty: Tensor | None = None) -> dict[str, Any]:
        return empty_rows(state, fresh, self.initial_state(len(fresh)))

    def mix(self, x: Tensor, state: dict[str, Any]) -> MixerOutput:
        start, count, phase = state["position"], x.shape[1], state["seen"] % self.rate
        block = self.rate * -(-min(count + self.rate - 1, max(self.window, LEAST_BLOCK)) // self.rate)
        length = block * -(-(count + self.rate - 1) // block)  # places of the current and all new groups
        q, k, v, pos = self.project(x, start)
        new = {"k": k.transpose(1, 2), "v": v.transpose(1, 2), "pos": pos.expand(len(x), -1)}
        raw = {name: self._extend(state["raw"][name], part, phase, length) for name, part in new.items()}
        hidden = place_rows(x, phase, length, state["hidden"])
        fresh = self._compress(hidden, raw["pos"][:, self.raw :])
        pooled = {name: torch.cat([state["pooled"][name].to(part.dtype), part], 1) for name, part in fresh.items()}
        queries = place_rows(q.transpose(1, 2), phase, length, q.new_zeros(len(x), 0, *q.transpose(1, 2).shape[2:]))
        y = take_rows(self._read(queries, raw, pooled, block), phase, count)  # [B, T, H, D]
        after = self._advance(state, raw, pooled, hidden, phase, count)
        aux = MixerAux(live=self._live(state["seen"], count), bytes_held=bytes_of(after))
        if self.reconstruction and self.training:
            aux.loss = reconstruction_loss(self, queries, raw, hidden, block)
        return MixerOutput(self.join_heads(y.transpose(1, 2), x), after, aux)

    def _extend(self, old: Tensor, new: Tensor, phase: Tensor, length: int) -> Tensor:
        """The stored raw slots followed by the current and the new groups, [B, raw + length, ..].

        Positions of empty places are NEVER.
        """
        before = old[:, self.raw :]
        if old.dim() == 2:  # positions, where empty places must be marked
            before = F.pad(before, (0, length - before.shape[1]), value=NEVER)
        return torch.cat([old[:, : self.raw].to(new.dtype), place_rows(new, phase, length, before)], 1)

    def _compress(self, hidden: Tensor, pos: Tensor) -> dict[str, Tensor]:
        """Pool groups of hidden states [B, length, C] to keys, values and positions; unfinished groups give empty slots."""
        groups, places = hidden.unflatten(1, (-1, self.rate)), pos.unflatten(1, (-1, self.rate))
        h = self.pool_groups(groups)  # [B, N, C]
        last = torch.where((places != NEVER).all(-1), places[..., -1], NEVER)
        keys = self.keys(h, last.clamp_min(0))
        return {"k": keys.transpose(1, 2), "v": self.values(h).transpose(1, 2), "pos": last}

    def pool_groups(self, groups: Tensor) -> Tensor:
        if self.pool is not None:
            return self.pool(groups)
        return groups.mean(2) if self.pooling == "mean" else groups.amax(2)

    def _read(self, q: Tensor, raw: dict[str, Tensor], pooled: dict[str, Tensor], block: int) -> Tensor:
        """Attention of q [B, length, H, D], cut into N blocks; each reads one range of raw and one of pooled memories."""
        cut = {name: x.unfold(1, self.raw + block, block) for name, x in raw.items()}  # [B, N, .., raw + block]
        far = {name: x.unfold(1, self.pooled + block // self.rate, block // self.rate) for name, x in pooled.items()}
        keys, values = (  # the head dim last in memory, or torch's fused attention would not serve
            torch.cat([far[n].transpose(-1, -2), cut[n].transpose(-1, -2)], -2).flatten(0, 1) for n in ("k", "v")
        )
        k_pos = torch.cat([far["pos"], cut["pos"]], -1).flatten(0, 1)[:, None, None]  # [B * N, 1, 1, S]
        q_pos = cut["pos"][..., self.raw :].flatten(0, 1)[:, None, :, None]
        seen = self._seen_in_block(block, q.device) & (k_pos != NEVER)
        seen = seen | (q_pos == NEVER)  # padded queries read any key, so that no row of the mask is empty
        q = q.unflatten(1, (-1, block)).flatten(0, 1).transpose(1, 2)  # [B * N, H, block, D]
        heads = q.shape[1]
        y = attend(q, share_heads(keys, heads), share_heads(values, heads), seen, q_pos - k_pos, self.relative_keys)
        return y.transpose(1, 2).unflatten(0, (raw["pos"].shape[0], -1)).flatten(1, 2)

    def _seen_in_block(self, block: int, device: torch.device) -> Tensor:
        """Which of a block's pooled and raw memories each of its queries reads, [block, pooled + raw slots] (bool).

        A query reads raw memories from the start of the group in which its window begins, and pooled ones before that.
        """
        place = self.raw + torch.arange(block, device=device)[:, None]  # of the query in its stretch
        border = (place + 1 - self.window).div(self.rate, rounding_mode="floor") * self.rate
        slot = torch.arange(self.raw + block, device=device)
        group = torch.arange(self.pooled + block // self.rate, device=device)
        near = (slot <= place) & (slot >= border)
        old = (group < border // self.rate + self.compressed) & (group >= border // self.rate)
        return torch.cat([old, near], -1)

    def _advance(self, state, raw, pooled, hidden, phase: Tensor, count: int) -> dict[str, Any]:
        """The state after the block: for every row its last raw and pooled slots, and the hidden states of its open group."""
        groups = (phase + count) // self.rate  # finished by this block
        first = groups * self.rate
        room = self.rate - 1  # the newest group may lie at the very end
        raw = {
            n: F.pad(x, (0, 0) * (x.dim() - 2) + (0, room), value=NEVER if n == "pos" else 0) for n, x in raw.items()
        }
        kept = {name: take_rows(x.detach(), first, self.raw + room) for name, x in raw.items()}
        later = {name: take_rows(x.detach(), groups, self.pooled) for name, x in pooled.items()}
        rest = take_rows(F.pad(hidden.detach(), (0, 0, 0, room)), first, room)
        seen = state["seen"] + count
        return {"raw": kept, "pooled": later, "hidden": rest, "seen": seen, "position": state["position"] + count}

    def _live(self, seen: Tensor, count: int) -> Tensor:
        past = seen.unsqueeze(1).double() + torch.arange(1, count + 1, device=seen.device)
        # In floating point, since torch.compile fails to sum integer quotients of indices.
        groups = ((past - self.window).clamp_min(0) / self.rate).floor()
        return (past - groups * self.rate + groups.clamp(max=self.compressed)).float().mean()
