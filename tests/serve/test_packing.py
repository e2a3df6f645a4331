"""A second copy of the weights for steps of several rows: the same logits and answers, and nothing is left behind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from expire_span.serve.packing import FEWEST, find_packable, packed
from tests.hf_models import forgetful, tiny

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch has no oneDNN here")
ROWS = (1, FEWEST - 1, FEWEST, 8, 63)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@torch.inference_mode()
def test_a_packed_layer_is_exact_in_float32(rows, bias):
    """Within what float32 allows for sums of 112 terms in any order; bfloat16 would be off by a hundred times as much."""
    torch.manual_seed(rows)
    layer, x = nn.Linear(111, 63, bias=bias), torch.randn(rows, 1, 111)
    exact = copy.deepcopy(layer).double()(x.double())
    plain = layer(x)
    with packed([layer]):
        y = layer(x)
    terms = x.abs() @ layer.weight.abs().T + (layer.bias.abs() if bias else 0)
    assert y.shape == plain.shape and y.dtype == torch.float32
    assert ((y - exact).abs() <= 112 * torch.finfo(torch.float32).eps / 2 * terms).all()
    assert torch.equal(layer(x), plain) and "forward" not in layer.__dict__


def test_only_plain_layers_in_float32_are_packed():
    class Other(nn.Linear):
        pass

    model = nn.ModuleDict({"plain": nn.Linear(8, 8), "other": Other(8, 8), "in_16_bits": nn.Linear(8, 8).bfloat16()})
    model["changed"] = nn.Linear(8, 8)
    model["changed"].forward = lambda x: x
    assert find_packable(model) == [model["plain"]]


def test_layers_are_as_before_after_an_exception():
    layer = nn.Linear(8, 8)
    with pytest.raises(RuntimeError, match="in the middle"), packed([layer]):
        assert "forward" in layer.__dict__
        raise RuntimeError("in the middle")
    assert "forward" not in layer.__dict__


def test_answers_with_packed_weights_are_those_without():
    from tests.serve.test_scheduler import SAMPLINGS, Client, alone, text_of

    handle = forgetful(tiny(), max_span=40, ramp=4)
    draws = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 90, (n,), generator=draws).tolist() for n in (3, 300, 8, 1, 40)]
    wanted = [alone(handle, prompt, 30, sampling) for prompt, sampling in zip(prompts, SAMPLINGS)]
    layers = find_packable(handle)
    assert len(layers) > 10
    with packed(layers):
        client = Client(handle, rows=5)
        asked = [client.ask(prompt, 30, sampling)[1] for prompt, sampling in zip(prompts, SAMPLINGS)]
        assert [text_of(x) for x in asked] == wanted
        client.scheduler.close()
