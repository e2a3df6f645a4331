"""A long sequence on one device, read piece after piece, with the gradients of the whole sequence.

First every piece is read once without gradient; the memories that outlive it are kept, layer by layer. Then the pieces are read
again from the last to the first, now with gradient: each gives gradients to the memories that it read from earlier pieces, and
takes those that later pieces gave to its own. Only the activations of one piece and the memories that outlive theirs are held,
and nothing is truncated: the sum of all gradients is that of the whole sequence in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from expire_span.ops.call import Call
from expire_span.ops.rule import NEVER, lifetime

from .current import within
from .survivors import Memories, Picked, Queries, merge


class _Column:
    """Rows [n, c] that are appended piece after piece, in a buffer that doubles when it is full."""

    def __init__(self, like: Tensor) -> None:
        self.data, self.count = like.new_empty(0, like.shape[1]), 0

    def add(self, x: Tensor) -> None:
        need = self.count + len(x)
        if need > len(self.data):
            grown = self.data.new_empty(max(need, 2 * len(self.data)), self.data.shape[1])
            grown[: self.count] = self.data[: self.count]
            self.data = grown
        self.data[self.count : need] = x
        self.count = need


class _Bank:
    """The memories of one call of the operator (one layer) that outlived their piece, numbered in the order of their pieces."""

    def __init__(self, like: Picked) -> None:
        self.states, self.span, self.places = (_Column(x) for x in (like.states, like.span, like.places))
        self.row, self.dies = (_Column(like.row.unsqueeze(1)) for _ in range(2))
        self.living = like.row.new_empty(0)
        """Numbers of the memories that later queries may see."""
        self.read: list[Tensor] = []
        """For each piece, the numbers of the memories that it sees."""
        self.written: list[tuple[int, Tensor]] = []
        """For each piece, the number of its first memory here, and the indices [n, 3] of all of them in the piece."""
        self.gradients: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    def write(self, picked: Picked, where: Tensor, dies: Tensor) -> None:
        first, new = self.states.count, (picked.states, picked.span, picked.places, picked.row[:, None], dies[:, None])
        for column, x in zip((self.states, self.span, self.places, self.row, self.dies), new):
            column.add(x.detach())
        self.written.append((first, where))
        self.living = torch.cat([self.living, torch.arange(first, self.states.count, device=where.device)])

    def select(self, queries: Queries, rows: int) -> Tensor:
        """The numbers of the memories that these queries see, of `rows` rows for each of the batch; others are dead from now
        on."""
        at, (row, dies) = self.living, (x.data[self.living, 0] for x in (self.row, self.dies))
        row = row // rows if len(queries.first) > 1 else torch.zeros_like(row)
        keep = dies > queries.first[row]
        if queries.first_doc is not None:
            keep &= self.places.data[at, 1] >= queries.first_doc[self.row.data[at, 0] // rows]
        self.living = at[keep]
        return self.living

    def take(self, numbers: Tensor) -> Picked:
        states, span, places, row = (x.data[numbers] for x in (self.states, self.span, self.places, self.row))
        return Picked(states, span, places, row.squeeze(1))

    def begin_gradients(self) -> None:
        """Room for the gradients of all memories, in float32 or better, since many pieces add to them."""
        states, span = (x.data[: x.count] for x in (self.states, self.span))
        precise = torch.promote_types(states.dtype, torch.float32)
        self.gradients = torch.zeros_like(states, dtype=precise), torch.zeros_like(span)


@dataclass(frozen=True)
class _Borrowed:
    """What one call of a piece that learns has read and written, to be joined with the other pieces' gradients."""

    bank: _Bank
    numbers: Tensor
    read: Picked
    written: Picked
    first: int


