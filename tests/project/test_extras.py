"""The core needs torch, numpy and safetensors only; what needs more says which extra brings it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from expire_span import extras
from expire_span.extras import EXTRAS, install_command

ROOT = Path(__file__).resolve().parent.parent.parent
HIDE = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None  # importing it fails as if it were not installed
"""
CORE = """
import torch
from expire_span import Decoder, DecoderConfig, ExpireSpan, ExpiringMemory, expire_attention
x = torch.randn(1, 2, 5, 8)
expire_attention(x, x, x, torch.rand(1, 5) * 3, ramp=2)
y, state, aux = ExpireSpan(16, 2, max_span=8, ramp=2)(torch.randn(1, 4, 16))
Decoder(DecoderConfig.modern(dim=16, layers=1, heads=2, ff_dim=16))(torch.zeros(1, 3, dtype=torch.long))
print("core works")
"""


def run(hidden: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HIDE + code, hidden, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_the_operator_and_the_layer_need_the_core_only():
    done = run(",".join(EXTRAS), CORE)
    assert done.returncode == 0 and "core works" in done.stdout, done.stderr


@pytest.mark.parametrize("missing", ["tyro", "rich", "accelerate"])
def test_a_missing_package_is_named_with_its_extra(missing):
    verb = {"tyro": "['recipes']", "rich": "['recipes']", "accelerate": "['train', 'recall']"}[missing]
    code = f"sys.argv[1:] = {verb}\nfrom expire_span.__main__ import main\nsys.exit(main())"
    done = run(missing, code)
    if missing == "rich" and done.returncode == 0:
        return  # this verb does without it
    assert done.returncode == 2, done.stderr
    assert f"needs the package {missing}; install it with: {install_command('train')}" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_extra_that_is_named_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS.values()) <= set(project["optional-dependencies"])
    assert [d.split(">")[0] for d in project["dependencies"]] == ["torch", "numpy", "safetensors"]


RECORDS = {
    "file:///home/ada/expire-span": ({"dir_info": {}}, "file:///home/ada/expire-span"),
    "file:///tmp/expire_span-1-py3-none-any.whl": ({"archive_info": {}}, "file:///tmp/expire_span-1-py3-none-any.whl"),
    "https://git.example/a/b": ({"vcs_info": {"vcs": "git"}}, "git+https://git.example/a/b"),
    "https://git.example/a": (
        {"vcs_info": {"vcs": "git", "requested_revision": "v1"}},
        "git+https://git.example/a@v1",
    ),
}
"""What pip records of an installation from a copy, a wheel and a git address, and the address that adds an extra to it."""


@pytest.mark.parametrize("url", RECORDS)
def test_the_command_that_adds_an_extra_names_where_the_package_came_from(url, tmp_path, monkeypatch):
    record, source = RECORDS[url]
    place = tmp_path / "expire_span-1.dist-info"
    place.mkdir()
    (place / "direct_url.json").write_text(json.dumps({"url": url, **record}))
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "expire_span" / "extras.py"))
    assert install_command("hf") == f"pip install 'expire-span[hf] @ {source}'"


def test_the_command_that_adds_an_extra_is_plain_where_nothing_is_recorded(tmp_path, monkeypatch):
    assert install_command("hf") == f"pip install -e '{ROOT}[hf]'", "a clone stays a clone"
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "expire_span" / "extras.py"))
    assert install_command("hf").startswith('pip install "expire-span[hf] @ $SOURCE", where SOURCE is')


PLACES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*")]


def test_every_page_and_notebook_installs_in_the_same_way():
    """The package is in no index: `pip install expire-span[...]` would find nothing. Docs name extras that exist."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told = 0
    for path in PLACES:
        text = path.read_text().replace('\\"', '"') if path.is_file() and path.name != "log.md" else ""
        for line in re.findall(r"pip install[^`\n]*", text):
            if "expire" in line or "'." in line or '"."' in line:
                found = re.match(r'pip install (?:--\S+ )*"expire-span\[([\w,]+)\] @ \$\{?SOURCE\}?"', line)
                assert found and set(found[1].split(",")) <= set(known), f"{path.name} says {line}"
                told += 1
    assert told >= 6, "pages do not say how to install any more"


@pytest.mark.parametrize("impl", ["auto", "chunked"])
def test_apple_gpus_are_refused_in_a_sentence(impl):
    import torch

    from expire_span.ops import resolve_impl

    with pytest.raises(ValueError, match=r"does not run on Apple's GPUs \(device mps\); move tensors"):
        resolve_impl(impl, torch.device("mps"))


def test_apple_gpus_are_no_device_of_training():
    from expire_span.train.devices import check_device

    with pytest.raises(ValueError, match="device must be auto, cpu, cuda or cuda:N, got 'mps'"):
        check_device("mps")


def test_windows_is_refused_in_a_sentence_but_help_is_given(monkeypatch, capsys):
    from expire_span.cli import main

    monkeypatch.setattr(sys, "platform", "win32")
    assert main(["--help"]) == 0 and "commands:" in capsys.readouterr().out
    assert main(["recipes"]) == 2
    assert "does not run on Windows" in capsys.readouterr().err
