"""Checkpoints of the released code as run folders: known buffers ignored, settings read off, bytes found, no code run."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from expire_span import load_decoder
from expire_span.cli import main
from expire_span.models import official
from expire_span.train.import_official import count_symbols
from tests.models.test_official import SETTINGS, make_checkpoint

MASK = torch.ones(SETTINGS["block"], SETTINGS["max_span"] + SETTINGS["block"] + SETTINGS["ramp"])
"""The buffer of every layer, of the size that the released code gives it."""


def with_buffers(state: dict, prefix: str = "") -> dict:
    return state | {f"{prefix}layers.{n}.attn.attn.mask_causal": MASK for n in range(SETTINGS["layers"])}


def save(path: Path, state: dict) -> Path:
    """As the released code saves it, with its optimizer and log beside the weights."""
    torch.save({"epoch": 3, "model": state, "logger": {"loss": [1.0]}, "optimizer": {"state": {}}}, path)
    return path


@pytest.fixture
def text(tmp_path) -> Path:
    """28 letters and a newline: with the unknown symbol, the 30 tokens of the checkpoint."""
    letters = bytes(range(65, 65 + 28))
    draw = random.Random(3)
    lines = [bytes(draw.choices(letters, weights=range(1, 29), k=60)) for _ in range(60)]
    path = tmp_path / "text.txt"
    path.write_bytes(letters + b"\n" + b"\n".join(lines) + b"\n")
    return path


def call(*args: str, capsys) -> tuple[int, str, str]:
    code = main([str(arg) for arg in args])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("prefix", ["", "module."])
def test_known_buffers_are_ignored_and_settings_read_off(prefix):
    state = make_checkpoint(True, prefix=prefix)
    told = official.read_settings(with_buffers(state, prefix))
    assert told == official.Settings(layers=3, heads=4, block=8, pre_norm=True, life=44)
    assert official.read_settings(state).life is None and not official.read_settings(make_checkpoint(False)).pre_norm
    plain = official.load(state, pre_norm=True, **SETTINGS)
    buffered = official.load(with_buffers(state, prefix), pre_norm=True, **SETTINGS)
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), buffered.state_dict().values()))
    with pytest.raises(ValueError, match=r"no place for, first layers\.0\.attn\.attn\.mask_other"):
        official.load(state | {f"{prefix}layers.0.attn.attn.mask_other": MASK}, pre_norm=True, **SETTINGS)


def test_symbols_are_ordered_as_the_released_code_does():
    """Counted word by word, sorted by count and turned round: equals come in the reverse order of their first use."""
    draw = random.Random(5)
    data = b"\n".join(bytes(draw.choices(b"abcdefgh", k=draw.randint(0, 9))) for _ in range(40))
    counts: dict[str, int] = {"<unk>": 0}
    for line in data.decode().split("\n"):
        for word in [*(str(ord(c)) for c in line), "<eos>"]:
            counts[word] = counts.get(word, 0) + 1
    want = [word for word, _ in sorted(counts.items(), key=lambda item: item[1])[::-1]]
    assert count_symbols(data) == want and max(Counter(counts.values()).values()) > 1


def test_an_imported_run_evaluates_generates_reports_and_trains_on(tmp_path, text, capsys):
    file = save(tmp_path / "model.pt", with_buffers(make_checkpoint(True)))
    run = tmp_path / "runs" / "theirs"
    options = ["--ramp", "4", "--temperature", "2", "--path", text, "--runs-dir", tmp_path / "runs"]
    training = ["--train.steps", "2", "--train.batch", "2", "--train.test-batches", "1", "--train.device", "cpu"]
    code, out, err = call("import", file, "--out", "theirs", *options, *training, capsys=capsys)
    assert code == 0 and "spans up to 40, ramp 4" in out, err
    config = json.loads((run / "config.json").read_text())
    assert config["origin"]["checkpoint"] == str(file) and config["config"]["model"]["vocab"] == 256

    theirs = official.load(make_checkpoint(True), pre_norm=True, **SETTINGS)
    words = count_symbols(text.read_bytes()[: int(len(text.read_bytes()) * 0.9) + 1])
    tokens = torch.randint(0, 29, (2, 40), generator=torch.Generator().manual_seed(1))  # all but the unknown symbol
    as_byte = torch.tensor([10 if word == "<eos>" else int(word) for word in words[:-1]])
    with torch.no_grad():
        want = theirs(tokens)[0][..., :29].log_softmax(-1)
        got = load_decoder(run)(as_byte[tokens])[0].log_softmax(-1)
    # Both sum the same products in float32; the logits here are below 50, so a few of their last bits remain.
    torch.testing.assert_close(got[..., as_byte], want, rtol=0, atol=1e-4)
    assert got.exp().sum(-1).allclose(torch.ones(()), atol=1e-5)

    code, out, err = call("eval", run, "--batches", "1", "--batch", "2", capsys=capsys)
    assert code == 0 and json.loads(out)["score_name"] == "bpb", err
    assert call("generate", run, "--prompt", "ABC", "--max-tokens", "5", capsys=capsys)[0] == 0
    assert call("report", run, capsys=capsys)[0] == 0 and (run / "report.html").stat().st_size > 1000
    assert call("resume", run, capsys=capsys)[0] == 0 and json.loads((run / "result.json").read_text())["step"] == 2


QUERY = "layers.0.attn.proj_query.weight"


def changed(path: Path, change: Callable[[torch.Tensor], torch.Tensor], part: str = QUERY) -> Path:
    """A checkpoint in which `change` was made to every tensor whose name has `part`."""
    state = with_buffers(make_checkpoint(True))
    return save(path / "a.pt", {name: change(x) if part in name else x for name, x in state.items()})


def cut_short(path: Path) -> Path:
    file = save(path / "a.pt", with_buffers(make_checkpoint(True)))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return file


def with_layer(path: Path, number: int) -> Path:
    return save(path / "a.pt", make_checkpoint(True) | {f"layers.{number}.norm1.bias": torch.ones(1)})


def pickled_code(path: Path) -> Path:
    class Evil:
        def __reduce__(self):
            return (Path.touch, (path.parent / "ran",))

    torch.save({"model": Evil()}, path)
    return path


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda p: p / "nothing.pt", [], "no checkpoint file"),
        (lambda p: save(p / "a.pt", make_checkpoint(True)), [], "give it with --max-span"),
        (lambda p: save(p / "a.pt", with_buffers(make_checkpoint(True))), [], "has 30 tokens, not the 256 bytes"),
        (lambda p: save(p / "a.pt", with_buffers(make_checkpoint(True))), ["--max-span", "9"], "mask, 44, got 9 and 4"),
        (lambda p: save(p / "a.pt", {"x": torch.ones(2)}), [], "lacks in_emb.weight"),
        (lambda p: save(p / "a.pt", {}), [], "must hold named tensors"),
        (lambda p: changed(p, torch.Tensor.int), [], "floating-point numbers, got torch.int32"),
        (lambda p: changed(p, torch.Tensor.to_sparse), [], "layout torch.sparse_coo"),
        (
            lambda p: changed(p, lambda x: x.to("meta")),
            [],
            "must be a dense tensor of floating-point numbers, got no data",
        ),
        (lambda p: changed(p, lambda x: x * torch.nan), [], "query.weight must hold finite numbers"),
        (lambda p: changed(p, lambda x: torch.cat([x, x]), "key_pe"), [], "(1, head_dim, block), got (2, 8, 8)"),
        (lambda p: with_layer(p, 10**11), [], "has layer 100000000000 but lacks layer 3"),
        (lambda p: cut_short(p), [], "cannot be loaded as weights alone"),
        (lambda p: pickled_code(p / "a.pt"), [], "code in it is never run"),
        (lambda p: (p / "a.pt").write_bytes(b"nonsense") and p / "a.pt", [], "cannot be loaded as weights alone"),
        (lambda p: (p / "a.safetensors").write_bytes(b"nonsense") and p / "a.safetensors", [], "safetensors file"),
    ],
)
def test_what_cannot_be_imported_is_one_sentence_and_leaves_nothing(tmp_path, capsys, make, options, words):
    file = make(tmp_path)
    code, _, err = call(
        "import", file, "--out", "a", "--ramp", "4", "--runs-dir", tmp_path / "runs", *options, capsys=capsys
    )
    assert code == 2 and words in err and len(err.strip().splitlines()) == 1, err
    assert not (tmp_path / "runs").exists() and not (tmp_path / "ran").exists()
