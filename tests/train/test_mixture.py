"""Contexts that a retrofit learns from: what a lesson asks for stands in its context, and answers weigh enough."""

import random
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from expire_span.errors import UserError
from expire_span.hf import RetrofitConfig, calibration, load_adapter, retrofit
from expire_span.hf.adapter import use_budget
from expire_span.hf.calibration import lost_attention
from expire_span.hf.texts import find_beginning
from expire_span.lab.suites.needles import VARIANTS, make_value, tell
from expire_span.models.marks import KEEP
from expire_span.runs import RunFolder
from expire_span.settings.retrofit import CHAT_MIXTURE, DistillConfig, parse_mixture
from expire_span.train import lessons, sampled_chats
from expire_span.train.distill import DistillLearner, distill, distill_on
from expire_span.train.distiller import Distiller, kl_divergence
from expire_span.train.lessons import Row, read_code
from expire_span.train.lookups import MAKERS
from expire_span.train.mixture import Contexts, build_mixture, choose_shares, weigh
from tests.hf_models import FAMILIES, byte_tokenizer, text

TURN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
TEMPLATE = TURN + "{% if add_generation_prompt %}[me]{% endif %}"
LENGTH = 1600
EVERYTHING = "text=1,code=1,lookups=1,repeats=1,chat=1"


@pytest.fixture(autouse=True)
def little_code(monkeypatch):
    """Few sources, since a tokenizer of bytes takes long."""
    monkeypatch.setattr(lessons, "CODE_FILES", 4)
    monkeypatch.setattr(lessons, "CODE_CHARACTERS", 4000)


def chat_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def documents(tokenizer, count=3):
    return [torch.tensor(tokenizer.encode(text(600, seed=n))) for n in range(count)]


def mixture(written, tokenizer, length=LENGTH):
    config = DistillConfig(budget=0.5, context=length, mixture=written)
    return build_mixture(documents(tokenizer), config, find_beginning(tokenizer), tokenizer, "cpu", 0)


def make_retrofit(**settings):
    config = FAMILIES["llama"]()
    config.vocab_size = 259
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    retrofitted = retrofit(model, RetrofitConfig(max_span=512, ramp=8, **settings))
    retrofitted.beginning = find_beginning(chat_tokenizer())
    return retrofitted


def test_a_mixture_is_written_as_shares():
    assert parse_mixture("text=3,lookups") == {"text": 0.75, "lookups": 0.25} and parse_mixture("auto") is None
    for wrong in ("books", "text=1,text=2", "text=x", "text=0", "", "lookups=inf"):
        with pytest.raises(ValueError, match="mixture"):
            DistillConfig(budget=0.5, mixture=wrong)


def test_auto_takes_what_there_is():
    chats, plain = chat_tokenizer(), byte_tokenizer()
    auto = DistillConfig(budget=0.5, context=1024, mixture="auto")
    assert choose_shares(auto, chats, torch.device("cuda")) == CHAT_MIXTURE
    assert set(choose_shares(auto, chats, torch.device("cpu"))) == set(CHAT_MIXTURE) - {"chat"}
    short = DistillConfig(budget=0.5, context=512, mixture="auto")
    assert set(choose_shares(short, chats, torch.device("cuda"))) == set(CHAT_MIXTURE) - {"chat"}
    short = DistillConfig(budget=0.5, context=128, mixture="auto")
    for config, tokenizer in ((auto, plain), (auto, None), (short, chats)):
        assert choose_shares(config, tokenizer, torch.device("cuda")) == {"text": 1.0}
    asked = DistillConfig(budget=0.5, context=512, mixture="chat")
    with pytest.raises(UserError, match="needs a model with a chat template"):
        choose_shares(asked, plain, torch.device("cpu"))
    with pytest.raises(UserError, match="tokens without its material, and a context has 256"):
        mixture("chat", chats, length=256)
    with pytest.raises(ValueError, match="tokenizer"):
        choose_shares(asked, None, torch.device("cpu"))
    with pytest.raises(UserError, match="at least 256 tokens, got 128"):
        choose_shares(DistillConfig(budget=0.5, context=128, mixture="lookups"), chats, torch.device("cpu"))


