"""The guide begins with what a reader will be able to do, says how things are, and speaks the field's language."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.modules_page import PAGE, as_markdown

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
PAGES = sorted(path for path in DOCS.glob("*.md") if path.name != "log.md")
HISTORY = (
    r"\bformerly\b|\bpreviously\b|\bthe version before\b|\bbefore: |\(before\b|did not work at first|\bused to be\b"
)
TERMS = ("prefill", "decode step", "continuous batching", "throughput", "latency", "curriculum", "KV entr")


def unfolded(text: str) -> str:
    """A page as it opens: without what is folded, and without code."""
    return re.sub(r"<details.*?</details>|^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_begins_with_what_you_can_do_and_how(path):
    lines = path.read_text().splitlines()
    opening = " ".join(lines[2:6])
    assert re.search(r"\b(this page|opens a page)\b", opening) and " you" in opening, opening
    assert any(line.startswith("```") for line in lines[:24]), f"{path.name} shows no command at the top"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_says_how_things_are(path):
    found = re.search(HISTORY, unfolded(path.read_text()))
    assert not found, f"{path.name} tells how it was ({found[0]}): docs/log.md is the place for that"


def test_the_results_open_with_at_most_three_thousand_words():
    text = (DOCS / "results.md").read_text()
    assert len(re.sub(r"[|]|-{3,}", " ", unfolded(text)).split()) <= 3000
    assert text.count("<details") == text.count("</details>") >= 10


def test_the_field_s_terms_are_used():
    guide = " ".join(path.read_text() for path in PAGES if path.name not in ("glossary.md", "results.md"))
    assert all(re.search(term, guide, re.IGNORECASE) for term in TERMS)


def table(text: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading."""
    part = text[text.index(f"## {heading}") :].split("\n## ", 2)[0:2][0]
    rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


def test_the_glossary_maps_both_ways():
    """Whatever one table calls a term of the field, the other has too, by a word of the same term."""
    text = (DOCS / "glossary.md").read_text()
    ours = " ".join(row[0] for row in table(text, "From our words to the field's terms"))
    theirs = " ".join(row[1] for row in table(text, "From our words to the field's terms"))
    for word in ("memory", "state", "block", "row", "cap", "carry", "lesson", "receptive field"):
        assert word in ours, word
    for row in table(text, "From the field's terms to ours")[:3]:
        assert any(word in theirs for word in re.split(r", | ", row[0])), row[0]


def test_the_page_of_modules_is_that_of_their_docstrings():
    assert PAGE.read_text() == as_markdown(), "write it again: python -m tests.modules_page"
