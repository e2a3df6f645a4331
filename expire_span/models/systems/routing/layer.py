"""Routing Transformer: tokens go to the nearest of learned centroids, and read the members of their own cluster.

Normalised queries serve as keys. A token belongs to the centroid that is nearest to its query before the rotary rotation, and
reads the last w members of that cluster, itself included. In training, centroids follow their members by a running mean. Some
heads, the local ones, read a window instead.

With `selection="recent"` training and streaming compute the same function. With `selection="top"`, as in the original, training
gives each cluster its w closest tokens of the whole block: which tokens those are depends on later ones (a leak), a token may
be in several clusters or in none, and carried memory is not read. Evaluation and streaming still use the last w members.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.models.kit.attention import AttentionMixer, empty_rows, share_heads
from expire_span.models.kit.grouped import empty_slots, grouped_attention
from expire_span.models.kit.window import Band, Ring
from expire_span.models.mixer import Keep, MixerAux, MixerOutput
from expire_span.models.state import bytes_of
from expire_span.models.systems.routing import RoutingConfig


class Routing(AttentionMixer):
    """State {"slots": the last members of the routed heads' clusters, "ring": the local heads' window, "position": of the
    next}."""

    settings_class = RoutingConfig
    settings: RoutingConfig
    separate_keys = False
    centroids: Tensor

    def __init__(self, *shape: Any, **options: Any) -> None:
        super().__init__(*shape, **options)
        m = self.settings
        local = self.shape.heads // 2 if m.local_heads is None else m.local_heads
        if local >= self.shape.heads:
            raise ValueError(f"local_heads must be fewer than the {self.shape.heads} heads, got {local}")
        self.local, self.routed = local, self.shape.heads - local
        self.ring = Ring(Band(local, m.window), self.shape.head_dim)
        self.register_buffer(
            "centroids", F.normalize(torch.randn(self.routed, m.clusters, self.shape.head_dim), dim=-1)
        )

    def initial_state(self, batch: int, keep: Keep = "kv", *, empty: Tensor | None = None) -> dict[str, Any]:
        m, like = self.settings, self.query.weight.detach()
        slots = empty_slots(batch, self.routed, m.clusters, m.members, self.shape.head_dim, like)
        seen = torch.zeros(batch, dtype=torch.int64, device=like.device)
        return {"slots": slots, "ring": self.ring.empty(batch, like), "position": 0, "seen": seen}

    def reset_rows(self, state: dict[str, Any], fresh: Tensor, *, empty: Tensor | None = None) -> dict[str, Any]:
        return empty_rows(state, fresh, self.initial_state(len(fresh)))

    def mix(self, x: Tensor, state: dict[str, Any]) -> MixerOutput:
        start, count, local = state["position"], x.shape[1], self.local
        pos = torch.arange(start, start + count, device=x.device)
        plain = F.rms_norm(self.split_heads(self.query(x)), (self.shape.head_dim,))  # [B, H, T, D]
        q, v = self.rotate(plain, pos), share_heads(self.values(x), plain.shape[1])
        stretch = self.ring.extend(state["ring"], q[:, :local], v[:, :local], pos)
        parts = []
        if local:
            parts.append(self.ring.band.attend(q[:, :local], stretch, start, None, self.relative_keys))
        y, slots, live = self._route(plain[:, local:], q[:, local:], v[:, local:], pos, state["slots"])
        after = {"slots": slots, "ring": self.ring.cut(stretch), "position": start + count}
        after["seen"] = state["seen"] + count
        past = state["seen"].unsqueeze(1) + torch.arange(1, count + 1, device=x.device)
        near = past.clamp(max=self.settings.window).float().mean()
        live = (self.routed * live.float().mean() + local * near) / self.shape.heads
        return MixerOutput(
            self.join_heads(torch.cat([*parts, y], 1), x), after, MixerAux(live=live, bytes_held=bytes_of(after))
        )

    def _route(self, plain: Tensor, q: Tensor, v: Tensor, pos: Tensor, slots) -> tuple[Tensor, Any, Tensor]:
        near = torch.einsum("bhtd,hgd->bhtg", plain.detach(), self.centroids.to(plain.dtype))
        cluster = near.argmax(-1)  # [B, H, T]
        options: dict[str, Any] = {"members": self.settings.members, "relative_keys": self.relative_keys}
        y, slots, live = grouped_attention(q, q, v, pos, cluster, slots, **options)
        if self.training:
            if self.settings.selection == "top":
                y = self._read_top(near, q, v)
            self._follow(plain.detach(), cluster)
        return y, slots, live

    def _read_top(self, near: Tensor, q: Tensor, v: Tensor) -> Tensor:
        """Causal attention among each cluster's w closest tokens; a token in several clusters gets the mean of its results."""
        width = min(self.settings.members, q.shape[2])
        index = near.transpose(2, 3).topk(width, dim=-1).indices.sort(-1).values  # [B, H, G, w]
        flat = index.flatten(2).unsqueeze(3).expand(-1, -1, -1, q.shape[3])
        queries, values = (x.gather(2, flat).unflatten(2, index.shape[2:]).flatten(1, 2) for x in (q, v))
        y = F.scaled_dot_product_attention(queries, queries, values, is_causal=True)  # [B, H * G, w, D]
        y = y.unflatten(1, index.shape[1:3]).flatten(2, 3)
        total = torch.zeros_like(q).scatter_add(2, flat, y)
        times = q.new_zeros(q.shape[:3]).scatter_add(2, index.flatten(2), torch.ones_like(y[..., 0]))
        return total / times.clamp_min(1).unsqueeze(3)

    @torch.no_grad()
    def _follow(self, plain: Tensor, cluster: Tensor) -> None:
        """Move centroids towards the mean of the tokens assigned to them; those without tokens stay."""
        if self.settings.decay == 1:
            return
        member = F.one_hot(cluster, self.settings.clusters).to(plain.dtype)  # [B, H, T, G]
        total = torch.einsum("bhtg,bhtd->hgd", member, F.normalize(plain, dim=-1))
        count = member.sum((0, 2)).unsqueeze(2)
        moved = torch.lerp(F.normalize(total, dim=-1).to(self.centroids.dtype), self.centroids, self.settings.decay)
        self.centroids.copy_(F.normalize(torch.where(count > 0, moved, self.centroids), dim=-1))
