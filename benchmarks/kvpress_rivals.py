"""kvpress beside our caches: its presses answer the prompts of a suite, in an environment of their own.

    expire-span evaluate-cache MODEL --suite ruler ... --out OUT       # our answers, and the prompts
    python -m benchmarks.kvpress_rivals OUT                            # theirs: the same model, prompts, scoring and budgets
    python -m benchmarks.kvpress_rivals OUT --presses KVzip,SnapKV --budgets 0.25 --prompts 5
    python -m benchmarks.kvpress_rivals OUT --workers 6 --seconds 300   # six processes share the prompts, for so long

The environment, .matrix/kvpress, is made at the first call (minutes, about 2 GB), with the transformers that kvpress wants;
`--python` names another one, and `--packages` a folder of packages that come before those of the interpreter. A
press NAME is the class NAMEPress of kvpress with its default settings; AdaKV distributes the scores of Expected Attention, and
CriticalKV of SnapKV. Answers go to OUT.rivals.jsonl as they are given, so that a killed call goes on where it was; at the end
the table and OUT.html are written again, with both. Every press here reads the whole context before it compresses it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".matrix"
FOLDER = PLACE / "kvpress"
PACKAGES = ("kvpress==0.5.5",)
PRESSES = "StreamingLLM,SnapKV,ExpectedAttention,AdaKV,Compactor,KVzip"


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="what --out of evaluate-cache was")
    parser.add_argument("--presses", default=PRESSES, help="names, with commas")
    parser.add_argument("--budgets", default="0.5,0.25,0.125", help="shares of the context's memories, with commas")
    parser.add_argument("--prompts", type=int, default=10**9, help="only the first so many prompts of each task")
    parser.add_argument("--tasks", default="", help="only these tasks, with commas")
    parser.add_argument("--python", type=Path, help="the interpreter of an environment that has kvpress")
    parser.add_argument("--packages", type=Path, help="a folder of packages that the interpreter takes before its own")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the prompts, each with the model")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no answer after so many seconds")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    given = parser.parse_args(args)
    from expire_span.lab.suites.page import write_results
    from expire_span.lab.suites.record import Record, answers_path, prompts_path, read_prompts, rivals_path

    settings, samples = read_prompts(given.out)
    if settings["suite"] == "text" or settings["dtype"] not in ("fp32", "bf16"):
        raise SystemExit(f"kvpress_rivals needs a suite's prompts, got {settings['suite']} in {settings['dtype']}")
    job = {"model": str(plain_folder(settings["model"])), "dtype": settings["dtype"], "device": given.device}
    job |= {"presses": given.presses.split(","), "budgets": [float(x) for x in given.budgets.split(",")]}
    job |= {"prompts": str(prompts_path(given.out).resolve()), "rivals": str(rivals_path(given.out).resolve())}
    job |= {"each": given.prompts, "tasks": [x for x in given.tasks.split(",") if x], "seconds": given.seconds}
    drop_cut_line(rivals_path(given.out))
    if (code := run_workers(given.python, given.packages, job, given.workers)) == 0:
        paths = write_results(given.out, Record(answers_path(given.out), settings), samples)
        print(f"wrote {', '.join(map(str, paths))}")
    return code


def drop_cut_line(path: Path) -> None:
    """Remove a last line that a kill has cut off, before workers append to the file."""
    data = path.read_bytes() if path.exists() else b""
    if not data.endswith(b"\n") and data:
        path.write_bytes(data[: data.rfind(b"\n") + 1])


def run_workers(python: Path | None, packages: Path | None, job: dict[str, Any], count: int) -> int:
    """Let `count` processes answer, each every count-th prompt; the first exit status that is not 0."""
    interpreter = python or (Path(sys.executable) if packages else make_environment())
    path = [str(x) for x in (packages and packages.resolve(), ROOT) if x]
    if python or packages:
        path += [x for x in os.environ.get("PYTHONPATH", "").split(os.pathsep) if x]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    commands = [
        [str(interpreter), "-m", "benchmarks.kvpress_worker", json.dumps({**job, "worker": n, "workers": count})]
        for n in range(count)
    ]
    with ThreadPoolExecutor(count) as pool:
        codes = pool.map(lambda x: subprocess.run(x, cwd=ROOT, env=environment).returncode, commands)
        return next((x for x in codes if x), 0)


def make_environment(folder: Path = FOLDER) -> Path:
    """The interpreter of the environment, which is made if it is not there yet."""
    python = folder / "bin" / "python"
    if (folder / "ready").is_file():
        return python
    import torch

    print(f"making {folder} with {', '.join(PACKAGES)} (about 2 GB, some minutes) ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(folder)], check=True)
    wanted = [f"torch=={torch.__version__.partition('+')[0]}", *PACKAGES]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, *wanted], check=True)
    (folder / "ready").touch()
    return python


def plain_folder(name: str) -> Path:
    """The model as a folder of safetensors in float32 with its tokenizer, which every transformers can load by its path; a GGUF
    file, or a name on the hub, is written into such a folder once."""
    if Path(name).is_dir():
        return Path(name).resolve()
    told, file = name, Path(name)
    if file.exists():
        told = f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}"
    folder = PLACE / "models" / hashlib.sha256(told.encode()).hexdigest()[:16]
    if not (folder / "ready").is_file():
        from expire_span.hf.loading import open_model

        model, tokenizer = open_model(name, "fp32", "cpu")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "ready").touch()
    return folder


if __name__ == "__main__":
    sys.exit(main())
