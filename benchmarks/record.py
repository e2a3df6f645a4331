"""What every benchmark writes beside its figures: hardware, versions, commit."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import expire_span


def environment() -> dict[str, Any]:
    gpu = torch.cuda.is_available()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": torch.cuda.get_device_name()
        if gpu
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "expire_span": expire_span.__version__,
        "commit": commit.stdout.strip() or None,
    }


def _name_of(value: object) -> str:
    """The last part of a path, for JSON: the folder of a file means nothing to a reader of the figures."""
    if isinstance(value, Path):
        return value.name
    raise TypeError(f"a figure must be a number, a text, a list or a table, got {type(value).__name__}")


def save(name: str, result: dict[str, Any], folder: str | Path = "benchmarks/out") -> Path:
    path = Path(folder) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), **result}, indent=1, default=_name_of) + "\n")
    return path
