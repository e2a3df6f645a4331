"""Text read by a tokenizer: scores per token and per byte, a run folder that carries its tokenizer, what is refused."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

tokenizers = pytest.importorskip("tokenizers", reason="the tests of tokens need the extra tokens")

from tokenizers import Tokenizer as Library  # noqa: E402
from tokenizers import models, normalizers, pre_tokenizers, trainers  # noqa: E402
from tokenizers.decoders import ByteLevel  # noqa: E402

from expire_span.checkpoint import load_model  # noqa: E402
from expire_span.cli import main  # noqa: E402
from expire_span.errors import UserError  # noqa: E402
from expire_span.extras import install_command  # noqa: E402
from expire_span.lab.compare.plan import check_belongs  # noqa: E402
from expire_span.models.decoder import Decoder  # noqa: E402
from expire_span.runs import RunFolder  # noqa: E402
from expire_span.settings.tasks import TextTask  # noqa: E402
from expire_span.tasks import tokens as module  # noqa: E402
from expire_span.tasks.text import Text  # noqa: E402
from expire_span.tasks.tokens import Tokenizer  # noqa: E402
from expire_span.train import supervised  # noqa: E402
from expire_span.train.evaluate import evaluate  # noqa: E402
from tests.error_budget import reordered  # noqa: E402
from tests.tiny import tiny_config  # noqa: E402

WORDS = "the fox took the grapes, the crow kept the cheese; süß und öde: 日本 🦊\n"
TEXT = (WORDS * 120).encode()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A text, a byte-level tokenizer, and one that lowers letters and drops spaces."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "text.txt").write_bytes(TEXT)
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        [WORDS], trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    library.enable_truncation(4)  # as files of models often have; a text must not be cut
    library.save(str(folder / "bpe.json"))
    lossy = Library(models.WordLevel({"<unk>": 0, "the": 1, "fox": 2}, unk_token="<unk>"))
    lossy.normalizer = normalizers.Lowercase()
    lossy.pre_tokenizer = pre_tokenizers.Whitespace()
    lossy.save(str(folder / "lossy.json"))
    return folder


def text_task(place: Path, tokenizer: str = "bpe.json", **fields) -> Text:
    return Text(TextTask(path=str(place / "text.txt"), tokenizer=str(place / tokenizer), **fields))


@pytest.mark.parametrize("piece", [2**16, 50])
@pytest.mark.parametrize("tokenizer", ["bpe.json", "lossy.json"])
def test_the_bytes_of_all_tokens_are_the_text(place, tokenizer, piece, monkeypatch):
    monkeypatch.setattr(module, "PIECE", piece)
    ids, sizes = Tokenizer(str(place / tokenizer)).measure(TEXT)
    assert len(ids) == len(sizes) and int(sizes.sum()) == len(TEXT) and int(sizes.min()) >= 0
    if tokenizer == "bpe.json":
        assert Tokenizer(str(place / tokenizer)).decode(ids.tolist()) == TEXT


def test_characters_of_several_tokens_count_once(place):
    own = Tokenizer(str(place / "bpe.json"))
    ids, sizes = own.measure("aé🦊".encode())
    assert int(sizes.sum()) == 1 + 2 + 4 and len(ids) >= 3


def test_splits_cut_no_character_and_are_the_same_bytes_for_every_tokenizer(place):
    bpe, lossy = text_task(place), text_task(place, "lossy.json")
    assert bpe.bounds == lossy.bounds
    joined = b"".join(bpe.split(name).tobytes() for name in ("train", "valid", "test"))
    assert joined == TEXT
    for name in ("train", "valid", "test"):
        bpe.split(name).tobytes().decode()


def test_a_score_per_byte_is_taken_over_the_bytes_of_the_scored_tokens(place):
    """A model that knows nothing needs log2(vocab) bits for a token, and as many per byte as tokens are short."""
    task = text_task(place)
    config = tiny_config(place / "text.txt", {"dim": 8, "layers": 1, "ff_dim": 8, "vocab": task.codec.size})
    decoder = Decoder(config.model)
    torch.nn.init.zeros_(decoder.head.weight)
    result = evaluate(decoder, task, "test", batch=2, block=16)
    ids, sizes = task.tokens("test")
    count, size = len(ids) - 1, int(sizes[1:].sum())
    assert result.text["tokens_scored"] == count and result.text["bytes_scored"] == size
    assert result.text["bits_per_token"] == pytest.approx(math.log2(task.codec.size), rel=1e-6)
    assert (
        result.score
        == result.text["bits_per_byte"]
        == pytest.approx(math.log2(task.codec.size) * count / size, rel=1e-6)
    )
    assert result.score_name == "bpb" and result.text["tokenizer_gives_text_back"]


def test_a_tokenizer_that_changes_the_text_is_told(place):
    decoder, task = decoder_of(place, "lossy.json")
    assert evaluate(decoder, task, "test", batch=2, block=4).text["tokenizer_gives_text_back"] is False


def decoder_of(place: Path, tokenizer: str) -> tuple[Decoder, Text]:
    task = text_task(place, tokenizer)
    config = tiny_config(place / "text.txt", {"dim": 8, "layers": 1, "ff_dim": 8, "vocab": task.codec.size})
    return Decoder(config.model), task


def test_bytes_have_no_scores_of_tokens(place):
    task = Text(TextTask(path=str(place / "text.txt")))
    assert task.codec.size == 256 and task.text_scores("test", 1.0, 1, 1) == {}
    assert next(iter(task.stream("valid", batch=1, block=8, seed=0))).sizes is None


@pytest.fixture(scope="module")
def run(place, tmp_path_factory) -> RunFolder:
    """A run that was trained with a tokenizer which is gone since."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copy(place / "bpe.json", folder / "gone.json")
    config = tiny_config(
        place / "text.txt", {"dim": 8, "layers": 1, "ff_dim": 8}, steps=2, test_batches=1, tracker="none"
    )
    config = replace(config, task=replace(config.task, tokenizer=str(folder / "gone.json")))
    trained = supervised.train(config, folder / "runs" / "mine", shown=False)
    (folder / "gone.json").unlink()
    return trained


