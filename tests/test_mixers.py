"""The shared test matrix: what every memory system must do, inside the one decoder."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from expire_span.config import DecoderConfig, ExpireSpanConfig
from expire_span.memories import MEMORIES, state_bytes
from expire_span.mixer_configs import MIXER_CONFIGS, POSITION_FREE, mixer_config
from expire_span.models import state as states
from expire_span.models.adaptive_span import HeadSpans
from expire_span.models.decoder import Decoder
from expire_span.models.mixer import MIXERS
from expire_span.models.span_predictor import ReachPredictor, SpanPredictor


def _expire(preset: str, **fields) -> DecoderConfig:
    base = getattr(DecoderConfig, preset)()
    mixer = replace(base.mixer, max_span=30, ramp=4, initial_span=0.3, **fields)
    return replace(base, vocab=40, dim=32, layers=2, heads=4, kv_heads=2, ff_dim=48, relative_window=8, mixer=mixer)


EXPIRE = {
    "modern": _expire("modern"),
    "modern, span per head": _expire("modern", span_per="kv_head"),
    "modern, heads that share": replace(
        _expire("modern", span_per="kv_head", own_heads=1, initial_spread=9.0, min_span=1.5), kv_heads=4
    ),
    "modern, learned reach": replace(
        _expire("modern", span_per="kv_head", own_heads=1, reach="learned", min_span=1.5), kv_heads=4
    ),
    "modern, L1": _expire("modern", span_loss="l1"),
    "modern, swiglu": replace(_expire("modern"), activation="swiglu"),
    "paper": _expire("paper"),
    "paper, pre-norm, zero vectors": replace(_expire("paper", initial_memories=8), norm="pre"),
}
SMALL = {
    "full": {},
    "transformer_xl": {"span": 11},
    "adaptive_span": {"max_span": 20, "ramp": 3, "initial_span": 0.3},
    "compressive": {"window": 7, "compressed": 5, "rate": 3, "pooling": "conv", "reconstruction": True},
    "sliding_window": {"window": 11},
    "longformer": {"window": 5, "dilation": 3, "dilated_heads": 1, "global_tokens": 3},
    "bigbird": {"block": 4, "window_blocks": 2},
    "linear": {"chunk": 16},
    "performer": {"features": 20, "chunk": 16},
    "routing": {"clusters": 3, "members": 5, "window": 7, "decay": 1.0},
    "reformer": {"buckets": 4, "members": 5},
    "tanh_rnn": {},
    "gru": {"hidden": 24},
    "gru_torch": {},
    "lstm": {},
    "forgetting": {"chunk": 13, "initial_gate": 0.8},
    "streaming_sinks": {"sinks": 3, "window": 7},
}
"""Settings so small that each system forgets, compresses or routes within the tests' 60 tokens."""


def small(kind: str, preset: str = "modern", **fields) -> DecoderConfig:
    base = getattr(DecoderConfig, preset)(vocab=40, dim=32, layers=2, heads=4, kv_heads=2, ff_dim=48, relative_window=8)
    return replace(base, mixer=mixer_config(kind, **{**SMALL[kind], **fields}))


OTHERS = {kind: small(kind) for kind in SMALL}
OTHERS |= {f"{kind}, paper": small(kind, "paper") for kind in SMALL if kind not in POSITION_FREE}
OTHERS |= {
    f"compressive, {pooling}": small("compressive", pooling=pooling, reconstruction=False)
    for pooling in ("mean", "max")
}
CONFIGS = EXPIRE | OTHERS
GROWING = {name for name, config in CONFIGS.items() if not MEMORIES[config.mixer.kind].bounded}


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


