"""Numeric options at sizes that no machine has: refused in one sentence, in bounded memory and time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import huge_sizes
from tests.forked import CONTEXT

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of processes as Linux does")


def check(folder: Path, sample: int | None = None) -> None:
    """In a process of its own, since each command's memory is bounded by what its parent holds."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_report, args=(folder, sample, theirs))
    process.start()
    theirs.close()
    assert ours.recv() == []
    process.join()


def _report(folder: Path, sample: int | None, pipe: Any) -> None:
    torch.set_num_threads(1)
    pipe.send(huge_sizes.check(folder, sample))


@pytest.mark.slow
def test_a_sample_of_huge_sizes(tmp_path):
    check(tmp_path, 12)


@pytest.mark.long
def test_all_huge_sizes(tmp_path):
    check(tmp_path)
