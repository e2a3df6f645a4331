"""The example for torchtitan, trained by its trainer on CPU processes (`make test-titan`)."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")

ROOT = Path(__file__).resolve().parents[2]
SAME = 3e-5
"""Losses are printed with five decimals; sums in another order change the last."""


def launch(folder: Path, processes: int, *options: str) -> tuple[int, str]:
    """A run of `expiring_tiny` in float32; what both processes print."""
    text = folder / "text"
    text.write_bytes(b"".join(b"%d forgets what %d remembers. " % (n * n % 97, n) for n in range(200)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", port]
    command += ["-m", "tests.titan.on_cpu", "--module", "expiring", "--config", "expiring_tiny"]
    command += ["--dataloader.dataset_path", str(text), "--dump_folder", str(folder), "--debug.seed", "3"]
    command += ["--training.mixed_precision_param", "float32", "--metrics.log_freq", "1", "--checkpoint.interval", "3"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples" / "torchtitan")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *options], env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


def losses(folder: Path, processes: int, *options: str) -> dict[int, tuple[float, float]]:
    """The loss and the gradient's norm of each step."""
    code, said = launch(folder, processes, "--metrics.disable_color_printing", *options)
    assert code == 0, said[-3000:]
    found = re.findall(r"step: +(\d+) +loss: +([\d.]+) +grad_norm: +([\d.]+)", said)
    return {int(step): (float(loss), float(norm)) for step, loss, norm in found}


def folder_of(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def test_two_processes_that_share_each_sequence_train_as_one(tmp_path):
    one = losses(folder_of(tmp_path, "one"), 1)
    two = losses(folder_of(tmp_path, "two"), 2, "--parallelism.context_parallel_degree", "2")
    assert list(one) == [1, 2, 3, 4, 5, 6] and one[6][0] < one[1][0] - 0.1
    for step, (loss, norm) in one.items():
        assert two[step][0] == pytest.approx(loss, abs=SAME), step
        assert two[step][1] == pytest.approx(norm, abs=2e-4), step  # printed with four decimals


def test_a_sharded_run_resumes_from_its_checkpoint(tmp_path):
    whole = losses(tmp_path, 2)
    shutil.rmtree(tmp_path / "checkpoint" / "step-6")
    assert losses(tmp_path, 2) == {step: whole[step] for step in (4, 5, 6)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--parallelism.tensor_parallel_degree", "2"), "tensor_parallel_degree must be 1 for this model, got 2"),
        (
            ("--parallelism.context_parallel_degree", "2", "--parallelism.context_parallel_load_balancer", "headtail"),
            "context_parallel_load_balancer must be None, since shards lie in order, got headtail",
        ),
    ],
)
def test_what_the_model_does_not_do_is_refused(tmp_path, options, words):
    code, said = launch(tmp_path, 2, *options)
    assert code != 0 and words in said
