"""Keys are rotated once, at their own position: answers in half precision keep apart, and streams have no end."""

import contextlib
import dataclasses

import pytest
import torch

pytest.importorskip("transformers")

from expire_span.hf.attention import is_kept
from expire_span.hf.rotary import turns_per_token
from expire_span.store.slots import FRESH
from expire_span.stream import Stream
from tests.exact_sums import SumsInFloat64
from tests.hf_models import FAMILIES, forgetful, read, tiny, tokens

HALVES = [torch.bfloat16, torch.float16]
LONG = [2**20, 2**28 + 5, 2**31 + 3, 2**40 + 1]


def half(dtype, family="llama", keep_first=3):
    return forgetful(tiny(family).to(dtype), max_span=60, ramp=8, keep_first=keep_first)


def answer(retrofitted, ids, count, neighbours=()):
    """Logits of `count` steps after a prompt, and its row's keys in the end; neighbours: {step: prompts that join, or None
    where one leaves}."""
    changes, rows = dict(neighbours), 3 if neighbours else 1
    stream, logits, joined = Stream(retrofitted, rows, static_shapes=True), [], []
    for prompt in changes.pop("before", ()):
        joined.append(stream.join(prompt[0], row=rows - 1 - len(joined)))
    for _ in range(FRESH - 12 if joined else 0):  # the slots are compacted while the answer is generated
        stream.feed([0] * rows)
    stream.join(ids[0], row=0)
    for step in range(count):
        if step in changes and changes[step] is None:
            stream.leave(joined.pop())
        elif step in changes:
            joined.append(stream.join(changes[step][0], row=rows - 1 - len(joined)))
        logits.append(stream.logits[0])
        stream.feed(stream.logits.argmax(-1))
    return torch.stack(logits), keys_of(stream.fork([0]))


def keys_of(stream):
    """The living keys of a stream of one row over slots, in order of birth, for each layer and head."""
    return [alive_keys(part["memory"], part["position"]) for part in stream.snapshot(0).state]


def alive_keys(memory, now):
    alive = memory.remaining(now)[0] > 0
    return [keys[living] for keys, living in zip(memory["k"][0], alive)]


BUSY = {"before": [tokens(1, 70, seed=7)], 5: tokens(1, 9, seed=8), 15: None}


@pytest.mark.parametrize("dtype", HALVES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.long)])
def test_half_precision_answers_do_not_depend_on_neighbours(family, dtype):
    """To the last bit, where sums do not depend on their order: neighbours of other ages join and leave meanwhile."""
    retrofitted, ids = half(dtype, family), tokens(1, 40)
    with SumsInFloat64():
        alone, own = answer(retrofitted, ids, 23)
        busy, beside = answer(retrofitted, ids, 23, BUSY)
    assert torch.equal(alone, busy)
    for mine, theirs in zip(own, beside):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs))


@pytest.mark.parametrize("dtype", HALVES, ids=["bf16", "fp16"])
def test_keys_of_a_prompt_are_stored_as_they_were_read(dtype):
    """Without any change to how sums are computed: a row that joins others of another age keeps its keys bit for bit."""
    retrofitted = half(dtype)
    cache, _ = read(retrofitted, tokens(1, 40))
    stream = Stream(retrofitted, 2, static_shapes=True)
    stream.join(tokens(1, 70, seed=7)[0], row=1)
    for _ in range(FRESH + 3):
        stream.feed([0, 0])
    stream.join(tokens(1, 40)[0], row=0)
    for found, kept in zip(keys_of(stream.fork([0])), cache.layers):
        assert all(torch.equal(a, b) for a, b in zip(found, alive_keys(kept.memory, cache.seen)))


# Streams without end


def placed_at(prompt, position):
    """A prompt that stands at a position, as if so many tokens had been read; first tokens stay where they are. What is alive
    beside them is read again there."""
    state = []
    for part in prompt.state:
        memory, offset = part["memory"], position - part["position"]
        pos, span = memory.slots["pos"], memory.slots["span"]
        moved = memory.replace_field("pos", torch.where(is_kept(span) | (pos < 0), pos, pos + offset))
        state.append({"memory": moved, "position": position})
    return dataclasses.replace(prompt, state=state)


def first_keys(state):
    """Keys of the tokens that are kept, in each layer without a window, in an order that does not depend on their positions:
    after 2**24 tokens, slots no longer tell these apart."""
    found = []
    for memory in (part["memory"] for part in state):
        kept = is_kept(memory.span)
        if kept.any():
            found.append(sorted(memory["k"][kept].tolist()))
    return found


