"""The exchange of memories among the ranks of a context group: those that another rank's queries can still see travel to it,
and their gradients travel back.

A memory travels as the bytes of its keys and values, its spans and its position, in one message a pair of ranks; a smaller
message before it says how many follow for each row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .survivors import Memories, Picked


@dataclass
class Traffic:
    """Bytes that this rank has sent to other ranks since it was built or `clear` was called."""

    memories: int = 0
    """Keys, values, spans and positions of memories."""
    gradients: int = 0
    """Gradients of memories, on their way back."""
    headers: int = 0
    """How many memories follow for each row, and what the ranks agree on before that."""
    pairs: dict[int, int] = field(default_factory=dict)
    """Number of memories sent, by receiving rank; a memory of one row counts once."""

    @property
    def total(self) -> int:
        return self.memories + self.gradients + self.headers

    def clear(self) -> None:
        self.memories = self.gradients = self.headers = 0
        self.pairs.clear()


@dataclass(frozen=True)
class Link:
    """A process group, this process's rank in it, and where traffic is counted."""

    group: Any
    rank: int
    size: int
    traffic: Traffic

    def swap(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Send x [sum(send), bytes] (uint8), send[r] rows to rank r; return the rows that come."""
        out = x.new_empty(sum(receive), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=self.group)
        return out

    def bytes_of(self, x: Tensor, send: list[int]) -> int:
        """Bytes of the rows of x that go to other ranks."""
        return (sum(send) - send[self.rank]) * x.shape[1] * x.element_size()


def exchange(link: Link, own: Memories, seen: Tensor) -> Picked:
    """Send this rank's memories to those that see them, seen [N, B, R, S] (bool), and return what others sent here."""
    where = seen.nonzero()
    counts = seen.sum(-1).flatten(1)  # [N, B * R]
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts, group=link.group)
    link.traffic.headers += counts[0].numel() * counts.element_size() * (link.size - 1)
    send, receive = (x.sum(1).tolist() for x in (counts, incoming))
    for rank, sent in enumerate(send):
        link.traffic.pairs[rank] = link.traffic.pairs.get(rank, 0) + sent
    picked = own.pick(where[:, 1:])
    states, span, places = _Travel.apply(link, send, receive, picked.states, picked.span, picked.places)  # type: ignore[misc]
    rows = torch.arange(counts.shape[1], device=counts.device).repeat(link.size)
    return Picked(states, span, places, rows.repeat_interleave(incoming.flatten()))


class _Travel(torch.autograd.Function):
    """Memories go to the ranks that see them; their gradients come back."""

    @staticmethod
    def forward(
        ctx: Any, link: Link, send: list[int], receive: list[int], states: Tensor, span: Tensor, places: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.link, ctx.send, ctx.receive = link, send, receive
        packed = _pack([states, span, places])
        link.traffic.memories += link.bytes_of(packed, send)
        parts = _unpack(link.swap(packed, send, receive), [states, span, places])
        ctx.mark_non_differentiable(parts[2])
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, states: Tensor, span: Tensor, _: Any) -> tuple[Any, ...]:
        packed = _pack([states, span])
        ctx.link.traffic.gradients += ctx.link.bytes_of(packed, ctx.receive)
        of_states, of_span = _unpack(ctx.link.swap(packed, ctx.receive, ctx.send), [states, span])
        return None, None, None, of_states, of_span, None


def _pack(parts: list[Tensor]) -> Tensor:
    """Tensors [n, c] of any dtypes as bytes [n, b]."""
    return torch.cat([x.detach().contiguous().view(torch.uint8) for x in parts], 1)


def _unpack(packed: Tensor, like: list[Tensor]) -> tuple[Tensor, ...]:
    widths = [x.shape[1] * x.element_size() for x in like]
    parts = packed.split(widths, 1)  # cloned, since a view of one row would begin at any byte
    return tuple(part.clone(memory_format=torch.contiguous_format).view(x.dtype) for part, x in zip(parts, like))
