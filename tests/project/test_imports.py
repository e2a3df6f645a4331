"""Imports flow one way, importing does nothing, and nothing that can run code is ever loaded."""

import ast
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from expire_span.extras import install_command

PACKAGE = Path(__file__).parent.parent.parent / "expire_span"
ROWS = {
    "checks": 1,
    "disk": 1,
    "settings": 1,
    "models.systems": 1,  # the declarations; each system's layer.py is of the models' row
    "errors": 1,
    "extras": 1,
    "field_docs": 1,
    "memories": 1,
    "runs": 1,
    "shipped": 1,
    "recipes": 1,
    "ops": 2,
    "web": 2,  # servers and their limits: knows no model
    "store": 3,
    "models": 4,
    "tasks": 4,
    "checkpoint": 5,
    "hf": 5.5,  # answers what streams ask of a model
    "vllm": 6,  # a plugin: vLLM imports it
    "serve": 6.5,  # continuous batching over streams of any model
    "sampling": 4,
    "stream": 5,
    "generate": 6,
    "testing": 5,
    "train": 6,
    "view": 7,
    "lab": 8,
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


def test_few_modules_lie_at_the_root():
    names = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert len(names) <= 12, names


@pytest.mark.parametrize(
    "module", [*FIRST_ROW, "train.launcher"]
)  # workers follow their launcher before torch is loaded
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
    assert ran.stdout.split()[-2:] == ["0", "2"] and install_command("train") in ran.stderr


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


@pytest.mark.parametrize("kind", ["decoder", "retrofit"])
def test_few_modules_lie_between_generate_and_the_kernel(kind, monkeypatch):
    """Those of this package on the stack of calls where a decode step computes attention over its slots."""
    from expire_span.ops.slots import attend_slots
    from expire_span.stream import Stream
    from tests.stream_cases import build

    if kind == "retrofit":
        pytest.importorskip("transformers")
        from tests.hf_models import forgetful, tiny
    stream = Stream(build("layer spans") if kind == "decoder" else forgetful(tiny()), 1, static_shapes=True)
    found: set[str] = set()

    def look(*args, **options):
        found.update(frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(None))
        return attend_slots(*args, **options)

    place = "models.slot_step" if kind == "decoder" else "hf.slots"
    monkeypatch.setattr(f"expire_span.{place}.attend_slots", look)
    stream.read([[5, 6]])
    next(stream.generate(max_tokens=1))
    between = sorted(name for name in found if name.startswith("expire_span.") and "stream.stream" not in name)
    assert f"expire_span.{place}" in between and len(between) <= 9, between


KIND_WORDS = {
    "EnvTask",
    "RetrofitTask",
    "PolicyConfig",
    "BaseModel",
    "DecoderConfig",
    "AgentTrainConfig",
    "DistillConfig",
}
KIND_WORDS |= {"TrainConfig", "RunConfig", "SupervisedRunConfig", "AgentRunConfig", "RetrofitRunConfig", "AgentReader"}
KIND_WORDS |= {"SUPERVISED", "AGENT", "RETROFIT", '"env"', '"retrofit"'}
"""Names and literals by which a source could tell one kind of run from another."""


def compared_words(tree: ast.AST) -> set[str]:
    """Every name and text in comparisons and in calls of isinstance and issubclass."""
    asked = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    asked += [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")
    ]
    inside = [part for node in asked for part in ast.walk(node)]
    names = {part.id for part in inside if isinstance(part, ast.Name)}
    names |= {part.attr for part in inside if isinstance(part, ast.Attribute)}
    return names | {f'"{part.value}"' for part in inside if isinstance(part, ast.Constant)}


def test_one_place_tells_kinds_of_run_apart():
    """settings/kinds.py. All others ask `config.kind` for what differs, and compare no kind, class or task word."""
    assert compared_words(ast.parse('isinstance(run.config, agent.EnvTask) or kind == "env"')) >= {"EnvTask", '"env"'}
    for module, path in MODULES.items():
        found = compared_words(ast.parse(path.read_text())) & KIND_WORDS
        allowed = {"RunConfig"} if module == "settings.run" else set()  # the class asks its file for the kind's fields
        assert module == "settings.kinds" or found <= allowed, f"{module} tells kinds of run apart by {found}"


RULES = {"ops.rule", "ops.triton.rule", "ops.reference"}
"""Where the deletion rule is written: for tensors, for kernels, and the definition that both are judged by."""
SETTINGS = {"max_span", "keep_first", "first", "shortest"}
"""Whole numbers of settings: their sums with a ramp say what budgets are possible before there are memories."""


def restated_rules(tree: ast.AST) -> list[str]:
    """Expressions that add a ramp to something or subtract it, or compare with it negated: what ops/rule.py has helpers for."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Sub)) and is_ramp(node.value):
            found.append(ast.unparse(node))
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            names = {getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(node)}
            found += [ast.unparse(node)] * ((is_ramp(node.left) or is_ramp(node.right)) and not names & SETTINGS)
        if isinstance(node, ast.Compare):
            sides = [side.operand for side in (node.left, *node.comparators) if isinstance(side, ast.UnaryOp)]
            found += [ast.unparse(node)] * any(is_ramp(side) for side in sides)
    return found


def is_ramp(node: ast.AST) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")).lower() == "ramp"


@pytest.mark.parametrize(
    "line",
    ["left = span + (pos - column) + self.ramp", "lifetime = median + ramp", "dead = span - age <= -s.ramp"]
    + ["left += ramp", "span = age - ramp", "until + RAMP"],
)
def test_a_restated_rule_is_found(line):
    assert restated_rules(ast.parse(line))


def test_the_deletion_rule_is_written_in_one_place():
    """Settings and declarations, which need no torch, check their own limits."""
    for module, path in MODULES.items():
        if module not in RULES and module not in FIRST_ROW:
            found = restated_rules(ast.parse(path.read_text()))
            assert not found, f"{module} restates the deletion rule: {found}; call ops/rule.py"
