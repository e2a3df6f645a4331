"""The shared test matrix: what every memory system must do, inside the one decoder."""

from dataclasses import replace

import pytest
import torch

from expire_span.memories import state_bytes
from expire_span.models import state as states
from expire_span.models.decoder import Decoder
from expire_span.models.mixer import Mixer, MixerAux, MixerOutput
from expire_span.models.systems import SYSTEMS, mixer_config
from expire_span.models.systems.expire_span import HeadReach
from expire_span.settings.run import DecoderConfig
from expire_span.testing import CHECKS, KEEPS, applies, draw_tokens, small_config
from tests.error_budget import DOUBLE


def _expire(preset: str, initial_memories: int = 0, **fields) -> DecoderConfig:
    base = getattr(DecoderConfig, preset)()
    paper = replace(base.mixer.paper, initial_memories=initial_memories)
    mixer = replace(base.mixer, **SYSTEMS["expire_span"].example, paper=paper, **fields)
    return replace(base, vocab=40, dim=32, layers=2, heads=4, kv_heads=2, ff_dim=48, relative_window=8, mixer=mixer)


EXPIRE = {
    "modern": _expire("modern"),
    "modern, span per head": _expire("modern", span_per="kv_head"),
    "modern, heads that share": replace(
        _expire("modern", span_per="kv_head", reach=HeadReach(own_heads=1, spread=9.0), min_span=1.5), kv_heads=4
    ),
    "modern, learned reach": replace(
        _expire("modern", span_per="kv_head", reach=HeadReach(True, own_heads=1), min_span=1.5), kv_heads=4
    ),
    "modern, born on the ramp": replace(
        _expire("modern", span_per="kv_head", reach=HeadReach(True, 2, shortest_shared=-3.5), min_span=-1.5), kv_heads=4
    ),
    "modern, L1": _expire("modern", span_loss="l1"),
    "modern, swiglu, head gates, no own values": replace(
        _expire("modern", subtract_own=True), activation="swiglu", head_gates=True
    ),
    "paper": _expire("paper"),
    "paper, pre-norm, zero vectors": replace(_expire("paper", initial_memories=8), norm="pre"),
}
SMALL = {kind: system.example for kind, system in SYSTEMS.items() if kind != "expire_span"}
"""Settings so small that each system forgets, compresses or routes within the tests' 60 tokens."""


OTHERS = {kind: small_config(kind) for kind in SMALL}
OTHERS |= {f"{kind}, paper": small_config(kind, "paper") for kind in SMALL if SYSTEMS[kind].scores_pairs}
OTHERS |= {
    f"compressive, {pooling}": small_config("compressive", pooling=pooling, reconstruction=False)
    for pooling in ("mean", "max")
}
CONFIGS = EXPIRE | OTHERS


def build(name: str) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(CONFIGS[name]).double()
    for block in model.blocks:
        if name in EXPIRE:
            torch.nn.init.normal_(block.mixer.span_predictor.weight, std=0.4)
        if CONFIGS[name].head_gates:
            torch.nn.init.normal_(block.mixer.head_gate.weight, std=0.4)
    return model


@pytest.fixture(params=EXPIRE)
def expiring(request) -> Decoder:
    return build(request.param)


tokens = draw_tokens


def read(model, x, state=None):
    """Read x; in training mode the state keeps hidden states, as in training, else keys and values."""
    return model(x, state, keep="hidden" if model.training else "kv")


