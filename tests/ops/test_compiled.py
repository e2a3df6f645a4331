"""Blocks through torch.compile: the same loss and gradients as without, for sequences that stand alone."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch

from expire_span.models.decoder import Decoder
from expire_span.models.lifetimes import Lifetimes
from expire_span.models.systems import SYSTEMS
from expire_span.models.systems.expire_span import HeadReach
from expire_span.settings.run import ExpireSpanConfig
from expire_span.testing import small_config
from tests.error_budget import DOUBLE
from tests.models.test_mixers import SMALL
from tests.tiny import MIXER


def losses(decoder: Decoder, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss, what is alive, and every gradient where gradients are on."""
    decoder.zero_grad()
    logits, _, aux = decoder(tokens[:, :-1], keep="nothing")
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    if torch.is_grad_enabled():
        (loss + 1e-3 * aux.loss).backward()
    grads = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "live": aux.live, **grads}


def check(kind: str, device: str, **fields) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = (
        small_config(kind)
        if kind in SMALL
        else replace(small_config("full"), mixer=ExpireSpanConfig(**MIXER, **fields))
    )
    dtype = torch.float64 if device == "cpu" else torch.float32  # the GPU's kernels take no float64
    decoder = Decoder(replace(model, layers=1)).to(device, dtype).train()
    for name, p in decoder.named_parameters():
        if "span_predictor.weight" in name:  # zero at the start
            torch.nn.init.normal_(p)
    tokens = torch.randint(0, model.vocab, (2, 97), device=device)
    expected = losses(decoder, tokens)
    decoder.compile_blocks(carry=False)
    found = losses(decoder, tokens)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        rtol, atol = (0.0, DOUBLE) if device == "cpu" else (2e-3, 2e-4)
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@torch.no_grad()
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_count_of_compressive_memories(backend):
    """The compiler has failed on it, where what a row has seen is known to be zero; the whole block takes a minute.

    The short case traces and differentiates as the whole compiler does, and generates no code.
    """
    mixer = Decoder(small_config("compressive")).layers()[0].mixer

    def count(x: torch.Tensor) -> torch.Tensor:
        return mixer._live(torch.zeros(len(x), dtype=torch.int64), x.shape[1])

    x = torch.zeros(2, 97)
    torch.testing.assert_close(torch.compile(count, backend=backend)(x), count(x))


WHOLE_COMPILER = [pytest.param("inductor", stop, marks=pytest.mark.long) for stop in (True, False)]


@pytest.mark.parametrize(("backend", "stop"), [("aot_eager", True), *WHOLE_COMPILER])
def test_compiled_spans_and_their_gradients(backend, stop, monkeypatch):
    """The short case traces and differentiates as the whole compiler does, but generates no C++, which takes a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    check("expire_span", "cpu", span_per="kv_head", reach=HeadReach(stop_gradient=stop))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("outputs", [1, 3, 8])
def test_spans_of_half_precision_states_keep_their_digits(outputs, stop):
    torch.manual_seed(0)
    rules = ExpireSpanConfig(max_span=8192, span_per="kv_head", reach=HeadReach(stop_gradient=stop))
    predictor = Lifetimes(512, outputs, rules).cuda()
    torch.nn.init.normal_(predictor.weight, std=0.05)
    h = torch.randn(2, 300, 512, device="cuda", dtype=torch.bfloat16).requires_grad_()
    direction = torch.randn(2, outputs, 300, device="cuda")
    value = torch.nn.Linear(512, 128, bias=False, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        values, span = torch.compile(predictor.with_values)(h, value)
    loss = (span * direction).sum() + values.float().square().sum()
    grads = torch.autograd.grad(loss, [h, value.weight, predictor.weight, predictor.bias])
    exact, plain = copy.deepcopy(predictor).double(), copy.deepcopy(value).double()
    h64 = h.detach().double().requires_grad_()
    values, want = exact.with_values(h64, plain)
    torch.testing.assert_close(span.double(), want, rtol=1e-4, atol=0.0)
    loss = (want * direction).sum() + values.square().sum()
    expected = torch.autograd.grad(loss, [h64, plain.weight, exact.weight, exact.bias])
    for got, value in zip(grads, expected):
        assert float((got.double() - value).norm() / value.norm()) < 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", sorted(SYSTEMS))
def test_compiled_on_a_gpu(kind):
    check(kind, "cuda")
