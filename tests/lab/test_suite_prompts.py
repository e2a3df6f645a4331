"""Suites: prompts hold what they ask for, scores are as defined, and rows answer as each alone."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from expire_span.errors import UserError  # noqa: E402
from expire_span.lab.caches.evaluate import method  # noqa: E402
from expire_span.lab.suites.asking import ask, in_batches  # noqa: E402
from expire_span.lab.suites.gsm8k import make_problems  # noqa: E402
from expire_span.lab.suites.haystack import Haystack, no_books, read_books, read_passages  # noqa: E402
from expire_span.lab.suites.lists import _coded_text, _word_list  # noqa: E402
from expire_span.lab.suites.prompts import Frame, Prompt, Sample  # noqa: E402
from expire_span.lab.suites.scoring import (  # noqa: E402
    final_number,
    follows,
    is_settled,
    paired_interval,
    rules_followed,
    strings_found,
)
from expire_span.lab.suites.tasks import RULER, TASKS, make_samples  # noqa: E402
from tests.hf_models import byte_tokenizer, forgetful, text, tiny  # noqa: E402

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"


def books() -> Haystack:
    return Haystack(tuple(f"The {word} was seen near the old mill at noon." for word in text(300).split()), "a book")


@pytest.fixture(scope="module")
def frame() -> Frame:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    return Frame(tokenizer)


@pytest.mark.parametrize("name", TASKS)
def test_a_prompt_holds_what_it_asks_for(frame: Frame, name: str) -> None:
    """Each answer stands in the tokens of the context, in none of the question; a context is as long as was said."""
    one, other = make_samples(frame, [name], books(), context=4500, count=2, seed=3)
    assert one.prompt.context != other.prompt.context and one.prompt.answers != other.prompt.answers
    assert one == make_samples(frame, [name], books(), context=4500, count=1, seed=3)[0]
    for x in (one, other):
        read, asked = (frame.tokenizer.decode(ids) for ids in (x.context, x.question))
        assert len(x.context) == 4500 if x.prompt.fills else 4300 < len(x.context) <= 4500
        assert read.startswith("<system>" if x.prompt.system else "<user>") and asked.endswith(x.prompt.prefix)
        assert "</user><assistant>" in asked
        for answer in x.prompt.answers:
            rule, _, value = answer.partition(":")
            wanted = value.capitalize() if x.prompt.rule == "rules" else rule
            assert wanted in read and (not wanted or wanted not in asked)


def test_needles_lie_everywhere_and_among_many(frame: Frame) -> None:
    places = []
    for x in make_samples(frame, ["single_2"], books(), context=2000, count=30, seed=0):
        places.append(x.prompt.context.index(x.prompt.answers[0]) / 2000)
    assert min(places) < 0.3 and max(places) > 0.7
    (crowd,) = make_samples(frame, ["multikey_2"], books(), context=4000, count=1, seed=0)
    key = crowd.prompt.question.split(" of ")[1].split()[0]
    assert crowd.prompt.context.count("One of the secret numbers") > 50 and crowd.prompt.context.count(key) == 1
    (many,) = make_samples(frame, ["multivalue"], books(), context=2000, count=1, seed=0)
    assert len(set(many.prompt.answers)) == 4 and many.prompt.context.count("One of the secret numbers") == 4


def test_lists_have_the_frequencies_of_their_definition() -> None:
    from collections import Counter

    listed, common = _word_list(0.5, 40, 30, 3)
    counts = Counter(word for word in listed.split() if not word.endswith("."))
    assert [word for word, _ in counts.most_common(10)] != [] and set(common) == {
        w for w, n in counts.items() if n == 30
    }
    assert sorted(set(counts.values())) == [3, 30] and len(counts) == 50
    coded, top = _coded_text(0.5, 2000)
    (dots, most), *rest = Counter(coded).most_common(4)
    assert dots == "...." and top == [word for word, _ in rest] and len(coded) == 2000
    for rank, (_, count) in enumerate(rest, 2):
        assert abs(count / most - rank**-2) < 0.01


def test_scores_are_as_defined() -> None:
    assert strings_found("It is 12 and AB-c.", ["12", "ab-C", "7"]) == pytest.approx(2 / 3)
    for answer, right in (("so #### 1,234.", 1), ("#### $1234\n", 1), ("1234", 0), ("#### 12 #### 1234", 0), ("", 0)):
        assert final_number(answer, ["1,234"]) == right, answer
    assert final_number("#### -5", ["-5"]) and not final_number("#### 5", ["-5"])
    rules = ["begin:gate", "no comma:", "mention:fox"]
    assert rules_followed("Gate. A fox sat.", rules) == 1 and rules_followed("A gate, then", rules) == 0
    assert rules_followed("...", ["no comma:"]) == 0 and rules_followed("", rules) == 0
    assert follows("SO IT GOES, fox".upper(), "capitals", "") and not follows("Aa", "capitals", "")
    assert (
        follows("it ends. Fox!", "end", "fox") and follows("a b", "words", "2") and not follows("a b c", "words", "2")
    )
    assert is_settled("strings", "a 12", ["12"]) and not is_settled("rules", "Gate fox", ["begin:gate"])
    assert is_settled("number", "so #### 12\n", ["7"]) and not is_settled("number", "so #### 12", ["12"])


def test_an_interval_is_of_the_mean_over_tasks() -> None:
    full = {"a": [1.0] * 20, "b": [1.0, 0.0] * 10}
    worse = {"a": [0.0] * 20, "b": [1.0, 0.0] * 10}
    assert paired_interval(worse, full) == (-0.5, -0.5, -0.5)
    mean, low, high = paired_interval({"a": [0.0] * 20, "b": [0.0] * 20}, full)
    assert mean == -0.75 and -0.9 < low < -0.75 < high < -0.6


def test_perplexities_are_of_the_same_documents() -> None:
    from expire_span.lab.suites.summary import summarise

    sizes = {"budget": 1.0, "task": "perplexity", "kept_bytes": 1, "peak_bytes": 1, "held_bytes": 1}
    lines = [{**sizes, "method": m, "index": n, "score": n + 1.0} for m, n in (("none", 0), ("none", 1), ("snap", 0))]
    full, snap = summarise(lines)
    assert full.scores == snap.scores and snap.loss_difference == (0.0, 0.0, 0.0) and full.average is None


@pytest.mark.parametrize("name", ["none", "expire"])
def test_rows_answer_as_each_alone_and_as_generate_does(name: str) -> None:
    """Questions of unequal length side by side; the full cache's answer is the one that transformers gives."""
    model = tiny()
    retrofitted, tokenizer = forgetful(model, max_span=60, ramp=4), byte_tokenizer()
    rng = random.Random(0)
    samples = []
    for n, length in enumerate((5, 9, 7)):
        prompt = Prompt("x", n, "", "", ("never",), 10)
        samples.append(Sample(prompt, *(tuple(rng.choices(range(3, 97), k=k)) for k in (80, length))))
    assert in_batches([*samples, replace(samples[0], context=(3, 4))], 2) == [
        samples[:2],
        samples[2:],
        [replace(samples[0], context=(3, 4))],
    ]
    with method(retrofitted, name, 0) as new_cache:
        together = ask(model, new_cache(), samples, tokenizer, set(), 16)
        alone = [ask(model, new_cache(), [x], tokenizer, set(), 16)[0] for x in samples]
    for a, b in zip(together, alone):
        assert (a.answer, a.kept_bytes, a.peak_bytes) == (b.answer, b.kept_bytes, b.peak_bytes) and a.tokens == 10
        assert a.kept_bytes <= a.peak_bytes and 0 < a.live <= 1 and abs(a.live - b.live) < 0.1
        assert (name == "none") == (a.live == 1)
    if name == "none":
        retrofitted.detach()
        for x, outcome in zip(samples, alone):
            ids = torch.tensor([x.context + x.question])
            made = model.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=-1)[0, ids.shape[1] :]
            assert tokenizer.decode(made, skip_special_tokens=True) == outcome.answer


