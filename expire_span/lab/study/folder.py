"""The folder of a study: settings.json, cells/ with the results of finished cells, and at the end study.json and report.html.

An interrupted study continues where it stopped: finished cells are not run again. A folder that holds anything else is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expire_span import __version__
from expire_span.disk.files import read_json
from expire_span.errors import StorageError
from expire_span.runs import UserError, describe, to_json, write_atomic


@dataclass(frozen=True)
class StudyFolder:
    path: Path

    @classmethod
    def open(cls, path: Path, study: str, settings: dict[str, Any]) -> StudyFolder:
        """Make the folder, or open the same study with the same settings."""
        head = json.loads(json.dumps({"study": study, "version": __version__, "settings": settings}))
        check_free(path, head)
        try:
            (path / "cells").mkdir(parents=True, exist_ok=True)
            write_atomic(path / "settings.json", to_json(head))
        except OSError as error:
            raise StorageError(f"cannot write the study folder {path}: {describe(error)}") from error
        return cls(path)

    def read_cell(self, name: str) -> dict[str, Any] | None:
        """The result of a finished cell, or None."""
        path = self.path / "cells" / f"{name}.json"
        return read_json(path) if path.is_file() else None

    def write_cell(self, name: str, found: dict[str, Any]) -> None:
        write_atomic(self.path / "cells" / f"{name}.json", to_json(found))

    def write_result(self, result: dict[str, Any]) -> Path:
        write_atomic(self.path / "study.json", to_json(result))
        return self.path / "study.json"


def check_free(path: Path, head: dict[str, Any]) -> None:
    """Refuse a folder that holds another study, the same with other settings, or anything else."""
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(f"--out {path} is a file; give a folder")
    if not (path / "settings.json").is_file():
        if any(path.iterdir()):
            raise UserError(f"--out {path} holds something that is no study; give an empty or a new folder")
        return
    try:
        found = read_json(path / "settings.json")
    except UserError as error:
        raise UserError(f"{error}; give another --out") from error
    if found.get("study") != head["study"]:
        raise UserError(f"--out {path} holds study {found.get('study')}, not {head['study']}; give another --out")
    for key in ("version", "settings"):
        if found.get(key) != head[key]:
            raise UserError(
                f"--out {path} holds study {head['study']} with {key} {_short(found.get(key))}, "
                f"not {_short(head[key])}; give another --out, or delete it"
            )


def _short(value: Any) -> str:
    return json.dumps(value).replace('"', "")
