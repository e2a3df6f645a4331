"""Fuzzes the command line: `python -m tests.fuzz_cli [SEED]`.

Hundreds of commands with wrong types, absurd numbers, hostile names and damaged files, all in this process. Each must end
within 20 seconds with an exit code and, where it is not 0, with sentences on stderr; a traceback, a hang or a file outside of
the runs folder is a failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from expire_span.checks import members_of
from expire_span.cli import main
from expire_span.recipes import RECIPES
from expire_span.train import supervised
from tests.tiny import tiny_config, write_text

LIMIT = 20
"""Seconds that a command may take."""
TINY = "--train.steps 1 --train.batch 2 --train.eval-batches 1 --train.test-batches 1 --train.device cpu"
TINY = f"{TINY} --train.tracker none --model.dim 16 --model.ff-dim 16 --model.heads 2 --train.eval-every 1".split()
DATA = {
    "recall": ["--train.block", "12", "--task.min-length", "2", "--task.max-length", "9"],
    "text_tiny": ["--train.block", "8", "--task.path", "text.txt"],
}
NUMBERS = ("abc", "-1", "0", "999999999999", "1" * 40, "nan", "inf", "-inf", "1e400", "½", "", "0x10", "1,5")
WORDS = ("odd", "", "\N{RIGHT-TO-LEFT OVERRIDE}x", "../../etc", "\ud800", "x" * 3000, "None", "[]", "$(touch ran)")
NAMES = ("", ".", "..", "/", "a/b", "../outside", "/etc/passwd", "\0", "x" * 300, "x" * 5000, "ü\u202e", "-rf", "--")
NAMES += ("\ud800", "a\nb", "$(touch ran)", "a b", "'; --", "%s", "{x}", "~root", "CON", "*", "?", "text.txt", "None")
DAMAGE = (b"", b"{", b"[]", b"null", b"\xff\xfe\0", b"[" * 50_000, b"3\n", b'{"step": NaN}\n', b'{"format": 2}')


class Hang(BaseException):
    """A command took too long."""


def list_cases(seed: int = 0) -> list[list[str]]:
    """Every command, in an order that depends on the seed, so that a sample of them has something of each kind."""
    cases = [*options_of_train(), *names(), *other_verbs(), *damaged()]
    random.Random(seed).shuffle(cases)
    return cases


def options_of_train() -> Iterator[list[str]]:
    for recipe in ("recall", "text_tiny"):
        for option, hint in fields_of(RECIPES[recipe]()):
            for value in values_for(hint, option):
                if option == "train.steps" and value == "999999999999":
                    continue  # a long training is not an error
                yield ["train", recipe, *DATA[recipe], *TINY, f"--{option}", value]


def fields_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every option of a config with its type."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{prefix}{field.name}".replace("_", "-")
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{name}.")
        else:
            yield name, hints[field.name]


def values_for(hint: Any, option: str) -> list[str]:
    """Four values of a kind that the option does not expect; which ones depends on its name."""
    members = members_of(hint)
    pool = NUMBERS if {int, float} & set(members) else WORDS
    return random.Random(option).sample(pool, 4)


def names() -> Iterator[list[str]]:
    for name in NAMES:
        for verb in ("resume", "eval", "generate", "report"):
            yield [verb, name]
        yield ["train", "recall", *DATA["recall"], *TINY, "--name", name]
        yield ["train", "recall", *DATA["recall"], *TINY, "--init-from", name]
        yield ["train", "text_tiny", *DATA["text_tiny"], *TINY, "--task.path", name]
        yield ["import", name, "--out", "b", "--ramp", "4"]
        yield ["import", "text.txt", "--out", name, "--ramp", "4"]
        yield [name]
        yield ["compare", "recall", "--mixers", name]


def other_verbs() -> Iterator[list[str]]:
    for value in NUMBERS:
        for option in ("batch", "batches", "block"):
            yield ["eval", "sound", f"--{option}", value]
        for option in ("temperature", "top-k", "top-p", "seed", "samples"):
            yield ["generate", "sound", "--max-tokens", "2", f"--{option}", value]
        for option in ("budgets", "seeds", "train-seconds"):  # a runs folder that is a file: nothing is trained
            yield ["compare", "recall", "--mixers", "expire_span", f"--{option}", value, "--runs-dir", "text.txt"]
        yield ["study", "entrances", "--jobs", value, "--seeds", "0"]
        yield ["import", "text.txt", "--out", "b", "--ramp", value]


def damaged() -> Iterator[list[str]]:
    """A command on a copy of a sound run with one damaged file; `damage FILE N` is read by `run_case`."""
    for name in ("config.json", "metrics.jsonl", "speed.jsonl", "result.json", "checkpoints"):
        for number in range(len(DAMAGE)):
            for verb in ("resume", "eval", "generate --max-tokens 2"):
                yield ["damage", name, str(number), *verb.split()[:1], "hurt", *verb.split()[1:]]


def prepare(folder: Path) -> None:
    """A text and a finished run called sound."""
    text = write_text(folder)
    config = tiny_config(Path(text.name), {"dim": 8, "layers": 1, "ff_dim": 8}, steps=2, test_batches=1, tracker="none")
    supervised.train(config, folder / "runs" / "sound", shown=False)


def run_case(case: list[str], folder: Path) -> str | None:
    """Run one command in `folder`; what is wrong with how it ended, or None."""
    before = _outside(folder)
    if case[0] == "damage":
        _damage(folder, case[1], DAMAGE[int(case[2])])
        case = case[3:]
    said, start = io.StringIO(), time.monotonic()
    fault = _call(case, said)
    _remove(folder, "hurt")
    if fault is None and time.monotonic() - start > LIMIT:
        fault = f"took {time.monotonic() - start:.0f} s"
    new = _outside(folder) - before
    return fault or (f"left {sorted(new)[:3]} outside of the runs folder" if new else None)


def _call(case: list[str], said: io.StringIO) -> str | None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf8", errors="backslashreplace")
    signal.signal(signal.SIGALRM, _hang)
    signal.alarm(LIMIT + 5)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
            code = main(list(case))
    except SystemExit as stop:
        code = stop.code
    except Hang:
        return "hung"
    except BaseException as error:
        return f"raised {type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
    lines = said.getvalue().strip().splitlines()
    if code not in (0, 1, 2):
        return f"ended with code {code}"
    if code and not (lines and lines[-1].startswith("expire-span: ")):
        return f"ended with code {code} and said {lines[-1:]}"
    return "showed a traceback" if any("Traceback" in line for line in lines) else None


def _hang(signum: int, frame: Any) -> None:
    raise Hang


def _outside(folder: Path) -> set[str]:
    """Files in the folder and beside it that are not below its runs folder."""
    inside = {str(p) for p in folder.rglob("*") if "runs" not in p.relative_to(folder).parts}
    return inside | {str(p) for p in folder.parent.iterdir()}


def _damage(folder: Path, name: str, data: bytes) -> None:
    run = folder / "runs" / "hurt"
    shutil.copytree(folder / "runs" / "sound", run)
    if name == "checkpoints":
        name = "checkpoints/step-00000002/state.json"
    (run / name).write_bytes(data)


def _remove(folder: Path, name: str) -> None:
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)
    for path in (folder / "runs").iterdir():
        if path.name != "sound":
            shutil.rmtree(path, ignore_errors=True)


def fuzz(cases: list[list[str]], folder: Path) -> list[str]:
    """Run all cases in `folder`; a sentence for each failure."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        prepare(folder)
        found = [(case, run_case(case, folder)) for case in cases]
    finally:
        os.chdir(here)
    return [f"{' '.join(word[:60] for word in case)!r} {fault}" for case, fault in found if fault is not None]


if __name__ == "__main__":
    everything = list_cases(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "work").mkdir()
        failures = fuzz(everything, Path(name) / "work")
    print(f"{len(everything)} cases, {len(failures)} failures", *failures, sep="\n")
    sys.exit(bool(failures))