def test_answers_weigh_as_much_as_all_else_where_they_are_predicted():
    answers = torch.zeros(100, dtype=torch.bool)
    answers[[40, 41, 99]] = True
    weights = weigh(Row(torch.arange(100), answers))
    assert weights.mean().item() == pytest.approx(1) and weights[[39, 40, 98]].sum().item() == pytest.approx(50)
    assert weights[41] == weights[99] == weights[0] < 1
    assert torch.equal(weigh(Row(torch.arange(9))), torch.ones(9))


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), chat_tokenizer()], ids=["text", "chat"])
@pytest.mark.parametrize("kind", ["lookups", "repeats"])
def test_what_is_asked_for_stands_in_the_context(kind, tokenizer):
    made, rng = mixture(kind, tokenizer).lessons[kind][1], numpy.random.default_rng(0)
    begins = list(find_beginning(tokenizer).context)
    for _ in range(6):
        row = made.draw(rng)
        assert row.answers is not None
        ids, answers = row.ids.tolist(), row.answers.tolist()
        assert len(ids) == len(answers) == LENGTH and ids[: len(begins)] == begins and any(answers)
        first = answers.index(True)
        told = tokenizer.decode(ids[:first])
        for start in (n for n in range(first, LENGTH) if answers[n] and not answers[n - 1]):
            end = answers.index(False, start) if False in answers[start:] else LENGTH
            answer = tokenizer.decode(ids[start:end]).strip()
            assert all(part in told for part in (answer.split(", ") if kind == "lookups" else [answer])), answer


def test_no_lookup_is_told_as_a_suite_tells_its_needles():
    rng = random.Random(0)
    theirs = {tell("x", make_value(rng, kind.values), kind.values)[:12] for kind in VARIANTS.values()}
    for make in MAKERS:
        for part in (part for _ in range(40) for part in make(rng).parts):
            assert not any(x in part for x in theirs) and "secret" not in part and "key is" not in part
    assert all(len(facts.parts) and facts.questions for facts in (make(rng) for make in MAKERS))


def test_code_is_read_from_installed_packages():
    found = read_code(byte_tokenizer())
    assert len(found) == 4 and all(torch.equal(x, y) for x, y in zip(found, read_code(byte_tokenizer())))


def test_kept_tokens_never_expire_in_training():
    retrofitted = make_retrofit(initial_span=0.01)
    learner = Distiller(retrofitted, [torch.arange(300) % 250], DistillConfig(budget=0.25, context=128, block=32))
    ids = torch.arange(128).view(1, -1) % 250
    _, _, plain = learner.read(Contexts.plain(ids))
    _, _, kept = learner.read(Contexts.of_rows([Row(ids[0], None, 40)]))
    assert bool((plain < 30).all()) and bool((kept - plain >= 39).all())
    marks = Contexts.of_rows([Row(ids[0], None, 40), Row(ids[0])]).marks
    assert (marks == KEEP).sum(1).tolist() == [40, 0]


def test_weights_scale_the_divergence_and_its_gradient():
    wanted, given = torch.randn(2, 3, 5), torch.randn(2, 3, 5, requires_grad=True)
    weights = torch.rand(2, 3)
    chances = wanted.log_softmax(-1)
    exact = (weights * (chances.exp() * (chances - given.log_softmax(-1))).sum(-1)).mean()
    found = kl_divergence(wanted, given, weights)
    torch.testing.assert_close(found, exact)
    torch.testing.assert_close(*(torch.autograd.grad(x, given)[0] for x in (found, exact)))


def test_queries_count_by_their_weight_in_the_calibration():
    q, k, ages = torch.randn(1, 4, 48, 8), torch.randn(1, 2, 48, 8), torch.tensor([0.0, 3.0, 20.0])
    parts = [torch.rand(1, 48) for _ in range(2)]
    one, two, both = (lost_attention(q, k, 1.0, ages, x) for x in (*parts, parts[0] + parts[1]))
    torch.testing.assert_close(one + two, both)
    torch.testing.assert_close(lost_attention(q, k, 1.0, ages, torch.ones(1, 48)), lost_attention(q, k, 1.0, ages))


