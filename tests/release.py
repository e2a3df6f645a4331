"""Builds the source archive and the wheel, installs each in an empty environment, and tries it there: `make release-check`.

python -m tests.release              # all libraries are fetched anew, at the versions of constraints.txt
python -m tests.release --libraries  # the libraries of this environment are used; only the package is installed
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from expire_span.cli import VERBS
from tests.newcomer import copy_sources, make_environment

ROOT = Path(__file__).resolve().parent.parent
FIRST_STEPS = (
    "train recall --name first --train.steps 20 --train.eval-batches 1 --train.test-batches 1",
    "report first",
    "generate --prompt Once --max-tokens 5",
)
"""The demo's recipe for some of its steps, its report, and the model that ships with the package."""


def call(command: list[str], folder: Path, **environment: str) -> str:
    """Run a command in a folder; what it said is shown, and everything ends, if it fails or prints a traceback."""
    told = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    } | environment
    done = subprocess.run(command, cwd=folder, env=told, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode or "Traceback" in done.stderr:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(place: Path) -> list[Path]:
    """The source archive, and the wheel that is made from it."""
    copy = place / "source"
    copy.mkdir(parents=True)
    copy_sources(copy)
    call([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place / "dist"), str(copy)], place)
    return sorted((place / "dist").iterdir())


def install(archive: Path, env: Path, libraries: bool) -> Path:
    """A new environment with the archive in it, in the way of docs/install.md; returns its programs."""
    pip = [str(env / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if libraries:
        make_environment(env)
        pip += ["--no-deps", "--no-index", "--no-build-isolation"]
    else:
        venv.create(env, with_pip=True)
    call([*pip, "-c", str(ROOT / "constraints.txt"), f"expire-span[all] @ {archive.as_uri()}"], env)
    return env / "bin"


def try_out(programs: Path, folder: Path) -> None:
    """Every --help, then the first steps of the demo, in an empty folder with an empty home."""
    folder.mkdir()
    program = str(programs / "expire-span")
    for verb in ("", *VERBS):
        call([program, *([verb] if verb else []), "--help"], folder, HOME=str(folder))
    for step in FIRST_STEPS:
        call([program, *step.split()], folder, HOME=str(folder))
        print(f"  expire-span {step}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", action="store_true", help="use the libraries of this environment")
    libraries = parser.parse_args().libraries
    with tempfile.TemporaryDirectory() as name:
        for number, archive in enumerate(build(Path(name) / "build")):
            print(archive.name, flush=True)
            env = Path(name) / f"env{number}"
            try_out(install(archive, env, libraries), Path(name) / f"work{number}")
    print("both archives install and run")


if __name__ == "__main__":
    main()
