"""Plays someone who follows the pages word by word: the commands under `<!-- run -->`, and those under `<!-- parse -->`.

`run` marks what takes seconds and needs nothing; `parse` what needs a model, data, a browser or minutes: its options are tried.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKED = re.compile(r"^<!-- (run|parse) -->\n```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks_of(page: Path, mark: str = "run|parse") -> list[str]:
    """The marked blocks of commands of a page."""
    return [code for kind, code in MARKED.findall(page.read_text(encoding="utf-8")) if re.fullmatch(mark, kind)]


def commands_of(page: Path) -> list[list[str]]:
    """The arguments of every marked `expire-span` command of a page."""
    blocks = [block.replace("\\\n", " ") for block in blocks_of(page)]
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [words[1:] for words in lines if words[:1] == ["expire-span"]]


def copy_sources(folder: Path) -> None:
    """What a build needs of the repository, in another folder, so that nothing an older build left behind can slip in."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "expire_span", folder / "expire_span", ignore=shutil.ignore_patterns("__pycache__"))


def make_environment(place: Path) -> None:
    """A new environment that finds the libraries of this one, but no package that is used in place, such as this one."""
    venv.create(place, with_pip=True)
    (packages,) = place.glob("lib/python*/site-packages")
    for old in packages.glob("setuptools*"):  # older Pythons bring one that cannot read our pyproject.toml
        shutil.rmtree(old)
    (packages / "libraries.pth").write_text(sysconfig.get_paths()["purelib"])


class Newcomer:
    """An empty folder, an empty home, and a new environment that finds the libraries of this one but not this package."""

    def __init__(self, place: Path) -> None:
        self.copy, self.home, self.folder, env = (place / name for name in ("copy", "home", "work", "env"))
        for folder in (self.copy, self.home, self.folder):
            folder.mkdir(parents=True)
        copy_sources(self.copy)
        make_environment(env)
        self.environment = {"HOME": str(self.home), "PATH": f"{env / 'bin'}:{os.environ['PATH']}", "MPLBACKEND": "agg"}
        self.environment |= {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "false"}
        self.environment |= {"SOURCE": f"file://{self.copy}", "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}

    def follow(self, block: str) -> subprocess.CompletedProcess[str]:
        """Run a block as it stands: in the copy of the repository if it speaks of the current folder, else in the empty one."""
        folder = self.copy if "$PWD" in block else self.folder
        command = ["bash", "-e", "-c", block]
        return subprocess.run(
            command,
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )


if __name__ == "__main__":
    newcomer = Newcomer(Path(sys.argv[1]))
    for page in PAGES:
        for block in blocks_of(page, "run"):
            done = newcomer.follow(block)
            print(f"{page.name}: {'fine' if not done.returncode else done.stdout + done.stderr}\n{block}")
