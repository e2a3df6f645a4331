"""The shared test matrix: what every memory system must do, inside the one decoder."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from expire_span.config import DecoderConfig
from expire_span.models import state as states
from expire_span.models.decoder import Decoder


def _expire(preset: str, **fields) -> DecoderConfig:
    base = getattr(DecoderConfig, preset)()
    mixer = replace(base.mixer, max_span=60, ramp=4, initial_span=0.3, **fields)
    return replace(base, vocab=40, dim=32, layers=2, heads=4, kv_heads=2, ff_dim=48, relative_window=8, mixer=mixer)


CONFIGS = {
    "modern": _expire("modern"),
    "modern, span per head": _expire("modern", span_per="kv_head"),
    "modern, L1": _expire("modern", span_loss="l1"),
    "modern, swiglu": replace(_expire("modern"), activation="swiglu"),
    "modern, short convolution": replace(_expire("modern"), short_conv=4),
    "paper": _expire("paper"),
    "paper, pre-norm, zero vectors": replace(_expire("paper", initial_memories=8), norm="pre"),
}


@pytest.fixture(params=CONFIGS)
def decoder(request) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(CONFIGS[request.param]).double()
    for block in model.blocks:
        torch.nn.init.normal_(block.mixer.span_predictor.weight, std=0.4)
        if block.conv is not None:
            torch.nn.init.normal_(block.conv.taps, std=0.3)
    return model


def tokens(rows=3, count=120, seed=1):
    return torch.randint(0, 40, (rows, count), generator=torch.Generator().manual_seed(seed))


def stream(model, x, sizes, state=None):
    outputs = []
    for part in x.split(sizes, 1):
        y, state, _ = model(part, state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("training", [True, False])
def test_causal(decoder, training):
    decoder.train(training)
    x = tokens()
    other = x.clone()
    other[:, 70:] = (other[:, 70:] + 1) % 40
    torch.testing.assert_close(decoder(x)[0][:, :70], decoder(other)[0][:, :70], rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [[1] * 120, [7] * 17 + [1], [50, 70], [120]], ids=["1", "7", "50+70", "120"])
@pytest.mark.parametrize("training", [True, False])
def test_any_chopping_gives_the_same_outputs(decoder, training, sizes):
    decoder.train(training)
    x = tokens()
    whole, chopped = decoder(x)[0], stream(decoder, x, sizes)[0]
    torch.testing.assert_close(chopped, whole, rtol=0, atol=1e-11)


def test_gradients_within_the_horizon_do_not_depend_on_how_the_past_was_chopped(decoder):
    decoder.train()
    x = tokens()
    found = []
    for sizes in ([60], [20, 40], [5] * 12):
        with torch.no_grad():
            _, state = stream(decoder, x[:, :60], sizes)
        y, _, aux = decoder(x[:, 60:], state)
        loss = F.cross_entropy(y[:, :-1].flatten(0, 1), x[:, 61:].flatten()) + 0.1 * aux.loss
        found.append(torch.autograd.grad(loss, list(decoder.parameters()), allow_unused=True))
    for other in found[1:]:
        for a, b in zip(found[0], other):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_every_parameter_learns(decoder):
    decoder.train()
    x = tokens()
    y, state, aux = decoder(x[:, :60])
    y, _, aux = decoder(x[:, 60:], state)
    (y.square().mean() + aux.loss).backward()
    idle = [name for name, p in decoder.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert idle == []


@pytest.mark.parametrize("training", [True, False])
def test_rows_are_independent(decoder, training):
    decoder.train(training)
    x = tokens()
    together = stream(decoder, x, 30)[0]
    for row in range(3):
        alone = stream(decoder, x[row : row + 1], 30)[0]
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-11)


@pytest.mark.parametrize("training", [True, False])
def test_reset_rows_begin_again(decoder, training):
    decoder.train(training)
    x, y = tokens(), tokens(seed=2)
    _, state = stream(decoder, x, 40)
    after = decoder(y, decoder.reset_rows(state, torch.tensor([True, False, True])))[0]
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
        tensors = states.pack(state)[0]
        used = sum(x.numel() * x.element_size() for name, x in tensors.items() if ".slots." in name)
        assert used <= aux.bytes_held <= 3 * used + 200_000


def test_memory_stays_flat_on_a_long_stream(decoder):
    decoder.eval()
    held = []
    state = None
    with torch.no_grad():
        for n in range(12):
            _, state, aux = decoder(tokens(count=100, seed=n), state)
            held.append(aux.bytes_held)
    assert max(held[6:]) <= 1.5 * max(held[:3])


def test_rebase_changes_nothing(decoder):
    decoder.eval()
    x, y = tokens(), tokens(seed=2)
    with torch.no_grad():
        _, state = stream(decoder, x, 40)
        moved = [_rebase(b.mixer, s, 97) for b, s in zip(decoder.blocks, state)]
        torch.testing.assert_close(decoder(y, moved)[0], decoder(y, state)[0], rtol=0, atol=1e-6)


def _rebase(mixer, state, offset):
    return {**state, "mixer": mixer.rebase(state["mixer"], offset)} if "mixer" in state else mixer.rebase(state, offset)


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
    assert all(0 < len(part["memory"]) < 100 for part in state)


def test_spans_start_at_the_asked_share():
    for share in (0.01, 0.1, 0.9):
        config = replace(CONFIGS["modern"], mixer=replace(CONFIGS["modern"].mixer, initial_span=share))
        span = Decoder(config)(tokens())[2].layers[0].span
        torch.testing.assert_close(span, torch.full_like(span, share * 60))


def test_cap_holds_and_counts():
    config = replace(CONFIGS["modern"], mixer=replace(CONFIGS["modern"].mixer, cap=5, initial_span=0.9))
    model = Decoder(config).eval()
    with torch.no_grad():
        _, state = stream(model, tokens(), 1)
    for part in state:
        assert int(part["memory"].live().max()) <= 5
        assert int(part["memory"].evicted.min()) > 50
