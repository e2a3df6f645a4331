"""Context parallelism: the sequence is cut into contiguous shards, one for each rank of a process group.

    with context_parallel(group) as context:
        y = expire_attention(q, k, v, span, ramp=8)  # all tensors hold this rank's shard

Every rank calls the operator, and backward, the same number of times in the same order. Any error of one rank's arguments is
raised on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from expire_span.ops.call import Call
from expire_span.ops.parts import can_read_parts

from .current import within
from .exchange import Link, Traffic, plan_exchange
from .overlap import attend_meanwhile
from .survivors import Memories, Queries, merge

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MESSAGE = 600
"""Bytes of an error message that other ranks are told."""


class ContextGroup:
    """The ranks that hold the shards of a sequence, in order; `traffic` counts the bytes that this rank sends."""

    def __init__(self, group: Any) -> None:
        """group: a process group, a `DeviceMesh` of one dimension, or None for all processes."""
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "a context group needs torch.distributed, which is not initialised; call init_process_group first"
            )
        if hasattr(group, "get_group"):
            if group.ndim != 1:
                raise ValueError(f"a context group is one dimension of a DeviceMesh, got {group.ndim}; give mesh[NAME]")
            group = group.get_group()
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(f"process {dist.get_rank()} is not in the context group; give the group that it is in")
        self.traffic = Traffic()
        self.link = Link(group, rank, dist.get_world_size(group), self.traffic)
        self.rank, self.size = rank, self.link.size
        on_gpu = dist.get_backend(group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of a tensor that holds the whole sequence along `dim`."""
        if x.shape[dim] % self.size:
            got = f"got {x.shape[dim]} tokens and {self.size} ranks"
            raise ValueError(
                f"the ranks of a context group must divide the sequence, {got}; pad it, or cut it elsewhere"
            )
        return x.chunk(self.size, dim)[self.rank]

    def first(self, count: int) -> int:
        return self.rank * count

    def total(self, count: int) -> int:
        return self.size * count

    def prepare(self, build: Callable[[], Call]) -> Call:
        """Check the arguments of all ranks. What is wrong on one of them, or differs between two, is raised on all."""
        call, error = None, None
        try:
            call = build()
            facts = _facts_of(call)
        except (ValueError, RuntimeError) as found:
            call, error, facts = None, found, [0.0] * len(_FACTS)
        table = self._gather(torch.tensor([float(call is None), *facts], dtype=torch.float64)).tolist()
        if any(row[0] for row in table):
            self._tell(error, [bool(row[0]) for row in table])
        for n, (name, shown) in enumerate(_FACTS, 1):
            self._check_column(name, shown, [row[n] for row in table])
        assert call is not None
        return call

    def check_equal(self, name: str, value: float) -> None:
        """Raise on all ranks if this number is not the same on each."""
        self._check_column(name, _number, self._gather(torch.tensor(value, dtype=torch.float64)).tolist())

    def _check_column(self, name: str, shown: Callable[[float], str], values: list[float]) -> None:
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            pair = f"got {shown(values[0])} on rank 0 and {shown(values[other])} on rank {other}"
            raise ValueError(f"the ranks of a context group must agree on the {name}, {pair}; make them equal")

    def attend(self, call: Call, run: Callable[[Call], Tensor]) -> Tensor:
        """Memories travel while the queries attend to those of this rank, where the implementation can join both."""
        own = Memories.of(call)
        seen = [own.seen_by(queries, call.ramp, call.causal) for queries in self._gather_queries(call)]
        seen[self.rank] = torch.zeros_like(seen[self.rank])  # its own memories need not travel
        exchange = plan_exchange(self.link, own, torch.stack(seen))
        if can_read_parts(call):
            return attend_meanwhile(exchange, own, call)
        return run(merge(exchange.travel(), own).into(call))

    def share_gradient(self, parameter: Tensor, grad: Tensor, dropped: Callable[[Tensor], Tensor]) -> Tensor:
        """The ranks add their gradients afterwards, so each gives its own or, where the sum is dropped, none."""
        return grad.masked_fill(dropped(self._gather(grad).sum(0).to(grad.device)), 0)

    def _gather_queries(self, call: Call) -> list[Queries]:
        """The positions and documents of every rank's queries."""
        own = Queries.of(call)
        parts = [x for x in (own.first, own.last, own.first_doc, own.last_doc) if x is not None]
        table = self._gather(torch.stack([x.expand(call.q.shape[0]) for x in parts]))  # [N, 2 or 4, B]
        ranges = [Queries(*(x.to(call.q.device) for x in row)) for row in table]
        for rank, (early, late) in enumerate(pairwise(table)):
            if len(parts) == 4 and bool((late[2] < early[3]).any()):
                ids = f"got {int(early[3].max())} on rank {rank} and {int(late[2].min())} on rank {rank + 1}"
                raise ValueError(
                    f"documents must not decrease along the ranks of a context group, {ids}; number them anew"
                )
        return ranges

    def _gather(self, x: Tensor) -> Tensor:
        """x of every rank, [N, *x.shape], on the CPU."""
        x = x.to(self.device)
        out = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(out, x, group=self.link.group)
        self.traffic.headers += x.numel() * x.element_size() * (self.size - 1)
        return torch.stack(out).cpu()

    def _tell(self, error: Exception | None, failed: list[bool]) -> None:
        """Raise the error of the first rank that failed, on every rank."""
        text = ("" if error is None else str(error)).encode()[:_MESSAGE]
        told = self._gather(torch.tensor(list(text.ljust(_MESSAGE, b"\0")), dtype=torch.uint8))
        if error is not None:
            raise error
        first = failed.index(True)
        message = bytes(told[first].tolist()).rstrip(b"\0").decode(errors="ignore")
        raise ValueError(f"rank {first} of the context group refused its input: {message}")


