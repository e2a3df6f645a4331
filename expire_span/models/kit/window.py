"""Attention to a window of last tokens and to the first tokens (sinks): the base of `sliding_window`, `streaming_sinks` and
`longformer`.

Streaming is exact: a sequence in pieces of any size gives the same outputs. The state has a fixed size.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.models.kit.attention import AttentionMixer, empty_rows, share_heads
from expire_span.models.kit.banded import Extra, banded_attention
from expire_span.models.mixer import Keep, MixerAux, MixerOutput
from expire_span.models.state import bytes_of
from expire_span.store import NEVER


@dataclass(frozen=True)
class Band:
    """`heads` key/value heads that read `window` tokens: the last ones, or with dilation d every d-th of the last window *
    d."""

    heads: int
    window: int
    dilation: int = 1

    @property
    def extent(self) -> int:
        return self.window * self.dilation

    def attend(
        self, q: Tensor, stretch: dict[str, Tensor], past: int, extra: Extra | None, relative_keys: Tensor | None
    ) -> Tensor:
        """q [B, Hq, T, D]; stretch: k, v [B, H, extent + T, D] and pos [B, extent + T] -> y [B, Hq, T, D].

        past: upper bound of the number of earlier tokens; slots of the ring that cannot have been filled yet are skipped.
        """
        unused = max(self.extent - past, 0) // self.dilation * self.dilation
        stretch = {
            "k": stretch["k"][:, :, unused:],
            "v": stretch["v"][:, :, unused:],
            "pos": stretch["pos"][:, unused:],
        }
        k, v, pos = share_heads(stretch["k"], q.shape[1]), share_heads(stretch["v"], q.shape[1]), stretch["pos"]
        options: dict[str, Any] = {"window": self.window, "dilation": self.dilation, "relative_keys": relative_keys}
        if extra is not None:
            extra = Extra(share_heads(extra.k, q.shape[1]), share_heads(extra.v, q.shape[1]), extra.pos)
        if self.dilation == 1:
            return banded_attention(q, k, v, pos.unsqueeze(1), extra=extra, **options)
        count, d = q.shape[2], self.dilation
        short = -count % d
        q, k, v = (_phases(F.pad(x, (0, 0, 0, short)), d) for x in (q, k, v))
        pos = F.pad(pos, (0, short), value=NEVER).unflatten(1, (-1, d)).transpose(1, 2).flatten(0, 1)
        if extra is not None:
            extra = Extra(*(x.repeat_interleave(d, dim=0) for x in extra))
        y = banded_attention(q, k, v, pos.unsqueeze(1), extra=extra, **options)  # [B * d, H, T / d, D]
        return y.unflatten(0, (-1, d)).permute(0, 2, 3, 1, 4).flatten(2, 3)[:, :, :count]


def _phases(x: Tensor, d: int) -> Tensor:
    """[B, H, S, D] -> [B * d, H, S / d, D]: d rows for each one, with every d-th entry from the offsets 0 to d - 1."""
    return x.unflatten(2, (-1, d)).permute(0, 3, 1, 2, 4).flatten(0, 1)


class Ring:
    """The last `extent` keys, values and positions of a band, as a state {"k", "v" [B, H, extent, D], "pos" [B, extent]}."""

    def __init__(self, band: Band, head_dim: int) -> None:
        self.band, self.head_dim = band, head_dim

    def empty(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        keys = like.new_zeros(batch, self.band.heads, self.band.extent, self.head_dim)
        pos = torch.full((batch, self.band.extent), NEVER, dtype=torch.int64, device=like.device)
        return {"k": keys, "v": keys.clone(), "pos": pos}

    def extend(self, ring: dict[str, Tensor], k: Tensor, v: Tensor, pos: Tensor) -> dict[str, Tensor]:
        """The ring's entries and the new ones after them, as one sequence."""
        pos = torch.cat([ring["pos"], pos.expand(k.shape[0], -1)], 1)
        keys, values = torch.cat([ring["k"].to(k.dtype), k], 2), torch.cat([ring["v"].to(v.dtype), v], 2)
        return {"k": keys, "v": values, "pos": pos}

    def cut(self, stretch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The last `extent` entries of what `extend` returned, copied, so that the bytes of the rest are freed."""
        extent = self.band.extent
        kept = {name: stretch[name].detach()[:, :, -extent:].clone() for name in ("k", "v")}
        return {**kept, "pos": stretch["pos"][:, -extent:].clone()}


class WindowMixer(AttentionMixer):
    """Bands of heads with a ring each, and the first `sinks` tokens; subclasses define both."""

    def __init__(self, *shape: Any, **options: Any) -> None:
        super().__init__(*shape, **options)
        self.bands, self.sinks = self.bands_and_sinks()
        self.rings = [Ring(band, self.shape.head_dim) for band in self.bands]

    @abstractmethod
    def bands_and_sinks(self) -> tuple[list[Band], int]:
        """The bands, covering all key/value heads, and how many first tokens stay."""

    def initial_state(self, batch: int, keep: Keep = "kv", *, empty: Tensor | None = None) -> dict[str, Any]:
        like = self.query.weight.detach()
        state: dict[str, Any] = {"rings": [ring.empty(batch, like) for ring in self.rings], "position": 0}
        first = like.new_zeros(batch, self.shape.num_kv_heads, self.sinks, self.shape.head_dim)
        pos = torch.full((batch, self.sinks), NEVER, dtype=torch.int64, device=like.device)
        state["sinks"] = {"k": first, "v": first.clone(), "pos": pos}
        state["seen"] = torch.zeros(batch, dtype=torch.int64, device=like.device)
        return {**state, "keep": keep}

    def reset_rows(self, state: dict[str, Any], fresh: Tensor, *, empty: Tensor | None = None) -> dict[str, Any]:
        return empty_rows(state, fresh, self.initial_state(len(fresh)))

    def mix(self, x: Tensor, state: dict[str, Any]) -> MixerOutput:
        start, count = state["position"], x.shape[1]
        q, k, v, pos = self.project(x, start)
        sinks = self._fill_sinks(state, k, v, pos)
        share = q.shape[1] // k.shape[1]
        parts, rings, first = [], [], 0
        for ring, old in zip(self.rings, state["rings"]):
            heads = slice(first, first + ring.band.heads)
            queries = q[:, heads.start * share : heads.stop * share]
            stretch = ring.extend(old, k[:, heads], v[:, heads], pos)
            extra = Extra(sinks["k"][:, heads], sinks["v"][:, heads], sinks["pos"].unsqueeze(1)) if self.sinks else None
            parts.append(ring.band.attend(queries, stretch, start, extra, self.relative_keys))
            rings.append(old if state["keep"] == "nothing" else ring.cut(stretch))
            first = heads.stop
        kept = {name: x.detach() for name, x in sinks.items()}
        after = {"rings": rings, "position": start + count, "sinks": kept, "seen": state["seen"] + count}
        after["keep"] = state["keep"]
        aux = MixerAux(live=self._live(state["seen"], count), bytes_held=bytes_of(after))
        return MixerOutput(self.join_heads(torch.cat(parts, 1), x), after, aux)

    def _fill_sinks(self, state: dict[str, Any], k: Tensor, v: Tensor, pos: Tensor) -> dict[str, Tensor]:
        """The sinks after this block: slot s of a row takes that row's s-th token, if it is in this block."""
        old = state["sinks"]
        if not self.sinks:
            return old
        source = torch.arange(self.sinks, device=k.device) - state["seen"].unsqueeze(1)  # [B, G]
        new = (source >= 0) & (source < k.shape[2])
        source = source.clamp(0, k.shape[2] - 1)
        index = source[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
        taken = {name: x.gather(2, index) for name, x in (("k", k), ("v", v))}
        out = {name: torch.where(new[:, None, :, None], x, old[name].to(x.dtype)) for name, x in taken.items()}
        return {**out, "pos": torch.where(new, pos[source], old["pos"])}

    def _live(self, seen: Tensor, count: int) -> Tensor:
        """Mean number of tokens that a query reads, over rows, queries and heads. seen [B]: tokens before this block."""
        past = seen.unsqueeze(1) + torch.arange(1, count + 1, device=seen.device)  # tokens so far, the query's included
        total = torch.zeros((), device=seen.device)
        for band in self.bands:
            near = ((past + band.dilation - 1) // band.dilation).clamp(max=band.window)
            older = past.clamp(max=self.sinks)
            if band.dilation == 1:
                older = torch.minimum(older, (past - band.window).clamp_min(0))
            total = total + band.heads * (near + older).float().mean()
        return total / self.shape.num_kv_heads