class Pieces:
    """A `Context` for `backward_in_pieces`: the part of the sequence that is read is piece `index` of `size`."""

    def __init__(self, size: int) -> None:
        self.size, self.index, self.learning = size, 0, False
        self.banks: list[_Bank] = []
        self.calls = 0
        self.borrowed: list[_Borrowed] = []
        self.shared: dict[Tensor, tuple[Tensor, Callable[[Tensor], Tensor]]] = {}
        """By parameter, the sum of its gradients so far, and where such a sum is dropped."""

    def first(self, count: int) -> int:
        return self.index * count

    def total(self, count: int) -> int:
        return self.size * count

    def prepare(self, build: Callable[[], Call]) -> Call:
        call = build()
        if not call.causal:
            raise ValueError(
                "pieces are read one after another, so that causal=False cannot see later ones; give causal=True"
            )
        return call

    @contextmanager
    def piece(self, index: int, *, learning: bool) -> Iterator[None]:
        self.index, self.learning, self.calls = index, learning, 0
        self.borrowed = []
        with within(self), torch.set_grad_enabled(learning):
            yield

    def attend(self, call: Call, run: Callable[[Call], Tensor]) -> Tensor:
        return run(self._widen(call))

    def share_gradient(self, parameter: Tensor, grad: Tensor, dropped: Callable[[Tensor], Tensor]) -> Tensor:
        """Every piece gives none at first: `give_shared` adds the sum of all, after the last of them."""
        before, _ = self.shared.get(parameter, (torch.zeros_like(grad), dropped))
        self.shared[parameter] = before + grad, dropped
        return torch.zeros_like(grad)

    def give_shared(self) -> None:
        for parameter, (total, dropped) in self.shared.items():
            torch.autograd.backward(parameter, total.masked_fill(dropped(total), 0))

    def _widen(self, call: Call) -> Call:
        own, number = Memories.of(call), self.calls
        self.calls += 1
        if self.learning and self.index < self.size - 1:
            return self._read_again(own, self.banks[number]).into(call)
        return self._read_first(own, Queries.of(call), call, number).into(call)

    def _read_first(self, own: Memories, queries: Queries, call: Call, number: int) -> Memories:
        """Read what earlier pieces left, leave what outlives this one. The last piece leaves nothing and learns at once."""
        if number == len(self.banks):
            self.banks.append(_Bank(own.pick(torch.empty(0, 3, dtype=torch.int64, device=own.pos.device))))
        bank, last = self.banks[number], self.index == self.size - 1
        bank.read.append(bank.select(queries, own.pos.shape[1]))
        dies = own.pos + lifetime(own.span, call.ramp).amax(2)
        where = ((own.pos != NEVER) & (dies > queries.last.view(-1, 1, 1) + 1)).nonzero()
        where = where[:0] if last else where
        picked = own.pick(where)
        bank.write(picked, where, dies[tuple(where.unbind(1))])
        return self._borrow(bank, own, picked) if self.learning else merge(bank.take(bank.read[self.index]), own)

    def _read_again(self, own: Memories, bank: _Bank) -> Memories:
        return self._borrow(bank, own, own.pick(bank.written[self.index][1]))

    def _borrow(self, bank: _Bank, own: Memories, written: Picked) -> Memories:
        numbers = bank.read[self.index]
        read = bank.take(numbers)
        read.states.requires_grad_()
        read.span.requires_grad_()
        self.borrowed.append(_Borrowed(bank, numbers, read, written, bank.written[self.index][0]))
        return merge(read, own)

    def backward(self, loss: Tensor) -> None:
        """Gradients of the loss of the piece that was read last, joined with those of later pieces."""
        if self.index == self.size - 1:
            for bank in self.banks:
                bank.begin_gradients()
        ends, gradients = [loss], [torch.ones_like(loss)]
        for b in self.borrowed:
            for end, of_all in zip((b.written.states, b.written.span), b.bank.gradients):
                if end.requires_grad and len(end):
                    ends.append(end)
                    gradients.append(of_all[b.first : b.first + len(end)].to(end.dtype))
        torch.autograd.backward(ends, gradients)
        for b in self.borrowed:
            for leaf, of_all in zip((b.read.states, b.read.span), b.bank.gradients):
                if leaf.grad is not None:
                    of_all.index_add_(0, b.numbers, leaf.grad.to(of_all.dtype))
        self.borrowed = []


def backward_in_pieces(loss_of: Callable[[int], Tensor], pieces: int) -> None:
    """Gradients of the sum of `loss_of(0) .. loss_of(pieces - 1)`, whose models read one sequence in that many pieces.

    `loss_of(n)` computes the loss of piece n by layers or `expire_attention`, which then read the memories of earlier pieces by
    themselves; positions default to those in the whole sequence. It is called twice for each piece but the last: once without
    gradient, in order, and once with gradient, in reverse; random numbers are the same both times. Gradients go to `.grad`.
    All pieces have the same number of tokens. Only the activations of one piece are held at a time.
    """
    if pieces < 1:
        raise ValueError(f"a sequence is read in at least 1 piece, got {pieces}")
    context, before = Pieces(pieces), []
    for n in range(pieces - 1):
        before.append(_random_state())
        with context.piece(n, learning=False):
            loss_of(n)
    after: list[Tensor] = []
    for n in reversed(range(pieces)):
        if n < pieces - 1:
            _set_random_state(before[n])
        with context.piece(n, learning=True):
            loss = loss_of(n)
            if n == pieces - 1:
                after = _random_state()
            context.backward(loss)
    context.give_shared()
    _set_random_state(after)


def _random_state() -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]


def _set_random_state(state: list[Tensor]) -> None:
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1])
