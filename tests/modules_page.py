"""Writes docs/modules.md, every module in one line, from its docstring's first sentence: `python -m tests.modules_page`."""

from __future__ import annotations

import ast
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "expire_span"
PAGE = ROOT / "docs" / "modules.md"
HEAD = """# Every module in one line

With this page you can find the file in which something is done. It is written by `python -m tests.modules_page` from the
first sentence of each module's docstring. `help(expire_span.NAME)` shows what a public name offers:

<!-- run -->
```bash
python -c "import expire_span; help(expire_span.expire_attention)"
```
"""


def first_sentence(path: Path) -> str:
    """The first paragraph of a module's docstring up to the end of its first sentence."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    words = " ".join(text.split("\n\n")[0].split())
    return words.split(". ")[0].rstrip(".").replace("|", "\\|").replace("<", "&lt;")


def folder_of(path: Path) -> str:
    """The part of the package under whose heading a file stands."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def as_markdown() -> str:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if first_sentence(path)]
    parts = [HEAD]
    for folder, inside in groupby(sorted(files, key=folder_of), folder_of):
        rows = [f"| `{path.relative_to(PACKAGE).as_posix()}` | {first_sentence(path)} |" for path in inside]
        parts.append(
            "\n".join([f"## {folder or 'expire_span'}", "", "| file | what it holds |", "|---|---|", *rows, ""])
        )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(as_markdown(), encoding="utf-8")
    print(PAGE)
