"""Suites: prompts hold what they ask for, scores are as defined, nothing is asked twice, and the page stands alone."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from expire_span.cli import main  # noqa: E402
from expire_span.errors import UserError  # noqa: E402
from expire_span.hf.evaluate import method  # noqa: E402
from expire_span.hf.texts import find_beginning  # noqa: E402
from expire_span.lab.suites.asking import ask, in_batches  # noqa: E402
from expire_span.lab.suites.gsm8k import make_problems  # noqa: E402
from expire_span.lab.suites.haystack import Haystack, no_books, read_books, read_passages  # noqa: E402
from expire_span.lab.suites.lists import _coded_text, _word_list  # noqa: E402
from expire_span.lab.suites.prompts import Frame, Prompt, Sample  # noqa: E402
from expire_span.lab.suites.record import Record  # noqa: E402
from expire_span.lab.suites.scoring import (  # noqa: E402
    final_number,
    follows,
    is_settled,
    paired_interval,
    rules_followed,
    strings_found,
)
from expire_span.lab.suites.tasks import RULER, TASKS, make_samples  # noqa: E402
from tests.hf_models import byte_tokenizer, forgetful, model_folder, text, tiny, word_tokenizer  # noqa: E402

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


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("suite") / "model")


def run(folder: Path, out: Path, *more: str) -> int:
    shown = ["--suite", "ruler", "--tasks", "pairs,passkey", "--context", "400", "--prompts", "2"]
    methods = ["--methods", "none,window", "--budgets", "0.25", "--device", "cpu", "--out", str(out)]
    return main(["evaluate-cache", str(folder), *shown, *methods, *more])


def test_a_suite_is_asked_once_and_leaves_a_page(folder: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """What a kill has cut off is asked again, and nothing else; more methods and prompts join the same record."""
    from expire_span.lab.suites import run as running

    asked: list[int] = []

    def counted(model, cache, samples, *rest):
        asked.append(len(samples))
        return ask(model, cache, samples, *rest)

    monkeypatch.setattr(running, "ask", counted)
    out = tmp_path / "made" / "suite.one"
    assert run(folder, out) == 0 and sum(asked) == 2 * 2 * 2
    printed = capsys.readouterr()
    assert "window 0.25" in printed.out and "repeated sentences" in printed.err and "8 of 8 answers" in printed.err
    record = tmp_path / "made" / "suite.one.jsonl"
    whole = record.read_bytes()
    found = json.loads((tmp_path / "made" / "suite.one.json").read_text())
    lines = whole.splitlines(keepends=True)
    record.write_bytes(b"".join(lines[:5]) + lines[5][: len(lines[5]) // 2])
    asked.clear()
    assert run(folder, out) == 0 and sum(asked) == 8 - 4
    again = json.loads((tmp_path / "made" / "suite.one.json").read_text())
    strip = lambda answers: sorted((x["method"], x["budget"], x["task"], x["index"], x["answer"]) for x in answers)  # noqa: E731
    assert strip(again["answers"]) == strip(found["answers"]) and again["rows"] == found["rows"]
    asked.clear()
    assert run(folder, out, "--methods", "none,window,knorm", "--prompts", "3") == 0
    assert sum(asked) == 3 * 2 + 2 * 2
    names = [row["method"] for row in json.loads((tmp_path / "made" / "suite.one.json").read_text())["rows"]]
    assert names == ["none", "window", "knorm"]
    page = (tmp_path / "made" / "suite.one.html").read_text()
    assert "src=" not in page and 'href="http' not in page and "<svg" in page and "knorm 0.25" in page
    capsys.readouterr()
    assert run(folder, out, "--seed", "1") == 2
    assert "holds answers with seed 0, this command has 1; give another --out" in capsys.readouterr().err
    lines = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(b"".join([lines[0], lines[1].replace(b'"score": 0', b'"score": 1'), *lines[2:]]))
    assert run(folder, out) == 2 and "does not match its checksum" in capsys.readouterr().err


def test_a_suite_keeps_an_adapters_dial_and_counts_its_bytes(folder: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    from expire_span.hf.loading import open_model
    from expire_span.lab.suites import run as running

    model, _ = open_model(str(folder), device="cpu")
    forgetful(model, max_span=300, ramp=16).save(tmp_path / "adapter")
    (tmp_path / "book.txt").write_text(" ".join(books().sentences) * 3)
    more = ["--methods", "none,expire", "--adapter", str(tmp_path / "adapter"), "--budgets", "0.25", "--prompts", "1"]
    more += ["--data", str(tmp_path / "book.txt"), "--documents", "1", "--tasks", "pairs"]
    assert run(folder, tmp_path / "suite", *more) == 0
    found = json.loads((tmp_path / "suite.json").read_text())
    full, ours = found["rows"]
    assert set(ours["scores"]) == {"pairs", "perplexity"} and ours["loss_difference"] is not None
    assert 0.2 * full["peak_bytes"] < ours["kept_bytes"] <= 0.25 * full["peak_bytes"] < ours["peak_bytes"]
    assert ours["peak_bytes"] < 0.4 * full["peak_bytes"] and ours["live"] < 0.5 < full["live"]
    assert full["held_bytes"] == full["kept_bytes"] == 400 * 2 * 2 * 2 * 8 * 4
    record = Record(tmp_path / "suite.jsonl", found["settings"])
    assert list(record.dials) == [0.25] and record.dials[0.25][0] > 0 and record.dials[0.25][1] == ""
    monkeypatch.setattr(running, "find_dial", lambda *_, **__: 0.0)
    assert run(folder, tmp_path / "suite", *more, "--budgets", "0.25,0.2") == 2
    assert "the adapter cannot meet a budget of 0.2: contexts of 400 tokens keep more" in capsys.readouterr().err


def test_a_suite_uses_what_keeps_the_nearest_number_of_memories(folder: Path, tmp_path: Path, monkeypatch) -> None:
    from expire_span.hf.loading import open_model
    from expire_span.lab.suites import run as running

    model, _ = open_model(str(folder), device="cpu")
    retrofitted = forgetful(model, max_span=300, ramp=16)
    retrofitted.save(tmp_path / "adapter")
    for predictor in retrofitted.predictors.values():
        predictor.bias.data -= 3.0
    retrofitted.save(tmp_path / "adapter" / "budget-0.1")
    contexts = [torch.randint(3, 60, (2, 300))]
    keeps = [running.count_bytes(retrofitted, contexts, 64, 1.0, kept=True)]
    running.use_folder(retrofitted, tmp_path / "adapter")
    keeps.append(running.count_bytes(retrofitted, contexts, 64, 1.0, kept=True))
    assert keeps[0] < 0.7 * keeps[1]
    choose = lambda budget: running.choose_folder(retrofitted, tmp_path / "adapter", contexts, budget, 64)  # noqa: E731
    middle = (keeps[0] * keeps[1]) ** 0.5
    assert choose(0.95 * middle) == "budget-0.1" and choose(1.05 * middle) == ""
    monkeypatch.setattr(running, "choose_folder", lambda *_: "budget-0.1")
    more = ["--methods", "expire", "--adapter", str(tmp_path / "adapter"), "--budgets", "0.3", "--prompts", "1"]
    more += ["--tasks", "pairs", "--chunk", "64"]
    assert run(folder, tmp_path / "suite", *more) == 0
    found = json.loads((tmp_path / "suite.json").read_text())
    assert Record(tmp_path / "suite.jsonl", found["settings"]).dials[0.3][1] == "budget-0.1"
    used = []
    monkeypatch.setattr(running, "choose_folder", None)
    monkeypatch.setattr(running, "use_folder", lambda _, chosen: used.append(chosen.name))
    assert run(folder, tmp_path / "suite", *more, "--prompts", "2") == 0 and used == ["budget-0.1"]


def test_a_suite_refuses_another_tokenizer_than_the_adapters(folder: Path, tmp_path: Path, capsys) -> None:
    from expire_span.hf.loading import open_model

    model, _ = open_model(str(folder), device="cpu")
    retrofitted = forgetful(model, max_span=300, ramp=16)
    retrofitted.beginning = find_beginning(word_tokenizer())
    retrofitted.save(tmp_path / "adapter")
    more = ["--methods", "expire", "--adapter", str(tmp_path / "adapter"), "--prompts", "1", "--tasks", "pairs"]
    assert run(folder, tmp_path / "suite", *more) == 2
    assert "the tokenizer is another one than the adapter was trained with" in capsys.readouterr().err


def test_problems_are_asked_and_memories_counted(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("expire_span.lab.suites.gsm8k.MOST_TOKENS", 24)
    file = tmp_path / "problems.jsonl"
    lines = [json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) for n in range(9)]
    file.write_text("\n".join(lines))
    more = ["--suite", "gsm8k", "--data", str(file), "--prompts", "1", "--methods", "none,window", "--budgets", "0.25"]
    assert main(["evaluate-cache", str(folder), *more, "--out", str(tmp_path / "g"), "--device", "cpu"]) == 0
    full, window = json.loads((tmp_path / "g.json").read_text())["rows"]
    assert full["live"] == 1 and window["live"] < 0.25 and set(full["scores"]) == {"gsm8k"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--suite", "gsm8k"], "the suite gsm8k needs --data, its .jsonl file of problems, got none"),
        (["--suite", "gsm8k", "--data", "x", "--tasks", "pairs"], "has one task, got --tasks pairs"),
        (["--suite", "ruler", "--methods", "expire"], "method expire needs --adapter, got none"),
        (["--suite", "ruler", "--tasks", "pairs,magic"], "unknown task 'magic'; known are single_1"),
        (["--suite", "ruler", "--context", "4096"], "--context 4096 is longer than the 2048 tokens"),
        (
            ["--suite", "ruler", "--context", "300"],
            "the task multikey_1 cannot be asked: a context with room for 299 tokens",
        ),
        (
            ["--suite", "ruler", "--tasks", "pairs", "--context", "400", "--budgets", "0.01"],
            "leaves 4 memories of a context",
        ),
        (["--suite", "ruler", "--context", "900", "--data", "missing"], "no text at missing: give a text file"),
        ([], "evaluate-cache needs --data, text to read, got none"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    folder: Path, tmp_path: Path, capsys, options: list[str], said: str
) -> None:
    assert main(["evaluate-cache", str(folder), "--out", str(tmp_path / "x"), "--device", "cpu", *options]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert said in errors[-1] and list(tmp_path.iterdir()) == []


def test_all_of_rulers_tasks_are_there() -> None:
    assert len(RULER) == 11 and no_books().take(random.Random(0), 7)[5] == no_books().sentences[0]


@pytest.mark.long
def test_a_killed_suite_gives_what_an_undisturbed_one_gives(folder: Path, tmp_path: Path) -> None:
    """The short twin cuts a line of the record in two, which is what a kill leaves behind."""
    import os
    import signal
    import subprocess
    import sys

    command = [
        sys.executable,
        "-m",
        "expire_span",
        "evaluate-cache",
        str(folder),
        "--suite",
        "ruler",
        "--device",
        "cpu",
    ]
    command += [
        "--tasks",
        "single_1,pairs",
        "--context",
        "400",
        "--prompts",
        "6",
        "--rows",
        "1",
        "--methods",
        "none,window",
    ]
    command += ["--budgets", "0.5", "--out"]
    found = {}
    for name, kills in (("whole", 0), ("killed", 3)):
        for _ in range(kills):
            process = subprocess.Popen([*command, str(tmp_path / name)], stderr=subprocess.PIPE, text=True)
            assert process.stderr is not None
            for line in process.stderr:
                if "answers, " in line and "preparing" not in line:
                    os.kill(process.pid, signal.SIGKILL)
                    break
            process.wait()
        subprocess.run([*command, str(tmp_path / name)], check=True)
        found[name] = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["whole"]["rows"] == found["killed"]["rows"] and len(found["killed"]["answers"]) == 24
