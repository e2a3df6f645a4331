"""The shared test matrix: what every memory system must do, inside the one decoder."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from expire_span.config import DecoderConfig
from expire_span.memories import state_bytes
from expire_span.mixer_configs import mixer_config
from expire_span.models import state as states
from expire_span.models.decoder import Decoder
from expire_span.models.mixer import Mixer, MixerAux, MixerOutput
from expire_span.models.systems import SYSTEMS
from expire_span.models.systems.expire_span import HeadReach


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
    "modern, swiglu": replace(_expire("modern"), activation="swiglu"),
    "paper": _expire("paper"),
    "paper, pre-norm, zero vectors": replace(_expire("paper", initial_memories=8), norm="pre"),
}
SMALL = {kind: system.example for kind, system in SYSTEMS.items() if kind != "expire_span"}
"""Settings so small that each system forgets, compresses or routes within the tests' 60 tokens."""


def small(kind: str, preset: str = "modern", **fields) -> DecoderConfig:
    base = getattr(DecoderConfig, preset)(vocab=40, dim=32, layers=2, heads=4, kv_heads=2, ff_dim=48, relative_window=8)
    return replace(base, mixer=mixer_config(kind, **{**SMALL[kind], **fields}))


OTHERS = {kind: small(kind) for kind in SMALL}
OTHERS |= {f"{kind}, paper": small(kind, "paper") for kind in SMALL if SYSTEMS[kind].scores_pairs}
OTHERS |= {
    f"compressive, {pooling}": small("compressive", pooling=pooling, reconstruction=False)
    for pooling in ("mean", "max")
}
CONFIGS = EXPIRE | OTHERS
GROWING = {name for name, config in CONFIGS.items() if not SYSTEMS[config.mixer.kind].bounded}


def build(name: str) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(CONFIGS[name]).double()
    for block in model.blocks:
        if name in EXPIRE:
            torch.nn.init.normal_(block.mixer.span_predictor.weight, std=0.4)
    return model


@pytest.fixture(params=CONFIGS)
def decoder(request) -> Decoder:
    return build(request.param)


@pytest.fixture(params=EXPIRE)
def expiring(request) -> Decoder:
    return build(request.param)


def tokens(rows=3, count=60, seed=1):
    return torch.randint(0, 40, (rows, count), generator=torch.Generator().manual_seed(seed))


def read(model, x, state=None):
    """In training mode what is kept is hidden states, as the trainer asks for, else keys and values."""
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


def test_the_past_is_read(decoder):
    """Without it, every other test here would pass for a mixer that remembers nothing."""
    decoder.eval()
    x = tokens()
    other = x.clone()
    other[:, 30] = (other[:, 30] + 1) % 40
    with torch.no_grad():
        moved = (stream(decoder, x, 20)[0] - stream(decoder, other, 20)[0]).abs().amax((0, 2))
    assert moved[31] > 1e-6
    assert moved[40:45].max() > 1e-9, "nothing is carried from block to block"


@pytest.mark.parametrize("training", [True, False])
def test_causal(decoder, training):
    decoder.train(training)
    x = tokens()
    other = x.clone()
    other[:, 33:] = (other[:, 33:] + 1) % 40
    torch.testing.assert_close(read(decoder, x)[0][:, :33], read(decoder, other)[0][:, :33], rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [[1] * 20 + [7] * 5 + [5], [23, 37]], ids=["1 and 7", "23+37"])
@pytest.mark.parametrize("training", [True, False])
def test_any_chopping_gives_the_same_outputs(decoder, training, sizes):
    decoder.train(training)
    x = tokens()
    with torch.no_grad():
        whole, chopped = read(decoder, x)[0], stream(decoder, x, sizes)[0]
    torch.testing.assert_close(chopped, whole, rtol=0, atol=1e-11)


