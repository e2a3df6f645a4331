"""How many slots each head of an adapter needs on real text: measured once, and kept in slots.json of the adapter folder.

    {"format": 1, "adapter": checksum of the predictors, "tokens": tokens of the longest document, "peaks": [[..], ..]}

`peaks` has one list for every attention layer, with a number for each key/value head: the most memories that were alive for a
next query; for layers with a window of their own it is empty. What is served may be longer than what was measured, or other
text, so heads get more slots than that (`with_room`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expire_span.checks import as_whole
from expire_span.disk.files import read_json, to_json, write_atomic
from expire_span.errors import UserError
from expire_span.ops.rule import lifetime

NAME = "slots.json"
FORMAT = 1
CHUNK = 256
"""Tokens per forward pass while measuring."""
ROOM = 0.25
"""Slots of a head beyond its measured peak, as a share of it."""


def with_room(peak: int) -> int:
    return peak + max(1, int(ROOM * peak))


def measure_peaks(retrofitted: Any, documents: Iterable[Tensor]) -> list[list[int]]:
    """The most memories of each layer and head that were alive for a next query, over documents [n] of token ids."""
    peaks = [[0] * (layer.kv_heads if layer.window is None else 0) for layer in retrofitted.layers]
    for ids in documents:
        for n, lives in enumerate(_read_lives(retrofitted, ids)):
            if retrofitted.layers[n].window is None:
                peaks[n] = [max(a, b) for a, b in zip(peaks[n], most_alive(lives))]
    return peaks


def most_alive(lives: Tensor) -> list[int]:
    """For each head, the largest number of memories that are alive at once for a next query; lives [heads, n]: the age at which
    the memory of each token is dead."""
    heads, count = lives.shape
    birth = torch.arange(count)
    # A memory is stored after its token, and for as long as the next query is younger than its life.
    until = torch.minimum(birth + (lives.cpu() - 1).clamp_min(0), torch.tensor(count))
    change = torch.zeros(heads, count + 1, dtype=torch.int64)
    change[:, :-1] += 1
    change.scatter_add_(1, until, torch.full_like(until, -1))
    return change.cumsum(1).amax(1).tolist()


@torch.no_grad()
def _read_lives(retrofitted: Any, ids: Tensor) -> list[Tensor]:
    """The lives of all memories of a document by layer, [heads, n]."""
    found: list[list[Tensor]] = [[] for _ in retrofitted.layers]
    cache = retrofitted.new_cache()
    for part in ids.unsqueeze(0).split(CHUNK, 1):
        retrofitted.model(part.to(retrofitted.model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
        for lives, layer in zip(found, cache.expiring):
            lives.append(lifetime(layer.spans[0], layer.ramp))
    return [torch.cat(x, -1) for x in found]


def save_peaks(folder: Path, head: dict[str, Any], tokens: int, peaks: list[list[int]]) -> None:
    write_atomic(
        folder / NAME, to_json({"format": FORMAT, "adapter": head["sha256"], "tokens": tokens, "peaks": peaks})
    )


def read_peaks(folder: Path, head: dict[str, Any]) -> list[list[int]] | None:
    """The measured peaks of an adapter; None where they were not measured. UserError if they are another adapter's."""
    path = folder / NAME
    if not path.is_file():
        return None
    told = read_json(path)
    peaks = told.get("peaks")
    whole = isinstance(peaks, list) and all(
        isinstance(layer, list) and all((as_whole(x) or 0) >= 1 for x in layer) for layer in peaks
    )
    if told.get("format") != FORMAT or not whole:
        raise UserError(f"{path} is not what this version writes; measure again, or remove it")
    if told.get("adapter") != head["sha256"]:
        raise UserError(
            f"{path} was measured with other predictors than those of {folder}; measure again, or remove it"
        )
    return peaks
