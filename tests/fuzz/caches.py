"""Hugging Face: tiny retrofitted models read through caches that delete, against the same model without a cache in float64,
row by row without padding."""

from __future__ import annotations

import copy
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expire_span import Sampling, Stream
from expire_span.hf import Retrofit
from tests.error_budget import assert_within_budget
from tests.hf_models import FAMILIES, VOCAB, forgetful, tiny

NAME = "caches"
MODES = ("read", "read", "read", "packed", "generate", "endless")
ACTS = ("none", "none", "fork", "select", "save", "compact", "move")
SIMPLE: dict[str, Any] = dict(
    seed=0, mode="read", family="llama", dtype="float64", keep_first=0, max_span=40, ramp=4, padding=[0], mask="all",
    pieces=[], how="greedy", count=1, slots=False,
)  # fmt: skip


def draw(rng: random.Random) -> dict[str, Any]:
    return dict(
        seed=rng.randrange(10**6),
        mode=rng.choice(MODES),
        family=rng.choice(sorted(FAMILIES)),
        dtype=rng.choice(["float64", "float64", "float32", "bfloat16"]),
        keep_first=rng.choice([0, 0, 1, 3, 9]),
        max_span=rng.choice([12, 40, 120]),
        ramp=rng.choice([1, 4, 16]),
        padding=[0] * rng.randint(1, 3) if rng.random() < 0.4 else [0, *(rng.choice([0, 1, 5, 30]) for _ in range(2))],
        mask=rng.choice(["all", "all", "new"]),
        pieces=[
            [rng.choice([1, 1, 2, 7, 33]), rng.choice(ACTS), rng.randrange(1000)] for _ in range(rng.randint(1, 8))
        ],
        how=rng.choice(["greedy", "sampling", "beams", "chunked"]),
        count=rng.choice([1, 10, 40, 90]),
        slots=rng.random() < 0.5,
    )


@cache
def _both_retrofits(family: str, dtype: str, keep_first: int, max_span: int, ramp: int) -> tuple[Retrofit, Retrofit]:
    """A retrofitted model, and one with the same weights in float64."""
    retrofitted = forgetful(tiny(family), max_span=max_span, ramp=ramp, keep_first=min(keep_first, max_span))
    retrofitted.model.to(getattr(torch, dtype))
    retrofitted.predictors.to(
        torch.promote_types(getattr(torch, dtype), torch.float32)
    )  # as they are in a model of fewer digits
    exact = copy.deepcopy(retrofitted.model).double()
    exact._expire_span_retrofit.predictors.double()
    return retrofitted, exact._expire_span_retrofit


@torch.no_grad()
def check(case: dict[str, Any]) -> None:
    case = SIMPLE | case
    retrofits = _both_retrofits(*(case[name] for name in ("family", "dtype", "keep_first", "max_span", "ramp")))
    modes = {"read": _check_read, "packed": _check_packed, "generate": _check_generate, "endless": _check_endless}
    try:
        modes[case["mode"]](case, *retrofits)
    except (
        ValueError
    ) as refusal:  # where first tokens lie cannot be known from a mask of the new tokens; then it says so
        unclear = case["mode"] == "read" and case["mask"] == "new" and case["keep_first"] and max(case["padding"])
        if not (unclear and "attention_mask" in str(refusal)):
            raise


def _tokens(case: dict[str, Any], rows: int, count: int) -> Tensor:
    return torch.randint(3, VOCAB, (rows, count), generator=torch.Generator().manual_seed(case["seed"]))


def _compare(retrofitted: Retrofit, exact: Retrofit, tokens: Tensor, got: Tensor, name: str = "logits") -> None:
    """got [n, V]: logits after the last n of a row's tokens [T]."""
    want, rounded = (h.model(tokens[None], use_cache=False).logits[0, -len(got) :] for h in (exact, retrofitted))
    if rounded.dtype == torch.float64:  # measured with float32's digits, by rounding the weights
        rounded = _single(retrofitted).model(tokens[None], use_cache=False).logits[0, -len(got) :]
    assert_within_budget(got, want, rounded, name=name)


@cache
def _single(retrofitted: Retrofit) -> Retrofit:
    model = copy.deepcopy(retrofitted.model).float()
    model._expire_span_retrofit.predictors.float()
    return model._expire_span_retrofit


