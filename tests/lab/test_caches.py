"""Rival caches hold what they may, budgets are met by the dial, and differences between books are judged fairly."""

from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from expire_span.hf import RetrofitConfig, retrofit  # noqa: E402
from expire_span.lab.caches.evaluate import (  # noqa: E402
    MOST_DIAL,
    bootstrap,
    count_bytes,
    evaluate,
    find_dial,
    find_right_answers,
    held_bytes,
    method,
    peak_tokens,
    read,
)
from expire_span.lab.caches.questions import make_questions  # noqa: E402
from tests.hf_models import VOCAB, byte_tokenizer, forgetful, tiny, tokens  # noqa: E402


def test_rivals_hold_what_they_may_and_the_full_cache_loses_nothing():
    model = tiny()
    retrofitted = forgetful(model, max_span=40, ramp=4)
    ids = tokens(1, 160)[0]
    with retrofitted.paused(), torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0]
    exact = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    capacity, budget = peak_tokens(retrofitted, 0.25, 160)
    seen = {}
    for name in ("none", "window", "sinks", "knorm", "snap"):
        with method(retrofitted, name, capacity) as new_cache:
            (losses,), (peak,) = read(model, new_cache(), ids[None], 16)
        assert (losses[: capacity - 1] - exact[: capacity - 1]).abs().max() < 1e-5  # until something is evicted
        assert peak == (160 * budget // capacity if name == "none" else budget)
        seen[name] = losses
    assert (seen["none"] - exact).abs().max() < 1e-5
    pairs = [(a, b) for a in seen for b in seen if a < b]
    assert all(not torch.allclose(seen[a], seen[b]) for a, b in pairs)
    assert model.config._attn_implementation == "expire_span"


def test_a_window_method_is_a_window():
    """Evicted token by token, the method window gives what a sliding window of the same size does, layer by layer."""
    model, ids = tiny(), tokens(1, 60)[0]
    retrofitted = retrofit(model, RetrofitConfig(max_span=60, ramp=4))
    with method(retrofitted, "window", 20) as new_cache:
        (losses,), _ = read(model, new_cache(), ids[None], 1)
    retrofitted.detach()
    from transformers import AutoModelForCausalLM, MistralConfig

    twin = AutoModelForCausalLM.from_config(MistralConfig(**(tiny().config.to_dict() | dict(sliding_window=21))))
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        logits = twin.eval()(ids[None], use_cache=False).logits[0]
    want = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    assert (losses - want).abs().max() < 1e-5


def test_a_dial_is_found_where_most_spans_are_far_longer_than_the_documents():
    """Spans of thousands of tokens in 400: at a dial of 0.03 nearly all that lived at 1 still lives."""
    retrofitted, ids = forgetful(tiny(), max_span=20_000, ramp=4), tokens(2, 400)
    for predictor in retrofitted.predictors.values():
        predictor.weight.data *= 4.0
        predictor.bias.data.fill_(-5.0)
    for kept in (False, True):
        count = lambda dial: count_bytes(retrofitted, [ids], 32, dial, kept=kept)  # noqa: B023, E731
        assert count(0.03) > 0.95 * count(1.0)
        for share in (0.85, 0.4, 0.1):
            budget = int(share * count(1.0))
            assert 0.93 * budget < count(find_dial(retrofitted, [ids], budget, 32, kept=kept)) <= budget


def test_the_dial_meets_a_budget():
    retrofitted = forgetful(tiny(), max_span=150, ramp=4)
    ids = tokens(2, 160)
    with method(retrofitted, "expire", 0) as new_cache:
        cache = new_cache()
        _, free = read(retrofitted.model, cache, ids, 16)
    assert torch.equal(held_bytes(cache), sum(x.sum(-1) for x in cache.live()) * (2 * 8 * 4 + 12))
    free = int(free.max())
    for budget in (free // 2, int(1.5 * free)):
        dial = find_dial(retrofitted, [ids], budget, 16)
        with method(retrofitted, "expire", 0, dial) as new_cache:
            _, peak = read(retrofitted.model, new_cache(), ids, 16)
        assert 0.9 * budget < int(peak.max()) <= budget and (dial < 1) == (budget < free) and retrofitted.dial == 1.0
    assert find_dial(retrofitted, [ids], 10 * free, 16) == MOST_DIAL
    assert find_dial(retrofitted, [ids], 1, 16) == 0.0
    for budget in (free // 2, int(1.2 * free)):  # what is kept at the end, on average
        dial = find_dial(retrofitted, [ids, ids[:1]], budget, 16, kept=True)
        kept = count_bytes(retrofitted, [ids, ids[:1]], 16, dial, kept=True)
        with method(retrofitted, "expire", 0, dial) as new_cache:
            read(retrofitted.model, cache := new_cache(), ids, 16)
        one, two = held_bytes(cache).tolist()
        assert kept == (2 * one + two) / 3 and 0.9 * budget < kept <= budget and one != two
    for name, share, said in (
        ("magic", 0.5, "unknown method 'magic'; known are none, window"),
        (
            "expire",
            0.02,
            r"budget of 0.02 leaves 3 memories of a context of 160 tokens, .* expire holds at least 4 \(a ramp",
        ),
        ("sinks", 0.04, "leaves 6 memories of a context of 160 tokens, but the method sinks holds at least 8;"),
    ):
        with pytest.raises(ValueError, match=said):
            evaluate(retrofitted, list(ids), [], [name], [share])


def test_rows_are_evaluated_as_each_alone():
    """What a row gives and holds does not depend on the rows read beside it, whatever the cache."""
    model = tiny()
    retrofitted, ids = forgetful(model, max_span=60, ramp=4), tokens(3, 96)
    questions = make_questions(byte_tokenizer(), [torch.randint(3, VOCAB, (320,)) for _ in range(3)], 3, "pairs")
    questions = [replace(q, context=q.context % VOCAB, question=q.question % VOCAB) for q in questions]
    questions = [replace(q, answer=torch.full_like(q.answer, n)) for n, q in enumerate(questions)]
    for name in ("none", "sinks", "snap", "expire"):
        with method(retrofitted, name, 24) as new_cache:
            losses, peak = read(model, new_cache(), ids, 16)
            for row in range(3):
                alone, held = read(model, new_cache(), ids[row : row + 1], 16)
                assert (alone - losses[row]).abs().max() < 1e-4 and held[0] == peak[row]
            right = find_right_answers(model, new_cache(), questions, 32)
            assert right == [find_right_answers(model, new_cache(), [q], 32)[0] for q in questions]


def test_bootstrap_finds_a_difference_and_only_that():
    ours, theirs = [1.0, 1.1, 0.9, 1.2], [1.5, 1.7, 1.4, 1.8]
    mean, low, high = bootstrap(ours, theirs)
    assert low < mean < high < 0
    _, low, high = bootstrap([1.0, 2.0, 1.0, 2.0], [2.0, 1.0, 2.0, 1.0])
    assert low < 0 < high