def stream(model, x, sizes, state=None):
    outputs = []
    for part in x.split(sizes, 1):
        y, state, _ = model(part, state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def test_every_system_is_in_the_matrix():
    assert {config.mixer.kind for config in CONFIGS.values()} == set(MIXERS) == set(MIXER_CONFIGS) == set(MEMORIES)


def test_an_unknown_mixer_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown mixer 'nothing', known are: expire_span, full, .*streaming_sinks"):
        mixer_config("nothing")


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
    torch.testing.assert_close(decoder(x)[0][:, :33], decoder(other)[0][:, :33], rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [[1] * 20 + [7] * 5 + [5], [23, 37]], ids=["1 and 7", "23+37"])
@pytest.mark.parametrize("training", [True, False])
def test_any_chopping_gives_the_same_outputs(decoder, training, sizes):
    decoder.train(training)
    x = tokens()
    with torch.no_grad():
        whole, chopped = decoder(x)[0], stream(decoder, x, sizes)[0]
    torch.testing.assert_close(chopped, whole, rtol=0, atol=1e-11)


def test_gradients_within_the_horizon_do_not_depend_on_how_the_past_was_chopped(decoder):
    decoder.train()
    x = tokens()
    found = []
    for sizes in ([30], [12, 18], [5] * 6):
        with torch.no_grad():
            _, state = stream(decoder, x[:, :30], sizes)
        y, _, aux = decoder(x[:, 30:], state)
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
    y, state, aux = decoder(x[:, :30])
    y, _, aux = decoder(x[:, 30:], state)
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
        fresh, carried = decoder(y)[0], decoder(y, state)[0]
    torch.testing.assert_close(after[[0, 2]], fresh[[0, 2]], rtol=0, atol=1e-9)
    torch.testing.assert_close(after[1], carried[1], rtol=0, atol=1e-11)


@pytest.mark.parametrize("training", [True, False])
def test_state_can_be_saved_forked_and_reordered(decoder, training):
    decoder.train(training)
    x, y = tokens(), tokens(seed=2)
    with torch.no_grad():
        _, state = stream(decoder, x, 40)
        want = decoder(y, state)[0]
        packed = states.pack(state)
        assert torch.equal(decoder(y, states.unpack(*packed))[0], want)
        forked = states.fork(state)
        decoder(tokens(seed=3), forked)
        assert torch.equal(decoder(y, state)[0], want), "using a state or its fork changed it"
        order = torch.tensor([2, 0, 0])
        swapped = decoder(y[order], states.select_rows(state, order))[0]
        torch.testing.assert_close(swapped, want[order], rtol=0, atol=1e-11)


def test_bytes_held_are_what_the_state_occupies(decoder):
    for training in (True, False):
        decoder.train(training)
        with torch.no_grad():
            _, state, aux = decoder(tokens())
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
        _, _, aux = decoder(tokens())
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
            _, state, aux = decoder(tokens(count=50, seed=n), state)
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
        _, state, _ = decoder(x[:, :-1])
        _, _, aux = decoder(x[:, -1:], state)
        base, read = decoder(x)[0][0, -1], 1
        for n in range(24):
            other = x.clone()
            other[:, n] = (other[:, n] + 1) % 40
            read += int((decoder(other)[0][0, -1] - base).abs().max() > 1e-12)
    assert float(aux.live) == read


def test_rebase_changes_nothing(expiring):
    decoder = expiring.eval()
    x, y = tokens(), tokens(seed=2)
    with torch.no_grad():
        _, state = stream(decoder, x, 40)
        moved = [b.mixer.rebase(s, 97) for b, s in zip(decoder.blocks, state)]
        torch.testing.assert_close(decoder(y, moved)[0], decoder(y, state)[0], rtol=0, atol=1e-6)


def test_noisy_spans_only_shorten_in_training():
    config = CONFIGS["modern"]
    torch.manual_seed(0)
    model = Decoder(replace(config, mixer=replace(config.mixer, noisy=True)))
    x = tokens()
    assert not torch.equal(model.train()(x)[0], model(x)[0])
    assert torch.equal(model.eval()(x)[0], model(x)[0])
    assert torch.equal(model.train()(x)[2].layers[0].span, model(x)[2].layers[0].span), (
        "deletion must see unclamped spans"
    )


def test_layer_drop_passes_hidden_states_through_and_spans_still_age():
    config = replace(CONFIGS["modern"], layer_drop=0.999)
    model = Decoder(config).train()
    x = tokens()
    y, state, _ = model(x)
    torch.testing.assert_close(y, model.head(model.norm(model.embed(x))))
    assert all(0 < int(part["living"].max()) < 50 for part in state)


@pytest.mark.parametrize("name", CONFIGS)
def test_sequences_that_stand_alone_compute_the_same(name):
    torch.manual_seed(0)
    model = Decoder(CONFIGS[name])
    x = tokens()
    torch.testing.assert_close(model(x, remember=False)[0], model(x)[0])


def test_spans_start_at_the_asked_share():
    for share in (0.01, 0.1, 0.9):
        config = replace(CONFIGS["modern"], mixer=replace(CONFIGS["modern"].mixer, initial_span=share))
        span = Decoder(config)(tokens())[2].layers[0].span
        torch.testing.assert_close(span, torch.full_like(span, share * 30))


def test_heads_learn_their_reach():
    """Two heads share theirs out among tokens, up to the longest span; two give it to all."""
    fields = dict(span_per="kv_head", own_heads=2, reach="learned", initial_span=0.2, initial_spread=16.0, min_span=2.0)
    config = replace(CONFIGS["modern"], kv_heads=4, mixer=replace(CONFIGS["modern"].mixer, **fields))
    model = Decoder(config)
    start = torch.tensor([0.8, 0.8 / 16 ** (1 / 3), 0.8 / 16 ** (2 / 3), 0.05]) * 30
    span = model(tokens())[2].layers[0].span  # [B, Hkv, T]
    torch.testing.assert_close(span, start.clamp_min(2)[None, :, None].expand_as(span))
    predictor = model.layers()[0].mixer.span_predictor
    torch.nn.init.normal_(predictor.weight, std=3)
    span = model(tokens())[2].layers[0].span
    spread = span.amax(-1) - span.amin(-1)
    assert spread[:, :2].min() > 0 and spread[:, 2:].max() == 0
    assert span.max() <= 30 and span[:, 2:].min() >= 2


def test_heads_start_apart_and_some_share():
    fields = dict(span_per="kv_head", own_heads=2, initial_span=0.2, initial_spread=16.0)
    config = replace(CONFIGS["modern"], kv_heads=4, mixer=replace(CONFIGS["modern"].mixer, **fields))
    span = Decoder(config)(tokens())[2].layers[0].span  # [B, Hkv, T]
    torch.testing.assert_close(span[0, :, 0], torch.tensor([0.8, 0.2, 0.05, 0.05]) * 30)


@torch.no_grad()
def test_heads_that_share_count_as_many():
    """The loss and the number alive are means over heads, however few rows of spans there are."""
    shared = replace(
        EXPIRE["modern, heads that share"], mixer=replace(EXPIRE["modern, heads that share"].mixer, own_heads=2)
    )
    each = replace(shared, mixer=replace(shared.mixer, own_heads=None))
    for loss in ("l1", "ramp"):
        few, all_heads = (Decoder(replace(c, mixer=replace(c.mixer, span_loss=loss))).double() for c in (shared, each))
        weights = few.state_dict()
        for (
            name,
            value,
        ) in all_heads.state_dict().items():  # the last row four heads are given is the one that two share
            if "span_predictor" in name:
                few_rows = torch.randn_like(weights[name])
                few.state_dict()[name].copy_(few_rows)
                value.copy_(torch.cat([few_rows, few_rows[-1:]]))
            else:
                value.copy_(weights[name])
        got, want = (model.train()(tokens(), remember=False) for model in (few, all_heads))
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[2].loss, want[2].loss)
        torch.testing.assert_close(got[2].live, want[2].live)


