"""The record of a suite: every answer as a line of JSON, written when it is given, so that a killed suite goes on where it was.

NAME.jsonl begins with the settings; a line that a kill has cut off is dropped. NAME.prompts.jsonl holds the prompts. Answers
that other programs gave to the same prompts are read from NAME.rivals.jsonl.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from expire_span.disk.files import check_line, check_plain, seal_line, write_atomic
from expire_span.errors import UserError

from .asking import Outcome
from .prompts import Prompt, Sample

PERPLEXITY = "perplexity"
"""The task whose score is the loss of a document, in nats a token: the only one of which less is better."""
Key = tuple[str, float, str, int]
"""Method, budget, task, index."""


class Record:
    """Answers by method, budget, task and index, on disk and in memory."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings))
        self.rows: dict[Key, dict[str, Any]] = {}
        self.dials: dict[float, tuple[float, str]] = {}
        """By budget: the factor of an adapter's spans, and the subfolder of what was trained for another budget, if any."""
        if path.exists():
            self._read()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, _line({"settings": self.settings}))

    def _read(self) -> None:
        whole = read_lines(self.path)
        made = whole[0].get("settings") if whole else None
        if made != self.settings:
            names = [x for x in self.settings if not isinstance(made, dict) or made.get(x) != self.settings[x]]
            first = names[0] if names else "settings"
            was = made.get(first) if isinstance(made, dict) else None
            raise UserError(
                f"{self.path} holds answers with {first} {was}, this command has {self.settings.get(first)}; "
                "give another --out, or delete the file to begin anew"
            )
        for fields in whole[1:]:
            self._take(fields)
        if not self.path.read_bytes().endswith(b"\n"):  # a kill has cut off the last line
            write_atomic(self.path, b"".join(_line(x) for x in whole))

    def _take(self, fields: dict[str, Any]) -> None:
        if "dial" in fields:
            self.dials[fields["budget"]] = fields["dial"], fields["folder"]
        else:
            self.rows[key_of(fields)] = fields

    def __contains__(self, key: Key) -> bool:
        return key in self.rows

    def add(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append lines, and wait until they are on the disk."""
        lines = list(lines)
        with open(self.path, "ab") as file:
            file.write(b"".join(_line(x) for x in lines))
            file.flush()
            os.fsync(file.fileno())
        for fields in lines:
            self._take(fields)

    def add_outcomes(self, method: str, budget: float, samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> None:
        self.add(
            {"method": method, "budget": budget, "task": x.prompt.task, "index": x.prompt.index, **asdict(outcome)}
            for x, outcome in zip(samples, outcomes)
        )


def key_of(fields: dict[str, Any]) -> Key:
    return fields["method"], float(fields["budget"]), fields["task"], int(fields["index"])


def _line(fields: dict[str, Any]) -> bytes:
    return seal_line(json.dumps(fields).encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a record; a last line that was cut off is left out, any other damage is refused."""
    check_plain(path)
    lines = path.read_bytes().split(b"\n")
    found = []
    for n, line in enumerate(lines):
        try:
            fields = json.loads(line) if line else None
        except ValueError as error:
            if n >= len(lines) - 1:
                break
            raise UserError(f"line {n + 1} of {path} is damaged; restore it from a copy, or delete the file") from error
        if isinstance(fields, dict):
            found.append(check_line(fields, line, f"line {n + 1} of {path}"))
    return found


def prompts_path(out: Path) -> Path:
    return out.with_name(out.name + ".prompts.jsonl")


def rivals_path(out: Path) -> Path:
    return out.with_name(out.name + ".rivals.jsonl")


def answers_path(out: Path) -> Path:
    return out.with_name(out.name + ".jsonl")


def write_prompts(out: Path, samples: Sequence[Sample], settings: dict[str, Any]) -> None:
    lines = [{"settings": settings}, *(x.to_dict() for x in samples)]
    write_atomic(prompts_path(out), b"".join(_line(x) for x in lines))


def read_prompts(out: Path) -> tuple[dict[str, Any], list[Sample]]:
    """The settings and the samples that `write_prompts` has written."""
    path = prompts_path(out)
    if not path.exists():
        raise UserError(f"no prompts at {path}: run expire-span evaluate-cache --suite ... --out {out} first")
    head, *lines = read_lines(path)
    samples = []
    for line in lines:
        context, question = (tuple(line.pop(name)) for name in ("context_tokens", "question_tokens"))
        samples.append(Sample(Prompt(**{**line, "answers": tuple(line["answers"])}), context, question))
    return head["settings"], samples


def read_rivals(out: Path) -> list[dict[str, Any]]:
    """What other programs answered to the same prompts; nothing if there is no such file."""
    path = rivals_path(out)
    return [x for x in read_lines(path) if "method" in x] if path.exists() else []
