"""The gated delta rule in plain PyTorch: the definition, step by step, and the same in chunks.

A head's state S is a matrix that maps keys to values. A step with query q, key k, value v, log gate g and writing strength b:

    S' = exp(g) S                     all entries decay
    S  = S' + k (b (v - S'^T k))^T    the value stored for the key moves towards the new value, by the share b
    y  = S^T q / sqrt(K)

Queries and keys have length 1. Shapes: q, k [B, H, T, K], v [B, H, T, V], g, b [B, H, T], S [B, H, K, V].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition: y [B, H, T, V] and the state after the last step."""
    outputs = []
    for t in range(q.shape[2]):
        faded = state * log_gate[:, :, t, None, None].exp()
        given = (k[:, :, t, :, None] * faded).sum(2)  # the value stored for the key, [B, H, V]
        written = strength[:, :, t, None] * (v[:, :, t] - given)
        state = faded + k[:, :, t, :, None] * written[:, :, None]
        outputs.append((q[:, :, t, :, None] * state).sum(2))
    return torch.stack(outputs, 2) * q.shape[-1] ** -0.5, state


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, strength: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """The same with a loop over chunks instead of steps: inside a chunk, all writes are found by one triangular solve.

    With G the sum of log gates since the chunk's start and u_i what step i writes, u_i = b_i (v_i - S'_i^T k_i) reads
    u_i = b_i (v_i - exp(G_i) S_0^T k_i - sum_(j<i) exp(G_i - G_j) (k_i . k_j) u_j): a unit lower triangular system.
    """
    count, size = q.shape[2], min(chunk, q.shape[2])
    short = -count % size
    q, k, v = (F.pad(x, (0, 0, 0, short)).unflatten(2, (-1, size)) for x in (q, k, v))  # [B, H, N, size, .]
    log_gate, strength = (F.pad(x, (0, short)).unflatten(2, (-1, size)) for x in (log_gate, strength))
    sums = log_gate.cumsum(3)  # G, [B, H, N, size]
    fading = _fading(sums)
    beta = strength.unsqueeze(-1)
    system = (beta * (k @ k.transpose(-1, -2)) * fading).tril(-1)  # padding has strength 0 and gate 1: it does nothing
    right = torch.cat([beta * v, beta * sums.exp().unsqueeze(-1) * k], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, old = solved.split([v.shape[-1], k.shape[-1]], -1)  # writes = fresh - old S_0
    scores = (q @ k.transpose(-1, -2)) * fading
    from_start = q * sums.exp().unsqueeze(-1)
    to_end = k * (sums[..., -1:] - sums).exp().unsqueeze(-1)
    whole = sums[..., -1].exp()[..., None, None]  # decay of S_0 over a whole chunk, [B, H, N, 1, 1]
    outputs = []
    for n in range(q.shape[2]):
        written = fresh[:, :, n] - old[:, :, n] @ state
        outputs.append(from_start[:, :, n] @ state + scores[:, :, n] @ written)
        state = whole[:, :, n] * state + to_end[:, :, n].transpose(-1, -2) @ written
    y = torch.stack(outputs, 2).flatten(2, 3)[:, :, :count]
    return y * q.shape[-1] ** -0.5, state


def _fading(sums: Tensor) -> Tensor:
    """exp(G_i - G_j) where j <= i, else 0: [.., size] -> [.., size, size]."""
    size = sums.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=sums.device).triu(1)
    return (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
