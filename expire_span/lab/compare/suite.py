"""A suite: the same memory systems and seeds in several environments, one comparison each.

runs/<name>/
  suite.json                      the recipe, and the environment of every folder
  <environment>/                  a comparison: see plan.py; random.json holds the score of random play
  table.md, table.json, curves.png    the outcome so far

It needs the standard library only, so that wrong input is refused before torch is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from expire_span import __version__
from expire_span.disk.files import check_seal, read_json, seal, to_json, write_atomic
from expire_span.errors import UserError
from expire_span.runs import check_name

from .plan import Comparison

SUITE_FORMAT = 1
"""Version of suite.json."""


def parse_environments(text: str) -> dict[str, str]:
    """The environments of the command line, a,b,module:c, by the name of their folder."""
    found: dict[str, str] = {}
    for env in (word.strip() for word in text.split(",")):
        if not env:
            raise UserError(f"--envs lists environments like a,b,module:c, got {text!r}")
        name = env.rpartition(":")[2].replace("/", "-")
        check_name(name)
        if name in found:
            raise UserError(f"each environment is compared once, got {env} and {found[name]} in --envs")
        found[name] = env
    return found


@dataclass(frozen=True)
class Suite:
    """A suite's folder and its comparisons."""

    path: Path
    recipe: str
    comparisons: dict[str, Comparison]
    """By the name of their folder."""

    @property
    def environments(self) -> dict[str, str]:
        return {name: comparison.config.task.env for name, comparison in self.comparisons.items()}  # type: ignore[union-attr]

    def write(self) -> None:
        for comparison in self.comparisons.values():
            comparison.write()
        head = {"format": SUITE_FORMAT, "version": __version__, "recipe": self.recipe}
        write_atomic(self.path / "suite.json", to_json(seal({**head, "environments": self.environments})))

    def list_runs(self) -> list[tuple[Comparison, str]]:
        """All runs; the first ones of all comparisons come first, so that an interrupted suite has some of each."""
        columns = ([(comparison, name) for name in comparison.runs] for comparison in self.comparisons.values())
        return [run for row in zip_longest(*columns) for run in row if run is not None]


def check_suite_place(path: Path, recipe: str) -> list[str]:
    """Refuse a folder that holds something other than a suite of this recipe; returns the folders that it has already."""
    file = path / "suite.json"
    if not file.exists():
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            raise UserError(
                f"{path} is there already and is no comparison of several environments; give another --name"
            )
        return []
    told = read_json(file)
    if told.get("format") != SUITE_FORMAT:
        given = f"format {told.get('format')} (written by version {told.get('version')})"
        raise UserError(f"{path} has {given}, this version reads format {SUITE_FORMAT}; give another --name")
    check_seal(told, file)
    if told["recipe"] != recipe:
        raise UserError(f"{path} is of recipe {told['recipe']}, got {recipe}; give another --name")
    return list(told["environments"])
