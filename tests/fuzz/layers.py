"""Memory systems in a decoder, in float64: after any chopping and any operations on states, a row's outputs are those of one
pass over the row's own tokens; and going on with one state changes no other."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from expire_span.models import state as states
from expire_span.models.decoder import Decoder
from expire_span.models.systems import SYSTEMS
from expire_span.models.systems.expire_span import HeadReach, PaperDetails
from expire_span.testing import VOCAB, small_config
from tests.error_budget import DOUBLE

NAME = "layers"
COPIES = {
    "twice": lambda state: state,
    "fork": states.fork,
    "detach": states.detach,
    "move": lambda state: states.move(state, "cpu"),
    "map": lambda state: states.map_tensors(state, lambda x: x),
    "save": lambda state: states.unpack(*states.pack(state)),
}
"""Ways to hand a state on."""
ACTS = ("read", "read", "read", *COPIES, "select", "reset")
MODEL = (
    "kind",
    "preset",
    "per_head",
    "learned",
    "min_span",
    "ramp",
    "max_span",
    "include_self",
    "initial",
    "eps",
    "gates",
    "subtract_own",
)
SIMPLE: dict[str, Any] = dict(
    seed=0, kind="full", preset="modern", per_head=False, learned=False, min_span=0.0, ramp=4, max_span=30,
    include_self=True, initial=0, eps=0.0, gates=False, subtract_own=False, keep="kv", rows=1, acts=[],
)  # fmt: skip


def draw(rng: random.Random) -> dict[str, Any]:
    kind = "expire_span" if rng.random() < 0.5 else rng.choice(sorted(SYSTEMS))
    return dict(
        seed=rng.randrange(10**6),
        kind=kind,
        preset=rng.choice(["modern", "paper"]) if SYSTEMS[kind].scores_pairs else "modern",
        per_head=rng.random() < 0.5,
        learned=rng.random() < 0.3,
        min_span=rng.choice([0.0, 0.0, 1.5, -3.0]),
        ramp=rng.choice([1, 4, 9]),
        max_span=rng.choice([6, 30, 200]),
        include_self=rng.random() < 0.7,
        initial=rng.choice([0, 0, 0, 3]),
        eps=rng.choice([0.0, 0.0, 1e-8, 1e-3]),
        gates=rng.random() < 0.2,
        subtract_own=rng.random() < 0.2,
        keep=rng.choice(["kv", "hidden"]),
        rows=rng.choice([1, 2, 3]),
        acts=[
            [rng.choice(ACTS), rng.choice([1, 1, 2, 5, 17, 30, 70]), rng.randrange(1000)]
            for _ in range(rng.randint(2, 10))
        ],
    )


@cache
def _build(seed: int, *values: Any) -> Decoder:
    case = dict(zip(MODEL, values))
    config = small_config(case["kind"], case["preset"])
    if case["kind"] == "expire_span":
        mixer = replace(
            config.mixer, ramp=case["ramp"], max_span=case["max_span"], min_span=max(case["min_span"], 0.5 - case["ramp"]),
            span_per="kv_head" if case["per_head"] or case["learned"] else "layer",
            paper=PaperDetails(case["include_self"], False, case["initial"], case["eps"]),
            reach=HeadReach(case["learned"], own_heads=1 if case["learned"] else None),
            subtract_own=case["subtract_own"],
        )  # fmt: skip
        config = replace(config, mixer=mixer, head_gates=case["gates"])
    torch.manual_seed(seed)
    decoder = Decoder(config).double().requires_grad_(False)
    for block in decoder.layers():
        weight = getattr(getattr(block.mixer, "span_predictor", None), "weight", None)
        if weight is not None:
            torch.nn.init.normal_(weight, std=0.4)
    return decoder


@dataclass
class _Row:
    """What a row of a state has read, and the logits that it was given."""

    tokens: Tensor
    logits: list[Tensor]


@dataclass
class _Version:
    """A state and its rows."""

    state: Any
    rows: list[_Row]


def _empty_row() -> _Row:
    return _Row(torch.zeros(0, dtype=torch.long), [])


def check(case: dict[str, Any]) -> None:
    case = SIMPLE | case
    keep = case["keep"] if SYSTEMS[case["kind"]].operator else "kv"
    model = _build(case["seed"] % 5, *(case[name] for name in MODEL)).train(keep == "hidden")
    g = torch.Generator().manual_seed(case["seed"])
    now = _Version(None, [_empty_row() for _ in range(case["rows"])])
    versions: list[_Version] = []
    for act, count, number in case["acts"]:
        if now.state is not None:
            now = _act(model, act, now, versions, number)
        now = _read(model, keep, now, count, g)
    for version in [*versions, now]:  # nothing that was done since has changed them
        _compare(model, keep, _read(model, keep, version, 3, g))


def _act(model: Decoder, act: str, now: _Version, versions: list[_Version], number: int) -> _Version:
    """The version to go on with; the other one, if there is one, is added to `versions`."""
    if act in COPIES:
        pair = [now, _Version(COPIES[act](now.state), now.rows)]
        versions.append(pair.pop(number % 2))
        return pair[0]
    rng = random.Random(number)
    after: _Version | None = None
    if act == "select":
        rows = [rng.randrange(len(now.rows)) for _ in range(rng.randint(1, 3))]
        after = _Version(states.select_rows(now.state, torch.tensor(rows)), [now.rows[n] for n in rows])
    if act == "reset":
        fresh = [rng.random() < 0.5 for _ in now.rows]
        rows = [_empty_row() if new else x for x, new in zip(now.rows, fresh)]
        after = _Version(model.reset_rows(now.state, torch.tensor(fresh)), rows)
    if after is None:
        return now
    versions.append(now)
    return after


def _read(model: Decoder, keep: Any, now: _Version, count: int, g: torch.Generator) -> _Version:
    x = torch.randint(0, VOCAB, (len(now.rows), count), generator=g)
    y, state, _ = model(x, now.state, keep=keep)
    rows = [_Row(torch.cat([old.tokens, new]), [*old.logits, part]) for old, new, part in zip(now.rows, x, y)]
    return _Version(state, rows)


def _compare(model: Decoder, keep: Any, version: _Version) -> None:
    """The logits of all rows against one pass over what they have read."""
    for row in version.rows:
        error = (torch.cat(row.logits) - model(row.tokens[None], keep=keep)[0][0]).abs().amax(-1)
        assert float(error.max()) <= DOUBLE, (
            f"logits are off by {error.max():.3g}, first at {int((error > DOUBLE).nonzero()[0])}"
        )
