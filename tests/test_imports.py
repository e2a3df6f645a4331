"""Imports flow one way, importing does nothing, and nothing that can run code is ever loaded."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "expire_span"
ROWS = {
    "checks": 1,
    "models.systems": 1,  # the declarations; each system's layer.py is of the models' row
    "errors": 1,
    "field_docs": 1,
    "files": 1,
    "migrations": 1,
    "mixer_configs": 1,
    "model_configs": 1,
    "task_configs": 1,
    "train_configs": 1,
    "memories": 1,
    "config": 1,
    "agent_configs": 1,
    "agent_recipes": 1,
    "retrofit_configs": 1,
    "records": 1,
    "runs": 1,
    "sizes": 1,
    "shipped": 1,
    "recipe_facts": 1,
    "recipes": 1,
    "task_recipes": 1,
    "ops": 2,
    "tensor_files": 2,
    "store": 3,
    "memory": 4,
    "models": 4,
    "tasks": 4,
    "checkpoint": 5,
    "hf": 5.5,  # decodes with the engine of streams
    "sampling": 4,
    "stream": 5,
    "generate": 6,
    "testing": 5,
    "train": 6,
    "view": 7,
    "analyse": 8,
    "compare": 8,
    "study": 8,
    "cli": 9,
    "__main__": 10,
    "__init__": 10,
}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    """Dotted name inside the package; a folder's own name for its `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_of(path): path for path in FILES}


def part_of(module: str) -> str:
    """The row's name: the first folder or file, but the declarations of memory systems have a row of their own."""
    if module.startswith("models.systems") and MODULES.get(module, PACKAGE / "__init__.py").name != "__init__.py":
        return "models.systems" if module == "models.systems.contract" else "models"
    return "models.systems" if module.startswith("models.systems") else module.split(".")[0]


FIRST_ROW = [module for module in MODULES if ROWS.get(part_of(module)) == 1]


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
            inside = module.removeprefix("expire_span").lstrip(".")
            for alias in node.names:
                whole = ".".join(x for x in (inside, alias.name) if x)
                names.append(f"expire_span.{whole}" if whole in MODULES or module == "expire_span" else module)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_flow_one_way(path):
    part = part_of(module_of(path))
    for name in imported_modules(path):
        if not name.startswith("expire_span.") or name == "expire_span.__version__":
            continue
        other = part_of(name.removeprefix("expire_span."))
        if other == part:
            continue
        assert other in ROWS, f"{path.name} imports {name}, which has no row: add it to ROWS"
        assert ROWS[other] < ROWS[part] or (ROWS[other] == 1 and ROWS[part] == 1), f"{part} must not import {other}"


ALIASES = ["memory", "mixer_configs", "tasks.task", "train.checkpoint"]
"""Former places of public names, kept for users' imports until the next release."""


def test_the_package_does_not_import_its_own_aliases():
    for path in FILES:
        used = {name.removeprefix("expire_span.") for name in imported_modules(path)} & set(ALIASES)
        assert not used, f"{path} imports {used}, which will be removed"


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, or nothing."""
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        for other in sorted(graph[module]):
            if circle := visit(other, [*trail, module]):
                return circle
        done.add(module)
        return []

    return next((circle for module in graph if (circle := visit(module, []))), [])


def test_no_module_imports_itself_through_others():
    """Inside folders too. A folder's `__init__` counts as itself: importing a neighbour does not import it."""
    graph = {}
    for module, path in MODULES.items():
        names = {name.removeprefix("expire_span.") for name in imported_modules(path)}
        graph[module] = {name for name in names if name in MODULES and name != module}
    assert find_circle(graph) == []


@pytest.mark.parametrize("module", FIRST_ROW)
def test_the_first_row_needs_only_the_standard_library(module):
    for name in imported_modules(MODULES[module]):
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names or top == "expire_span", f"{module} imports {name}"


def test_only_the_kernels_import_triton():
    for path in FILES:
        if "triton" not in path.parts:
            assert not any(name.split(".")[0] == "triton" for name in imported_modules(path)), path


def test_importing_loads_nothing_heavy():
    code = "import sys, expire_span; print([m for m in ('torch', 'numpy', 'triton', 'matplotlib') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_the_core_alone_shows_help_and_names_the_extra_of_a_command():
    code = "import sys; sys.modules['tyro'] = None; from expire_span.cli import main\n"
    code += "print(main(['--version']), main(['eval', 'x']))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split()[-2:] == ["0", "2"] and "pip install 'expire-span[train]'" in ran.stderr


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