def test_a_least_span_is_kept():
    predictor = SpanPredictor(8, 1, ExpireSpanConfig(max_span=100, min_span=5.0, initial_span=0.2))
    span = predictor(torch.randn(2, 3, 8))
    torch.testing.assert_close(span, torch.full_like(span, 20.0))
    torch.nn.init.constant_(predictor.bias, -20)
    torch.testing.assert_close(predictor(torch.randn(2, 3, 8)), torch.full_like(span, 5.0))


def test_a_least_reach_is_kept_and_left_at_once():
    """What leads further down is dropped of the sum over all tokens, not of each: what is left would be noise that leads up."""
    rules = ExpireSpanConfig(max_span=100, min_span=5.0, span_per="kv_head", reach="learned")
    predictor = ReachPredictor(8, 2, 1, rules)
    torch.nn.init.constant_(predictor.ratio, -0.1)
    h, pushes = torch.randn(2, 3, 8), torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(predictor(h), torch.full((2, 2, 3), 5.0))
    for push in (pushes + 3, pushes - 3):  # a step goes against the gradient
        (grad,) = torch.autograd.grad((predictor(h) * push).sum(), predictor.ratio)
        torch.testing.assert_close(grad, (100 * push.sum((0, 2))).clamp_max(0))


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
        y, state, _ = model(x[:, :30])
        z, _, aux = model(x[:, 30:], states.detach(state))
    got = torch.cat([y, z], 1).float()
    if name not in ("routing", "reformer"):  # where a rounding error sends a token elsewhere
        assert (got - want).norm() < 0.03 * want.norm()
    (got.square().mean() + aux.loss.float()).backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_a_closed_head_of_adaptive_span_opens_again_at_once():
    """Pressure on a span that is zero already does not pile up."""
    spans = HeadSpans(2, 100, 0.1)
    optimizer = torch.optim.Adam(spans.parameters(), lr=0.05)

    def press(sign: float, steps: int) -> torch.Tensor:
        for _ in range(steps):
            optimizer.zero_grad()
            (sign * spans(torch.zeros(1, 1, 4)).sum()).backward()
            optimizer.step()
        return spans(torch.zeros(1, 1, 4)).detach()

    assert press(1.0, 300).abs().max() == 0
    assert spans.ratio.min() > -0.5, "momentum carries a ratio a little below zero, no further"
    assert press(-1.0, 20).min() > 0
