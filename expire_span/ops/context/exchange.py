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

    def begin(self, parts: list[Tensor], send: list[int], receive: list[int]) -> Transfer:
        """Begin to send the rows of all parts [sum(send), c], send[r] of them to rank r, while others send theirs here."""
        packed = _pack(parts)
        out = packed.new_empty(sum(receive), packed.shape[1])
        work = dist.all_to_all_single(out, packed, receive, send, group=self.group, async_op=True)
        return Transfer(work, packed, out, parts)

    def bytes_of(self, parts: list[Tensor], send: list[int]) -> int:
        """Bytes of the rows of all parts that go to other ranks."""
        return (sum(send) - send[self.rank]) * sum(x.shape[1] * x.element_size() for x in parts)


@dataclass(frozen=True)
class Transfer:
    """Rows on their way in both directions."""

    work: Any
    packed: Tensor
    """What is sent; held until it has been."""
    out: Tensor
    like: list[Tensor]

    def wait(self) -> tuple[Tensor, ...]:
        """The rows that came, in parts like those that were sent."""
        self.work.wait()
        return _unpack(self.out, self.like)


@dataclass(frozen=True)
class Exchange:
    """Which of this rank's memories travel, and how many come from each rank; all ranks have agreed on that."""

    link: Link
    picked: Picked
    send: list[int]
    receive: list[int]
    row: Tensor
    """The row to which each memory that comes belongs."""

    def travel(self) -> Picked:
        """The memories that come, waited for; their gradients travel back."""
        p = self.picked
        states, span, places = _Travel.apply(self, p.states, p.span, p.places)  # type: ignore[misc]
        return Picked(states, span, places, self.row)

    def begin(self, states: Tensor, span: Tensor, places: Tensor) -> Transfer:
        parts = [states, span, places]
        self.link.traffic.memories += self.link.bytes_of(parts, self.send)
        return self.link.begin(parts, self.send, self.receive)

    def begin_back(self, states: Tensor, span: Tensor) -> Transfer:
        """Begin to send the gradients of the memories that came; those of the ones that were sent come back."""
        self.link.traffic.gradients += self.link.bytes_of([states, span], self.receive)
        return self.link.begin([states, span], self.receive, self.send)


def plan_exchange(link: Link, own: Memories, seen: Tensor) -> Exchange:
    """Tell all ranks how many of this rank's memories they will get: those that they see, seen [N, B, R, S] (bool)."""
    where = seen.nonzero()
    counts = seen.sum(-1).flatten(1)  # [N, B * R]
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts, group=link.group)
    link.traffic.headers += counts[0].numel() * counts.element_size() * (link.size - 1)
    send, receive = (x.sum(1).tolist() for x in (counts, incoming))
    for rank, sent in enumerate(send):
        link.traffic.pairs[rank] = link.traffic.pairs.get(rank, 0) + sent
    rows = torch.arange(counts.shape[1], device=counts.device).repeat(link.size)
    return Exchange(link, own.pick(where[:, 1:]), send, receive, rows.repeat_interleave(incoming.flatten()))


class _Travel(torch.autograd.Function):
    """Memories go to the ranks that see them; their gradients come back."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, states: Tensor, span: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        parts = exchange.begin(states, span, places).wait()
        ctx.mark_non_differentiable(parts[2])
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, states: Tensor, span: Tensor, _: Any) -> tuple[Any, ...]:
        return None, *ctx.exchange.begin_back(states, span).wait(), None


def _pack(parts: list[Tensor]) -> Tensor:
    """Tensors [n, c] of any dtypes as bytes [n, b]."""
    return torch.cat([x.detach().contiguous().view(torch.uint8) for x in parts], 1)


def _unpack(packed: Tensor, like: list[Tensor]) -> tuple[Tensor, ...]:
    widths = [x.shape[1] * x.element_size() for x in like]
    parts = packed.split(widths, 1)  # cloned, since a view of one row would begin at any byte
    return tuple(part.clone(memory_format=torch.contiguous_format).view(x.dtype) for part, x in zip(parts, like))
