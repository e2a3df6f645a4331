"""Distillation meets its budget, goes on where it stopped, and the commands around it work end to end."""

import json
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from expire_span.cli import main  # noqa: E402
from expire_span.hf import RetrofitConfig, load_adapter, retrofit  # noqa: E402
from expire_span.hf.evaluate import (  # noqa: E402
    MOST_DIAL,
    answers,
    bootstrap,
    evaluate,
    find_dial,
    held_bytes,
    method,
    peak_tokens,
    read,
)
from expire_span.hf.questions import make_questions  # noqa: E402
from expire_span.hf.settings import DistillConfig  # noqa: E402
from expire_span.train.distill import Learner, distill, kl_divergence  # noqa: E402

from .hf_models import VOCAB, byte_tokenizer, forgetful, model_folder, text, tiny, tokens  # noqa: E402

SMALL = dict(context=64, block=32, batch=2, checkpoint_every=4, lr=0.02)


def documents():
    return list(tokens(4, 80))


def test_it_learns_to_meet_the_budget(tmp_path):
    model = tiny()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    handle = retrofit(model, RetrofitConfig(max_span=64, ramp=4))
    result = distill(
        handle, documents(), DistillConfig(budget=0.5, steps=36, gain=0.4, **SMALL | dict(lr=0.06)), tmp_path / "run"
    )
    assert 20 < result["live"] < 44, result  # the target is 32 of 64
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 36 and lines[0]["live"] == 64 and lines[0]["kl"] < 1e-6 < lines[-1]["kl"]
    handle.detach()
    assert load_adapter(model, tmp_path / "run" / "adapter").config.max_span == 64


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path):
    settings = DistillConfig(budget=0.5, steps=8, **SMALL)

    class Stop(Exception):
        pass

    def stop(line):
        if line["step"] == 6:
            raise Stop

    def run(folder, progress=None):
        handle = retrofit(tiny(), RetrofitConfig(max_span=64, ramp=4))
        distill(handle, documents(), settings, folder, progress)
        return handle.predictors.state_dict()

    whole = run(tmp_path / "whole")
    with pytest.raises(Stop):
        run(tmp_path / "cut", stop)
    resumed = run(tmp_path / "cut")
    assert all(torch.equal(x, whole[name]) for name, x in resumed.items())
    steps = [json.loads(line)["step"] for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 9))
    with pytest.raises(ValueError, match="was begun with steps 8, got 9"):
        handle = retrofit(tiny(), RetrofitConfig(max_span=64, ramp=4))
        distill(handle, documents(), DistillConfig(budget=0.5, steps=9, **SMALL), tmp_path / "cut")


def test_spans_of_earlier_blocks_still_learn():
    """Gradients of contexts read in blocks are those of the context read at once, but for the frozen states between."""
    model = tiny()
    handle = forgetful(model, max_span=40, ramp=8)
    model.requires_grad_(False)
    ids = tokens(2, 60)
    out = []
    for sizes in ([60], [20, 20, 20]):
        cache = handle.new_cache(learning=True)
        logits = [model(part, past_key_values=cache).logits for part in ids.split(sizes, 1)]
        torch.cat(logits, 1)[:, 40:].square().mean().backward()
        last = handle.predictors["1"].weight.grad.clone()  # the last layer's: nothing behind it is cut off
        handle.predictors.zero_grad()
        out.append((torch.cat(logits, 1).detach(), last))
    assert (out[0][0] - out[1][0]).abs().max() < 1e-5
    assert torch.allclose(out[0][1], out[1][1], rtol=1e-3, atol=1e-6) and out[0][1].abs().max() > 1e-4


def test_the_divergence_and_its_gradient():
    """In more pieces than one, and against torch's own; only the student gets a gradient."""
    torch.manual_seed(0)
    wanted, given = torch.randn(3, 700, 11, dtype=torch.float64), torch.randn(3, 700, 11, requires_grad=True)
    loss = kl_divergence(wanted.float(), given)
    (2 * loss).backward()
    twin = given.detach().double().requires_grad_()
    each = torch.nn.functional.kl_div(twin.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="none")
    (2 * each.sum(-1).mean()).backward()
    assert abs(float(loss) - float(each.sum(-1).mean())) < 1e-5
    assert (given.grad - twin.grad).abs().max() < 1e-9


