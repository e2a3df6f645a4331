"""The decoder in every dtype, with layers that differ, and with tokens it does not know."""

import itertools
from dataclasses import replace

import pytest
import torch

from expire_span import Backbone, BackboneConfig, Decoder, DecoderConfig, ExpireSpan, ExpireSpanConfig
from expire_span.models import decoder as decoder_module
from expire_span.models.encoder import Encoder
from expire_span.models.systems import SYSTEMS
from expire_span.models.systems.recurrent import GRUConfig
from expire_span.models.systems.sliding_window import SlidingWindowConfig
from expire_span.testing import draw_tokens, small_config
from tests.error_budget import DOUBLE

TINY = DecoderConfig.modern(vocab=40, dim=32, layers=2, heads=4, ff_dim=32, mixer=ExpireSpanConfig(max_span=30, ramp=4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["expire_span", "adaptive_span", "full", "transformer_xl"])
def test_models_of_any_dtype_run_and_stream(kind, dtype):
    torch.manual_seed(0)
    model, x = Decoder(small_config(kind)).eval(), draw_tokens()
    with torch.no_grad():
        want = model(x)[0]
        model.to(dtype)
        whole, state = model(x)[0], None
        parts = []
        for piece in x.split(7, 1):
            y, state, _ = model(piece, state)
            parts.append(y)
    assert whole.dtype == dtype
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float64: 2**-24}[dtype]
    budget = 60 * rounding * float(want.abs().max())  # some dozen rounded operations a layer, two layers
    assert float((whole.to(want.dtype) - want).abs().max()) < budget
    assert float((torch.cat(parts, 1).to(want.dtype) - whole.to(want.dtype)).abs().max()) < budget


def test_layers_may_hold_different_memory_systems():
    config = replace(TINY, layers=5, partner=GRUConfig(hidden=16), pattern="ppm")
    kinds = [type(block.mixer).__name__ for block in Decoder(config).layers()]
    assert kinds == ["GRU", "GRU", "ExpireSpan", "GRU", "GRU"]
    for bad in ({"pattern": "pm"}, {"partner": GRUConfig()}, {"pattern": "mx"}):
        with pytest.raises(ValueError, match="pattern"):
            replace(TINY, **bad)


@pytest.mark.parametrize("partner", [GRUConfig(hidden=16), SlidingWindowConfig(window=5)])
def test_a_hybrid_streams_what_it_computes_whole(partner):
    torch.manual_seed(0)
    model = Decoder(replace(TINY, layers=4, partner=partner, pattern="pppm")).double().eval()
    x, state, parts = draw_tokens(), None, []
    with torch.no_grad():
        for piece in x.split([1, 9, 20, 30], 1):
            y, state, aux = model(piece, state)
            parts.append(y)
        torch.testing.assert_close(torch.cat(parts, 1), model(x)[0], rtol=0, atol=DOUBLE)
    assert aux.live.shape == (4,)


def test_tokens_outside_the_vocabulary_are_named():
    with pytest.raises(ValueError, match="tokens must lie between 0 and 39, got 3 to 40"):
        Decoder(TINY)(torch.tensor([[3, 40]]))


def test_every_layer_stands_alone():
    """Built from plain arguments, without a decoder's config; a state of None starts fresh."""
    for kind, system in SYSTEMS.items():
        module, name = system.layer.split(":")
        layer = getattr(__import__(module, fromlist=[name]), name)(32, 4, **system.example)
        y, state, _ = layer(torch.randn(2, 9, 32))
        y, state, aux = layer(torch.randn(2, 1, 32), state)
        assert y.shape == (2, 1, 32) and aux.bytes_held > 0, kind


def test_a_layer_alone_owns_its_relative_positions():
    layer = ExpireSpan(32, 4, max_span=16, ramp=2, positions="relative", relative_window=8, qk_norm=False)
    assert layer.relative_keys is layer.own_relative_keys
    layer(torch.randn(1, 5, 32)).y.square().mean().backward()
    assert float(layer.own_relative_keys.grad.abs().sum()) > 0
    with pytest.raises(ValueError, match="give settings or single fields, got both"):
        ExpireSpan(32, 4, settings=ExpireSpanConfig(), ramp=3)


