"""Checkpoints of the released code: our decoder must compute their function, block after block.

The other side here is a dense re-computation from the published facts: nothing is ever deleted, all ages are explicit.
"""

import math

import pytest
import torch
from torch.nn import functional as F

from expire_span.models import official
from tests.error_budget import FACTOR, assert_within_budget

SETTINGS = dict(heads=4, block=8, max_span=40, ramp=4, temperature=2.0, layers=3)


def make_checkpoint(pre_norm: bool, dim=32, inner=64, vocab=30, prefix="") -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(7)

    def draw(*shape, std=0.3):
        return torch.randn(*shape, generator=g) * std

    key_pe = draw(1, dim // SETTINGS["heads"], SETTINGS["block"], std=1.0)
    out = {
        "in_emb.weight": draw(vocab, dim, std=1.0),
        "out.out_emb.weight": draw(vocab, dim),
        "out.out_emb.bias": draw(vocab),
    }
    if pre_norm:
        out |= {"out_norm.weight": 1 + draw(dim), "out_norm.bias": draw(dim)}
    for n in range(SETTINGS["layers"]):
        layer = {f"attn.proj_{x}.weight": draw(dim, dim, std=0.15) for x in ("query", "key", "val", "out")}
        layer |= {"attn.attn.key_pe": key_pe}
        layer |= {"attn.attn.expire_span.span_predictor.weight": draw(1, dim, std=1.0)}
        layer |= {"attn.attn.expire_span.span_predictor.bias": draw(1) - 1}
        layer |= {"ff.fc1.weight": draw(inner, dim), "ff.fc1.bias": draw(inner)}
        layer |= {"ff.fc2.weight": draw(dim, inner), "ff.fc2.bias": draw(dim)}
        for norm in ("norm1", "norm2"):
            layer |= {f"{norm}.weight": 1 + draw(dim), f"{norm}.bias": draw(dim)}
        out |= {f"layers.{n}.{name}": x for name, x in layer.items()}
    return {prefix + name: x for name, x in out.items()}


def dense_stream(sd, tokens, pre_norm, spans=None):
    """Log-probabilities and the auxiliary loss of every block, from a dense computation over the whole past.

    The normaliser's 1e-8 is a share of the living memories' softmax: the released code takes it of all that are still
    stored, and when it deletes a dead one depends on its buffers. `spans`: a list that collects the spans of each layer.
    """
    m, ramp, heads = SETTINGS["block"], SETTINGS["ramp"], SETTINGS["heads"]
    h = F.embedding(tokens, sd["in_emb.weight"])
    batch, count, dim = h.shape
    aux = torch.zeros(batch, count // m, dtype=h.dtype)
    age = torch.arange(count)[:, None] - (torch.arange(count + m) - m)[None]  # memories: m zeros, then the tokens
    for n in range(SETTINGS["layers"]):
        w = {name.removeprefix(f"layers.{n}."): x for name, x in sd.items() if name.startswith(f"layers.{n}.")}

        def norm(x, which, w=w):
            return F.layer_norm(x, (dim,), w[f"{which}.weight"], w[f"{which}.bias"])

        past = torch.cat([h.new_zeros(batch, m, dim), h], 1)
        mem, query = (norm(past, "norm1"), norm(h, "norm1")) if pre_norm else (past, h)
        split = lambda x: x.unflatten(-1, (heads, -1)).transpose(1, 2)  # noqa: E731
        q, k, v = (split(x @ w[f"attn.proj_{s}.weight"].T) for x, s in ((query, "query"), (mem, "key"), (mem, "val")))
        predictor = "attn.attn.expire_span.span_predictor"
        logit = mem / SETTINGS["temperature"] @ w[f"{predictor}.weight"][0] + w[f"{predictor}.bias"]
        span = SETTINGS["max_span"] * torch.sigmoid(logit)
        if spans is not None:
            spans.append(span)
        left = span[:, None] - age  # [B, T, S]
        mask = (1 + left / ramp).clamp(0, 1)
        on_ramp = (mask > 0) & (mask < 1)
        aux += (left * on_ramp).sum(-1).unflatten(1, (-1, m)).sum(-1) / ramp / m
        pe = w["attn.attn.key_pe"][0]  # [D, M], entry p is distance M - p
        rel = (q @ pe).gather(-1, (m - age).clamp(0, m - 1).expand(batch, heads, -1, -1))
        score = (q @ k.mT + rel * ((age >= 1) & (age <= m))) / math.sqrt(dim // heads)
        gone = (age <= 0) | (mask == 0)
        share = torch.softmax(score.masked_fill(gone[:, None], -torch.inf), -1) * mask[:, None]
        share = share / (share.sum(-1, keepdim=True) + 1e-8)
        mixed = (share @ v).transpose(1, 2).flatten(2) @ w["attn.proj_out.weight"].T

        def ff(x, w=w):
            return F.relu(x @ w["ff.fc1.weight"].T + w["ff.fc1.bias"]) @ w["ff.fc2.weight"].T + w["ff.fc2.bias"]

        if pre_norm:
            h = h + mixed
            h = h + ff(norm(h, "norm2"))
        else:
            h = norm(h + mixed, "norm1")
            h = norm(h + ff(h), "norm2")
    if pre_norm:
        h = F.layer_norm(h, (dim,), sd["out_norm.weight"], sd["out_norm.bias"])
    return torch.log_softmax(h @ sd["out.out_emb.weight"].T + sd["out.out_emb.bias"], -1), aux


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("pre_norm", [False, True])
def test_streaming_gives_their_log_probabilities_and_auxiliary_loss(pre_norm, training, dtype):
    sd = make_checkpoint(pre_norm)
    tokens = torch.randint(0, 30, (3, 15 * SETTINGS["block"]), generator=torch.Generator().manual_seed(1))
    exact = dense_stream({n: x.double() for n, x in sd.items()}, tokens, pre_norm)
    rounded = dense_stream(sd, tokens, pre_norm)
    decoder = official.load(sd, pre_norm=pre_norm, **SETTINGS).train(training).to(dtype)
    state, logs, losses = decoder.initial_state(3, "hidden" if training else "kv"), [], []
    for block in tokens.split(SETTINGS["block"], 1):
        logits, state, aux = decoder(block, state)
        logs.append(torch.log_softmax(logits, -1))
        losses.append(aux.row_loss)
    for got, *both in zip((torch.cat(logs, 1), torch.stack(losses, 1)), exact, rounded):
        assert_within_budget(got, *both)
    stored = [int(part["memory"].living.max()) if training else len(part["memory"]) for part in state]
    assert max(stored) < 60, "expired memories are still stored"


@pytest.mark.parametrize("pre_norm", [False, True])
def test_no_span_of_this_checkpoint_ends_at_a_whole_step(pre_norm):
    """The auxiliary loss jumps where a memory dies: if rounding decided at which step, no budget could hold."""
    tokens = torch.randint(0, 30, (3, 15 * SETTINGS["block"]), generator=torch.Generator().manual_seed(1))
    exact: list[torch.Tensor] = []
    rounded: list[torch.Tensor] = []
    for dtype, spans in ((torch.float64, exact), (torch.float32, rounded)):
        dense_stream({n: x.to(dtype) for n, x in make_checkpoint(pre_norm).items()}, tokens, pre_norm, spans)
    nearest = min(float((x - x.round()).abs().min()) for x in exact)
    error = max(float((x - y).abs().max()) for x, y in zip(exact, rounded))
    assert nearest > FACTOR * error


def test_prefix_module_is_accepted():
    plain = official.load(make_checkpoint(True), pre_norm=True, **SETTINGS)
    prefixed = official.load(make_checkpoint(True, prefix="module."), pre_norm=True, **SETTINGS)
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), prefixed.state_dict().values()))


def test_bad_checkpoints_are_named():
    sd = make_checkpoint(False)
    with pytest.raises(ValueError, match=r"lacks 1 of .* layers\.1\.ff\.fc1\.bias"):
        official.load({n: x for n, x in sd.items() if n != "layers.1.ff.fc1.bias"}, pre_norm=False, **SETTINGS)
    with pytest.raises(ValueError, match="no place for, first surplus"):
        official.load(sd | {"surplus": torch.ones(1)}, pre_norm=False, **SETTINGS)
    with pytest.raises(ValueError, match="covers 8 distances but block is 16"):
        official.load(sd, pre_norm=False, **(SETTINGS | {"block": 16}))
    with pytest.raises(ValueError, match=r"query.weight must have shape \(32, 32\), got \(16, 32\)"):
        official.load(sd | {"layers.0.attn.proj_query.weight": torch.ones(16, 32)}, pre_norm=False, **SETTINGS)