def test_the_rate_falls_at_the_end_and_the_budget_at_the_beginning():
    handle = retrofit(tiny(), RetrofitConfig(max_span=64, ramp=4))
    learner = Learner(handle, documents(), DistillConfig(budget=0.25, anneal=0.5, decay=0.5, **SMALL))
    for share, rate, target in ((0.0, 0.02, 64), (0.25, 0.02, 32), (0.5, 0.02, 16), (0.75, 0.01, 16), (1.0, 1e-3, 16)):
        learner.set_rate(share)
        assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        assert learner.target_at(share) == pytest.approx(target)


def test_budgets_in_shares_tokens_and_bytes():
    handle = retrofit(tiny(), RetrofitConfig(max_span=64, ramp=8))
    per_token = handle.bytes_per_token
    assert per_token == 2 * 2 * (2 * 8 * 4 + 12)  # layers, heads, keys and values of 8 float32, span and position
    for given in (dict(budget=0.5), dict(budget_tokens=32), dict(budget_bytes=32 * per_token)):
        assert DistillConfig(**given, **SMALL).target(8, per_token) == 32
    for given, said in (
        (dict(budget=1.5), r"must lie in \(0, 1\], got 1.5"),
        (dict(), "give one of budget, budget_tokens and budget_bytes, got none"),
        (dict(budget=0.5, budget_tokens=3), "give one of budget"),
        (dict(budget_tokens=100), "more than the context of 64 tokens"),
        (dict(budget=0.05), "so 8 is the least budget, got 3.2 memories; give more, or a shorter ramp"),
    ):
        with pytest.raises(ValueError, match=said):
            Learner(handle, documents(), DistillConfig(**given, **SMALL))
    with pytest.raises(ValueError, match="every layer of MistralForCausalLM has a window of its own"):
        Learner(retrofit(tiny("mistral")), documents(), DistillConfig(budget=0.5, **SMALL))
    with pytest.raises(ValueError, match="no document has a context of 64 tokens, the longest has 9"):
        Learner(handle, [torch.arange(9)], DistillConfig(budget=0.5, **SMALL))


# Evaluation


def test_rivals_hold_what_they_may_and_the_full_cache_loses_nothing():
    model = tiny()
    handle = forgetful(model, max_span=40, ramp=4)
    ids = tokens(1, 160)[0]
    with handle.paused(), torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0]
    exact = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    capacity, budget = peak_tokens(handle, 0.25, 160)
    seen = {}
    for name in ("none", "window", "sinks", "knorm", "snap"):
        with method(handle, name, capacity) as new_cache:
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
    handle = retrofit(model, RetrofitConfig(max_span=60, ramp=4))
    with method(handle, "window", 20) as new_cache:
        (losses,), _ = read(model, new_cache(), ids[None], 1)
    handle.detach()
    from transformers import AutoModelForCausalLM, MistralConfig

    twin = AutoModelForCausalLM.from_config(MistralConfig(**(tiny().config.to_dict() | dict(sliding_window=21))))
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        logits = twin.eval()(ids[None], use_cache=False).logits[0]
    want = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    assert (losses - want).abs().max() < 1e-5


