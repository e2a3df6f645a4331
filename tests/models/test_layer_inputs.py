"""Layers, models, streams and settings: what they are given is checked where it enters, in one sentence with both values."""

from __future__ import annotations

import dataclasses
import math
import typing

import pytest
import torch

from expire_span import (
    Backbone,
    BackboneConfig,
    Decoder,
    DecoderConfig,
    Encoder,
    ExpireSpan,
    ExpireSpanConfig,
    ExpiringMemory,
    Sampling,
    Stream,
    register,
    sampling,
)
from expire_span.models.mixer import build_mixer
from expire_span.models.state import bytes_of, fork
from expire_span.models.systems import SYSTEMS, LayerShape
from expire_span.settings import agent, gridworld_tasks, models, retrofit, sequence_tasks, text_tasks, train

X = torch.ones(2, 5, 16)

OPTIONS = {
    "ramp as text": (dict(ramp="2"), "ramp must be a whole number, got '2'"),
    "endless ramp": (dict(ramp=math.inf), "ramp must be a whole number, got inf"),
    "no span": (dict(max_span=None), "max_span must be a whole number, got None"),
    "unknown word": (dict(span_per="head"), "span_per must be one of layer, kv_head, got 'head'"),
    "unknown positions": (dict(positions="alibi"), "positions must be one of rotary, relative, none, got 'alibi'"),
    "a span in steps": (dict(initial_span=20), "initial_span must be a share of max_span above 0 and below 1, got 20"),
    "half a head": (dict(heads=2.0), "heads must be a whole number, got 2.0"),
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


def test_a_layer_without_numbers():
    with pytest.raises(ValueError, match="x is on the device meta, which holds no numbers; give it on a CPU or a GPU"):
        build().to("meta")(X.to("meta"))


class Outputs(torch.nn.Module):
    """Gives the layer's outputs alone, as programs to be recorded must."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).y


@pytest.mark.filterwarnings("ignore")  # torch's own, about the recorder that is refused
def test_recorders_of_fixed_shapes_are_refused():
    with pytest.raises(ValueError, match=r"torch\.export records fixed shapes, .*; export keep='nothing', got 'kv'"):
        torch.export.export(Outputs(), (X,))
    with pytest.raises(ValueError, match=r"torch\.jit\.trace cannot record a memory; give the model to torch\.compile"):
        torch.jit.trace(Outputs(), X)


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
    for fresh in ([True, False], torch.ones(2)):
        with pytest.raises(ValueError, match=r"fresh must be a tensor of bool, one mark for each of the 2 rows, got"):
            model(X, fresh=fresh)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", SYSTEMS)
def test_every_memory_system_takes_nothing_and_refuses_other_rows(kind):
    """No rows or no tokens change no state; a state of other rows is refused; inference mode may end between blocks."""
    torch.manual_seed(0)
    layer = build_mixer(LayerShape(16, 2), SYSTEMS[kind].settings(**SYSTEMS[kind].example)).eval()
    x, later = torch.randn(2, 12, 16), torch.randn(2, 3, 16)
    with torch.no_grad():
        state = layer(x).state
        want = layer(later, fork(state)).y
        y, after, aux = layer(x[:, :0], fork(state))
        assert y.shape == (2, 0, 16) and aux.bytes_held == bytes_of(state) and torch.equal(layer(later, after).y, want)
        assert layer(x[:0]).y.shape == (0, 12, 16)
        with pytest.raises(ValueError, match=r"the state holds 2 rows and x has 3; begin with None, or choose rows by"):
            layer(torch.randn(3, 3, 16), state)
    with torch.inference_mode():
        state = layer(x).state
    torch.testing.assert_close(layer(later, state).y, want)


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
    for marks, got in ((torch.ones(3).bool(), r"torch.bool of shape \(3,\)"), (torch.tensor([0, 1]), "torch.int64 of")):
        with pytest.raises(ValueError, match=rf"must be a tensor of bool, one mark for each of the 2 rows, got {got}"):
            store.forget_rows(marks)
    with pytest.raises(ValueError, match=r"the rows to select must lie in 0\.\.1, got -1 to 2"):
        store.select(torch.tensor([2, -1]))
    with pytest.raises(
        ValueError, match=r"k must be one of the fields .*'k': \(2, .*, 8\)}, with its shape, got \(2, 8\)"
    ):
        store.replace_field("k", torch.ones(2, 8))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_temperatures(value):
    """With NaN every draw was token 0."""
    with pytest.raises(ValueError, match=f"temperature must be 0 or more and finite, got {value}"):
        Sampling(temperature=value)


MODEL = DecoderConfig.modern(vocab=16, dim=16, layers=1, heads=2, ff_dim=16, mixer=ExpireSpanConfig(max_span=8, ramp=2))
TOKENS = {
    "a list": ([[1, 2]], r"tokens must be a tensor \[B, T\], got list; convert it"),
    "floats": (torch.ones(2, 3), r"tokens must be integers, got torch.float32; convert them by tokens.long\(\)"),
    "bool": (torch.ones(2, 3, dtype=torch.bool), "tokens must be integers, got torch.bool"),
    "elsewhere": (
        torch.ones(2, 3, dtype=torch.int64, device="meta"),
        "tokens are on meta but the model is on cpu; move one of them",
    ),
    "one row": (
        torch.ones(3, dtype=torch.int64),
        r"tokens must have shape \[B, T\], got \(3,\); one row is tokens\[None\]",
    ),
}


@pytest.mark.parametrize("name", TOKENS)
def test_tokens(name):
    tokens, words = TOKENS[name]
    with pytest.raises(ValueError, match=words):
        Decoder(MODEL)(tokens)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_tokens_of_any_integer_dtype(dtype):
    """Bytes are often held as uint8, which torch's embedding does not take."""
    decoder, tokens = Decoder(MODEL).eval(), torch.tensor([[3, 1, 15]])
    assert torch.equal(decoder(tokens.to(dtype)).logits, decoder(tokens).logits)


def test_models_are_built_from_their_settings():
    for model, wanted in ((Decoder, "DecoderConfig"), (Backbone, "BackboneConfig")):
        for given in ("recall", None, ExpireSpanConfig()):
            with pytest.raises(ValueError, match=rf"built from a {wanted}, got .*; give {model.__name__}\({wanted}\("):
                model(given)  # type: ignore[arg-type]


def test_streams():
    decoder = Decoder(MODEL)
    for given in ("recall", None, MODEL, torch.nn.Linear(2, 2), Encoder(MODEL)):  # an encoder would read ahead
        with pytest.raises(
            ValueError, match=rf"a stream runs a Decoder or a Retrofit, got {type(given).__name__}; give"
        ):
            Stream(given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows must be a whole number of at least 1, got '2'"):
        Stream(decoder, rows="2")  # type: ignore[arg-type]
    stream = Stream(decoder, rows=2)
    for prompts in ("hello", b"\1\2", None):
        with pytest.raises(
            ValueError, match=r"read takes a list of prompts, one for each row, got .*; give \[prompt\]"
        ):
            stream.read(prompts)  # type: ignore[arg-type]
    for prompt in ("hello", None, [[1], [2, 3]]):
        with pytest.raises(
            ValueError, match=r"a prompt must be bytes, a list of integers .* for row 0; text is encoded"
        ):
            stream.read([prompt])  # type: ignore[arg-type]
    stream.read([[1], [2]])
    with pytest.raises(ValueError, match=r"sampling must be a Sampling, got 0\.8; give Sampling\("):
        stream.generate(0.8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"max_tokens must be a whole number, 0 or more, got 1\.5"):
        stream.generate(max_tokens=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"row must be a whole number in 0\.\.1, got 'a'"):
        stream.join([1], "a")  # type: ignore[arg-type]


SETTINGS = {
    "a word": ("gru", r"mixer must be a settings object, got 'gru'; give .*\.recurrent\.GRUConfig\(\.\.\.\)$"),
    "a class": (ExpireSpanConfig, r"got <class .*; give .*\.ExpireSpanConfig\(\.\.\.\)$"),
    "nothing": (None, r"got None; give .*ExpireSpanConfig\(\.\.\.\), for example"),
    "a table": ({"kind": "gru"}, r"got \{'kind': 'gru'\}; give"),
}


def test_layers_and_the_registry_take_their_own_kind():
    with pytest.raises(ValueError, match="settings of ExpireSpan must be a ExpireSpanConfig, got 'gru'"):
        ExpireSpan(16, 2, settings="gru")
    with pytest.raises(ValueError, match="register takes a MemorySystem, got 'gru'"):
        register("gru")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_memory_systems(name):
    given, words = SETTINGS[name]
    with pytest.raises(ValueError, match=words):
        DecoderConfig(mixer=given)


def test_every_field_of_every_config_refuses_what_it_cannot_hold():
    """Each was a TypeError of a comparison inside, or was accepted and failed later."""
    classes = [system.settings for system in SYSTEMS.values()]
    for module in (agent, gridworld_tasks, models, retrofit, sampling, sequence_tasks, text_tasks, train):
        classes += [x for x in vars(module).values() if dataclasses.is_dataclass(x) and x.__module__ == module.__name__]
    plain = [cls for cls in dict.fromkeys(classes) if all(_has_default(field) for field in dataclasses.fields(cls))]
    assert len(plain) > 40
    for cls in plain:
        for name, hint in typing.get_type_hints(cls).items():
            for value in ("x", ["x"], object()) if hint is not str else (3, ["x"], object()):
                with pytest.raises(ValueError, match=rf"^{name} must be .*, got "):
                    cls(**{name: value})


def _has_default(field: dataclasses.Field) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def test_a_config_derived_outside_is_checked_too():
    @dataclasses.dataclass(frozen=True)
    class Mine(ExpireSpanConfig):
        own: int = 3

    assert Mine(own=4).own == 4
    with pytest.raises(ValueError, match=r"own must be a whole number, got 2\.5"):
        Mine(own=2.5)  # type: ignore[arg-type]
