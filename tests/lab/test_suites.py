"""The command of suites: nothing is asked twice, budgets are met, the page stands alone."""

import json
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from expire_span.cli import main  # noqa: E402
from expire_span.hf.texts import find_beginning  # noqa: E402
from expire_span.lab.suites.asking import ask  # noqa: E402
from expire_span.lab.suites.record import Record  # noqa: E402
from tests.hf_models import forgetful, model_folder, text, word_tokenizer  # noqa: E402


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
    (tmp_path / "book.txt").write_text(
        " ".join(f"The {word} was seen near the old mill at noon." for word in text(300).split()) * 3
    )
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
