"""Two real processes give the same result as one: DDP, forked and through accelerate launch, and FSDP."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import DistributedType

from expire_span.recipes import text_tiny
from expire_span.runs import RunFolder
from expire_span.train.devices import check_processes
from expire_span.train.supervised import check_rows, train
from tests.error_budget import reordered
from tests.forked import call_several
from tests.tiny import as_options, spawn, tiny_config, write_text

SAME = reordered(256, depth=10)
"""Relative difference after at most ten steps whose gradients sum the tokens of a batch in another order; 3e-5."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def launcher(kind: str) -> tuple[str, ...]:
    port = str(free_port())
    if kind == "fsdp":
        return ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port, "-m", "tests.fsdp_child")
    options = ("--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
    launch = ("-m", "accelerate.commands.launch", "--multi_gpu", *options, "--main_process_port", port)
    return (*launch, "-m", "expire_span")


def call(kind: str, *args: str, processes: int = 2) -> tuple[int, str]:
    """processes: of forked ones; launched ones are two."""
    if kind == "forked":
        return call_several(*args, port=free_port(), processes=processes)
    process = spawn(*args, launcher=launcher(kind))
    out, err = process.communicate(timeout=300)
    return process.returncode, out + err


def lines(path: Path) -> list[dict]:
    return RunFolder.open(path).read_metrics()


def check_same(one: list[dict], two: list[dict]) -> None:
    """Assert equality up to the order of float32 sums. Bytes held may differ, since padding depends on which rows are stored
    together."""
    assert len(one) == len(two)
    for a, b in zip(one, two):
        assert a.keys() == b.keys() and a.pop("bytes_held") == pytest.approx(b["bytes_held"], rel=0.1)
        for name, value in a.items():
            assert b[name] == (value if isinstance(value, str) else pytest.approx(value, rel=SAME, abs=1e-7)), (
                a["step"],
                name,
            )


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    """Forked from one process that has loaded the modules; the long twin below launches them as a user does."""
    check_two_processes(tmp_path, "forked", steps=4)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_equal_one_and_resume_exactly(tmp_path, kind):
    """The short twin above trains with DDP alone, for fewer steps, and does not resume."""
    check_resume_is_exact(kind, check_two_processes(tmp_path, kind, steps=10))


def check_two_processes(tmp_path: Path, kind: str, steps: int) -> RunFolder:
    config = tiny_config(
        write_text(tmp_path),
        steps=steps,
        log_every=1,
        eval_every=steps // 2,
        checkpoint_every=4,
        accumulate=2,
        batch=8,
        span_weight=0.1,
    )
    one = train(config, tmp_path / "one", shown=False)
    args = ["train", "text_tiny", "--runs-dir", str(tmp_path), "--name", "two", *as_options(config, text_tiny())]
    code, output = call(kind, *args)
    assert code == 0, output
    two = RunFolder.open(tmp_path / "two")
    assert two.environment["processes"] == 2
    assert two.environment["distributed"] == ("FSDP" if kind == "fsdp" else "MULTI_CPU")
    check_same(lines(one.path), lines(two.path))
    assert two.read_result()["loss"] == pytest.approx(one.read_result()["loss"], rel=SAME)
    return two


def check_resume_is_exact(kind: str, run: RunFolder) -> None:
    """Take away the end of the run and let two processes write it again."""
    before = (run.path / "metrics.jsonl").read_bytes()
    shutil.rmtree(run.checkpoints / "step-00000010")
    (run.path / "result.json").unlink()
    code, output = call(kind, "resume", str(run.path))
    assert code == 0, output
    assert (run.path / "metrics.jsonl").read_bytes() == before


def accelerator(kind: DistributedType, processes: int) -> Any:
    return SimpleNamespace(distributed_type=kind, num_processes=processes, device="cpu")


def test_what_several_processes_cannot_do(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, batch=4)
    check_processes(config, accelerator(DistributedType.MULTI_CPU, 2))
    check_rows(config.train, 2)
    with pytest.raises(ValueError, match="got batch 4, 3 processes and accumulate 1"):
        check_rows(config.train, 3)
    sharded = accelerator(DistributedType.FSDP, 2)
    with pytest.raises(ValueError, match="optimizer muon needs whole matrices"):
        check_processes(tiny_config(tmp_path, optimizer="muon"), sharded)
    with pytest.raises(ValueError, match="positions relative"):
        check_processes(tiny_config(tmp_path, {"positions": "relative"}), sharded)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="FSDP needs several GPUs, got device cpu"):
        check_processes(config, accelerator(DistributedType.MULTI_CPU, 2))
