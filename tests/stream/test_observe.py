"""What every model of a stream tells of the tokens that it reads is what it computes with."""

from __future__ import annotations

import pytest
import torch

from expire_span.ops.rule import lifetime
from expire_span.stream.decoders import model_of
from tests.stream_cases import build

COUNT = 90
ROUNDING = 1e-5


def retrofitted(family: str, dial: float = 1.0, **settings):
    pytest.importorskip("transformers")
    from tests.hf_models import forgetful, tiny

    made = forgetful(tiny(family), max_span=40, ramp=4, **settings)
    made.dial = dial
    return made


CASES = {
    "layer spans": lambda: build("layer spans"),
    "spans per head": lambda: build("spans per head"),
    "cap": lambda: build("cap"),
    "retrofit": lambda: retrofitted("llama"),
    "first tokens are kept": lambda: retrofitted("llama", keep_first=3),
    "dial": lambda: retrofitted("llama", dial=1.7),
    "windows": lambda: retrofitted("gemma3", keep_first=2),
    "table of positions": lambda: retrofitted("gpt2"),
}


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_spans_are_those_that_the_stores_go_by(case):
    """Each memory in the state has the lifetime that was reported for it, whatever gave it: a prediction, the dial, a window of
    the base model, or that first tokens are kept. Nothing else lives."""
    made = CASES[case]()
    model, tokens = model_of(made), torch.randint(3, 97, (COUNT,), generator=torch.Generator().manual_seed(0))
    ramp = made.config.ramp if hasattr(made, "predictors") else made.config.mixer.ramp
    parts, state = [], None
    for part in tokens.split([40, 1, COUNT - 41]):
        parts.append(found := model.observe(part, state))
        state = found.state
    for n, held in enumerate(memory for memory in (part["memory"] for part in state)):
        span = torch.cat([part.reports[n].span.view(-1, part.logits.shape[0]) for part in parts], -1)
        lives = lifetime(span, ramp)  # [heads, T]
        expected = {(h, t) for h, t in ((lives + torch.arange(COUNT)) > COUNT).nonzero().tolist()}
        alive = (held.remaining(COUNT) > 0).view(len(lives), -1).nonzero().tolist()
        pos, own = held.pos.view(len(lives), -1), lifetime(held.span, held.ramp).view(len(lives), -1)
        stored = {(h, int(pos[h, slot])): float(own[h, slot]) for h, slot in alive}
        assert stored.keys() <= expected and (model.capped or stored.keys() == expected)
        assert 3 < len(stored) < lives.numel() / 2
        assert all(life == float(lives[place]) or life > 2**28 < float(lives[place]) for place, life in stored.items())


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"cap"}))
@torch.inference_mode()
def test_logits_are_those_of_one_pass_and_states_stay(case):
    model, tokens = model_of(CASES[case]()), torch.randint(3, 97, (COUNT,), generator=torch.Generator().manual_seed(0))
    first = model.observe(tokens[:50])
    both = [model.observe(tokens[50:], first.state) for _ in range(2)]
    assert torch.equal(both[0].logits, both[1].logits), "reading on from a state leaves it as it is"
    whole = model.undeleted(tokens[None])[0]
    torch.testing.assert_close(torch.cat([first.logits, both[0].logits]), whole, atol=ROUNDING, rtol=ROUNDING)
    torch.testing.assert_close(both[0].logits[-1:], model.prefill(tokens[None]).logits, atol=ROUNDING, rtol=ROUNDING)
