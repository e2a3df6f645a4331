"""The examples of docs/hf.md run as they stand, on a tiny model."""

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from .hf_models import model_folder, text

PAGE = Path(__file__).parent.parent / "docs" / "hf.md"


def test_examples_run_in_order(tmp_path, monkeypatch, capsys):
    model_folder(tmp_path / "MODEL")
    (tmp_path / "book.txt").write_text(text(100))
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(examples) == 3
    for example in examples:
        assert len(example.splitlines()) <= 13
        exec(compile(example, str(PAGE), "exec"), {})
    said = capsys.readouterr().out
    assert "tensor([[" in said and "What did the fox take?" in said