def test_only_systems_of_the_operator_look_both_ways():
    with pytest.raises(ValueError, match=r"looks both ways, which only .* can do, got gru"):
        Encoder(replace(TINY, mixer=GRUConfig()))
    with pytest.raises(ValueError, match="carries no memory"):
        Encoder(TINY)(draw_tokens(), keep="kv")


def test_an_agent_rolls_out_in_eval_mode_with_states_that_learning_starts_from():
    """Step by step with real deletion, then one block from the stored state: the same outputs, and gradients into old spans."""
    torch.manual_seed(0)
    config = BackboneConfig(dim=16, heads=2, layers=2, ff_dim=16, mixer=ExpireSpanConfig(max_span=12, ramp=3))
    backbone, x = Backbone(config).double(), torch.randn(2, 40, 16, dtype=torch.float64)
    state = backbone.eval().initial_state(2, "hidden")
    with torch.no_grad():
        for n in range(20):
            _, state, _ = backbone(x[:, n : n + 1], state)
        start, steps = state, []
        for n in range(20, 40):
            h, state, aux = backbone(x[:, n : n + 1], state)
            steps.append(h)
    assert float(aux.live.max()) < 15, "nothing was deleted"
    h, _, aux = backbone.train()(x[:, 20:], start)
    torch.testing.assert_close(h, torch.cat(steps, 1), rtol=0, atol=DOUBLE)
    (h.square().mean() + aux.loss).backward()
    assert all(float(block.mixer.span_predictor.weight.grad.abs().sum()) > 0 for block in backbone.layers())


class OnGPU(torch.Tensor):
    """A tensor that says that it lies on a GPU."""

    is_cuda = True


@pytest.fixture
def like_on_a_gpu(monkeypatch):
    """A decoder whose embeddings seem to lie on a GPU, and whose layers change nothing."""
    decoder = Decoder(small_config("expire_span"))
    plain = decoder.embed.forward
    monkeypatch.setattr(decoder_module, "_single_tokens", itertools.count(1))
    monkeypatch.setattr(decoder.embed, "forward", lambda tokens: plain(tokens).as_subclass(OnGPU))
    monkeypatch.setattr(
        decoder.backbone, "forward", lambda x, state, **_: (x.as_subclass(torch.Tensor), state or [], None)
    )
    return decoder


def test_reading_single_tokens_on_a_gpu_recommends_a_stream_once(like_on_a_gpu):
    token = torch.zeros(1, 1, dtype=torch.int64)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"expire_span.Stream\(decoder\)") as told:
        for _ in range(3 * decoder_module.MANY_SINGLE_TOKENS):
            like_on_a_gpu(token, [])
    assert len(told) == 1 and told[0].filename == __file__, "it names the line that called the decoder"


@pytest.mark.parametrize("count, state, learning", [(2, [], False), (1, None, False), (1, [], True)])
def test_other_calls_recommend_no_stream(like_on_a_gpu, recwarn, count, state, learning):
    """Blocks, the first token of a text, and steps that gradients go through."""
    tokens = torch.zeros(1, count, dtype=torch.int64)
    with torch.set_grad_enabled(learning):
        for _ in range(decoder_module.MANY_SINGLE_TOKENS):
            like_on_a_gpu(tokens, state)
    assert not recwarn.list


def test_single_tokens_on_a_cpu_recommend_no_stream(monkeypatch, recwarn):
    monkeypatch.setattr(decoder_module, "_single_tokens", itertools.count(decoder_module.MANY_SINGLE_TOKENS))
    decoder = Decoder(small_config("expire_span")).eval()
    with torch.no_grad():
        decoder(torch.zeros(1, 1, dtype=torch.int64), decoder.initial_state(1))
    assert not recwarn.list
