"""Every causal family of the installed transformers works as the definition says, or is refused, as docs/families.md says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from expire_span.hf import attention, layouts, retrofit
from tests.families_page import PAGE, read_page
from tests.hf_families import REFUSED, UNTRIED, WORKS, Outcome, families, outcome, tiny_model

REPRESENTATIVE = (
    "gpt_oss",  # sinks, windows in every other layer
    "gemma2",  # soft caps, windows
    "smollm3",  # layers without rotary positions
    "qwen3_moe",
    "phi3",  # one projection for queries, keys and values
    "olmo2",
    "qwen3_next",  # recurrent layers
    "falcon_h1",  # recurrent states beside attention
)
VERSION, LISTED = read_page(PAGE.read_text(encoding="utf-8"))
HERE = set(families())


@pytest.mark.parametrize("kind", [kind for kind in REPRESENTATIVE if kind in HERE])
def test_representative_families(kind):
    _check(outcome(kind))


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(HERE - set(REPRESENTATIVE)))
def test_every_other_family(kind):
    _check(outcome(kind))


def _check(found: Outcome) -> None:
    """In the version that the page was written with, it is right; in another one, what works there works here."""
    told = LISTED.get(found.kind)
    if transformers.__version__ == VERSION:
        assert told is not None and (found.verdict, found.said) == (told.verdict, told.said)
    elif told is not None and found.verdict != UNTRIED:
        assert found.verdict == told.verdict or told.verdict != WORKS, found.said


def test_the_page_lists_every_family():
    if transformers.__version__ == VERSION:
        assert set(LISTED) == HERE
    counted = re.search(r"(\d+) modelling files work", PAGE.read_text(encoding="utf-8"))
    assert counted is not None and int(counted[1]) >= 40
    assert {LISTED[kind].verdict for kind in REPRESENTATIVE} == {WORKS}
    assert all(o.said for o in LISTED.values() if o.verdict == REFUSED)


def _without(name: str, monkeypatch) -> None:
    """Retrofits ignore one argument of the attention interface."""
    true = attention.attend

    def attend(*args, **kwargs):
        return true(*args, **{n: x for n, x in kwargs.items() if n != name})

    monkeypatch.setattr(attention, "attend", attend)


@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [("gpt_oss", "s_aux", torch.float32), ("gemma2", "softcap", torch.float32), ("llama", "scaling", torch.float32)]
    + [("gpt_oss", "s_aux", torch.bfloat16)],
)
def test_a_retrofit_that_would_change_the_model_is_refused(kind, name, dtype, monkeypatch):
    model, ids = tiny_model(kind).to(dtype), torch.arange(4, 40)[None]
    if name == "scaling":
        for layer in model.model.layers:
            layer.self_attn.scaling *= 0.7
    with torch.no_grad():
        before = model(ids).logits
        _without(name, monkeypatch)
        with pytest.raises(
            ValueError, match="would not be the same model with spans: read at once, its logits differ by 0"
        ):
            retrofit(model)
        assert torch.equal(model(ids).logits, before)
    assert not any(m._forward_pre_hooks for m in model.modules()) and not hasattr(model, "_expire_span_retrofit")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_that_is_overlooked_is_refused(dtype, monkeypatch):
    true = layouts._describe
    monkeypatch.setattr(layouts, "_describe", lambda call: replace(true(call), window=None))
    with pytest.raises(ValueError, match="would not be the same model with spans: read at once"):
        retrofit(tiny_model("gemma3_text").to(dtype))


def test_in_few_bits_a_models_own_rounding_is_the_measure(monkeypatch):
    """Trained models amplify rounding: with 8-bit weights one pass and chunks differ by 0.2, and single tokens go astray."""
    noise, token = 0.0, None

    def coarse(model, args, kwargs, out):
        count = out.logits.shape[1]
        off = noise * torch.randn(out.logits.shape, generator=torch.Generator().manual_seed(count)) * out.logits.std()
        if token is not None and count > token:
            off[:, token] += 5 * out.logits.std() * (1 if hasattr(model, "_expire_span_retrofit") else -1)
        out.logits = out.logits + off.to(out.logits.dtype)

    def fits(amount, place, dtype=torch.bfloat16):
        nonlocal noise, token
        noise, token = amount, place
        model = tiny_model("llama").to(dtype)
        model.register_forward_hook(coarse, with_kwargs=True)
        retrofit(model).detach()

    fits(0.0, 1)
    fits(0.15, None)
    with pytest.raises(ValueError, match="cannot read in chunks"):
        fits(0.4, None)
    with pytest.raises(ValueError, match=r"would not be the same|cannot read in chunks"):
        fits(0.0, 1, torch.float32)


@pytest.mark.skipif("bamba" not in HERE, reason="this version has no such family")
def test_a_model_that_reads_chunks_inexactly_is_refused_as_such():
    with pytest.raises(
        ValueError, match=r"bamba. cannot read in chunks, as a retrofit does: without spans, through its own cache"
    ):
        retrofit(tiny_model("bamba"))


def test_pictures_are_refused():
    retrofitted = retrofit(tiny_model("llama"))
    with pytest.raises(ValueError, match="reads text only, got pixel_values; leave it out"):
        retrofitted.model(torch.arange(4, 9)[None], pixel_values=torch.zeros(1, 3, 8, 8))
