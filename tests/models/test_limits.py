"""Each memory system in the limit where it must equal something known."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from expire_span.models.decoder import Decoder
from expire_span.models.lifetimes import REACH_RATE
from expire_span.models.mixer import build_mixer
from expire_span.models.systems import mixer_config
from expire_span.models.systems.compressive.layer import Compressive
from expire_span.models.systems.expire_span import HeadReach
from expire_span.settings.run import DecoderConfig
from tests.error_budget import DOUBLE

BASE = DecoderConfig.modern(vocab=30, dim=32, layers=2, heads=4, kv_heads=2, ff_dim=48)


def decoder(kind, positions="rotary", **fields):
    torch.manual_seed(0)
    config = replace(BASE, positions=positions, relative_window=6, mixer=mixer_config(kind, **fields))
    return Decoder(config).double().eval()


def mixer(kind, base=BASE, **fields):
    torch.manual_seed(0)
    return build_mixer(base.shape(0), mixer_config(kind, **fields)).double().eval()


def same_weights(a, b):
    """Give b the weights that it shares with a."""
    missing = b.load_state_dict(a.state_dict(), strict=False).missing_keys
    assert all(name.split(".")[4] in ("span_predictor", "gate", "pool") for name in missing), missing
    return b


def tokens(count=50, rows=2):
    return torch.randint(0, 30, (rows, count), generator=torch.Generator().manual_seed(3))


def outputs(model, sizes=50):
    state, parts = None, []
    with torch.no_grad():
        for part in tokens().split(sizes, 1):
            y, state, _ = model(part, state)
            parts.append(y)
    return torch.cat(parts, 1)


WIDE = {
    "transformer_xl": {"span": 50},
    "sliding_window": {"window": 50},
    "longformer": {"window": 50, "max_window": 99},
    "longformer, sinks only": {"window": 1, "growth": 1, "global_tokens": 50},
    "bigbird": {"block": 8, "window_blocks": 7},
    "bigbird, first blocks only": {"block": 8, "window_blocks": 1, "global_blocks": 7},
    "streaming_sinks": {"sinks": 4, "window": 46},
    "streaming_sinks, sinks only": {"sinks": 50, "window": 1},
    "compressive": {"window": 50, "rate": 4},
    "compressive, rate 1": {"window": 9, "compressed": 41, "rate": 1},
    "compressive, rate 1, convolution": {"window": 9, "compressed": 41, "rate": 1, "pooling": "conv"},
    "adaptive_span": {"max_span": 100, "initial_span": 1.0},
    "expire_span": {"max_span": 10_000, "initial_span": 0.99},
    "forgetting": {},
}


@pytest.mark.parametrize("positions", ["rotary", "relative"])
@pytest.mark.parametrize("name", WIDE)
def test_what_holds_everything_equals_full_attention(name, positions):
    full = decoder("full", positions)
    other = same_weights(full, decoder(name.split(",")[0], positions, **WIDE[name]))
    if name == "forgetting":  # a gate that never closes
        for block in other.blocks:
            block.mixer.gate.weight.data.zero_()
            block.mixer.gate.bias.data.fill_(50.0)
    torch.testing.assert_close(outputs(other), outputs(full), rtol=0, atol=DOUBLE)
    torch.testing.assert_close(outputs(other, 13), outputs(full), rtol=0, atol=DOUBLE)


@pytest.mark.parametrize("positions", ["rotary", "relative"])
def test_windows_agree(positions):
    """Two independent implementations of the same rule, and two systems without their specialities."""
    fixed = decoder("transformer_xl", positions, span=9)
    want = outputs(fixed)
    for kind, fields in {
        "sliding_window": {"window": 9},
        "streaming_sinks": {"sinks": 0, "window": 9},
        "longformer": {"window": 9, "growth": 1, "global_tokens": 0, "dilation": 1, "dilated_heads": 1},
        "compressive": {"window": 5, "compressed": 4, "rate": 1},
    }.items():
        other = same_weights(fixed, decoder(kind, positions, **fields))
        torch.testing.assert_close(outputs(other), want, rtol=0, atol=DOUBLE)
    assert (want - outputs(same_weights(fixed, decoder("full", positions)))).abs().max() > 1e-3


def test_adaptive_span_with_ratio_one_and_a_hard_edge_equals_the_fixed_span():
    fixed = decoder("transformer_xl", span=9)
    other = same_weights(fixed, decoder("adaptive_span", max_span=8, ramp=1, initial_span=1.0))
    torch.testing.assert_close(outputs(other), outputs(fixed), rtol=0, atol=DOUBLE)


def test_a_learned_reach_that_all_tokens_share_alike_is_adaptive_span():
    """Output, loss and every gradient, whatever the heads' spans are."""
    fields = dict(max_span=20, ramp=4, initial_span=0.25)
    adaptive = decoder("adaptive_span", **fields)
    learned = decoder("expire_span", **fields, span_per="kv_head", reach=HeadReach(True, own_heads=1), span_loss="l1")
    learned.load_state_dict(adaptive.state_dict(), strict=False)
    results = []
    for model in (adaptive, learned):
        for block in model.layers():
            predictor = block.mixer.span_predictor
            steps = torch.linspace(-2, 18, block.mixer.shape.num_kv_heads, dtype=torch.float64)
            if model is adaptive:
                predictor.ratio.data = steps / 20
            else:
                predictor.reach.data = torch.where(steps > 0, torch.log1p(steps.clamp_min(0) / 4) / REACH_RATE, -0.1)
        logits, _, aux = model.train()(tokens(), keep="nothing")
        (logits.square().mean() + aux.loss).backward()
        grads = {name: p.grad for name, p in model.named_parameters() if "span_predictor" not in name}
        # One step of a head's reach weighs L in the one scale, and (ramp + reach) REACH_RATE in the other.
        weight = 20 if model is adaptive else (4 + steps.clamp_min(0)) * REACH_RATE
        spans = [
            getattr(block.mixer.span_predictor, "ratio" if model is adaptive else "reach") for block in model.layers()
        ]
        results.append((logits.detach(), aux.loss.detach(), grads, [p.grad / weight for p in spans]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=DOUBLE)


def test_adaptive_span_is_its_formula():
    """Two heads with different spans, against the dense soft mask."""
    model = mixer("adaptive_span", max_span=20, ramp=4)
    model.span_predictor.ratio.data = torch.tensor([0.2, 0.7], dtype=torch.float64)
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    pos = torch.arange(40)
    q = model.norm_and_rotate(model.split_heads(model.query(x)), pos)
    k, v = (h.repeat_interleave(2, 1) for h in (model.keys(x, pos), model.split_heads(model.value(x))))
    distance = pos[:, None] - pos
    span = (20 * model.span_predictor.ratio).repeat_interleave(2)[:, None, None]
    mask = ((4 + span - distance) / 4).clamp(0, 1) * (distance >= 0)
    weight = mask * (q @ k.transpose(-1, -2) / 8**0.5).exp()
    want = model.join_heads(weight / weight.sum(-1, keepdim=True) @ v)
    out = model(x, model.initial_state(2))
    torch.testing.assert_close(out.y, want, rtol=0, atol=DOUBLE)
    torch.testing.assert_close(out.aux.loss, torch.full((2,), 20 * 0.45, dtype=torch.float64))


def test_dilated_heads_read_every_third_token():
    model = decoder("longformer", window=4, growth=1, dilation=3, dilated_heads=2, global_tokens=0)
    x = tokens(rows=1)
    with torch.no_grad():
        base = model.blocks[0](model.embed(x), None)[0][0, 40]
        read = []
        for n in range(41):
            other = x.clone()
            other[0, n] = (other[0, n] + 1) % 30
            if (model.blocks[0](model.embed(other), None)[0][0, 40] - base).abs().max() > 1e-9:
                read.append(n)
    assert read == [31, 34, 37, 40]


def test_bigbird_reads_its_random_blocks():
    model = mixer("bigbird", block=4, window_blocks=1, global_blocks=0, random_blocks=2)
    own = torch.arange(40)[None]
    chosen = model._blocks(own)[0]
    assert torch.equal(chosen, model._blocks(own)[0]) and bool((chosen[:, 0] == own[0]).all())
    drawn = chosen[5:, 1:]
    assert bool((drawn < own[0, 5:, None]).all()) and len(set(drawn[drawn >= 0].tolist())) > 10
    others = mixer("bigbird", block=4, window_blocks=1, global_blocks=0, random_blocks=2, seed=1)._blocks(own)
    assert not torch.equal(others[0], chosen)


# Pooling


def test_compressive_pools_groups_that_left_the_window():
    """One layer against a dense definition: raw keys inside the border, pooled ones before it."""
    for pooling in ("mean", "max"):
        model = mixer("compressive", window=6, compressed=3, rate=4, pooling=pooling)
        assert isinstance(model, Compressive)
        x = torch.randn(1, 40, 32, dtype=torch.float64)
        y = model(x, model.initial_state(1)).y
        pos = torch.arange(40)
        groups = x.unflatten(1, (10, 4))
        h = groups.mean(2) if pooling == "mean" else groups.amax(2)
        keys = torch.cat([model.keys(x, pos), model.keys(h, pos[3::4])], 2)
        values = torch.cat([model.split_heads(model.value(x)), model.split_heads(model.value(h))], 2)
        seen = torch.zeros(40, 50, dtype=torch.bool)
        for n in range(40):
            border = max(0, (n + 1 - 6) // 4 * 4)
            seen[n, border : n + 1] = True
            seen[n, 40 + max(0, border // 4 - 3) : 40 + border // 4] = True
        q = model.norm_and_rotate(model.split_heads(model.query(x)), pos)
        k, v = (part.repeat_interleave(2, 1) for part in (keys, values))
        want = model.join_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))
        torch.testing.assert_close(y, want, rtol=0, atol=DOUBLE)


def test_reconstruction_trains_the_pooling_alone_and_vanishes_where_nothing_is_lost():
    model = mixer("compressive", window=4, rate=1, pooling="conv", reconstruction=True).train()
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    assert float(model(x, model.initial_state(2)).aux.loss.detach().max()) < 1e-20
    model = mixer("compressive", window=4, rate=4, pooling="conv", reconstruction=True).train()
    loss = model(x, model.initial_state(2)).aux.loss
    assert loss.shape == (2,) and float(loss.detach().min()) > 0
    loss.sum().backward()
    touched = [name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
    assert touched == ["pool.taps"]


# Hashing and clustering


def shared_attention(model, x, *, alone):
    """Dense causal attention over shared queries and keys; `alone`: a token reads itself only where it must."""
    pos = torch.arange(x.shape[1])
    q = model.rotate(F.rms_norm(model.split_heads(model.query(x)), (8,)), pos)
    v = model.split_heads(model.value(x)).repeat_interleave(2, 1)
    mask = torch.zeros(len(pos), len(pos), dtype=torch.float64).masked_fill(pos[:, None] < pos, -torch.inf)
    if alone:
        mask = mask.masked_fill(pos[:, None] == pos, -1e5)
    return model.join_heads(F.scaled_dot_product_attention(q, q, v, attn_mask=mask))


@pytest.mark.parametrize("selection", ["recent", "chunks"])
@pytest.mark.parametrize("training", [True, False])
def test_reformer_with_one_bucket_equals_full_attention_over_shared_keys(selection, training):
    model = mixer("reformer", buckets=1, rounds=2, members=40, selection=selection).train(training)
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    y = model(x, model.initial_state(2)).y
    torch.testing.assert_close(y, shared_attention(model, x, alone=True), rtol=0, atol=DOUBLE)


@pytest.mark.parametrize("selection", ["recent", "top"])
@pytest.mark.parametrize("training", [True, False])
def test_routing_with_one_cluster_equals_full_attention_over_shared_keys(selection, training):
    model = mixer("routing", clusters=1, members=40, window=40, selection=selection).train(training)
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    y = model(x, model.initial_state(2)).y
    torch.testing.assert_close(y, shared_attention(model, x, alone=False), rtol=0, atol=DOUBLE)


def test_a_routed_query_reads_the_last_members_of_its_own_cluster():
    model = mixer("routing", clusters=3, members=4, local_heads=0)
    x = torch.randn(1, 40, 32, dtype=torch.float64)
    pos = torch.arange(40)
    plain = F.rms_norm(model.split_heads(model.query(x)), (8,))
    q, v = model.rotate(plain, pos), model.split_heads(model.value(x)).repeat_interleave(2, 1)
    cluster = torch.einsum("bhtd,hgd->bhtg", plain, model.centroids).argmax(-1)
    same = (cluster.unsqueeze(3) == cluster.unsqueeze(2)) & (pos[:, None] >= pos)
    later = same.flip(3).cumsum(3).flip(3)  # members from each one up to the query
    want = model.join_heads(F.scaled_dot_product_attention(q, q, v, attn_mask=same & (later <= 4)))
    out = model(x, model.initial_state(1))
    torch.testing.assert_close(out.y, want, rtol=0, atol=DOUBLE)
    assert float(out.aux.live) == pytest.approx(float((same & (later <= 4)).sum(-1).double().mean()))


def test_centroids_follow_their_members_in_training_only():
    model = mixer("routing", clusters=3, members=4, decay=0.5)
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    before = model.centroids.clone()
    model(x, model.initial_state(2))
    assert torch.equal(model.centroids, before)
    model.train()(x, model.initial_state(2))
    assert not torch.equal(model.centroids, before)
    torch.testing.assert_close(model.centroids.norm(dim=-1), torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("kind, selection", [("routing", "top"), ("reformer", "chunks")])
def test_the_published_selection_looks_ahead_in_training_only(kind, selection):
    """What docs/memories.md says of them: training leaks, evaluation is causal and streams exactly."""
    fields = {"members": 4, **({"clusters": 3, "decay": 1.0} if kind == "routing" else {"buckets": 4, "rounds": 1})}
    model = decoder(kind, selection=selection, **fields)
    x = tokens()
    other = x.clone()
    other[:, 30:] = (other[:, 30:] + 1) % 30
    for training in (True, False):
        model.train(training)
        with torch.no_grad():
            moved = (model(x)[0] - model(other)[0])[:, :30].abs().max()
        assert (moved > 1e-6) == training
    torch.testing.assert_close(outputs(model, 7), outputs(model), rtol=0, atol=DOUBLE)
