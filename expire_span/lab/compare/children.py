"""A child process that trains one run of a comparison: how it is started, asked to stop, and why it ended."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

from expire_span.disk.files import write_atomic

PATIENCE = 60.0
"""Seconds that a child gets to save its work when the comparison is stopped."""


START = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
place = sys.argv[1]
spec = spec_from_file_location("expire_span", place + "/__init__.py", submodule_search_locations=[place])
sys.modules["expire_span"] = package = module_from_spec(spec)
spec.loader.exec_module(package)
from expire_span.lab.compare.worker import main
sys.exit(main(sys.argv[2:]))
"""
"""The program of a child process, run with -P: the current folder is not searched for modules, so that a file in it with the
name of a library is never run; and the package is loaded from the same folder as in this process."""


def tell_failure(child: subprocess.Popen[bytes], said: IO[bytes], log: Path) -> str | None:
    """Why an ended child failed, or None; what it said in several lines is written into the log."""
    log.unlink(missing_ok=True)  # the log of an earlier attempt
    if child.returncode == 0:
        return None
    said.seek(0)
    words = said.read().decode(errors="replace").strip()
    if not words or child.returncode < 0:
        return describe_end(child.returncode)
    if "\n" not in words:
        return words
    write_atomic(log, f"{words}\n".encode())
    return f"{find_reason(words)}; all it said is in {log}"


def find_reason(words: str) -> str:
    """The line of a traceback that names the error, without the paragraphs of advice that may follow it."""
    lines = words.splitlines()
    named = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Unsupported)\b", line)]
    return (named or lines)[-1]


def describe_end(code: int) -> str:
    """In words, how a child process ended that printed no reason."""
    if code >= 0:
        return f"its process ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    cause = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
    return f"its process was killed by {name}{cause}"


def start_child(
    folder: Path, name: str, said: IO[bytes], environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a child that gets no signals from the terminal: closing its standard input asks it to stop."""
    command = [sys.executable, "-P", "-c", START, str(Path(__file__).parents[2]), str(folder.resolve()), name]
    out = subprocess.DEVNULL
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=out, stderr=said, start_new_session=True, env=environment
    )


def stop_child(child: subprocess.Popen[bytes]) -> None:
    """Ask the child to save and end; after `PATIENCE` seconds it is killed."""
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.close()
    try:
        child.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