@pytest.mark.parametrize("static_shapes", [False, True], ids=["cache", "slots"])
@pytest.mark.parametrize("position", LONG)
def test_first_tokens_stay_bit_for_bit_however_long_a_stream_is(position, static_shapes):
    retrofitted = half(torch.bfloat16)
    stream = Stream(retrofitted, 1, static_shapes=static_shapes)
    prompt = stream.prefill(tokens(1, 100)[0])
    with torch.inference_mode():
        stream.join(placed_at(prompt, position))
    for n, token in enumerate(tokens(1, 2 * FRESH + 3, seed=4).T):
        stream.feed(token)
        assert bool(stream.logits.isfinite().all()), n
    before, state = first_keys(prompt.state), stream.snapshot(0).state
    assert state[0]["position"] == position + 2 * FRESH + 3
    assert len(before) == 2 and before == first_keys(state) and len(before[0]) == 2 * 3


@torch.no_grad()
def test_slots_hold_first_tokens_after_a_simulated_age_of_2_to_the_31():
    """The slots' own positions count in float32, which stops counting at 2**29; what is kept must not depend on it."""
    retrofitted = half(torch.float32)
    stream = Stream(retrofitted, 1, static_shapes=True)
    stream.join(tokens(1, 100)[0])
    stepper = stream._engine.stepper
    with torch.inference_mode():
        for memory in stepper.memories:
            memory.slots.pos.masked_fill_(is_kept(memory.slots.span), -float(2**31))
        stepper.clock.epochs += 2**31
    for token in tokens(1, 3 * FRESH, seed=4).T:
        stream.feed(token)
    for part in stream.snapshot(0).state:
        assert bool((is_kept(part["memory"].span).sum(-1) == 3).all())


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_neox", "mistral"])
def test_a_stream_reads_far_away_what_it_reads_at_the_beginning(family):
    """Without first tokens, only distances matter: a shift of all positions by 2**40 changes float32 rounding alone."""
    retrofitted, ids = forgetful(tiny(family), max_span=60, ramp=8), tokens(2, 90)
    places = torch.arange(90).unsqueeze(0)
    near = retrofitted.model(ids, position_ids=places, use_cache=False).logits
    exact = retrofitted.model.double()(ids, position_ids=places, use_cache=False).logits
    retrofitted.model.float()
    budget = 4 * max(float((near - exact).abs().max()), 1e-6)
    for position in LONG:
        far = retrofitted.model(ids, position_ids=places + position, use_cache=False).logits
        assert (far - near).abs().max() <= budget


def test_angles_are_those_of_float64_arithmetic():
    """Against whole numbers of turns with 200 bits: the angle is exact to float32 rounding at every position."""
    retrofitted = forgetful(tiny())
    rotary = retrofitted.model.model.rotary_emb
    turns = turns_per_token(rotary.inv_freq)
    for position in (0, 1, 4095, *LONG):
        cos, sin = rotary(torch.zeros(1), torch.tensor([[position]]))
        phase = (
            torch.tensor([(int(n) * position) % 2**64 / 2**64 for n in turns], dtype=torch.float64).repeat(2)
            * 2
            * torch.pi
        )
        # A float32 angle in [-pi, pi] is off by at most 3 half units in its last place, and a cosine by one of its own.
        assert (cos[0, 0] - phase.cos()).abs().max() < 4 * 2**-23 and (sin[0, 0] - phase.sin()).abs().max() < 4 * 2**-23
    wanted = rotary.inv_freq.double() / (2 * torch.pi)
    assert (turns[: len(wanted)].double() / 2.0**64 - wanted).abs().max() < 2**-53


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_pause_and_detaching_give_the_model_its_own_angles_back(family):
    model = tiny(family)
    rotary, retrofitted = model.model.rotary_emb, forgetful(model)
    assert "forward" in vars(rotary)
    with contextlib.suppress(RuntimeError), retrofitted.paused():
        assert "forward" not in vars(rotary)
        raise RuntimeError
    assert "forward" in vars(rotary)
    rotary.forward = mine = rotary.forward
    retrofitted.detach()
    assert "forward" not in vars(rotary) and mine is not None


def test_models_whose_angles_change_with_the_length_are_left_alone():
    from transformers import AutoModelForCausalLM

    config = FAMILIES["llama"]()
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    retrofitted = forgetful(AutoModelForCausalLM.from_config(config).eval())
    assert not retrofitted.endless and "forward" not in vars(retrofitted.model.model.rotary_emb)
    assert not Stream(retrofitted, 1, static_shapes=True).static_shapes  # such keys cannot be kept as they were rotated
