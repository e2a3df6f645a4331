"""Lifetimes that a caller gives to single tokens: kept as long as the row lives, or deleted at a given age at the latest.

A mark changes the span that was predicted for the token's memories, in every layer and head, before anything reads or stores
it. So marked memories are read and deleted by the same rule as all others, with the same exactness.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from expire_span.ops.rule import full_until
from expire_span.store.slots import KEPT

FREE = -1
"""The mark of a token that has the lifetime that the model predicts."""
KEEP = int(KEPT)
"""The mark of a token whose memories never expire."""
LATEST = 2**24
"""The largest age that a mark may give; larger ones are not exact in float32."""


def override(span: Tensor, marks: Tensor | None, ramp: float) -> Tensor:
    """The spans [B, P, T] of tokens with these marks [B, T]: a mark n deletes what is n tokens old, on the ramp before."""
    if marks is None:
        return span
    marks = marks.to(span.device).unsqueeze(1)
    latest = full_until(marks.clamp(0, LATEST).to(span.dtype), ramp)
    span = torch.where((marks >= 0) & (marks != KEEP), torch.minimum(span, latest), span)
    return span.masked_fill(marks == KEEP, KEPT)


def check_marks(marks: Sequence[int] | Tensor | None, tokens: int, row: int | None = None) -> Tensor | None:
    """Marks [T] of a prompt of so many tokens, checked; None where no token is marked."""
    if marks is None:
        return None
    where = "" if row is None else f" for row {row}"
    found = torch.as_tensor(marks)
    if found.dim() != 1 or len(found) != tokens or found.is_floating_point() or found.dtype == torch.bool:
        got = f"shape {tuple(found.shape)} of {found.dtype}"
        raise ValueError(f"marks must be one whole number for each of {tokens} tokens, got {got}{where}")
    found = found.to(torch.int64).cpu()
    wrong = found[(found != KEEP) & ((found < FREE) | (found > LATEST))]
    if len(wrong):
        raise ValueError(f"a mark must be FREE, KEEP or an age of 0 to {LATEST:,}, got {int(wrong[0])}{where}")
    return found if bool((found != FREE).any()) else None
