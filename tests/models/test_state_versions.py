"""States are values: whatever goes on with one version, no other version changes.

Trees of versions are made by random operations; what a version holds is copied when it is made, and compared at the end.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from expire_span.models import state as states
from expire_span.models.systems import SYSTEMS
from expire_span.sampling import Sampling
from expire_span.store import ExpiringMemory
from expire_span.store.slots import Slots
from expire_span.stream import Stream
from expire_span.testing import VOCAB, applies, small_config
from tests.stream_cases import CASES, SHAPE, build

SEEDS = st.integers(0, 2**31)
RAMP = 4
QUICK = settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def held(state: Any) -> dict[str, Tensor]:
    """Copies of all that a state says: of a store the slots in use, since spare ones may be written by later versions."""
    state = states.map_tensors(state, torch.clone, lambda x: x.as_rectangle() if isinstance(x, ExpiringMemory) else x)
    return {name: x.clone() for name, x in states.pack(state)[0].items()}


def check_same(now: dict[str, Tensor], then: dict[str, Tensor], story: Any) -> None:
    assert now.keys() == then.keys(), story
    changed = [name for name in now if not torch.equal(now[name], then[name])]
    assert not changed, f"{changed} changed after {story}"


def handed_on(state: Any, rows: int, g: torch.Generator) -> dict[str, Any]:
    """Everything that hands a state on to somebody else, by name."""
    order = torch.randint(rows, (rows,), generator=g)
    return {
        "move": lambda: states.move(state, "cpu"),
        "detach": lambda: states.detach(state),
        "map": lambda: states.map_tensors(state, lambda x: x),
        "fork": lambda: states.fork(state),
        "select": lambda: states.select_rows(state, order),
        "save": lambda: states.unpack(*states.pack(state)),
        "deepcopy": lambda: copy.deepcopy(state),
    }


def choose(options: Any, g: torch.Generator) -> Any:
    options = list(options)
    return options[int(torch.randint(len(options), (), generator=g))]


# The store


def add(memory: ExpiringMemory, count: int, g: torch.Generator) -> ExpiringMemory:
    first = int(memory.pos.amax()) + 1 if len(memory) and int(memory.pos.amax()) >= 0 else 0
    span = torch.rand(2, 2, count, generator=g) ** 3 * 150
    x = torch.randn(2, 2, count, 3, generator=g)
    return memory.append(torch.arange(first, first + count), span, x=x).expire(first + count)


def change_store(memory: ExpiringMemory, g: torch.Generator) -> tuple[str, ExpiringMemory]:
    if not len(memory) or torch.rand((), generator=g) < 0.5:
        count = choose((1, 1, 2, 40), g)
        return f"append {count}", add(memory, count, g)
    options = handed_on(memory, 2, g) | {
        "own fork": memory.fork,
        "compact": memory.compact,
        "rectangle": memory.as_rectangle,
        "forget": lambda: memory.forget_rows(torch.tensor([True, False])),
        "forget nothing": lambda: memory.forget_rows(torch.tensor([False, False])),
        "spans": lambda: memory.with_span(memory.span + 1),
        "field": lambda: memory.replace_field("x", memory.slots["x"]),
    }
    name = choose(options, g)
    return name, options[name]()


@settings(max_examples=25, deadline=None)
@given(SEEDS)
def test_no_version_of_a_store_changes_another(seed):
    g = torch.Generator().manual_seed(seed)
    versions = [ExpiringMemory.empty((2, 2), ramp=RAMP)]
    copies, story = [held(versions[0])], []
    for _ in range(25):
        n = choose(range(len(versions)), g)
        name, new = change_store(versions[n], g)
        story.append((n, name))
        versions.append(new)
        copies.append(held(new))
    for version, before in zip(versions, copies):
        check_same(held(version), before, story)


def test_a_field_that_two_stores_are_given_is_not_shared():
    g = torch.Generator().manual_seed(0)
    one = add(ExpiringMemory.empty((2, 2), ramp=RAMP), 5, g)
    two, given = one.fork(), one.slots["x"].clone()
    before = given.clone()
    one, two = (add(m.replace_field("x", given), 1, g) for m in (one, two))
    assert not torch.equal(one["x"], two["x"]) and torch.equal(one["x"][..., :5, :], two["x"][..., :5, :])
    assert torch.equal(given, before)


def test_handing_a_store_on_copies_nothing_that_need_not_be_copied():
    """One that is moved to where it is already goes on in place; only the second that goes on copies."""
    memory = add(ExpiringMemory.empty((2, 2), ramp=RAMP), 5, torch.Generator().manual_seed(0))
    moved = states.detach(states.move(memory, "cpu"))
    after = add(moved, 1, torch.Generator().manual_seed(1))
    assert after.slots["x"].data_ptr() == memory.slots["x"].data_ptr()
    again = add(memory, 1, torch.Generator().manual_seed(2))
    assert again.slots["x"].data_ptr() != memory.slots["x"].data_ptr()


def test_grown_slots_share_nothing_with_the_old_ones():
    old = Slots(2, 4, [64, 64], ramp=RAMP)
    new = old.grown([128, 64])
    for name, x in new.tensors().items():
        assert x.data_ptr() != old.tensors()[name].data_ptr(), name


# Layers


@pytest.mark.parametrize("keep", ["kv", "hidden"])
@pytest.mark.parametrize("kind", SYSTEMS)
@QUICK
@given(SEEDS)
def test_no_version_of_a_state_changes_another(kind, keep, seed):
    if not applies("causal", kind, keep):
        return
    g, model = torch.Generator().manual_seed(seed), build(small_config(kind))
    versions: list[Any] = [model.initial_state(2, keep)]
    copies, story = [held(versions[0])], []
    with torch.no_grad():
        for _ in range(14):
            n = choose(range(len(versions)), g)
            options = handed_on(versions[n], 2, g)
            options["reset"] = lambda n=n: model.reset_rows(versions[n], torch.tensor([False, True]))
            name = choose(options, g) if torch.rand((), generator=g) < 0.5 else "read"
            count = choose((1, 1, 1, 30), g)
            options["read"] = lambda n=n, c=count: model(torch.randint(VOCAB, (2, c), generator=g), versions[n]).state
            story.append((n, name))
            versions.append(options[name]())
            copies.append(held(versions[-1]))
    for version, before in zip(versions, copies):
        check_same(held(version), before, story)


# Streams


def held_by_stream(stream: Stream) -> dict[str, Tensor]:
    engine = stream._engine
    if stream.static_shapes:
        found = {name: x.clone() for name, x in engine.packed()[0].items()}
    else:
        found = held([group.state for group in engine.groups]) | {"logits": engine.logits.clone()}  # type: ignore[attr-defined]
    return found | {"position": torch.tensor(stream.position), "active": torch.tensor(stream.active)}


def step_stream(stream: Stream, g: torch.Generator, path: Any) -> tuple[str, Stream]:
    """Go on with a stream, or make another from it."""
    name = choose(("write", "write", "join", "fork", "save"), g)
    if name == "write":
        for _ in stream.generate(Sampling(seed=choose(range(9), g)), choose((1, 3, 20), g)):
            pass
    elif name == "join":
        stream.join(torch.randint(200, (choose((1, 60), g),), generator=g), choose(range(stream.rows), g))
    elif name == "fork":
        return name, stream.fork([choose(range(stream.rows), g) for _ in range(2)])
    else:
        stream.save(path)
        return name, Stream.load(stream.model, path)
    return name, stream


PLAIN = ("longformer", "full")
"""Systems whose streams take plain steps."""


@pytest.mark.parametrize("case", [*CASES, *PLAIN])
@settings(QUICK, max_examples=2)
@given(SEEDS)
def test_no_stream_changes_another(case, tmp_path_factory, seed):
    g, path = torch.Generator().manual_seed(seed), tmp_path_factory.mktemp("streams") / "saved"
    shape = {name: value for name, value in SHAPE.items() if name != "heads"}
    decoder = build(case if case in CASES else replace(small_config(case), vocab=256, **shape))
    streams, story = [Stream(decoder, rows=2)], []
    streams[0].read([b"one", b"another"])
    copies = [held_by_stream(streams[0])]
    for _ in range(10):
        n = choose(range(len(streams)), g)
        name, new = step_stream(streams[n], g, path)
        story.append((n, name))
        if new is streams[n]:
            copies[n] = held_by_stream(new)
        else:
            streams.append(new)
            copies.append(held_by_stream(new))
        for stream, before in zip(streams, copies):
            check_same(held_by_stream(stream), before, story)