def test_budgets_take_strict_turns_where_a_time_limit_skips_steps():
    settings = DistillConfig(budget=0.5, more_budgets="0.25", context=64, block=32, batch=1, calibrate=0, steps=1000)
    retrofitted = make_retrofit()
    distiller, chosen = Distiller(retrofitted, [torch.randint(40, (400,)) for _ in range(3)], settings), []
    for place in (0, 2, 4, 18, 20):  # the clock's places in the schedule, all even
        distiller.step(place)
        chosen.append(distiller.levels.index(distiller.level))
    assert chosen == [0, 1, 0, 1, 0]


def test_a_mixed_run_at_two_budgets_goes_on_as_if_it_had_not_been_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "STEPS", 10)
    monkeypatch.setattr(sampled_chats, "SAMPLED", 2)
    monkeypatch.setattr(sampled_chats, "TOKENS", 6)
    tokenizer = chat_tokenizer()
    given: Any = dict(context=1100, block=550, batch=2, steps=3, calibrate=1, checkpoint_every=2, eval_every=100)
    given |= dict(eval_contexts=1, log_every=1, device="cpu", tracker="none", mixture=EVERYTHING, more_budgets="0.25")
    settings, docs = DistillConfig(budget=0.5, **given), documents(tokenizer)
    retrofitted = make_retrofit()
    whole = distill(retrofitted, docs, settings, tmp_path / "whole", tokenizer=tokenizer)
    wanted, result = retrofitted.learned(), whole.read_result() or {}
    assert result["mixture_loss"] > 0 and 0 < result["mixture_live"] <= 1100

    class Stop(Exception):
        pass

    step = DistillLearner.step

    def stop(self, index):
        if index == 2:
            raise Stop
        return step(self, index)

    monkeypatch.setattr(DistillLearner, "step", stop)
    with pytest.raises(Stop):
        distill(make_retrofit(), docs, settings, tmp_path / "cut", tokenizer=tokenizer)
    monkeypatch.setattr(DistillLearner, "step", step)
    retrofitted = make_retrofit()
    run = distill_on(retrofitted, docs, RunFolder.open(tmp_path / "cut"), tokenizer=tokenizer)
    assert all(torch.equal(x, wanted[name]) for name, x in retrofitted.learned().items())
    assert run.read_result() == result
    assert set(result["more_budgets"]) == {"budget-0.25"} and result["more_budgets"]["budget-0.25"]["target"] == 275
    check_budgets_of_adapter(run.path / "adapter", retrofitted)


def check_budgets_of_adapter(folder, retrofitted):
    """What was trained at a budget is what is attached, and judged, at that budget."""
    model, first = retrofitted.model, {name: x.clone() for name, x in retrofitted.learned().items()}
    use_budget(retrofitted, folder, 0.25)
    second = {name: x.clone() for name, x in retrofitted.learned().items()}
    assert all(bool((first[n] != second[n]).any()) for n in ("0.bias", "1.weight"))
    use_budget(retrofitted, folder, 0.3)
    assert all(torch.equal(x, first[name]) for name, x in retrofitted.learned().items())
    retrofitted.detach()
    for budget, wanted in ((None, first), (0.25, second)):
        with load_adapter(model, folder, budget=budget) as found:
            assert all(torch.equal(x, wanted[name]) for name, x in found.learned().items())
    with pytest.raises(UserError, match=r"budget of 0\.125, its further budgets are 0\.25"):
        load_adapter(model, folder, budget=0.125)


def test_further_budgets_are_checked_before_anything_is_read():
    for wrong, why in (("0.5", "different shares"), ("2", "shares in"), ("a", "numbers"), ("0.2,0.2", "different")):
        with pytest.raises(ValueError, match=f"more_budgets must be .*{why}"):
            DistillConfig(budget=0.5, more_budgets=wrong)
    with pytest.raises(ValueError, match=r"the least budget, got 10\.24"):
        DistillConfig(budget=0.5, more_budgets="0.01", context=1024).check_budget(ramp=64, keep_first=4)
