"""Tests of the example for torchtitan in an environment of its own, on CPU processes: `make test-titan`.

    python -m tests.titan_environment                     # makes the environment if there is none (minutes), runs the tests
    python -m tests.titan_environment --python PYTHON     # in an environment that has torchtitan already

It is kept in .matrix/titan. Where torchtitan cannot be installed, tests are skipped with pip's reason, and the exit code is 0.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.matrix import PLACE, ROOT, make_venv

FOLDER = PLACE / "titan"
PACKAGES = ("torch==2.13.0", "torchtitan==0.3.0", "triton>=3.6", "pytest")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", type=Path, help="the interpreter of an environment that has torchtitan")
    given = parser.parse_args()
    try:
        python = given.python or make_environment()
    except subprocess.CalledProcessError as error:
        lines = [x for x in (error.stderr or "").splitlines() if x.startswith("ERROR")] or ["no reason given"]
        print(f"skipped: torchtitan cannot be installed here: {lines[0]}")
        return 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "--noconftest", "tests/titan"]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def make_environment() -> Path:
    """The interpreter of the environment, which is made if it is not there yet."""
    python = FOLDER / "bin" / "python"
    if not (FOLDER / "ready").is_file():
        print(f"making {FOLDER} (about 2 GB, some minutes) ...", flush=True)
        make_venv(Path(sys.executable), FOLDER)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "--disable-pip-version-check",
            "install",
            "--quiet",
        ]
        subprocess.run([*pip, *PACKAGES], check=True, capture_output=True, text=True)
        (FOLDER / "ready").touch()
    return python


if __name__ == "__main__":
    sys.exit(main())