@contextmanager
def context_parallel(group: Any = None) -> Iterator[ContextGroup]:
    """Inside, `expire_attention` and the layers built on it read shards of one sequence, one shard a rank of `group`.

    group: a process group, a `DeviceMesh` of one dimension, None for all processes, or a `ContextGroup` made before. All
    tensors hold this rank's shard; shards have equal lengths and lie in the order of ranks. Positions default to those in the
    whole sequence, `cu_seqlens` are boundaries in the whole sequence, and all others are given for the shard.
    """
    context = group if isinstance(group, ContextGroup) else ContextGroup(group)
    with within(context):
        yield context


def _facts_of(call: Call) -> list[float]:
    """What all ranks must agree on, as numbers, in the order of `_FACTS`."""
    (batch, heads, count, dim), spans = call.q.shape, call.span
    lifetimes = 1 if spans.dim() == 2 else spans.shape[1]
    grad = torch.is_grad_enabled()
    learns = [grad and (call.k.requires_grad or call.v.requires_grad), grad and spans.requires_grad]
    relative = 0 if call.relative_keys is None else len(call.relative_keys)
    facts = [batch, heads, call.k.shape[1], count, dim, _DTYPES.index(call.q.dtype), lifetimes, call.k_pos.dim() == 3]
    facts += [
        call.ramp,
        call.scale,
        call.normalizer_eps,
        call.causal,
        call.include_self,
        relative,
        call.ids is not None,
    ]
    return [float(x) for x in (*facts, *learns)]


def _number(x: float) -> str:
    return f"{x:.12g}"


def _switch(x: float) -> str:
    return str(bool(x))


def _dtype(x: float) -> str:
    return str(_DTYPES[int(x)]).removeprefix("torch.")


_FACTS: list[tuple[str, Callable[[float], str]]] = [
    ("number of rows", _number),
    ("number of query heads", _number),
    ("number of key/value heads", _number),
    ("number of tokens a shard", _number),
    ("head dim", _number),
    ("dtype of q", _dtype),
    ("number of rows of spans", _number),
    ("use of positions per head", _switch),
    ("ramp", _number),
    ("scale", _number),
    ("normalizer_eps", _number),
    ("value of causal", _switch),
    ("value of include_self", _switch),
    ("length of relative_keys", _number),
    ("use of documents", _switch),
    ("need of gradients of k and v", _switch),
    ("need of gradients of span", _switch),
]
