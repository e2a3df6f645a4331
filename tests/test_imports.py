"""Imports flow one way, importing does nothing, and nothing that can run code is ever loaded."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "expire_span"
ROWS = {
    "checks": 1,
    "errors": 1,
    "files": 1,
    "migrations": 1,
    "mixer_configs": 1,
    "model_configs": 1,
    "task_configs": 1,
    "train_configs": 1,
    "memories": 1,
    "config": 1,
    "runs": 1,
    "recipes": 1,
    "ops": 2,
    "segments": 2,
    "memory": 3,
    "models": 4,
    "tasks": 4,
}
ROWS |= {
    "checkpoint": 5,
    "hf": 5,
    "generate": 5,
    "train": 6,
    "view": 7,
    "compare": 8,
    "study": 8,
    "cli": 9,
    "__main__": 10,
    "__init__": 10,
}
STANDARD_ONLY = {name for name, row in ROWS.items() if row == 1}
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> list[str]:
    """Absolute names of everything a file imports, at the top or inside functions."""
    package = ("expire_span", *path.relative_to(PACKAGE).parts[:-1])
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(x for x in (base, node.module) if x)
            names += [f"{module}.{a.name}" for a in node.names] if module == "expire_span" else [module]
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_flow_one_way(path):
    part = part_of(path)
    for name in imported_modules(path):
        if not name.startswith("expire_span."):
            continue
        other = name.split(".")[1]
        if other == part or other == "__version__":
            continue
        assert other in ROWS, f"{path.name} imports {name}, which has no row: add it to ROWS"
        assert ROWS[other] < ROWS[part] or (ROWS[other] == 1 and ROWS[part] == 1), f"{part} must not import {other}"


@pytest.mark.parametrize("part", sorted(STANDARD_ONLY))
def test_the_first_row_needs_only_the_standard_library(part):
    for name in imported_modules(PACKAGE / f"{part}.py"):
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names or top == "expire_span", f"{part} imports {name}"


def test_only_the_kernels_import_triton():
    for path in FILES:
        if "triton" not in path.parts:
            assert not any(name.split(".")[0] == "triton" for name in imported_modules(path)), path


def test_importing_loads_nothing_heavy():
    code = "import sys, expire_span; print([m for m in ('torch', 'numpy', 'triton', 'matplotlib') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_public_names_resolve():
    import expire_span

    for name in expire_span.__all__:
        assert getattr(expire_span, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        expire_span.nothing  # noqa: B018


def test_no_file_that_can_run_code_is_loaded():
    for path in FILES:
        names = imported_modules(path)
        assert not {"pickle", "dill", "cloudpickle", "joblib"} & {n.split(".")[0] for n in names}, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords), path
