"""One long file read by several processes is scored as by one."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from expire_span.cli import files, main
from expire_span.models.systems.recurrent import GRUConfig
from expire_span.ops.context import ContextGroup
from expire_span.runs import RunFolder
from expire_span.settings.run import DecoderConfig
from expire_span.stream import scoring
from expire_span.stream.scoring import score_file
from expire_span.tasks.text import BYTES
from expire_span.train.supervised import train
from tests.error_budget import DOUBLE, reordered
from tests.ranks import Ranks
from tests.stream_cases import CASES, SHAPE, build
from tests.tiny import spawn, tiny_config, write_text
from tests.train.test_ddp import launcher

BLOCK = 16
SHARED = [case for case in CASES if case not in ("cap", "paper preset")]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as found:
        yield found


def score(group: Any, path: Path, case: str, lengths: tuple[int, ...] = ()) -> Any:
    """The result of one process (group None) or of one rank, or the sentence that it is told. lengths: bytes, by rank."""
    context = None if group is None else ContextGroup(group)
    decoder, before = build(case).double(), scoring.PROMPT_BLOCK
    if lengths and context is not None:
        path = path.with_suffix(f".{context.rank}")
        path.write_bytes(bytes(lengths[context.rank]))
    scoring.PROMPT_BLOCK = BLOCK
    try:
        with open(path, "rb") as file:
            return score_file(decoder, BYTES, file, context=context)
    except ValueError as error:
        return str(error)
    finally:
        scoring.PROMPT_BLOCK = before


@pytest.mark.parametrize("case", SHARED)
def test_processes_score_a_file_as_one_does(ranks, tmp_path, case):
    """Lengths of no token beyond what is read alone, of a part of a round, and of many rounds."""
    for size, length in ((2, 2), (3, 5), (2, 200), (3, 201), (4, 202)):
        path = tmp_path / "file"
        path.write_bytes(bytes((i * i * 7 + i) % 251 for i in range(length)))
        one, found = score(None, path, case), ranks.call(score, size, path, case)
        assert all(part == found[0] for part in found)
        assert found[0]["bytes"] == length
        assert found[0]["bits_per_byte"] == pytest.approx(one["bits_per_byte"], rel=DOUBLE)
        assert found[0]["live"] == pytest.approx(one["live"], rel=DOUBLE)


def test_every_process_holds_its_own_part_of_the_memories(ranks, tmp_path):
    """Beside the slots that every store keeps spare, all together hold what one would hold."""
    (tmp_path / "file").write_bytes(bytes(range(250)) * 8)
    one = score(None, tmp_path / "file", "layer spans")["peak_bytes_per_row"]
    four = ranks.call(score, 4, tmp_path / "file", "layer spans")[0]["peak_bytes_per_row"]
    assert four < 3 * one


def test_faults_of_one_process_are_told_to_all(ranks, tmp_path):
    told = ranks.call(score, 3, tmp_path / "file", "layer spans", (50, 50, 49))
    assert len(set(told)) == 1
    assert "agree on the number of tokens in the file, got 50 on rank 0 and 49 on rank 2" in told[0]
    assert "at least 2 bytes, got 1" in ranks.call(score, 2, tmp_path / "file", "layer spans", (1, 1))[0]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CASES["cap"], "cap needs the whole file in one process, got 2; start one process"),
        (CASES["paper preset"], "paper.initial_memories needs the whole file"),
        (DecoderConfig.modern(**SHAPE, mixer=GRUConfig()), "the memory system gru needs the whole file"),
    ],
)
def test_models_that_cannot_share_a_file_are_refused_by_name(config, words):
    from expire_span.cli.files import _check_shared

    with pytest.raises(ValueError, match=words):
        _check_shared(build(config), 2)


def command(group: Any, run: Path, file: Path) -> str:
    """What `eval --file` prints in a rank of this group."""
    context, said = ContextGroup(group), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setenv("RANK", str(context.rank))
        patch.setattr(files, "_join_processes", lambda _: (torch.device("cpu"), context))
        assert files.eval_file(RunFolder.open(run), file, "cpu") == 0
    return said.getvalue()


def test_the_first_of_several_processes_prints_the_result_of_one(ranks, tmp_path, capsys):
    """The long twin launches the command as a user does."""
    run, file = trained(tmp_path)
    assert main(["eval", str(run), "--file", str(file), "--device", "cpu"]) == 0
    first, second = ranks.call(command, 2, run, file)
    assert second == ""
    check_same(json.loads(capsys.readouterr().out), json.loads(first))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["forked", "ddp"])
def test_launched_processes_score_a_file(tmp_path, capsys, kind):
    run, file = trained(tmp_path)
    assert main(["eval", str(run), "--file", str(file), "--device", "cpu"]) == 0
    process = spawn("eval", str(run), "--file", str(file), "--device", "cpu", launcher=launcher(kind))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    check_same(json.loads(capsys.readouterr().out), json.loads(out))


def trained(folder: Path) -> tuple[Path, Path]:
    """A run, and a file to score."""
    text = write_text(folder)
    run = train(tiny_config(text, steps=2, eval_every=2), folder / "run", shown=False)
    (folder / "long").write_bytes(text.read_bytes() * 2)
    return run.path, folder / "long"


def check_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    for name in ("bits_per_byte", "live"):
        assert two[name] == pytest.approx(one[name], rel=reordered(256, depth=10))
    assert two["bytes"] == one["bytes"] == 6000
