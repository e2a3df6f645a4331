"""A layer in a model of one's own: what it is given is checked where it enters, in one sentence with both values."""

from __future__ import annotations

import math

import pytest
import torch

from expire_span import Backbone, BackboneConfig, ExpireSpan, ExpireSpanConfig, ExpiringMemory, Sampling

X = torch.ones(2, 5, 16)

OPTIONS = {
    "ramp as text": (dict(ramp="2"), "ramp must be a finite number, got '2'"),
    "endless ramp": (dict(ramp=math.inf), "ramp must be a finite number, got inf"),
    "no span": (dict(max_span=None), "max_span must be a finite number, got None"),
    "unknown word": (dict(span_per="head"), "span_per must be one of layer, kv_head, got 'head'"),
    "unknown positions": (dict(positions="alibi"), "positions must be one of rotary, relative, none, got 'alibi'"),
    "half a head": (dict(heads=2.0), "dim and heads must be whole numbers, got 16 and 2.0"),
}
INPUTS = {
    "no batch": (X[0], r"x must have shape \[B, T, 16\], got \(5, 16\)"),
    "other width": (X[..., :15], r"x must have shape \[B, T, 16\], got \(2, 5, 15\)"),
    "a list": (X.tolist(), r"x must be a tensor \[B, T, 16\], got list"),
    "integers": (X.long(), "x is torch.int64 but the layer's weights are torch.float32; convert one of them"),
    "half precision": (X.bfloat16(), "x is torch.bfloat16 but the layer's weights are torch.float32"),
    "elsewhere": (X.to("meta"), "x is on meta but the layer is on cpu; move one of them"),
}


def build(dim: int = 16, heads: int = 2, **options) -> ExpireSpan:
    return ExpireSpan(dim, heads, **{"max_span": 8, "ramp": 2, **options})


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    options, words = OPTIONS[name]
    with pytest.raises(ValueError, match=words):
        build(**options)


@pytest.mark.parametrize("name", INPUTS)
def test_hidden_states(name):
    x, words = INPUTS[name]
    with pytest.raises(ValueError, match=words):
        build()(x)


def test_autocast_may_mix_dtypes():
    with torch.autocast("cpu", torch.bfloat16):
        assert build()(X.bfloat16()).y.shape == X.shape


def test_states():
    layer = build()
    model = Backbone(BackboneConfig(dim=16, layers=2, heads=2, ff_dim=16, mixer=ExpireSpanConfig(max_span=8, ramp=2)))
    for start in (layer.initial_state, model.initial_state):
        with pytest.raises(ValueError, match="keep must be one of hidden, kv, nothing, got 'all'"):
            start(2, keep="all")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="a whole number of rows, 0 or more, got -1"):
            start(-1)
    with pytest.raises(ValueError, match="keep must be one of hidden, kv, nothing, got 'all'"):
        model(X, keep="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the state is not one that this layer made, got str; begin with None"):
        layer(X, "state")
    with pytest.raises(ValueError, match="the state has 1 layers and the model 2; begin with None"):
        model(X, model(X).state[:1])
    with pytest.raises(ValueError, match=r"fresh must have shape \(2,\), one mark a row, got \(1,\)"):
        model(X, model(X).state, fresh=torch.tensor([True]))


def test_stores():
    """A key of width 1 would be broadcast over the stored ones' width."""
    pos, span, k = torch.arange(3), torch.ones(2, 3), torch.ones(2, 3, 8)
    store = ExpiringMemory.empty(2, ramp=4).append(pos, span, k=k)
    with pytest.raises(ValueError, match=r"k must have shape \(2, 3, 8\), as what is stored, got \(2, 3, 1\)"):
        store.append(pos + 3, span, k=k[..., :1])
    with pytest.raises(ValueError, match=r"positions must be integers, got torch.float32"):
        store.append(pos + 3.5, span, k=k)
    with pytest.raises(ValueError, match="k must be a tensor, got list"):
        store.append(pos + 3, span, k=k.tolist())


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_temperatures(value):
    """With NaN every draw was token 0."""
    with pytest.raises(ValueError, match=f"temperature must be 0 or more and finite, got {value}"):
        Sampling(temperature=value)
