"""`expire-span analyse`: classes of letters, intervals, and the three questions asked of a tiny run."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from expire_span.cli import main
from expire_span.cli.analyse import show
from expire_span.lab.analyse.analysis import analyse, choose_word, cut_spans, rank_layer, replace_word
from expire_span.lab.analyse.classes import CLASSES, classify
from expire_span.lab.analyse.intervals import class_means, mean_of
from expire_span.lab.analyse.pictures import draw_classes
from expire_span.lab.analyse.reading import TextModel, TextReading
from expire_span.models.systems import mixer_config
from expire_span.runs import RunFolder, UserError
from expire_span.train.supervised import train
from tests.error_budget import reordered
from tests.tiny import tiny_config

TEXT = "== History ==\nThe Nile flows. In 1922 Howard saw Egypt and Cairo again.\nCHAPTER II\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    folder = tmp_path_factory.mktemp("analyse")
    (folder / "text.txt").write_text(TEXT * 60)
    config = tiny_config(folder / "text.txt", steps=2, checkpoint_every=2)
    return train(config, folder / "runs" / "tiny", shown=False)


def test_every_letter_has_a_class():
    found = classify(TEXT)
    by_class = {name: "".join(np.array(list(TEXT))[found == n]) for n, name in enumerate(CLASSES)}
    assert by_class["title"] == "== History ==CHAPTER II"
    assert by_class["name"] == "NileHowardEgyptCairo"  # "The" and "In" begin sentences
    assert by_class["digit"] == "1922" and by_class["newline"] == "\n" * 3
    assert by_class["space"].count(" ") == TEXT.count(" ") - 3  # those of titles belong to the titles
    assert len(classify("")) == 0


def test_intervals_hold_the_true_mean_and_shrink_with_data():
    draw = np.random.default_rng(0)
    hits, widths = 0, []
    for n in range(100):
        noise = np.repeat(draw.normal(size=2000 if n % 2 else 400), 5)  # neighbours are alike
        classes = draw.integers(0, 2, len(noise))
        found = class_means(noise + classes, classes, 3)
        hits += found[1]["low"] <= 1.0 <= found[1]["high"]
        widths.append(found[1]["high"] - found[1]["low"])
        assert found[2] == {"count": 0, "mean": 0.0, "low": 0.0, "high": 0.0}
    assert 85 <= hits <= 100
    assert np.mean(widths[::2]) > 1.7 * np.mean(widths[1::2])
    assert mean_of(np.array([3.0]))["mean"] == mean_of(np.array([3.0]))["high"] == 3.0


def test_the_longest_lived_class_is_found():
    classes = classify(TEXT)
    spans = np.where(classes == CLASSES.index("digit"), 900.0, 5.0)
    layer = rank_layer(TextReading(TEXT, {4: spans}, np.zeros(len(TEXT))), 4, classes)
    best = max(layer["classes"], key=lambda row: row["mean"])
    assert best["class"] == "digit" and best["count"] == 4 and best["mean"] == 900
    assert {entry["around"][1] for entry in layer["longest"][:4]} == set("1922")


def test_reading_in_blocks_costs_what_reading_whole_does(run):
    model = TextModel.open(run, 200)
    model.decoder.double()
    rounding = reordered(1, size=16)  # what is read is kept as float32: bits of letters, below 16
    whole = model.read(model.tokens)
    blocks = replace(model, block=7).read(model.tokens)
    assert whole.text == model.text and len(whole.bits) == len(whole.text)
    np.testing.assert_allclose(blocks.bits, whole.bits, rtol=0, atol=rounding)
    np.testing.assert_allclose(blocks.spans[2], whole.spans[2], rtol=reordered(1), atol=0)
    logits = model.decoder(model.tokens.unsqueeze(0))[0][0].detach()
    want = torch.nn.functional.cross_entropy(logits[:-1], model.tokens[1:]) / np.log(2)
    assert whole.bits[1:].mean() == pytest.approx(float(want), abs=rounding) and whole.bits[0] == 0


def test_a_cut_below_every_span_costs_something_and_one_above_nothing(run):
    model = TextModel.open(run, 300)
    reading = model.read(model.tokens)
    classes = classify(reading.text)
    same = cut_spans(model, reading, 1e6, classes)
    assert same["bits_cut"] == same["bits"] and all(row["mean"] == 0 for row in same["classes"])
    cut = cut_spans(model, reading, 0, classes)
    assert cut["bits_cut"] != cut["bits"] and sum(row["count"] for row in cut["classes"]) == 299
    total = sum(row["mean"] * row["count"] for row in cut["classes"]) / 299
    assert total == pytest.approx(cut["bits_cut"] - cut["bits"], abs=1e-9)


def test_only_the_word_is_replaced(run, monkeypatch):
    model, read = TextModel.open(run, 300), []
    original = TextModel.read
    monkeypatch.setattr(TextModel, "read", lambda self, x, limit=None: read.append(x) or original(self, x, limit))
    found = replace_word(model, model.text, "Egypt")
    count = found["passages"]
    texts = ["".join(model.letters[t] for t in x.tolist()) for x in read]
    assert len(texts) == 3 * count and "Egypt" in texts[0]
    assert texts[count] == texts[0].replace("Egypt", "somewhere", 1)
    assert [word["word"] for word in found["words"]] == ["Egypt", "somewhere", "Humpty Dumpty"]
    assert choose_word("so Memphis, and then Memphis or Thebes") == "Memphis" and choose_word("nothing here") is None
    with pytest.raises(UserError, match="does not have the word 'Atlantis'"):
        replace_word(model, model.text, "Atlantis")
    with pytest.raises(UserError, match="the model has no token for"):
        model.encode("日")


def test_the_command_writes_answers_and_pictures(run, capsys):
    args = ["analyse", run.name, "--runs-dir", str(run.path.parent), "--tokens", "250", "--limits", "8,2"]
    assert main([*args, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "mean span where Egypt stood" in said and "bits more a letter" in said
    assert "±" in said.split("bits more a letter")[1]
    told = json.loads((run.path / "analysis.json").read_text())
    assert told["tokens"] == 250 and [cut["limit"] for cut in told["cut"]] == [8, 2]
    for name in ("classes", "cut", "replaced"):
        assert (run.path / f"analysis_{name}.png").read_bytes().startswith(b"\x89PNG")
    for layer in (*told["layers"], *told["cut"]):
        layer["classes"][1] |= {"count": 0, "mean": 0.0}
    told["layers"][-1]["classes"][0] |= {"low": 20.0, "high": 29.0}
    show(told)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[3][2] == rows[-2][2] == "-" and rows[3][1] != "-"  # a class without letters has no mean
    assert rows[2 + len(told["layers"]) + 1][0] == "±4.5"
    assert [text.get_text() for text in draw_classes(told["layers"]).axes[0].texts][1] == "none"
    for bad, words in (("a", "like 1024,256"), ("-3", "0 or more"), ("inf", "finite")):
        assert main([*args[:-1], bad]) == 2 and words in capsys.readouterr().err


def test_a_model_without_its_data_is_analysed(run, tmp_path, monkeypatch, capsys):
    """Its sample or a text is read, and an analysis of the model that ships is not written into the package."""
    shutil.copytree(run.path, tmp_path / "given")
    given = RunFolder.open(tmp_path / "given")
    given = replace(given, config=replace(given.config, task=replace(given.config.task, path="moved")))
    (tmp_path / "given" / "sample.txt").write_text(TEXT)
    (tmp_path / "other.txt").write_text(TEXT * 2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("expire_span.cli.analyse.find_run", lambda *_: given)
    monkeypatch.setattr(RunFolder, "is_shipped", True)
    before = sorted((tmp_path / "given").iterdir())
    for options, count in (((), len(TEXT)), (("--text", "other.txt"), 2 * len(TEXT))):
        assert main(["analyse", "--limits", "2", *options]) == 0, capsys.readouterr().err
        assert json.loads((tmp_path / "analysis" / "analysis.json").read_text())["tokens"] == count
    assert sorted((tmp_path / "given").iterdir()) == before


def test_runs_without_spans_are_refused(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT * 60)
    model = {"mixer": mixer_config("gru")}
    other = train(tiny_config(tmp_path / "text.txt", model, steps=1), tmp_path / "gru", shown=False)
    with pytest.raises(UserError, match="the memory system gru gives tokens no spans"):
        analyse(other, count=50)
