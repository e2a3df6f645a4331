"""Weighs the extras: megabytes on disk that each adds to the core, in this environment: `python -m benchmarks.extras`.

It reads pyproject.toml and the records of the installed packages; one that is not installed is named instead of weighed.
"""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
OWN = "expire-span"


def packages_of(
    needs: list[str], extras: dict[str, list[str]], found: set[str], asked: set[str] | None = None
) -> set[str]:
    """The names of all packages that these requirements bring, with what those need in turn.

    asked: extras of the package that has these requirements.
    """
    for need in map(Requirement, needs):
        if need.marker is not None and not any(need.marker.evaluate({"extra": e}) for e in ["", *(asked or ())]):
            continue
        if need.name == OWN:
            for extra in need.extras:
                packages_of(extras[extra], extras, found)
        elif need.name not in found:
            found.add(need.name)
            packages_of(requirements_of(need.name), extras, found, need.extras)
    return found


def requirements_of(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def size_of(name: str) -> int:
    """Bytes of an installed package; 0 if it is missing."""
    try:
        files = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        print(f"  {name} is not installed")
        return 0
    places = (Path(str(file.locate())) for file in files if file.suffix != ".pyc")
    return sum(place.stat().st_size for place in places if place.is_file())


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    core = packages_of(project["dependencies"], extras, set())
    print(f"core: {sum(map(size_of, core)) / 1e6:,.0f} MB in {len(core)} packages, torch {metadata.version('torch')}")
    for extra, needs in extras.items():
        more = packages_of(needs, extras, set()) - core
        print(f"{extra}: {sum(map(size_of, more)) / 1e6:,.0f} MB in {len(more)} packages")


if __name__ == "__main__":
    main()
