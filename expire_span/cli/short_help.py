"""Short help for commands with many options: --help shows the usual ones, --help-all all of them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from expire_span.field_docs import field_docs


def show_usual(prog: str, command: Any, usual: Sequence[str]) -> str:
    """Help on the usual options. `command` holds the defaults; options that it does not have are left out."""
    lines = [f"usage: {prog} [OPTIONS]", "", textwrap.fill((command.__doc__ or "").strip(), 78), "", "usual options:"]
    for option in usual:
        found = find_field(command, option)
        if found is not None:
            lines += _describe(option, *found)
    lines += ["", f"All options: {prog} --help-all"]
    return "\n".join(lines)


def find_field(command: Any, option: str) -> tuple[Any, str] | None:
    """Default and documentation of an option such as train.steps; options of a run are fields of `command.config`."""
    inside: Any = command
    *path, last = option.replace("-", "_").split(".")
    if not hasattr(inside, [*path, last][0]):
        inside = getattr(inside, "config", None)
    for name in path:
        inside = getattr(inside, name, None)
    if inside is None or not hasattr(inside, last):
        return None
    return getattr(inside, last), field_docs(type(inside)).get(last, "")


def _describe(option: str, default: Any, doc: str) -> list[str]:
    width = min(shutil.get_terminal_size().columns, 100)
    shown = f"(default: {default})" if default not in ("", None) else ""
    text = textwrap.wrap(" ".join(f"{doc} {shown}".split()), max(width - 28, 20)) or [""]
    head = f"  --{option}"
    first = [f"{head:<27} {text[0]}"] if len(head) < 27 else [head, f"{'':28}{text[0]}"]
    return [*first, *(f"{'':28}{line}" for line in text[1:])]
