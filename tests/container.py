"""Follows the Dockerfile and compose.yaml without Docker: a folder stands for the image, a new environment for its Python.

    python -m tests.container FOLDER      # in an empty folder; pip fetches everything, as in a real build (minutes)

Instructions that copy, set and run are carried out as they stand; paths of the image lie in the folder. No user is changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def instructions(path: Path = ROOT / "Dockerfile") -> Iterator[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            yield name, rest


def services(path: Path = ROOT / "compose.yaml") -> dict[str, Any]:
    import yaml

    return yaml.safe_load(path.read_text(encoding="utf-8"))["services"]


class Image:
    """What a build makes: files, an environment, a working folder and the command."""

    def __init__(self, place: Path, **environment: str) -> None:
        """environment: further variables, such as pip's."""
        self.root, self.env, self.work = place / "root", place / "env", place / "root"
        self.variables = {"PATH": f"{self.env / 'bin'}:{os.environ['PATH']}", "LANG": "C.UTF-8", **environment}
        self.entry: list[str] = []
        self.command: list[str] = []

    def build(self) -> None:
        """Carry out all instructions. The environment is made where there is none yet."""
        if not self.env.exists():
            venv.create(self.env, with_pip=True)
        for name, rest in instructions():
            getattr(self, f"do_{name.lower()}")(rest)

    def inside(self, path: str) -> Path:
        """The place of a path of the image."""
        return self.root / path.lstrip("/") if path.startswith("/") else self.work / path

    def do_from(self, rest: str) -> None:
        assert re.fullmatch(r"python:3\.\d+-slim", rest), rest

    def do_workdir(self, rest: str) -> None:
        self.work = self.inside(rest)
        self.work.mkdir(parents=True, exist_ok=True)

    def do_copy(self, rest: str) -> None:
        *sources, target = rest.split()
        for source in (ROOT / x for x in sources):
            place = self.inside(target)
            if source.is_dir():
                shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, place)

    def do_env(self, rest: str) -> None:
        for name, _, value in (x.partition("=") for x in rest.split()):
            self.variables[name] = str(self.inside(value)) if value.startswith("/") else value

    def do_run(self, rest: str) -> None:
        done = subprocess.run(["bash", "-ec", rest], cwd=self.work, env=self.variables, capture_output=True, text=True)
        assert done.returncode == 0, f"RUN {rest}: {done.stdout[-2000:]}{done.stderr[-2000:]}"

    def do_entrypoint(self, rest: str) -> None:
        self.entry = json.loads(rest)

    def do_cmd(self, rest: str) -> None:
        self.command = json.loads(rest)

    def do_nothing(self, rest: str) -> None:
        pass

    do_arg = do_expose = do_user = do_nothing

    def start(self, command: list[str], log: Path, **environment: str) -> subprocess.Popen:
        """A container of this image, whose output goes to a file."""
        program = shutil.which(self.entry[0], path=self.variables["PATH"])
        assert program is not None and Path(program).is_relative_to(self.env), program
        with log.open("w") as out:
            words, told = [program, *self.entry[1:], *command], self.variables | environment
            return subprocess.Popen(words, cwd=self.work, env=told, stdout=out, stderr=out)


if __name__ == "__main__":
    image = Image(Path(sys.argv[1]))
    image.build()
    print(f"built; start it with: cd {image.work} && {image.env / 'bin' / image.entry[0]} {' '.join(image.command)}")
