"""What a programmer sees of the package: types in editors, `help()`, and the scripts beside it."""

from __future__ import annotations

import ast
import gc
import inspect
import pydoc
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import expire_span
from expire_span import field_docs
from expire_span.cli.study import _show
from tests import matrix

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIGS = (
    "ExpireSpanConfig",
    "HeadReach",
    "PaperDetails",
    "BackboneConfig",
    "DecoderConfig",
    "RunConfig",
    "TrainConfig",
)


@pytest.mark.parametrize("name", CONFIGS)
def test_help_shows_what_each_field_means(name):
    config = getattr(expire_span, name)
    shown = " ".join(pydoc.plain(pydoc.render_doc(config)).replace("|", " ").split())
    for field in config.__dataclass_fields__:
        assert f" {field}: " in shown.split("Methods defined here")[0] or field == "kind", field
    assert config.__doc__.splitlines()[0].endswith((".", "presets."))


def test_help_has_the_words_of_the_source():
    assert "ramp: Soft edge of the mask, in steps (R)." in (expire_span.ExpireSpanConfig.__doc__ or "")


def test_the_layer_names_its_options():
    """At run time, for `help()`, and under TYPE_CHECKING, for editors: the same names and defaults, those of the settings."""
    shown = inspect.signature(expire_span.ExpireSpan).parameters
    assert list(shown)[:5] == ["dim", "heads", "kv_heads", "max_span", "ramp"] and shown["ramp"].default == 32
    source = ast.parse(inspect.getsource(expire_span.ExpireSpan)).body[0]
    guarded = next(
        node for node in ast.walk(source) if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ).args
    named = dict(zip((a.arg for a in guarded.kwonlyargs), guarded.kw_defaults))
    assert [a.arg for a in guarded.args][1:] + list(named) == list(shown)
    for name, default in named.items():
        if isinstance(default, ast.Constant) and name in shown:
            assert shown[name].default == default.value, name


def test_type_checkers_see_the_module_that_a_name_is_loaded_from():
    """The imports under TYPE_CHECKING, which editors read, against the table that is used at run time."""
    body = ast.parse((ROOT / "expire_span" / "__init__.py").read_text()).body
    guarded = next(node for node in body if isinstance(node, ast.If)).body
    seen = {
        alias.name: str(node.module) for node in guarded if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen.keys() == expire_span._PUBLIC.keys() == set(expire_span.__all__) - {"__version__"}
    assert all(
        seen[name].startswith(f"expire_span.{module}")
        for name, module in expire_span._PUBLIC.items()
        if name != "RunConfig"
    )


@pytest.mark.long
def test_public_names_have_their_real_types(tmp_path):
    """Pyright on a user's file; the short twin above reads the imports."""
    names = sorted(set(expire_span.__all__) - {"__version__"})
    lines = ["import expire_span", *(f"reveal_type(expire_span.{name})" for name in names)]
    # What a call returns.
    calls = [f"{name}.__call__" for name in ("Backbone", "Decoder", "Encoder", "ExpireSpan", "Mixer")]
    lines += [f"reveal_type(expire_span.{call})" for call in calls]
    (tmp_path / "user.py").write_text("\n".join(lines))
    (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT}"]}}')
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "user.py"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300).stdout
    types = [line.split("Type of", 1)[1] for line in said.splitlines() if "Type of" in line]
    assert len(types) == len(names) + len(calls) and all("-> " in line for line in types[len(names) :])
    assert not [line for line in types if "-> Any" in line] and not [
        line for line in types if 'Any"' in line or "Unknown" in line
    ], said


def test_a_quick_study_says_so(capsys, tmp_path):
    for quick in (True, False):
        _show(tmp_path, {}, lambda result: [], quick=quick)
        assert ("This was a quick study" in capsys.readouterr().out) == quick


def test_the_matrix_finds_interpreters_that_start():
    here = ".".join(map(str, sys.version_info[:2]))
    found = matrix.find_python(here)
    assert found is None or matrix.output(str(found), "-c", "print(1)") == "1"
    assert matrix.find_python("3.99") is None
    assert matrix.output(sys.executable, "-c", "raise SystemExit(3)") == matrix.output("no-such-program") == ""


def test_the_matrix_says_what_happened():
    outcomes = [matrix.Outcome("3.11", "3.9.0", "2.13.0", "== 17 passed in 61.20s (0:01:01) ==", 70.2, True)]
    assert "| 3.11 | 3.9.0 | 2.13.0 | 17 passed | 70 |" in matrix.as_table(outcomes)
    assert {v.rsplit(".", 1)[0] for v in matrix.TRITONS} == {"3.6", "3.7", "3.8", "3.9"}


def test_many_threads_may_ask_what_fields_mean():
    """A server asks from several threads. Python 3.11 fails if one parses while the collector lets another one parse."""
    files = sorted(str(path) for path in Path(expire_span.__file__).parent.rglob("*.py"))[:60]
    before = gc.get_threshold()
    gc.freeze()  # so that a collection looks at what is new only
    gc.set_threshold(100)
    gc.callbacks.append(_let_others_run)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(field_docs._classes_of.__wrapped__, files))
    finally:
        gc.callbacks.remove(_let_others_run)
        gc.set_threshold(*before)
        gc.unfreeze()
    assert any(found)


def _let_others_run(phase: str, info: dict) -> None:
    time.sleep(1e-3)
