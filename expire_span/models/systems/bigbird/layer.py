"""BigBird, causal: each block of queries reads the last blocks, the first blocks and some random earlier ones.

Blocks count from a row's first token. The random blocks depend only on the seed, the layer and the number of the query's block,
so that streaming is exact. Any past block may be drawn later, so the state keeps everything, though a query reads little of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from expire_span.models.kit.alignment import place_rows, take_rows
from expire_span.models.kit.attention import AttentionMixer, attend, share_heads
from expire_span.models.mixer import Keep, MixerAux, MixerOutput
from expire_span.models.state import bytes_of
from expire_span.models.systems.bigbird import BigBirdConfig
from expire_span.models.systems.full.layer import FOREVER
from expire_span.store import NEVER, ExpiringMemory


class BigBird(AttentionMixer):
    """State {"memory": ExpiringMemory of k and v, "start": position of each row's first token [B], "position": of the next}."""

    settings_class = BigBirdConfig
    settings: BigBirdConfig

    def initial_state(self, batch: int, keep: Keep = "kv", *, empty: Tensor | None = None) -> dict[str, Any]:
        device = self.query.weight.device
        start = torch.zeros(batch, dtype=torch.int64, device=device)
        memory = ExpiringMemory.empty(batch, ramp=1, device=device)
        return {"memory": memory, "start": start, "position": 0, "keep": keep}

    def reset_rows(self, state: dict[str, Any], fresh: Tensor, *, empty: Tensor | None = None) -> dict[str, Any]:
        start = torch.where(fresh.to(state["start"].device), state["position"], state["start"])
        return {**state, "memory": state["memory"].forget_rows(fresh), "start": start}

    def mix(self, x: Tensor, state: dict[str, Any]) -> MixerOutput:
        now, count, memory = state["position"], x.shape[1], state["memory"]
        q, k, v, pos = self.project(x, now)
        keys, values, base = k, v, now - len(memory)  # base: position of the first slot
        if len(memory):
            keys = torch.cat([memory["k"].transpose(1, 2).to(k.dtype), k], 2)
            values = torch.cat([memory["v"].transpose(1, 2).to(v.dtype), v], 2)
        y, live = self._read(q, keys, values, state["start"], now, base)
        if state["keep"] != "nothing":
            span = torch.full((len(x), count), float(FOREVER), device=x.device)
            memory = memory.append(pos, span, check_values=False, k=k.transpose(1, 2), v=v.transpose(1, 2)).expire(
                now + count
            )
        after = {"memory": memory, "start": state["start"], "position": now + count, "keep": state["keep"]}
        return MixerOutput(
            self.join_heads(y.transpose(1, 2), x), after, MixerAux(live=live, bytes_held=bytes_of(after))
        )

    def _read(self, q: Tensor, k: Tensor, v: Tensor, start: Tensor, now: int, base: int) -> tuple[Tensor, Tensor]:
        """Each query block gathers its key blocks and attends; y [B, T, H, D] and the mean number of tokens read.

        start [B] is the position of each row's first token, `now` that of the first query, `base` that of the first key.
        """
        size, count, heads = self.settings.block, q.shape[2], q.shape[1]
        phase = (now - start) % size  # [B]: place of the first query in its block
        blocks = -(-(count + size - 1) // size)
        # [B, N]: number of each block.
        own = ((now - start) // size).unsqueeze(1) + torch.arange(blocks, device=q.device)
        index, places, seen = self._find_pairs(own, (now + count - start)[:, None, None])
        slots = (places + (start - base)[:, None, None]).clamp(0, k.shape[2] - 1).flatten(1)
        keys, values = (self._gather(x, slots, blocks, heads) for x in (k, v))
        queries = place_rows(q.transpose(1, 2), phase, blocks * size, q.new_zeros(len(q), 0, heads, q.shape[3]))
        queries = queries.unflatten(1, (blocks, size)).flatten(0, 1).transpose(1, 2)  # [B * N, H, size, D]
        allowed = (seen | ~seen.any(-1, keepdim=True)).flatten(0, 1).unsqueeze(1)  # padding reads any key: no empty row
        age = (index.unsqueeze(3) - places.unsqueeze(2)).flatten(0, 1).unsqueeze(1)
        y = attend(queries, keys, values, allowed, age, self.relative_keys)
        y = y.transpose(1, 2).unflatten(0, (len(q), blocks)).flatten(1, 2)
        live = take_rows(seen.sum(-1).flatten(1), phase, count).float().mean()
        return take_rows(y, phase, count), live

    def _find_pairs(self, own: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For query blocks with the numbers `own` [B, N], in rows of `tokens` [B] tokens: the tokens' numbers of the queries
        [B, N, size] and of the keys [B, N, K * size], and which query sees which key [B, N, size, K * size] (bool).

        A token's number counts from its row's first token.
        """
        within = torch.arange(self.settings.block, device=own.device)
        index = own[..., None] * self.settings.block + within
        places = (self._blocks(own)[..., None] * self.settings.block + within).flatten(2)
        held = (places >= 0) & (places < tokens)
        return index, places, held.unsqueeze(2) & (places.unsqueeze(2) <= index.unsqueeze(3))

    def _gather(self, x: Tensor, slots: Tensor, blocks: int, heads: int) -> Tensor:
        """Keys or values [B, Hkv, S, D] at slots [B, N * K], for all query heads: [B * N, H, K, D]."""
        index = slots[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        return share_heads(x.gather(2, index), heads).unflatten(2, (blocks, -1)).transpose(1, 2).flatten(0, 1)

    @torch.compiler.disable()  # little work; the compiler would treat the numbers as symbolic expressions, and fails
    def _blocks(self, own: Tensor) -> Tensor:
        """The numbers of the K blocks that query blocks `own` [B, N] read, [B, N, K]; NEVER for a missing or repeated one."""
        m = self.settings
        window = own[..., None] - torch.arange(m.window_blocks, device=own.device)
        first = torch.arange(m.global_blocks, device=own.device).expand(*own.shape, -1)
        draw = torch.arange(m.random_blocks, device=own.device) * 40_503 + m.seed * 69_069 + self.shape.depth * 7_919
        mixed = (own[..., None] * 2_654_435_761 + draw * 97) % 2**31 * 48_271 % (2**31 - 1)
        past = (own[..., None] - m.window_blocks + 1).clamp_min(0)  # blocks before the window
        random = torch.where(past > 0, mixed % past.clamp_min(1), NEVER)
        chosen = torch.cat([window, first, random], -1)
        chosen = torch.where((chosen < 0) | (chosen > own[..., None]), NEVER, chosen)
        same = (chosen.unsqueeze(-1) == chosen.unsqueeze(-2)).tril(-1).any(-1)
        return torch.where(same, NEVER, chosen)
