"""The definition: dense expiring attention and its span loss, written to be read. All implementations are tested against it.

With `age = t - i` (causal) or `|t - i|`, and `r = span_i - age`:

    m_ti  = clamp(1 + r / ramp, 0, 1), and 0 where i may not be seen (i > t, i = t without include_self, another document)
    a_ti  = m_ti exp(s_ti) / sum_j m_tj exp(s_tj)
    y_t   = sum_i a_ti v_i, or zero where nothing lives

With `softcap`, the scores are squashed to c tanh(s / c). With `sinks`, each query head has one more logit in its normaliser,
to which no value belongs. With `normalizer_eps`, that number times sum_j exp(s_tj) over the living memories is added to it.

It takes any float dtype, float64 included, and its memory use grows as T x S.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ages(q_pos: Tensor, k_pos: Tensor, *, causal: bool) -> Tensor:
    """Integer age of every memory at every query. q_pos [.., T], k_pos [.., S] -> [.., T, S]."""
    age = q_pos.unsqueeze(-1) - k_pos.unsqueeze(-2)
    return age if causal else age.abs()


def in_one_document(q_doc: Tensor, k_doc: Tensor) -> Tensor:
    """Which memories belong to the document of which queries, for every head. q_doc [B, T], k_doc [B, S] -> [B, 1, T, S]."""
    return (q_doc.unsqueeze(-1) == k_doc.unsqueeze(-2)).unsqueeze(1)


def expiry_mask(span: Tensor, age: Tensor, *, ramp: float, include_self: bool) -> Tensor:
    """The soft mask m in [0, 1]; the span gets a gradient only where 0 < m < 1. span [.., S], age [.., T, S] -> [.., T, S]."""
    span, steps = span.unsqueeze(-2), age.to(span.dtype)
    mask = 1 + (span - steps) / ramp
    on_ramp = (mask > 0) & (mask < 1)
    # Stores delete a memory where span - age <= -ramp. The quotient above may round to more than -1 there; a query that sees
    # nothing else would then read a memory that a store has deleted.
    visible = (age >= 0 if include_self else age > 0) & (span - steps > -ramp)
    return torch.where(visible, torch.where(on_ramp, mask, (mask >= 1).to(mask.dtype)), 0)


def relative_scores(q: Tensor, age: Tensor, relative_keys: Tensor) -> Tensor:
    """q . p_age for ages 1..M and zero elsewhere. q [.., T, D], age [.., T, S], relative_keys [M, D] -> [.., T, S]."""
    window = relative_keys.shape[0]
    table = q @ relative_keys.to(q.dtype).transpose(-1, -2)  # [.., T, M]
    index = age.clamp(1, window).sub(1).expand(*table.shape[:-1], -1)
    return torch.where((age >= 1) & (age <= window), table.gather(-1, index), 0)


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    *,
    ramp: float,
    causal: bool,
    include_self: bool,
    scale: float,
    relative_keys: Tensor | None = None,
    normalizer_eps: float = 0.0,
    documents: tuple[Tensor, Tensor] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Dense expiring attention over normalised inputs: span [B, Hkv, S], q_pos [B, Hkv, T], k_pos [B, Hkv, S].

    documents: ids of the queries [B, T] and of the memories [B, S].
    """
    if k.shape[2] == 0:
        return torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    k, v, span, q_pos, k_pos = (x.repeat_interleave(group, dim=1) for x in (k, v, span, q_pos, k_pos))
    age = ages(q_pos, k_pos, causal=causal)  # [B, H, T, S]
    mask = expiry_mask(span, age, ramp=ramp, include_self=include_self)
    if documents is not None:
        mask = torch.where(in_one_document(*documents), mask, 0)
    k, v = without_unseen(k, v, mask)
    scores = q @ k.transpose(-1, -2)
    if relative_keys is not None:
        scores = scores + relative_scores(q, age, relative_keys)
    scores = soft_capped(scores * scale, softcap).masked_fill(mask == 0, -torch.inf)
    peak = scores.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    if sinks is not None:
        sinks = sinks.to(scores.dtype).view(1, -1, 1, 1)
        peak = torch.maximum(peak, sinks.detach())
    weight = torch.exp(scores - peak)  # [B, H, T, S], zero where dead
    faded = mask.to(weight.dtype) * weight
    total = faded.sum(-1, keepdim=True) + normalizer_eps * weight.sum(-1, keepdim=True)
    total = total if sinks is None else total + torch.exp(sinks - peak)
    share = faded / torch.where(total > 0, total, 1)
    return share.to(v.dtype) @ v


def soft_capped(scores: Tensor, softcap: float) -> Tensor:
    """Scores squashed to the range of -softcap to softcap; 0 leaves them as they are."""
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def without_unseen(k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """k and v [B, H, S, D] with zeros for memories that no query sees, mask [B, H or 1, T, S].

    Such a memory may hold NaN or infinity, which a weight of zero would not remove: 0 times NaN is NaN.
    """
    unseen = (mask == 0).all(-2).unsqueeze(-1)
    return k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)


def ramp_loss_dense(span: Tensor, q_pos: Tensor, k_pos: Tensor, *, ramp: float) -> Tensor:
    """Sum of r_ti / ramp over the pairs of age >= 1 on the ramp (0 < m < 1). span, k_pos [.., S], q_pos [.., T] -> [..]."""
    age = ages(q_pos, k_pos, causal=True)
    remaining = span.unsqueeze(-2) - age.to(span.dtype)
    mask = (1 + remaining / ramp).clamp(0, 1)
    on_ramp = (mask > 0) & (mask < 1) & (age >= 1)
    return torch.where(on_ramp, remaining, 0).sum((-1, -2)) / ramp