def _check_read(case: dict[str, Any], retrofitted: Retrofit, exact: Retrofit) -> None:
    """Pieces with left padding, with operations on the cache in between."""
    lengths, padding = [piece[0] for piece in case["pieces"]], torch.tensor(case["padding"])
    first = max(case["padding"]) + 1
    ids = _tokens(case, len(padding), first + sum(lengths))
    order = torch.arange(len(padding))  # the row of `ids` that each row of the cache has read
    mask = (torch.arange(ids.shape[1]) >= padding[:, None]).long()
    cache_, seen = retrofitted.new_cache(), 0
    given: list[list[Tensor]] = [[] for _ in padding]
    for count, act, number in [[first, "none", 0], *case["pieces"]]:
        cache_, order, given = _act(retrofitted, cache_, act, random.Random(number), order, given)
        mine, real = ids[order][:, seen : seen + count], mask[order][:, : seen + count]
        seen += count
        places = (real.cumsum(-1) - 1).clamp_min(0)[:, -count:]
        options: dict[str, Any] = {"position_ids": places}
        if bool(padding.any()):
            options["attention_mask"] = real[:, -count:] if case["mask"] == "new" else real
        logits = retrofitted.model(mine, past_key_values=cache_, **options).logits
        for row, (found, origin) in enumerate(zip(logits, order.tolist())):
            given[row] = [*given[row], found[max(0, int(padding[origin]) - seen + count) :]]
    for row, origin in enumerate(order.tolist()):
        _compare(retrofitted, exact, ids[origin, int(padding[origin]) : seen], torch.cat(given[row]))


def _act(retrofitted, cache_, act, rng, order, given) -> tuple[Any, Tensor, list[list[Tensor]]]:
    if act == "fork":
        copies, kept = rng.randint(1, 2), cache_
        cache_ = cache_.fork(copies)
        rows = torch.arange(len(order)).repeat_interleave(copies)
        if kept.seen:  # going on with the original changes nothing in the fork
            retrofitted.model(torch.full((len(order), 3), 5), past_key_values=kept)
    elif act == "select":
        rows = torch.tensor([rng.randrange(len(order)) for _ in range(rng.randint(1, 3))])
        cache_.reorder_cache(rows) if len(rows) == len(order) else cache_.batch_select_indices(rows)
    else:
        rows = torch.arange(len(order))
    if act == "save":
        with tempfile.TemporaryDirectory() as folder:
            cache_.save(Path(folder) / "cache")
            cache_ = retrofitted.new_cache().load(Path(folder) / "cache")
    elif act == "compact":
        cache_.compact()
    elif act == "move":
        kept, cache_ = cache_, cache_.fork().to("cpu")
    return cache_, order[rows], [given[n] for n in rows.tolist()]


def _check_packed(case: dict[str, Any], retrofitted: Retrofit, exact: Retrofit) -> None:
    """Documents with restarting positions in one row, without a cache; now and then a long row of many."""
    lengths = [piece[0] for piece in case["pieces"]]
    if case["seed"] % 10 == 0 and case["family"] != "gpt2":
        lengths = (lengths * 2000)[: max(1, 8192 * len(lengths) // sum(lengths))]
    ids = _tokens(case, 1, sum(lengths))
    places = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    packed = retrofitted.model(ids, position_ids=places, use_cache=False).logits[0]
    parts = list(zip(ids[0].split(lengths), packed.split(lengths)))
    for tokens, got in parts[:20] + parts[20:][-20:]:
        _compare(retrofitted, exact, tokens, got)


def _check_generate(case: dict[str, Any], retrofitted: Retrofit, exact: Retrofit) -> None:
    """`generate` with deletion draws what `generate` draws without a cache, in float64, where no rounding turns a choice."""
    padding = torch.tensor(case["padding"])
    ids = _tokens(case, len(padding), 41)
    mask = (torch.arange(41) >= padding[:, None]).long()
    options: dict[str, Any] = dict(
        attention_mask=mask, max_new_tokens=min(case["count"], 25), pad_token_id=0, eos_token_id=None
    )
    options |= {
        "greedy": dict(do_sample=False),
        "sampling": dict(do_sample=True, temperature=0.8, top_k=20),
        "beams": dict(do_sample=False, num_beams=3),
        "chunked": dict(do_sample=False, prefill_chunk_size=16),
    }[case["how"]]
    texts = []
    for cached in (True, False):
        torch.manual_seed(case["seed"])
        past = dict(past_key_values=exact.new_cache()) if cached else dict(use_cache=False)
        texts.append(exact.model.generate(ids * mask, **past, **options))
        options.pop("prefill_chunk_size", None)
    assert torch.equal(*texts), f"generate wrote other texts, {int((texts[0] != texts[1]).sum())} tokens differ"


def _check_endless(case: dict[str, Any], retrofitted: Retrofit, exact: Retrofit) -> None:
    """A stream that generates, over slots or a cache."""
    if case["dtype"] == "float64":
        retrofitted = _single(retrofitted)
    rows = len(case["padding"])
    stream = Stream(retrofitted, rows, static_shapes=case["slots"])
    ids, given = _tokens(case, rows, 1 + sum(piece[0] for piece in case["pieces"])), []
    stream.read(list(ids))
    for _ in range(case["count"] * 3):
        given.append(stream.logits)  # those that gave the next token
        (step,) = stream.generate(Sampling(temperature=1.0, seed=case["seed"]), 1)
        ids = torch.cat([ids, step.tokens[:, None]], 1)
    logits = torch.stack(given, 1).to(retrofitted.model.dtype)  # the stream hands them on in float32, to draw from
    for row in range(rows):
        _compare(retrofitted, exact, ids[row, :-1], logits[row], "logits of the stream")