def test_a_text_begins_as_its_tokenizer_begins_it() -> None:
    tokenizer = byte_tokenizer()
    from tokenizers.processors import TemplateProcessing

    both = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.backend_tokenizer.post_processor = both
    plain = Frame(tokenizer).to_sample(Prompt("x", 0, "abc", "d", ("a",), 4), 10)
    assert plain.context[0] == 1 and 2 not in plain.context and 1 not in plain.question


def test_books_are_read_as_sentences_and_passages(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Chapter. " * 40 + "This is a sentence of the book. And here is another one! " * 40)
    book = read_books(tmp_path)
    assert set(book.sentences) <= {"This is a sentence of the book.", "And here is another one!"}
    assert len(read_passages(byte_tokenizer(), tmp_path, 100, 4)[0]) == 100
    assert read_passages(byte_tokenizer(), tmp_path, 10**6, 4) == []
    with pytest.raises(UserError, match=r"no text at .*: give a text file"):
        read_books(tmp_path / "nothing")
    (tmp_path / "b.txt").write_text("short")
    with pytest.raises(UserError, match="has 0 whole sentences, at least 5"):
        read_books(tmp_path / "b.txt")


def test_problems_have_their_examples_in_the_context(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    lines = [json.dumps({"question": f"What is {n} + 1?", "answer": f"Add.\n#### {n + 1}"}) for n in range(12)]
    file.write_text("\n".join(lines))
    prompts = make_problems(file, 3)
    assert [x.answers for x in prompts] == [("9",), ("10",), ("11",)] and len({x.context for x in prompts}) == 1
    assert prompts[0].context.count("####") == 1 + 8 and "What is 8" in prompts[0].question
    for damaged, said in (
        ("\n".join(lines[:5]), "has 5 problems, more than 8"),
        ("[1]", "line 1 of .* must be a JSON table"),
    ):
        file.write_text(damaged)
        with pytest.raises(UserError, match=said):
            make_problems(file, 3)


def test_all_of_rulers_tasks_are_there() -> None:
    assert len(RULER) == 11 and no_books().take(random.Random(0), 7)[5] == no_books().sentences[0]
