"""The model that ships with the package, and the command that makes such a folder of a run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import safetensors.torch
import torch

import expire_span
from benchmarks.shipped_data import cut, split_books
from expire_span import SHIPPED, load_decoder
from expire_span.cli import main
from expire_span.recipes import get_recipe
from expire_span.runs import RunError, RunFolder, UserError
from expire_span.settings.tasks import RecallTask
from expire_span.tasks.text import Text
from expire_span.train import ship as shipping
from expire_span.train.ship import MOST_BYTES, Shipment, ship
from expire_span.train.supervised import train
from tests.tiny import tiny_config, write_text

ABOUT = Shipment("words that repeat", note="a test", batches=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    folder = tmp_path_factory.mktemp("shipped")
    config = tiny_config(write_text(folder), {"dim": 32}, steps=12)  # wide enough for matrices beyond SMALL
    return train(config, folder / "runs" / "tiny", shown=False)


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory) -> RunFolder:
    return ship(run, tmp_path_factory.mktemp("out") / "small", ABOUT, device="cpu")


# The folder that ships


def test_it_is_whole_and_small():
    shipped = RunFolder.open(SHIPPED)
    (weights,) = SHIPPED.glob("checkpoints/*/model.safetensors")
    assert weights.stat().st_size <= MOST_BYTES and shipped.finished
    assert "/" not in shipped.config.task.path, "nobody else's folders are named"
    card = (SHIPPED / "README.md").read_text()
    result = shipped.read_result()
    for words in (f"{result['score']:.4f} bits per byte", "live memories", "| data |", "expire-span train shipped"):
        assert words in card
    assert len((SHIPPED / "sample.txt").read_bytes()) >= 2048, "the page begins with so many tokens"


def test_it_loads_as_float32_and_reads_text_better_than_chance():
    decoder = load_decoder()
    assert {p.dtype for p in decoder.parameters()} == {torch.float32}
    assert expire_span.SHIPPED == SHIPPED
    text = (SHIPPED / "sample.txt").read_bytes()[:257]
    tokens = torch.tensor([list(text)])
    with torch.inference_mode():
        logits = decoder(tokens[:, :-1])[0]
    bits = torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:]) / torch.log(torch.tensor(2.0))
    assert float(bits) < 5, "a uniform guess costs 8"


def test_commands_take_it_without_a_name(tmp_path, monkeypatch, capfdbinary):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "--prompt", "The ", "--max-tokens", "5", "--device", "cpu"]) == 0
    assert len(capfdbinary.readouterr().out) == len(b"The ") + 5 + 1
    assert main(["trace", "--tokens", "4"]) == 0
    header, *steps = map(json.loads, capfdbinary.readouterr().out.splitlines())
    assert header["name"] == SHIPPED.name and len(steps) == 4
    assert main(["trace", SHIPPED.name, "--tokens", "1"]) == 0, "it has a name as well"


# ship


def test_what_is_shipped_is_the_run(run, folder):
    assert sorted(p.name for p in folder.path.iterdir()) == [
        *("README.md", "checkpoints", "config.json", "result.json", "sample.txt")
    ]
    (weights,) = folder.path.glob("checkpoints/*/model.safetensors")
    kinds = {x.dtype for x in safetensors.torch.load_file(weights).values()}
    assert kinds == {torch.float16, torch.float32}
    ours, theirs = load_decoder(folder.path).state_dict(), load_decoder(run.path).state_dict()
    for name, x in theirs.items():
        assert ours[name].dtype == torch.float32
        # Rounding to float16, subnormals included.
        torch.testing.assert_close(ours[name], x, rtol=2.0**-11, atol=2.0**-25)
    assert folder.config.model == run.config.model and folder.config.task.path == "text.txt"
    data = Text(run.config.task)
    assert (folder.path / "sample.txt").read_bytes() == data.split("test").tobytes()[:-1], "the last is only predicted"
    card = (folder.path / "README.md").read_text()
    assert "words that repeat" in card and "**a test**" in card and str(run.path.parent) not in card


def test_refusals(run, folder, tmp_path, monkeypatch, capsys):
    with pytest.raises(UserError, match="already exists"):
        ship(run, folder.path, ABOUT)
    with monkeypatch.context() as patch:
        patch.setattr(shipping, "MOST_BYTES", 1000)
        with pytest.raises(UserError, match=r"take [\d,]+ bytes, and 1,000 can be shipped"):
            ship(run, tmp_path / "large", ABOUT, device="cpu")
    with monkeypatch.context() as patch:  # weights that half precision cannot hold
        patch.setattr(shipping, "_halve", lambda weights: {name: torch.zeros_like(x) for name, x in weights.items()})
        with pytest.raises(RunError, match="half precision raises the loss"):
            ship(run, tmp_path / "lossy", ABOUT, device="cpu")
    with pytest.raises(RunError, match="beyond float16"):
        shipping._halve({"w": torch.full((2000,), 1e6)})
    other = replace(tiny_config(tmp_path / "none", steps=1), task=RecallTask(min_length=3, max_length=6))
    recall = train(replace(other, train=replace(other.train, carry=False, block=8)), tmp_path / "recall", shown=False)
    assert main(["ship", str(recall.path), "--out", str(tmp_path / "x"), "--data", "none"]) == 2
    assert "ship needs a run of bytes, got a run of task recall" in capsys.readouterr().err
    assert not list(tmp_path.glob("l*")) and not (tmp_path / "x").exists()


def test_the_command(run, tmp_path, capsys):
    text = tmp_path / "own.txt"
    text.write_bytes(b"my own sample")
    out = tmp_path / "given"
    options = ["--data", "words", "--sample", str(text), "--batches", "1", "--device", "cpu"]
    assert main(["ship", str(run.path), "--out", str(out), *options]) == 0
    assert (out / "sample.txt").read_bytes() == b"my own sample"
    assert main(["trace", str(out)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 1 + len(b"my own sample"), "the path, a header, the steps"


def test_the_recipe_fits_and_its_data_is_cut_where_it_says(tmp_path):
    from expire_span.models.decoder import Decoder

    config = get_recipe("shipped")()
    weights = shipping._halve(Decoder(config.model).state_dict())
    assert 0.9 * MOST_BYTES < len(safetensors.torch.save(weights)) <= MOST_BYTES
    books = {f"{n:02}.txt": bytes([65 + n % 16]) * 40_000 for n in range(33)}
    files = cut(b"w" * 900_000 + b"v" * 50_000 + b"t" * 50_000, split_books(books))
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    task = Text(replace(config.task, path=str(tmp_path)))
    # A share of all bytes is rounded down, so an edge may be a few bytes off.
    found = {split: set(task.split(split)[4:-4].tobytes()) for split in ("train", "valid", "test")}
    kinds = {split: {bytes([x]) for x in values} & {b"w", b"v", b"t", b"P"} for split, values in found.items()}
    assert kinds == {"train": {b"w"}, "valid": {b"v", b"P"}, "test": {b"t"}}, "P is the sixteenth book"
