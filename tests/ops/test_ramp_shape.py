"""Every implementation asks the one rule how memories fade: with half a cosine for a ramp, each agrees with its definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from expire_span.models.stepping import Stepper
from expire_span.models.systems.expire_span import HeadReach
from expire_span.ops import expire_attention, rule
from expire_span.ops.reference import ages
from expire_span.settings.run import DecoderConfig, ExpireSpanConfig
from tests.error_budget import assert_all_within_budget, assert_within_budget, reordered
from tests.operator_cases import Case, as_dtype
from tests.ops.test_triton import run
from tests.stream_cases import build
from tests.triton_interpreter import DEVICE, ON_GPU, PAPER, small_tiles

pytestmark = [pytest.mark.usefixtures("cosine", small_tiles.__name__)]
CASES = {
    "gaps, a store": Case(1, 2, 1, 40, stored=30, dim=32, gaps=True),
    "born on the ramp, no self": Case(1, 2, 2, 35, dim=32, spans="short", per_head=True, options=PAPER),
    "eps": Case(1, 2, 1, 35, stored=20, dim=32, spans="edges", options={"normalizer_eps": 0.1}),
    "relative keys": Case(1, 2, 1, 35, dim=32, gaps=True, relative=12, options={"normalizer_eps": 0.1}),
}


def define_cosine(span: Tensor, age: Tensor, *, ramp: float, include_self: bool) -> Tensor:
    """The weights, [.., T, S]: half a cosine from 1 at age = span to 0 at age = span + ramp."""
    remaining = span.unsqueeze(-2) - age.to(span.dtype)
    visible = age >= 0 if include_self else age > 0
    fading = (1 + torch.cos(math.pi * (remaining / ramp).clamp(-1, 0))) / 2
    on_ramp = (remaining < 0) & (remaining > -ramp)
    return torch.where(visible, torch.where(on_ramp, fading, (remaining >= 0).to(span.dtype)), 0)


@pytest.fixture
def cosine(monkeypatch):
    if ON_GPU:
        pytest.skip("compiled kernels keep the shape with which they were compiled")
    import triton.language as tl

    monkeypatch.setattr(rule, "COSINE", True)
    monkeypatch.setattr("expire_span.ops.triton.rule.COSINE", tl.constexpr(True))
    monkeypatch.setattr("expire_span.ops.reference.expiry_mask", define_cosine)


def assert_same(case: Case, impl: str, dtype: torch.dtype) -> None:
    got = run(case, impl, dtype, device=DEVICE)
    assert_all_within_budget(got, run(case, "reference"), run(case, "reference", torch.float32))
    case = Case(**{**vars(case), "spans": "alive"})  # the same inputs, but nothing fades
    assert not torch.allclose(got["y"], run(case, impl, dtype, device=DEVICE)["y"], atol=1e-3)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("impl", ["chunked", "triton"])
def test_outputs_and_gradients(name, impl):
    assert_same(CASES[name], impl, torch.float32)


def test_outputs_and_gradients_of_the_fused_kernel_of_the_cpu(monkeypatch):
    monkeypatch.setattr("expire_span.ops.problem.FUSED_FROM", 1)
    assert_same(CASES["gaps, a store"], "chunked", torch.float32)


@pytest.mark.parametrize("impl", ["chunked", "triton"])
def test_decoding(impl):
    x = as_dtype(Case(1, 2, 1, 3, stored=60, dim=32, gaps=True).tensors(torch.float32), torch.float32)
    exact, rounded = (
        expire_attention(**as_dtype(x, d), ramp=7.0, impl="reference") for d in (torch.float64, torch.float32)
    )
    assert_within_budget(expire_attention(**x, ramp=7.0, impl=impl), exact, rounded)


@pytest.mark.parametrize("fused", [False, True])
@torch.inference_mode()
def test_steps_over_slots(monkeypatch, fused):
    monkeypatch.setattr("expire_span.models.slot_step.slot_kernel_serves", lambda impl, like: fused)
    shape = dict(dim=32, layers=1, heads=2, ff_dim=32)  # an interpreted step takes its time for each layer and head
    spans = dict(max_span=24, ramp=6, initial_span=0.2, span_per="kv_head")
    mixer = ExpireSpanConfig(**spans, reach=HeadReach(spread=4.0))
    decoder = build(DecoderConfig.modern(**shape, mixer=mixer))
    tokens = torch.randint(256, (1 if fused else 2, 16), generator=torch.Generator().manual_seed(1))
    stepper, found = Stepper(decoder, len(tokens)), []
    for token in tokens.unbind(1):
        found.append(stepper.logits(token).clone())
        stepper.clock.column += 1
        stepper.clock.on_device += 1
    torch.testing.assert_close(torch.stack(found, 1), decoder(tokens)[0], rtol=0, atol=reordered(100, depth=13))


def test_weights_of_the_definition_differ_from_the_line():
    age, span = ages(torch.arange(20), torch.zeros(1, dtype=torch.long), causal=True), torch.tensor([5.0])
    bent = define_cosine(span, age, ramp=7.0, include_self=True)[:, 0]
    line = (1 + (span - age[:, 0]) / 7).clamp(0, 1)
    torch.testing.assert_close(bent, rule.fade(span - age[:, 0], 7.0), rtol=0, atol=1e-6)
    assert (bent - line).abs().max() > 0.05
