"""What training carries from block to block: the hidden states of living memories, as plain tensors.

    hidden [B, S, C]   pos [B, S]   evicted [B]   block, how many tokens came last   living [B], None once settled

Positions count from the start of the block to come, so a stored memory's is negative and none grows without bound. At the
end of a block the dead are wiped and moved to the front, the living stay behind them in order of birth. That result is as
wide whatever died, so a block needs no word from the host and can be compiled, or recorded as a CUDA graph. `settle` then
cuts the dead slots off: it waits for the device once per step for all layers together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from expire_span.memory import NEVER

Carried = dict[str, Any]


def empty(batch: int, dim: int, *, dtype: torch.dtype, device: torch.device) -> Carried:
    hidden = torch.zeros(batch, 0, dim, dtype=dtype, device=device)
    pos = torch.zeros(batch, 0, dtype=torch.int64, device=device)
    evicted = torch.zeros(batch, dtype=torch.int64, device=device)
    return {"hidden": hidden, "pos": pos, "living": None, "evicted": evicted, "block": 0}


def delete_dead(hidden: Tensor, pos: Tensor, left: Tensor, state: Carried, *, block: int, cap: int | None) -> Carried:
    """The state after a block of `block` tokens: what has steps `left` for the next query is kept, up to `cap` of a row.

    hidden [B, N, C] and pos [B, N] hold the stored memories and the block's own.
    """
    alive = (left > 0) & (pos != NEVER)
    evicted = state["evicted"]
    if cap is not None and cap < pos.shape[1]:
        alive, lost = _hold_to_cap(alive, left, cap)
        evicted = evicted + lost
    kept = _dead_first(hidden.detach(), pos - block, alive)
    return {**state, **kept, "living": alive.sum(-1), "evicted": evicted, "block": block}


def forget_rows(state: Carried, rows: Tensor, start: Carried) -> Carried:
    """The rows marked in `rows` [B] (bool) hold what `start` holds, and nothing else."""
    gone = rows.to(state["pos"].device)[:, None]
    alive = torch.cat([(state["pos"] != NEVER) & ~gone, (start["pos"] != NEVER) & gone], 1)
    hidden = torch.cat([state["hidden"], start["hidden"].to(state["hidden"].dtype)], 1)
    kept = _dead_first(hidden, torch.cat([state["pos"], start["pos"]], 1), alive)
    return {**state, **kept, "living": alive.sum(-1)}


def bytes_held(state: Carried) -> int:
    return sum(state[name].numel() * state[name].element_size() for name in ("hidden", "pos", "living"))


def settle(states: list[Any], *, copy: bool = True) -> list[Any]:
    """Cut off the slots that no row needs, in all layers' states at once. States of other kinds pass through.

    copy: give the cut-off memory free; without, the states are views for a caller who copies them anyway.
    """
    pending = [n for n, state in enumerate(states) if _is_pending(state)]
    if not pending:
        return states
    counts = torch.stack([states[n]["living"] for n in pending]).amax(-1).tolist()
    settled = list(states)
    for n, count in zip(pending, counts):
        settled[n] = _cut(states[n], count, copy)
    return settled


def _is_pending(state: Any) -> bool:
    return isinstance(state, dict) and state.get("living") is not None


def _cut(state: Carried, count: int, copy: bool) -> Carried:
    hidden, pos = state["hidden"], state["pos"]
    width = choose_width(count, pos.shape[1] - state["block"], pos.shape[1])
    if width < pos.shape[1]:
        hidden, pos = (x[:, pos.shape[1] - width :] for x in (hidden, pos))
        hidden, pos = (hidden.contiguous(), pos.contiguous()) if copy else (hidden, pos)
    return {**state, "hidden": hidden, "pos": pos, "living": None}


def choose_width(count: int, before: int, most: int) -> int:
    """Slots for `count` living ones: few different numbers, and slow to shrink, since each is a shape to compile for.

    before: the slots there were before the block was added; most: those there are now.
    """
    step = max(8, 1 << max(count.bit_length() - 4, 0))
    want = -(-count // step) * step
    kept = before if want <= before <= want + want // 2 else want
    return min(kept, most)


def _hold_to_cap(alive: Tensor, left: Tensor, cap: int) -> tuple[Tensor, Tensor]:
    """Hold every row to `cap` living memories: those with the fewest steps left go first, the older of equals."""
    ranked = left.masked_fill(~alive, -torch.inf).argsort(dim=-1, stable=True)[:, : left.shape[1] - cap]
    gone = torch.zeros_like(alive).scatter(-1, ranked, True)
    return alive & ~gone, (alive & gone).sum(-1)


def _dead_first(hidden: Tensor, pos: Tensor, alive: Tensor) -> dict[str, Tensor]:
    """Living slots to the end in their order; the others wiped, in front. A permutation from one running count."""
    index = torch.arange(pos.shape[1], device=pos.device)
    rank = alive.cumsum(-1)  # of the living: how many up to here
    target = torch.where(alive, pos.shape[1] - rank[:, -1:] + rank - 1, index - rank)
    order = torch.zeros_like(target).scatter(-1, target, index.expand_as(target))
    alive = alive.gather(-1, order)
    taken = hidden.gather(1, order.unsqueeze(-1).expand_as(hidden))
    return {
        "hidden": taken.masked_fill(~alive.unsqueeze(-1), 0),
        "pos": torch.where(alive, pos.gather(-1, order), NEVER),
    }