def test_the_dial_meets_a_budget():
    handle = forgetful(tiny(), max_span=150, ramp=4)
    ids = tokens(2, 160)
    with method(handle, "expire", 0) as new_cache:
        cache = new_cache()
        _, free = read(handle.model, cache, ids, 16)
    assert torch.equal(held_bytes(cache), sum(x.sum(-1) for x in cache.live()) * (2 * 8 * 4 + 12))
    free = int(free.max())
    for budget in (free // 2, int(1.5 * free)):
        dial = find_dial(handle, [ids], budget, 16)
        with method(handle, "expire", 0, dial) as new_cache:
            _, peak = read(handle.model, new_cache(), ids, 16)
        assert 0.9 * budget < int(peak.max()) <= budget and (dial < 1) == (budget < free) and handle.dial == 1.0
    assert find_dial(handle, [ids], 10 * free, 16) == MOST_DIAL
    with pytest.raises(ValueError, match="unknown method 'magic'; known are none, window"):
        evaluate(handle, list(ids), [], ["magic"], [0.5])


def test_rows_are_evaluated_as_each_alone():
    """What a row gives and holds does not depend on the rows read beside it, whatever the cache."""
    model = tiny()
    handle, ids = forgetful(model, max_span=60, ramp=4), tokens(3, 96)
    questions = make_questions(byte_tokenizer(), [torch.randint(3, VOCAB, (320,)) for _ in range(3)], 3, "pairs")
    questions = [replace(q, context=q.context % VOCAB, question=q.question % VOCAB) for q in questions]
    questions = [replace(q, answer=torch.full_like(q.answer, n)) for n, q in enumerate(questions)]
    for name in ("none", "sinks", "snap", "expire"):
        with method(handle, name, 24) as new_cache:
            losses, peak = read(model, new_cache(), ids, 16)
            for row in range(3):
                alone, held = read(model, new_cache(), ids[row : row + 1], 16)
                assert (alone - losses[row]).abs().max() < 1e-4 and held[0] == peak[row]
            right = answers(model, new_cache(), questions, 32)
            assert right == [answers(model, new_cache(), [q], 32)[0] for q in questions]


def test_bootstrap_finds_a_difference_and_only_that():
    ours, theirs = [1.0, 1.1, 0.9, 1.2], [1.5, 1.7, 1.4, 1.8]
    mean, low, high = bootstrap(ours, theirs)
    assert low < mean < high < 0
    _, low, high = bootstrap([1.0, 2.0, 1.0, 2.0], [2.0, 1.0, 2.0, 1.0])
    assert low < 0 < high


# Commands


def test_the_commands_end_to_end(tmp_path, capsys, monkeypatch):
    folder, book = model_folder(tmp_path / "model"), tmp_path / "book.txt"
    book.write_text(text())
    adapter, sizes = str(tmp_path / "run" / "adapter"), ["--max-span", "96", "--ramp", "8", "--context", "96"]
    sizes += ["--block", "48", "--batch", "1", "--steps", "6", "--lr", "0.02"]
    common = ["--data", str(book), "--device", "cpu"]
    assert (
        main(["retrofit", str(folder), "--out", str(tmp_path / "run"), "--budget-tokens", "40", *common, *sizes]) == 0
    )
    assert "(budget 40)" in capsys.readouterr().out
    assert main(["verify", adapter, "--tokens", "160", "--device", "cpu"]) == 0
    assert "sound, made for" in capsys.readouterr().out
    out = ["--context", "400", "--documents", "2", "--questions", "1", "--out", str(tmp_path / "table")]
    asked = ["--methods", "none,sinks,snap,expire", "--budgets", "0.25", "--chunk", "32"]
    assert main(["evaluate-cache", str(folder), "--adapter", adapter, *common, *out, *asked]) == 0
    assert "expire - snap at 0.25" in capsys.readouterr().out
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["none", "sinks", "snap", "expire"]
    assert all(row["peak_bytes"] <= row["budget_bytes"] and row["accuracy"] is not None for row in rows)
    assert (tmp_path / "table.png").stat().st_size > 1000
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nand again\n\n"))
    assert main(["chat", str(folder), "--adapter", adapter, "--max-tokens", "5", "--device", "cpu"]) == 0
    assert "tokens read" in capsys.readouterr().err


def test_commands_say_what_is_wrong(tmp_path, capsys):
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    book = tmp_path / "book.txt"
    book.write_text(text(50))
    for words, said in (
        (["retrofit", str(pickled), "--data", str(book)], "has pickled weights only (pytorch_model.bin)"),
        (["retrofit", str(tmp_path), "--data", str(book)], "has no *.safetensors weights"),
        (["retrofit", "m", "--data", str(tmp_path / "no")], "no text at"),
        (["retrofit", "m", "--data", str(book), "--budget", "2"], "must lie in (0, 1], got 2.0"),
        (["verify", str(tmp_path)], "it has no adapter.json"),
        (["evaluate-cache", "m", "--data", str(book)], "method expire needs --adapter, got none"),
        (
            ["evaluate-cache", "m", "--data", str(book), "--methods", "none", "--budgets", "7"],
            "shares in (0, 1], got 7",
        ),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error