def test_gradients_within_the_horizon_do_not_depend_on_how_the_past_was_chopped(decoder):
    decoder.train()
    x = tokens()
    found = []
    for sizes in ([30], [12, 18], [5] * 6):
        with torch.no_grad():
            _, state = stream(decoder, x[:, :30], sizes)
        y, _, aux = read(decoder, x[:, 30:], state)
        loss = F.cross_entropy(y[:, :-1].flatten(0, 1), x[:, 31:].flatten()) + 0.1 * aux.loss
        found.append(torch.autograd.grad(loss, list(decoder.parameters()), allow_unused=True))
    for other in found[1:]:
        for a, b in zip(found[0], other):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_every_parameter_learns(decoder):
    decoder.train()
    x = tokens()
    y, state, aux = read(decoder, x[:, :30])
    y, _, aux = read(decoder, x[:, 30:], state)
    (y.square().mean() + aux.loss).backward()
    idle = [name for name, p in decoder.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert idle == []


@pytest.mark.parametrize("training", [True, False])
def test_rows_are_independent(decoder, training):
    decoder.train(training)
    x = tokens()
    with torch.no_grad():
        together = stream(decoder, x, 30)[0]
        for row in range(2):
            alone = stream(decoder, x[row : row + 1], 30)[0]
            torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-11)


@pytest.mark.parametrize("training", [True, False])
def test_reset_rows_begin_again(decoder, training):
    decoder.train(training)
    x, y = tokens(), tokens(seed=2)
    with torch.no_grad():
        _, state = stream(decoder, x, [31, 29])
        after = stream(decoder, y, [25, 35], decoder.reset_rows(state, torch.tensor([True, False, True])))[0]
        fresh, carried = read(decoder, y)[0], read(decoder, y, state)[0]
    torch.testing.assert_close(after[[0, 2]], fresh[[0, 2]], rtol=0, atol=1e-9)
    torch.testing.assert_close(after[1], carried[1], rtol=0, atol=1e-11)


@pytest.mark.parametrize("training", [True, False])
def test_state_can_be_saved_forked_and_reordered(decoder, training):
    decoder.train(training)
    x, y = tokens(), tokens(seed=2)
    with torch.no_grad():
        _, state = stream(decoder, x, 40)
        want = read(decoder, y, state)[0]
        packed = states.pack(state)
        assert torch.equal(read(decoder, y, states.unpack(*packed))[0], want)
        forked = states.fork(state)
        read(decoder, tokens(seed=3), forked)
        assert torch.equal(read(decoder, y, state)[0], want), "using a state or its fork changed it"
        order = torch.tensor([2, 0, 0])
        swapped = read(decoder, y[order], states.select_rows(state, order))[0]
        torch.testing.assert_close(swapped, want[order], rtol=0, atol=1e-11)


def test_bytes_held_are_what_the_state_occupies(decoder):
    for training in (True, False):
        decoder.train(training)
        with torch.no_grad():
            _, state, aux = read(decoder, tokens())
        tensors = {name: x for name, x in states.pack(state)[0].items() if not name.endswith("evicted")}
        used = sum(x.numel() * x.element_size() for x in tensors.values())
        assert used <= aux.bytes_held <= (3 * used + 200_000 if any(".slots." in name for name in tensors) else used)
        states.map_tensors(state, check_storage)


def check_storage(x):
    """A view of a large tensor would hold all of it."""
    assert x.untyped_storage().nbytes() <= x.numel() * x.element_size() + 64
    return x


@pytest.mark.parametrize("name", OTHERS)
def test_bytes_held_are_those_of_the_formula(name):
    """Exactly so for states of fixed size; stores may hold spare room, and learned spans stay below their limit."""
    decoder = build(name).eval()
    with torch.no_grad():
        _, _, aux = read(decoder, tokens())
    claimed = 3 * state_bytes(decoder.config, 60, element=8)
    if decoder.config.mixer.kind in ("full", "transformer_xl", "adaptive_span", "bigbird", "forgetting"):
        spare = 3 * 2 * 2 * 36 * (2 * 2 * 8 * 8 + 12 + 32)
        assert 0.4 * claimed <= aux.bytes_held <= 2.6 * claimed + spare
    else:
        assert aux.bytes_held == claimed


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in GROWING])
def test_memory_stays_flat_on_a_long_stream(name):
    decoder, held, state = build(name).eval(), [], None
    with torch.no_grad():
        for n in range(12):
            _, state, aux = read(decoder, tokens(count=50, seed=n), state)
            held.append(aux.bytes_held)
    assert max(held[6:]) <= 1.5 * max(held[:3])


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


def test_rebase_changes_nothing(expiring):
    decoder = expiring.eval()
    x, y = tokens(), tokens(seed=2)
    with torch.no_grad():
        _, state = stream(decoder, x, 40)
        moved = [b.mixer.rebase(s, 97) for b, s in zip(decoder.blocks, state)]
        torch.testing.assert_close(read(decoder, y, moved)[0], read(decoder, y, state)[0], rtol=0, atol=1e-6)


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
