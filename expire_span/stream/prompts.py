"""Reading prompts: they are checked, grouped by length, and read in blocks, as fast as a forward pass of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from expire_span.checks import show
from expire_span.models.decoder import Decoder
from expire_span.models.marks import FREE

PROMPT_BLOCK = 1024
"""Tokens of a row that one forward pass reads on a CPU."""
GPU_BLOCK = 65_536
"""Tokens of all rows together that one forward pass reads on a GPU, with a small vocabulary."""
MOST_LOGITS = 2**29
"""Logits of one forward pass on a GPU: with a large vocabulary a pass reads fewer tokens."""

Prompt = Sequence[int] | bytes | Tensor


def check_prompt(prompt: Prompt, vocab: int, row: int | None = None) -> Tensor:
    """The prompt as tokens [T]."""
    where = "" if row is None else f" for row {row}"
    is_bytes = isinstance(prompt, (bytes, bytearray))
    try:
        tokens = torch.tensor(bytearray(prompt), dtype=torch.uint8) if is_bytes else torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError):  # text, None, lists of unequal lengths
        wanted = "bytes, a list of integers or a tensor of them"
        raise ValueError(
            f"a prompt must be {wanted}, got {show(prompt)}{where}; text is encoded first, as in text.encode()"
        ) from None
    if tokens.dim() != 1 or not len(tokens):
        raise ValueError(f"a prompt must be a list of at least one token, got shape {tuple(tokens.shape)}{where}")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ValueError(f"a prompt must consist of integers, got {tokens.dtype}{where}")
    tokens = tokens.to(torch.int64).cpu()
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab:
        wrong, where = high if high >= vocab else low, where.replace(" for", " of")
        raise ValueError(f"tokens must lie in 0..{vocab - 1}, the model's vocabulary, got {wrong} in the prompt{where}")
    return tokens


def stack_marks(marks: dict[int, Tensor | None], rows: list[int], tokens: int) -> Tensor | None:
    """The marks of rows with prompts of the same length, [n, T]; None where nothing is marked."""
    if all(marks[row] is None for row in rows):
        return None
    free = torch.full((tokens,), FREE)
    return torch.stack([free if (own := marks[row]) is None else own for row in rows])


def group_by_length(prompts: dict[int, Tensor]) -> Iterator[tuple[list[int], Tensor]]:
    """Group rows whose prompts have the same length: yields the rows of a group and their prompts [n, T]."""
    lengths: dict[int, list[int]] = {}
    for row, prompt in prompts.items():
        lengths.setdefault(len(prompt), []).append(row)
    for rows in lengths.values():
        yield rows, torch.stack([prompts[row] for row in rows])


def part_size(tokens: int, most: int) -> int:
    """Length of equal parts of at most `most` tokens: a short part at the end would cost nearly as much as a long one."""
    return -(-tokens // max(1, -(-tokens // most)))


def read_blocks(
    decoder: Decoder, prompt: Tensor, state: Any = None, marks: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor, Any, Any]]:
    """Feed tokens [B, T] block by block: yields each block, its logits [B, block, V], the state after it and the report.
    marks [B, T]: lifetimes of single tokens (models/marks.py)."""
    device = decoder.embed.weight.device
    size = PROMPT_BLOCK
    if device.type == "cuda":
        size = max(256, min(GPU_BLOCK, MOST_LOGITS // decoder.config.vocab) // len(prompt))
    blocks = prompt.split(size, dim=1)
    for block, marked in zip(blocks, repeat(None) if marks is None else marks.split(size, dim=1)):
        block = block.to(device, non_blocking=True)
        if marked is not None:
            state = decoder.initial_state(len(prompt)) if state is None else state
            state = [{**part, "marks": marked} if "memory" in part else part for part in state]
        logits, state, aux = decoder(block, state)
        yield block, logits, state, aux