def test_the_run_folder_carries_its_tokenizer(run, place):
    assert (run.path / "tokenizer.json").read_bytes() == (place / "bpe.json").read_bytes()
    opened = RunFolder.open(run.path)
    assert opened.config.task.tokenizer == str(run.path / "tokenizer.json")  # type: ignore[union-attr]
    decoder, _ = load_model(opened)
    assert decoder.config.vocab == Tokenizer(str(place / "bpe.json")).size
    result = opened.read_result()
    assert result is not None and result["text"]["bits_per_byte"] == result["score"]
    line = opened.read_metrics()[0]
    assert line["score"] < line["loss"] / math.log(2)  # per byte is less than per token


def call(capfdbinary, *args: str) -> tuple[int, bytes, bytes]:
    code = main(list(args))
    out = capfdbinary.readouterr()
    return code, out.out, out.err


def test_generate_eval_and_verify_use_the_copy(run, place, capfdbinary):
    runs = ("--runs-dir", str(run.path.parent))
    code, out, err = call(capfdbinary, "generate", "mine", "--prompt", "the fox", "--max-tokens", "20", *runs)
    assert code == 0 and out.startswith(b"the fox") and len(out.decode()) > 8, err
    code, out, err = call(capfdbinary, "generate", "mine", "--max-tokens", "3", "--samples", "2", *runs)
    assert code == 0 and out.count(b"\n\n") >= 2, err
    code, out, err = call(capfdbinary, "eval", "mine", *runs)
    assert code == 0 and json.loads(out)["text"]["bytes_scored"] > 0, err
    code, out, err = call(capfdbinary, "eval", "mine", "--file", str(place / "text.txt"), *runs)
    found = json.loads(out)
    assert code == 0 and found["bytes"] == len(TEXT) and found["bits_per_byte"] < found["bits_per_token"], err
    code, out, err = call(capfdbinary, "verify", "mine", "--file", str(place / "text.txt"), "--tokens", "40", *runs)
    assert code == 0 and b"exact to rounding" in out, err


