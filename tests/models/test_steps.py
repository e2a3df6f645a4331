"""Steps without gradients (`begin_steps`): each memory is computed once, and all is as if it were computed at every step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from expire_span.models.policy import Policy
from expire_span.models.systems.expire_span import ExpireSpanConfig, HeadReach, PaperDetails
from expire_span.settings.agent import ObservationField, PolicyConfig
from expire_span.store import NEVER, trim_states
from expire_span.store.steps import StepMemory

ROWS, STEPS = 3, 13
MIXER = ExpireSpanConfig(max_span=9, ramp=3, initial_span=0.5)
CASES = {
    "rotary": (MIXER, {}),
    "no positions, normalised": (MIXER, {"positions": "none", "qk_norm": True}),
    "relative, a span for each head": (
        replace(MIXER, span_per="kv_head"),
        {"positions": "relative", "relative_window": 5},
    ),
    "one head with spans of its own": (
        replace(MIXER, span_per="kv_head", reach=HeadReach(own_heads=1)),
        {"kv_heads": 2},
    ),
    "without itself": (replace(MIXER, paper=PaperDetails(include_self=False, normalizer_eps=0.1)), {}),
}


def build(mixer: ExpireSpanConfig, model: dict) -> Policy:
    torch.manual_seed(0)
    field = ObservationField("value", "numbers", (3,))
    usual = {"dim": 16, "layers": 2, "heads": 4, "ff_dim": 16} | model
    policy = Policy(PolicyConfig.modern(**usual, mixer=mixer, observation=(field,), actions=(3,))).eval()
    with torch.no_grad():
        for block in policy.layers():
            rule: Any = block.mixer.span_predictor
            rule.weight.normal_(std=0.5)
    return policy


def read(policy: Policy, states: list, seen: torch.Tensor, ended: torch.Tensor) -> tuple[list, list]:
    """The values of all steps and the living memories after each, rows beginning anew after the steps marked in `ended`."""
    values, living = [], []
    for x, gone in zip(seen, ended):
        out = policy({"value": x.unsqueeze(1)}, states)
        values.append(out.value)
        living.append([part["memory"].living.tolist() for part in out.state])
        states = policy.reset_rows(out.state, gone)
    return [torch.stack(values), living], states


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_steps_equal_plain_calls(case):
    """Values, living memories and what is kept at the end; twice in a row, with rows that begin anew on the way."""
    policy = build(*CASES[case])
    plain = steps = policy.initial_state(ROWS, "hidden")
    for _ in range(2):
        seen, ended = torch.randn(STEPS, ROWS, 3), torch.rand(STEPS, ROWS) < 0.1
        begun = policy.begin_steps(steps, STEPS)
        assert all(isinstance(part["memory"], StepMemory) for part in begun)
        (values, living), begun = read(policy, begun, seen, ended)
        (wanted, counts), plain = read(policy, plain, seen, ended)
        torch.testing.assert_close(values, wanted, rtol=1e-4, atol=1e-5)
        assert living == counts and any(n < STEPS for n in living[-1][0])
        steps = trim_states(policy.end_steps(begun))
        for one, other in zip(steps, trim_states(plain)):
            (held, pos), (kept, places) = ((s["memory"].hidden, s["memory"].pos) for s in (one, other))
            for row in range(ROWS):
                alive, living_here = pos[row] != NEVER, places[row] != NEVER
                assert torch.equal(pos[row, alive], places[row, living_here])
                torch.testing.assert_close(held[row, alive], kept[row, living_here], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_has_no_such_form_is_played_as_before():
    capped = build(replace(MIXER, cap=4), {})
    state = capped.initial_state(ROWS, "hidden")
    assert not isinstance(capped.begin_steps(state, 3)[0]["memory"], StepMemory)
    begun = build(MIXER, {}).begin_steps(state, 3)[0]["memory"]
    with pytest.raises(ValueError, match="end the steps first"):
        begun.state_dict()
