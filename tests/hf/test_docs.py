"""The examples of docs/hf.md run as they stand, on a tiny model."""

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from expire_span.cli import main
from tests.hf_models import model_folder, text

PAGE = Path(__file__).parent.parent.parent / "docs" / "hf.md"


def test_examples_run_in_order(tmp_path, monkeypatch, capsys):
    model_folder(tmp_path / "MODEL")
    (tmp_path / "book.txt").write_text(text(100))
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(examples) == 5
    for example in examples:
        assert len(example.splitlines()) <= 13
        exec(compile(example, str(PAGE), "exec"), {})
    said = capsys.readouterr().out
    for words in ("tensor([[", "memories were deleted", "What did the fox take?", "What is my name?"):
        assert words in said, words
    commands = re.findall(r"^expire-span (verify adapter.*?) *(?:#.*)?$", PAGE.read_text(), flags=re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert main([*command.split(), "--device", "cpu"]) == 0
        assert f"adapter: intact, made for {tmp_path / 'MODEL'};" in capsys.readouterr().out
