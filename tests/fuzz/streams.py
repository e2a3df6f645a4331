"""`Stream`: after reads, steps, forks, saves and replaced rows, every row's logits are those of one float64 pass of the decoder
over the row's own tokens, in which nothing is deleted."""

from __future__ import annotations

import copy
import random
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expire_span.models.decoder import Decoder
from expire_span.models.systems import SYSTEMS
from expire_span.store.slots import FRESH
from expire_span.stream import Sampling, Step, Stream
from expire_span.testing import small_config
from tests.error_budget import assert_within_budget
from tests.stream_cases import CASES, build

NAME = "stream"
MODELS = [name for name in CASES if name != "cap"]
"""Under a cap, what is evicted depends on rounding, so that float64 evicts others."""
JUMPS = ("routing", "reformer")
"""Systems in which a rounding error sends a token elsewhere: compared in float64 only."""
ACTS = ("write", "write", "write", "read", "join", "join", "fork", "save")
SIMPLE: dict[str, Any] = dict(seed=0, model="layer spans", dtype="float64", rows=1, acts=[])


def draw(rng: random.Random) -> dict[str, Any]:
    model = rng.choice(MODELS) if rng.random() < 0.75 else rng.choice(sorted(set(SYSTEMS) - {"expire_span"}))
    dtype = rng.choice(["float64", "float32", "float32", "bfloat16"])
    acts = [[rng.choice(ACTS), rng.choice([1, 2, 7, 30, 120]), rng.randrange(1000)] for _ in range(rng.randint(1, 8))]
    return dict(
        seed=rng.randrange(10**6),
        model=model,
        dtype="float64" if model in JUMPS else dtype,
        rows=rng.choice([1, 2, 3]),
        acts=acts,
    )


@cache
def _decoders(model: str, seed: int, dtype: str) -> tuple[Decoder, Decoder]:
    """The decoder, and one with the same weights in float64."""
    decoder = (
        build(model if model in CASES else small_config(model), seed).to(getattr(torch, dtype)).requires_grad_(False)
    )
    return decoder, copy.deepcopy(decoder).double()


@dataclass
class _Row:
    """What a row has read and drawn, and the logits it was given after each of the last tokens."""

    tokens: list[int]
    logits: dict[int, Tensor] = field(default_factory=dict)
    """By the number of tokens read."""


@dataclass
class _Version:
    stream: Stream
    rows: list[_Row | None]
    """None for idle rows."""

    def note(self) -> None:
        for row, logits in zip(self.rows, self.stream.logits):
            if row is not None:
                row.logits[len(row.tokens)] = logits

    def copied(self, stream: Stream, order: list[int]) -> _Version:
        rows = (self.rows[n] for n in order)
        return _Version(stream, [None if x is None else _Row(list(x.tokens), dict(x.logits)) for x in rows])


def check(case: dict[str, Any]) -> None:
    case = SIMPLE | case
    decoder, exact = _decoders(case["model"], case["seed"] % 5, case["dtype"])
    rng = random.Random(case["seed"])
    now = _Version(Stream(decoder, case["rows"]), [None] * case["rows"])
    _read(now, rng, 20)
    versions: list[_Version] = []
    for act, count, number in case["acts"]:
        now = _act(now, versions, act, count, random.Random(number))
    for version in [*versions, now]:
        _write(version, 3, Sampling(seed=1), events=False)
        for row in version.rows:
            if row is not None:
                _compare(decoder, exact, row)


def _act(now: _Version, versions: list[_Version], act: str, count: int, rng: random.Random) -> _Version:
    if act == "write":
        count = min(count, FRESH + 10)
        temperature = rng.choice([0.0, 0.7, 1.0])
        _write(now, count, Sampling(temperature, rng.choice([None, 20]), seed=rng.randrange(3)), rng.random() < 0.4)
    elif act == "read":
        _read(now, rng, count)
    elif act == "join":
        row, prompt = rng.randrange(now.stream.rows), _prompt(now, rng, count)
        now.stream.join(prompt, row)
        now.rows[row] = _Row(prompt)
        now.note()
    elif act in ("fork", "save"):
        return _copy(now, versions, act, rng)
    return now


def _copy(now: _Version, versions: list[_Version], act: str, rng: random.Random) -> _Version:
    order = list(range(now.stream.rows))
    if act == "fork":
        order = [rng.choice(order) for _ in range(rng.randint(1, 3))]
        if all(now.rows[n] is None for n in order):
            return now
        other = now.stream.fork(order)
    else:
        with tempfile.TemporaryDirectory() as folder:
            now.stream.save(Path(folder) / "stream")
            other = Stream.load(now.stream.model, Path(folder) / "stream")
    pair = [now, now.copied(other, order)]
    versions.append(pair.pop(rng.randrange(2)))
    return pair[0]


def _prompt(now: _Version, rng: random.Random, most: int) -> list[int]:
    return [rng.randrange(now.stream.model.config.vocab) for _ in range(rng.randint(1, most))]


def _read(now: _Version, rng: random.Random, most: int) -> None:
    prompts = [_prompt(now, rng, most) for _ in range(rng.randint(1, now.stream.rows))]
    now.stream.read(prompts)
    now.rows = [_Row(prompt) for prompt in prompts] + [None] * (now.stream.rows - len(prompts))
    now.note()


def _write(now: _Version, count: int, sampling: Sampling, events: bool) -> None:
    before, made = now.stream.position, 0
    alive = _alive(now.stream) if events else []
    for step in now.stream.generate(sampling, count, events=events):
        made += 1
        for row, token in zip(now.rows, step.tokens.tolist()):
            assert (token == -1) == (row is None), f"an idle row must give -1 and no other, got {token}"
            if row is not None:
                row.tokens.append(token)
        now.note()
        alive = _check_events(now.stream, step, alive) if events else alive
    assert now.stream.position == before + made == before + count, f"position {now.stream.position} after {made} steps"


def _alive(stream: Stream) -> list[int]:
    """Number of living memories of all active rows and heads, for each layer; -1 where a layer keeps no slots."""
    return [int(live.sum()) if live.shape[1] else -1 for live in stream.live_by_head]


def _check_events(stream: Stream, step: Step, before: list[int]) -> list[int]:
    """Births minus deaths are what the number of living memories changes by."""
    after = _alive(stream)
    for happened, old, new in zip(step.events or [], before, after):
        if old >= 0:
            born = int((~happened.born.isnan()).sum())
            assert new == old + born - len(happened.died), (
                f"{old} alive, {born} born, {len(happened.died)} died, {new} left"
            )
    return after


def _compare(decoder: Decoder, exact: Decoder, row: _Row) -> None:
    tokens, places = torch.tensor([row.tokens]), torch.tensor(sorted(row.logits)) - 1
    with torch.inference_mode():
        want, rounded = (model(tokens, keep="hidden")[0][0, places] for model in (exact, decoder))
    got = torch.stack([row.logits[n + 1] for n in places.tolist()])
    got = got.to(decoder.embed.weight.dtype) if decoder.embed.weight.dtype == torch.bfloat16 else got
    assert_within_budget(got, want, rounded.float() if rounded.dtype == torch.float64 else rounded, name="logits")