def test_file_and_split_agree(run, place, tmp_path, capfdbinary):
    """One row through the test split, and the same bytes as a file."""
    task = text_task(place, valid_share=0.2, test_share=0.2)
    decoder, _ = load_model(RunFolder.open(run.path))
    raw = task.split("test").tobytes()
    (tmp_path / "test.txt").write_bytes(raw)
    result = evaluate(decoder, task, "test", batch=1, block=64)
    code, out, _ = call(capfdbinary, "eval", str(run.path), "--file", str(tmp_path / "test.txt"))
    assert code == 0 and json.loads(out)["bits_per_byte"] == pytest.approx(result.score, rel=reordered(256, depth=13))


def test_a_comparison_knows_its_runs_by_the_tokenizer_that_was_given(run, place):
    opened = RunFolder.open(run.path)
    given = replace(opened.config, task=replace(opened.config.task, tokenizer="given.json"))  # type: ignore[call-arg]
    check_belongs(opened, given, None)
    with pytest.raises(UserError, match="belongs to another run"):
        check_belongs(opened, replace(given, task=replace(given.task, path="other.txt")), None)  # type: ignore[call-arg]


def test_a_changed_tokenizer_is_refused(run, tmp_path, capfdbinary):
    hurt = tmp_path / "hurt"
    shutil.copytree(run.path, hurt)
    text = (hurt / "tokenizer.json").read_text()
    (hurt / "tokenizer.json").write_text(text.replace('"fox"', '"fax"') + " ")
    code, _, err = call(capfdbinary, "generate", str(hurt))
    assert code == 2 and b"is not the tokenizer that the run was trained with" in err and b"Traceback" not in err


def test_resume_reads_the_copy(place, tmp_path):
    shutil.copy(place / "bpe.json", tmp_path / "gone.json")
    config = tiny_config(
        place / "text.txt", {"dim": 8, "layers": 1, "ff_dim": 8}, steps=2, test_batches=1, tracker="none"
    )
    config = replace(config, task=replace(config.task, tokenizer=str(tmp_path / "gone.json")))
    run = supervised.train(config, tmp_path / "mine", shown=False)
    (tmp_path / "gone.json").unlink()
    (run.path / "result.json").unlink()
    again = supervised.resume(RunFolder.open(run.path), shown=False)
    assert again.finished


BAD = [
    ("nowhere.json", b"nowhere.json is not a file; give a tokenizer.json"),
    ("text.txt", b"cannot be read"),
    (".", b"is not a file"),
]


@pytest.mark.parametrize(("tokenizer", "words"), BAD)
def test_wrong_files_are_one_sentence(place, tmp_path, monkeypatch, capfdbinary, tokenizer, words):
    monkeypatch.chdir(place)
    options = ("--task.path", "text.txt", "--task.tokenizer", tokenizer, "--runs-dir", str(tmp_path / "runs"))
    code, _, err = call(capfdbinary, "train", "text_tiny", *options)
    assert code == 2 and words in err and len(err.strip().splitlines()) == 1, err
    assert not (tmp_path / "runs").exists()


def test_text_that_is_not_utf8_names_the_byte(place):
    with pytest.raises(UserError, match=r"byte 3 is 0xff.*leave --task.tokenizer out"):
        Tokenizer(str(place / "bpe.json")).encode(b"abc\xff", "the text")


def test_a_missing_package_is_named_with_its_extra(place, monkeypatch, capfdbinary):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    options = ("--task.path", str(place / "text.txt"), "--task.tokenizer", str(place / "bpe.json"))
    code, _, err = call(capfdbinary, "train", "text_tiny", *options)
    assert code == 2 and install_command("tokens").encode() in err


def test_a_prompt_without_a_token_is_refused(place):
    from expire_span.generate import generate_text

    decoder, _ = decoder_of(place, "lossy.json")
    with pytest.raises(ValueError, match="has no token; give a prompt"):
        next(generate_text(decoder, Tokenizer(str(place / "lossy.json")), b"  "))


def test_labels_are_visible(place):
    own = Tokenizer(str(place / "bpe.json"))
    ids = own.encode(b"the fox\n")
    labels = [own.label(int(token)) for token in ids]
    assert "".join(labels) == "the␣fox⏎"
    assert all(own.label(token).strip() for token in range(own.size))