def stream(model, x, sizes, state=None):
    outputs = []
    for part in x.split(sizes, 1):
        y, state, _ = read(model, part, state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def test_every_system_is_in_the_matrix():
    assert {config.mixer.kind for config in CONFIGS.values()} == set(SYSTEMS)


def test_an_unknown_mixer_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown mixer 'nothing', known are: expire_span, full, .*streaming_sinks"):
        mixer_config("nothing")


def test_a_system_that_is_not_whole_is_refused_when_it_is_built():
    class Half(Mixer):
        def mix(self, x, state):
            return MixerOutput(x, state, MixerAux())

    with pytest.raises(TypeError, match=r"Half.*initial_state.*reset_rows"):
        Half(8)  # type: ignore[abstract]


MATRIX = [
    pytest.param(name, check, keep, id=f"{name}: {check}, {keep}")
    for name, config in CONFIGS.items()
    for check in CHECKS
    for keep in KEEPS
    if applies(check, config.mixer.kind, keep)
]


@pytest.mark.parametrize(("name", "check", "keep"), MATRIX)
def test_the_shared_matrix(name, check, keep):
    CHECKS[check](build(name).train(keep == "hidden"), keep)


@pytest.mark.parametrize("name", OTHERS)
def test_bytes_held_are_those_of_the_formula(name):
    """The formula is exact for states of fixed size; stores may have spare slots, and with learned spans it is an upper
    bound."""
    decoder = build(name).eval()
    with torch.no_grad():
        _, _, aux = read(decoder, tokens())
    claimed = 3 * state_bytes(decoder.config, 60, element=8)
    if decoder.config.mixer.kind in ("full", "transformer_xl", "adaptive_span", "bigbird", "forgetting"):
        spare = 3 * 2 * 2 * 36 * (2 * 2 * 8 * 8 + 12 + 32)
        assert 0.4 * claimed <= aux.bytes_held <= 2.6 * claimed + spare
    else:
        assert aux.bytes_held == claimed


@pytest.mark.parametrize("name", ["full", "transformer_xl", "sliding_window", "streaming_sinks", "bigbird"])
def test_live_is_counted(name):
    """By hand: how many tokens move the last output of one layer when each of them is changed."""
    config = replace(CONFIGS[name], layers=1, kv_heads=4)
    torch.manual_seed(0)
    decoder = Decoder(config).double().eval()
    x = tokens(rows=1, count=25)
    with torch.no_grad():
        _, state, _ = read(decoder, x[:, :-1])
        _, _, aux = read(decoder, x[:, -1:], state)
        base, count = read(decoder, x)[0][0, -1], 1
        for n in range(24):
            other = x.clone()
            other[:, n] = (other[:, n] + 1) % 40
            count += int((read(decoder, other)[0][0, -1] - base).abs().max() > 1e-12)
    assert float(aux.live) == count


def test_layer_drop_passes_hidden_states_through_and_spans_still_age():
    config = replace(CONFIGS["modern"], layer_drop=0.999)
    model = Decoder(config).train()
    x = tokens()
    y, state, _ = read(model, x)
    torch.testing.assert_close(y, model.head(model.backbone.norm(model.embed(x))))
    assert all(0 < int(part["memory"].living.max()) < 50 for part in state)


@pytest.mark.parametrize("name", CONFIGS)
def test_sequences_that_stand_alone_compute_the_same(name):
    torch.manual_seed(0)
    model = Decoder(CONFIGS[name])
    x = tokens()
    torch.testing.assert_close(model(x, keep="nothing")[0], read(model, x)[0])


def test_cap_holds_and_counts():
    config = replace(CONFIGS["modern"], mixer=replace(CONFIGS["modern"].mixer, cap=5, initial_span=0.9))
    model = Decoder(config).eval()
    with torch.no_grad():
        _, state = stream(model, tokens(), 1)
    for part in state:
        assert int(part["memory"].live().max()) <= 5
        assert int(part["memory"].evicted.min()) > 30


@pytest.mark.parametrize(
    "name", [*(kind for kind in SMALL if hasattr(build(kind).blocks[0].mixer, "head_gate")), "modern"]
)
def test_gates_scale_heads_and_start_at_one(name):
    """Closed gates leave nothing of a layer's output; open halfway, as they start, they change nothing."""
    plain, x = build(name).blocks[0].mixer, torch.randn(2, 20, 32, dtype=torch.float64)
    torch.manual_seed(0)
    gated = Decoder(replace(CONFIGS[name], head_gates=True)).double().blocks[0].mixer
    gated.load_state_dict(plain.state_dict(), strict=False)
    plain.eval(), gated.eval()
    torch.testing.assert_close(gated(x)[0], plain(x)[0], rtol=0, atol=DOUBLE)
    torch.nn.init.constant_(gated.head_gate.bias, -1e3)
    assert not gated(x)[0].any()
    with pytest.raises(ValueError, match="without its input x, which their gates need; give head_gates=False"):
        gated.join_heads(x.view(2, 20, 4, 8).transpose(1, 2))


@pytest.mark.parametrize("name", [*SMALL, "modern"])
def test_half_precision_trains_with_carried_memory(name):
    model = build(name).float().train()
    x = tokens()
    with torch.no_grad():
        want = stream(model, x, 30)[0]
    with torch.autocast("cpu", torch.bfloat16):
        y, state, _ = read(model, x[:, :30])
        z, _, aux = read(model, x[:, 30:], states.detach(state))
    got = torch.cat([y, z], 1).float()
    if name not in ("routing", "reformer"):  # where a rounding error sends a token elsewhere
        assert (got - want).norm() < 0.03 * want.norm()
    (got.square().mean() + aux.loss.float()).backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
