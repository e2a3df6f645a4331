"""Does a change of the code change what is learned? `python -m benchmarks.same_losses BEFORE AFTER`.

Each side is a commit, checked out into a temporary folder, or a folder (`.` is the working tree). Both train the first 50 steps
of recall, text_small, entrances and words on the CPU from the same seed, and one comparison of two memory systems for 20
steps. The losses agree when every metrics.jsonl is the same byte for byte. The exit code is 0 then, and 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

STEPS = 50
SHORT = ["--train.log-every", "1", "--train.test-batches", "1", "--train.eval-batches", "1", "--train.device", "cpu"]
RECIPES = ("recall", "text_small", "entrances", "words")


def write_text(path: Path, size: int = 400_000) -> None:
    """Write a text of repeating words, which is always the same."""
    draw = random.Random(7)
    words = [bytes(draw.choices(range(97, 123), k=draw.randint(2, 9))).decode() for _ in range(300)]
    path.write_text(" ".join(draw.choice(words) for _ in range(size // 6)))


def list_commands(text: Path, runs: Path) -> list[list[str]]:
    """The arguments of every run that is compared."""
    out = []
    for recipe in RECIPES:
        data = ["--task.path", str(text)] if recipe == "text_small" else []
        steps = ["--train.steps", str(STEPS), "--train.eval-every", str(STEPS)]
        out.append(["train", recipe, *steps, *SHORT, *data, "--runs-dir", str(runs)])
    systems = ["--mixers", "gru,expire_span", "--train.steps", "20"]
    return [*out, ["compare", "recall", *systems, *SHORT, "--runs-dir", str(runs)]]


def run_side(source: Path, text: Path, runs: Path) -> dict[str, bytes]:
    """Train everything with the package in `source`; returns the metrics files by their path in the runs folder."""
    env = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    for args in list_commands(text, runs):
        command = [sys.executable, "-m", "expire_span", *args]
        done = subprocess.run(command, cwd=runs.parent, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{source}: {' '.join(args)} ended with code {done.returncode}: {done.stderr.strip()}")
    return {str(path.relative_to(runs)): path.read_bytes() for path in sorted(runs.rglob("metrics.jsonl"))}


def find_difference(before: bytes, after: bytes) -> str | None:
    """The first step and value that differ, in words; None where the bytes are the same."""
    if before == after:
        return None
    pairs = list(zip(before.splitlines(), after.splitlines()))
    for old, new in ((json.loads(a), json.loads(b)) for a, b in pairs):
        for name in {**old, **new}:
            if old.get(name) != new.get(name):
                return f"step {old.get('step')}, {name}: {old.get(name)} before, {new.get(name)} after"
    return f"{len(before.splitlines())} lines before, {len(after.splitlines())} after"


def check_out(side: str, folder: Path) -> Path:
    """The source tree of one side; that of a folder is copied, so that the folder can be edited meanwhile."""
    if Path(side).is_dir():
        shutil.copytree(Path(side) / "expire_span", folder / "expire_span")
        return folder
    subprocess.run(["git", "worktree", "add", "--detach", str(folder), side], check=True, capture_output=True)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("before")
    parser.add_argument("after")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text.txt")
        sides = {"before": args.before, "after": args.after}
        try:
            sources = {side: check_out(commit, folder / f"{side}-source") for side, commit in sides.items()}
            for side in sides:
                (folder / side).mkdir()
            with ThreadPoolExecutor(2) as pool:
                jobs = {s: pool.submit(run_side, sources[s], folder / "text.txt", folder / s / "runs") for s in sides}
                before, after = (jobs[side].result() for side in ("before", "after"))
        finally:
            for side in sides:
                remove = ["git", "worktree", "remove", "--force", str(folder / f"{side}-source")]
                subprocess.run(remove, capture_output=True)
    return show_outcome(before, after)


def show_outcome(before: dict[str, bytes], after: dict[str, bytes]) -> int:
    different = 0
    for path in sorted({**before, **after}):
        fault = find_difference(before.get(path, b""), after.get(path, b""))
        different += fault is not None
        print(f"{path:<50}{'the same' if fault is None else f'DIFFERENT at {fault}'}")
    return 1 if different or not before else 0


if __name__ == "__main__":
    sys.exit(main())
