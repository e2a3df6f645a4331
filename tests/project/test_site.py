"""The site of docs/: its guide's code runs, its pages are all listed, and it is built without a warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from expire_span import __all__ as public_names
from tests.models import test_official
from tests.view import test_trace

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
GUIDE = (
    "operator",
    "scale",
    "layer",
    "training",
    "kv_cache",
    "packed",
    "saving",
    "recipes",
    "tasks",
    "official",
    "trace",
    "view",
)
"""Pages whose Python is run from top to bottom; `prepare` makes the files that some of them open."""
RUN_ELSEWHERE = {
    "hf.md": "tests/hf/test_docs.py, on a tiny model",
    "serving.md": "below, on a tiny model",
}


def snippets(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), flags=re.DOTALL | re.MULTILINE)


def prepare(page: str, monkeypatch) -> None:
    """Make the file that a page's code opens, in the current folder: a checkpoint of the released code, or a trace."""
    if page == "official":
        for name, value in dict(heads=4, block=256, layers=8).items():  # those of the page
            monkeypatch.setitem(test_official.SETTINGS, name, value)
        torch.save({"model": test_official.make_checkpoint(False, dim=16, inner=16)}, "checkpoint.pt")
    if page in ("trace", "view"):
        trace = test_trace.trace_of(test_trace.decoder_of(test_trace.SHARED), test_trace.tokens_of(20))
        trace.save("file.jsonl")


@pytest.mark.parametrize("page", GUIDE)
def test_code_of_the_guide_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare(page, monkeypatch)
    code = snippets(f"{page}.md")
    assert code
    names: dict[str, object] = {}
    for number, snippet in enumerate(code):
        exec(compile(snippet, f"docs/{page}.md, snippet {number}", "exec"), names)


def test_code_of_the_page_on_streams_runs(monkeypatch):
    import expire_span
    from expire_span import Decoder, DecoderConfig, ExpireSpanConfig

    mixer = ExpireSpanConfig(max_span=16, ramp=4)
    decoder = Decoder(DecoderConfig.modern(dim=16, layers=1, heads=2, ff_dim=16, mixer=mixer)).eval()
    monkeypatch.setattr(expire_span, "load_decoder", lambda run: decoder, raising=False)
    (code,) = snippets("serving.md")
    assert "max_tokens=None" in code  # endless, as people will use it; not here
    names: dict[str, object] = {}
    exec(compile(code.replace("max_tokens=None", "max_tokens=200"), "docs/serving.md", "exec"), names)
    assert len(names["tokens"]) == 16  # type: ignore[arg-type]


def test_every_page_with_python_is_run_or_says_where():
    with_python = {path.name for path in DOCS.glob("*.md") if snippets(path.name)}
    assert with_python <= {f"{page}.md" for page in GUIDE} | set(RUN_ELSEWHERE), "run the new page's code in GUIDE"


def files_of(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [file for part in parts for file in files_of(part)]  # type: ignore[union-attr]


def test_navigation_lists_every_page_once():
    listed = files_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_every_public_name_has_a_place_in_the_reference():
    """And every object that the reference names is defined where it says."""
    texts = [path.read_text() for path in sorted((DOCS / "api").glob("*.md"))]
    named = [name for text in texts for name in re.findall(r"^::: (\S+)", text, re.MULTILINE)]
    members = [
        name.strip() for text in texts for part in re.findall(r"members: \[(.*)\]", text) for name in part.split(",")
    ]
    assert set(public_names) - {"__version__"} <= {name.rsplit(".", 1)[1] for name in named} | set(members)
    for name in named:
        module, _, last = name.rpartition(".")
        assert source_of(name) or re.search(rf"^(class|def) {last}\b|\b{last}\b", source_of(module), re.MULTILINE), name


def source_of(module: str) -> str:
    """The text of a module, or nothing where there is none of this name. Importing it would cost seconds."""
    place = ROOT / module.replace(".", "/")
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((file.read_text() for file in files if file.is_file()), "")


def build(target: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(target)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path):
    """The short twins above check the navigation, the links (test_docs.py) and the names of the reference."""
    pytest.importorskip("mkdocs", reason="the site needs the extra docs")
    done = build(tmp_path / "site")
    assert done.returncode == 0 and not (done.stdout + done.stderr).strip(), done.stdout + done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        fetched = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"(?:https?:)?//[^\"]*", page.read_text())
        assert not fetched, f"{page.name} fetches {fetched[:2]}"
