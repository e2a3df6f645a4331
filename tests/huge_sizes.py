"""Every numeric option of every command at sizes that no machine has: `python -m tests.huge_sizes FOLDER [SAMPLE]`.

Each command runs in a process of its own, which may take little more memory than loading the package takes. It must be refused
in one sentence, or succeed. Options that say how long a command works may also make it work on until it is stopped.
"""

from __future__ import annotations

import dataclasses
import os
import pkgutil
import random
import resource
import signal
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from expire_span.checks import members_of

SIZES = (999_999_999_999, 2**62)
SPARE = 2 * 2**30
"""Bytes of address space that a command may take beside what is loaded already."""
LIMIT = 20
"""Seconds of processor time that a command may take."""
TINY = (
    "--train.steps 1 --train.batch 2 --train.block 12 --train.eval-batches 1 --train.test-batches 1 --train.device cpu"
)
TINY += " --train.tracker none --model.dim 16 --model.ff-dim 16 --model.heads 2 --train.eval-every 1"
RETROFIT = (
    "base --data text.txt --steps 1 --context 32 --block 32 --batch 1 --eval-contexts 1 --device cpu --budget 0.5"
)
LONG = {
    "steps", "train.steps", "seconds", "train.seconds", "train-seconds", "max-tokens", "tokens", "episodes", "batches",
    "seeds", "frames", "jobs", "documents", "questions", "train.eval-batches", "train.test-batches", "eval-contexts",
    "calibrate", "train.accumulate", "samples",
}  # fmt: skip
"""Options that say how long to work."""
WAITING = ("serve", "view")
"""Commands that wait for requests until they are stopped."""


def commands() -> dict[str, Any]:
    """A command line that works, with small sizes, and the class of its options."""
    from expire_span.recipes import RECIPES

    hf = "base --adapter adapter --device cpu"
    places = {
        "eval run --device cpu": "runs.Eval",
        "generate run --prompt a --max-tokens 2 --device cpu": "generate.Generate",
        "verify run --tokens 32 --device cpu": "verify.Verify",
        "verify adapter --tokens 32 --device cpu": "verify.Verify",
        "trace run --text text.txt --tokens 32": "trace.TraceCommand",
        "figure growth": "figure.FigureCommand",
        "analyse run --tokens 64": "analyse.Analyse",
        f"compare recall --mixers expire_span {TINY}": "compare.Compare",
        "data collision --frames 100 --to collision": "data.Data",
        "play corridor": "play.Play",
        "ship run --out shipped": "ship.Ship",
        f"retrofit {RETROFIT}": "retrofit.RetrofitCommand",
        f"evaluate-cache {hf} --data text.txt --context 32 --documents 1": "evaluate_cache.EvaluateCache",
        f"chat {hf}": "chat.ChatCommand",
        f"serve {hf}": "serve.Serve",
        "study entrances --quick": "study.Entrances",
        "study word-rnn --steps 1": "study.WordRNN",
        "study questions --quick": "study.Questions",
        "view run --no-browser": "view.View",
    }
    found = {line: pkgutil.resolve_name(f"expire_span.cli.{x.replace('.', ':')}") for line, x in places.items()}
    return found | {
        f"train recall {TINY} --task.min-length 2 --task.max-length 9": RECIPES["recall"](),
        f"train text_tiny {TINY} --task.path text.txt": RECIPES["text_tiny"](),
    }


def numbers_of(kind: Any, prefix: str = "") -> Iterator[str]:
    """The names of all numeric options of a class of settings, or of an object of one."""
    from expire_span.cli.parsing import UNNAMED

    hints = typing.get_type_hints(kind if isinstance(kind, type) else type(kind))
    for field in dataclasses.fields(kind):
        name, hint = f"{prefix}{field.name}".replace("_", "-"), hints[field.name]
        if not isinstance(kind, type) and dataclasses.is_dataclass(getattr(kind, field.name)):
            yield from numbers_of(getattr(kind, field.name), f"{name}.")
        elif dataclasses.is_dataclass(hint) and field.name != "config":  # a recipe's, of which `train` has them all
            yield from numbers_of(hint, prefix if field.name in UNNAMED else f"{name}.")
        elif {int, float} & set(members_of(hint)):
            yield name


def list_cases(seed: int = 0) -> list[tuple[str, str, int]]:
    """Command line, option and size, in an order that depends on the seed."""
    cases = [
        (line, name, size)
        for line, kind in commands().items()
        for name in sorted(set(numbers_of(kind)))
        for size in SIZES
    ]
    random.Random(seed).shuffle(cases)
    return cases


def prepare(folder: Path) -> None:
    """A text, a tiny run, and a tiny model with an adapter."""
    from expire_span.cli import main
    from expire_span.hf.loading import open_model
    from tests.hf_models import forgetful, model_folder
    from tests.tiny import write_text

    os.chdir(folder)
    write_text(folder)
    assert main([*f"train text_tiny {TINY} --task.path text.txt --name run --runs-dir .".split()]) == 0
    model, _ = open_model(str(model_folder(folder / "base")), device="cpu")
    forgetful(model, max_span=60, ramp=8).save(folder / "adapter")


def fault_of(line: str, name: str, size: int) -> str | None:
    """Run one command; what is wrong with how it ended."""
    said = Path(f"said-{os.getpid()}.txt")
    child = os.fork()
    if child == 0:
        _run([*line.split(), f"--{name}", str(size)], said)
    _, status, used = os.wait4(child, 0)
    words = said.read_text(errors="replace").splitlines()
    told = [x for x in words if x.startswith("expire-span: ")]
    if os.WIFSIGNALED(status):
        worked = name in LONG if os.WTERMSIG(status) == signal.SIGXCPU else line.startswith(WAITING)
        worked &= os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM)
        return None if worked else f"ended by signal {os.WTERMSIG(status)} after {used.ru_utime:.0f} s: {words[-1:]}"
    if any("Traceback" in x for x in words):
        return f"a traceback: {words[-1]}"
    code = os.WEXITSTATUS(status)
    if any("unknown option" in x for x in told):
        return f"not a command to test: {told[-1]}"
    return None if code == 0 or told else f"exit code {code} without a sentence: {words[-3:]}"


def _run(arguments: list[str], said: Path) -> None:
    import traceback

    from expire_span.cli import main

    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    held = pages * resource.getpagesize() + SPARE
    resource.setrlimit(resource.RLIMIT_AS, (held, held))
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
    signal.alarm(3 * LIMIT if arguments[0] in WAITING else 60 * LIMIT)  # others are bounded by their processor time
    code = 70
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def check(folder: Path, sample: int | None = None, seed: int = 0) -> list[str]:
    """The commands that did not end as they should, with what happened."""
    prepare(folder)
    found, cases = [], list_cases(seed)
    if sample is not None:
        cases = [x for x in cases if x[1] not in LONG and not x[0].startswith(WAITING)][:sample]
    for n, (line, name, size) in enumerate(cases):
        print(f"{n + 1} of {len(cases)}: --{name} {size}", file=sys.stderr, flush=True)
        fault = fault_of(line, name, size)
        if fault is not None:
            found.append(f"expire-span {line} --{name} {size}: {fault}")
            print(found[-1], flush=True)
    return found


if __name__ == "__main__":
    sys.exit(bool(check(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else None)))
