"""What attention layers share: projections, heads, positions, and attention under an explicit mask."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expire_span.models.mixer import Mixer, Recordable
from expire_span.ops.reference import relative_scores

from .rotary import rotary_angles, rotate


class AttentionMixer(Mixer):
    """Base of attention layers: query, key, value and output projections, grouped key/value heads, rotary positions, and
    normalised queries and keys."""

    separate_keys: ClassVar[bool] = True
    """Whether there is a key projection; False where queries serve as keys (Reformer, Routing Transformer)."""
    recordable_alone: ClassVar[bool] = False
    """Whether forward and backward can be recorded as a CUDA graph (the host never waits for the device), without carried
    memory and without learned relative positions."""

    def __init__(self, *shape: Any, **options: Any) -> None:
        super().__init__(*shape, **options)
        dim, kv_dim = self.shape.dim, self.shape.num_kv_heads * self.shape.head_dim
        self.query = nn.Linear(dim, dim, bias=False)
        if self.separate_keys:
            self.key = nn.Linear(dim, kv_dim, bias=False)
        self.value = nn.Linear(dim, kv_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.head_gate: nn.Linear | None = None
        if self.shape.head_gates:
            self.head_gate = nn.Linear(dim, self.shape.heads)
            nn.init.zeros_(self.head_gate.weight)
            nn.init.zeros_(self.head_gate.bias)
        if self.shape.positions == "relative" and self._shared_keys[0] is None:
            self.own_relative_keys = nn.Parameter(torch.randn(self.shape.relative_window, self.shape.head_dim))

    @property
    def relative_keys(self) -> nn.Parameter | None:
        """The learned key embedding of distances [M, D]: the model's shared one, or this layer's own if it was built alone."""
        return self._shared_keys[0] if self._shared_keys[0] is not None else getattr(self, "own_relative_keys", None)

    def recordable(self) -> Recordable:
        return Recordable(alone=self.recordable_alone and self.relative_keys is None)

    def split_heads(self, x: Tensor) -> Tensor:
        """[B, S, H * D] -> [B, H, S, D]."""
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

    def norm_and_rotate(self, x: Tensor, pos: Tensor) -> Tensor:
        """Normalise and rotate queries or keys [B, H, S, D] at pos [S] or [B, S]."""
        if self.shape.qk_norm:
            x = F.rms_norm(x, (self.shape.head_dim,))
        return self.rotate(x, pos.unsqueeze(-2) if pos.dim() == 2 else pos)

    def rotate(self, x: Tensor, pos: Tensor) -> Tensor:
        """Apply rotary positions, where the model uses them, to x [.., S, D]; pos broadcasts against [.., S]."""
        return rotate(x, self.angles(pos, x.dtype)) if self.shape.positions == "rotary" else x

    def angles(self, pos: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(dtype, torch.float32)
        return rotary_angles(pos, self.shape.head_dim, self.shape.rotary_base, precise)

    def queries(self, x: Tensor, pos: Tensor) -> Tensor:
        """Queries [B, Hq, T, D] of x [B, T, C] at pos [T] or [B, T]."""
        return self.norm_and_rotate(self.split_heads(self.query(x)), pos)

    def keys(self, h: Tensor, pos: Tensor) -> Tensor:
        """Keys [B, Hkv, S, D] of h [B, S, C] at pos [S] or [B, S]."""
        return self.norm_and_rotate(self.split_heads(self.key(h)), pos)

    def values(self, h: Tensor) -> Tensor:
        """Values [B, Hkv, S, D] of h [B, S, C]."""
        return self.split_heads(self.value(h))

    def project(self, x: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [B, Hq, T, D], k and v [B, Hkv, T, D] and positions [T] of x [B, T, C], whose first token is at `start`."""
        pos = torch.arange(start, start + x.shape[1], device=x.device)
        return self.queries(x, pos), self.keys(x, pos), self.values(x), pos

    def join_heads(self, y: Tensor, x: Tensor | None = None) -> Tensor:
        """Scale heads by their gates, concatenate them and apply the output projection: [B, H, T, D] -> [B, T, C].

        x [B, T, C] is the layer's input, from which the gates follow; without gates it is not needed.
        """
        y = y.transpose(1, 2)
        if self.head_gate is not None:
            if x is None:
                name = type(self).__name__
                raise ValueError(
                    f"{name} joins heads without its input x, which their gates need; give head_gates=False"
                )
            y = y * (2 * torch.sigmoid(self.head_gate(x))).unsqueeze(-1).to(y.dtype)
        return self.out(y.flatten(2))


def share_heads(x: Tensor, heads: int) -> Tensor:
    """Key/value heads [B, Hkv, ..] repeated for `heads` query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def subtract_projection(y: Tensor, v: Tensor) -> Tensor:
    """y [.., D] without its projection on v [.., D]."""
    direction = F.normalize(v.to(torch.promote_types(v.dtype, torch.float32)), dim=-1)
    return y - ((y * direction).sum(-1, keepdim=True) * direction).to(y.dtype)


def scaled_relative_scores(q: Tensor, age: Tensor, relative_keys: Tensor) -> Tensor:
    """The operator's scores of learned distances over sqrt(D), for attention that scales its scores before it adds them."""
    return relative_scores(q, age, relative_keys) * q.shape[-1] ** -0.5


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, age: Tensor, relative_keys: Tensor | None) -> Tensor:
    """Softmax attention over the pairs marked in `seen` [.., T, S] (bool); q [N, H, T, D], k and v [N, H, S, D].

    age [.., T, S] selects the learned relative keys [M, D], which are added to the scores; None adds nothing.
    """
    mask = seen
    if relative_keys is not None:
        mask = scaled_relative_scores(q, age, relative_keys).masked_fill(~seen, -torch.inf)
    return F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask)


def empty_rows(state: Any, fresh: Tensor, blank: Any) -> Any:
    """The state whose rows marked in `fresh` [B] (bool) are those of the empty state `blank`; the others stay."""
    if isinstance(state, Tensor):
        return torch.where(fresh.to(state.device).reshape(-1, *(1,) * (state.dim() - 1)), blank.to(state.dtype), state)
    if isinstance(state, dict):
        return {name: empty_rows(x, fresh, blank[name]) for name, x in state.items()}
    if isinstance(state, (list, tuple)):
        return [empty_rows(x, fresh, y) for x, y in zip(state, blank)]
    return state
