"""The notebooks run from top to bottom, and what their last lines show can be shown."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as Jupyter does; returns the value of its last line, if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last is not None else None


def run_notebook(path: Path) -> tuple[list[Any], dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {"__name__": "__main__"}
    return [run_cell("".join(cell["source"]), names) for cell in cells if cell["cell_type"] == "code"], names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_well_formed_and_hold_no_output(path):
    book = json.loads(path.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert book["cells"][0]["cell_type"] == "markdown" and book["cells"][0]["source"][0].startswith("# ")


def test_see_a_model_forget(capsys):
    values, names = run_notebook(EXAMPLES / "05_see_a_model_forget.ipynb")
    shown = [value for value in values if hasattr(value, "_repr_html_")]
    assert len(shown) == 1 and shown[0]._repr_html_().startswith("<iframe sandbox")
    out = capsys.readouterr().out
    costs = [float(x) for x in re.findall(r"([\d.]+) bits a byte", out)]
    assert len(costs) == 4 and costs[2] >= costs[0] - 0.05, "forgetting at once does not help"
    assert len(names["trace"]) == len(names["text"])


def test_learned_expiry_in_your_own_model(capsys):
    _, names = run_notebook(EXAMPLES / "06_learned_expiry_in_your_own_model.ipynb")
    assert names["right"] > 0.9, "guessing gives a quarter"
    assert names["cues"] > 2 * max(names["noise"], 1), "the cue outlives the noise"
    assert names["held"][199] == names["held"][399], "memory stays flat"
