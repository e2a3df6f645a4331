"""The page that sets our figures beside the published ones says of every row on what ground the two stand."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/paper.md"
TERMS = {"same data", "same task", "re-implementation"}


def test_every_row_beside_a_published_figure_states_its_terms():
    lines = PAGE.read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    heads = [row for row in rows if "published" in row]
    bodies = [row for row in rows if "published" not in row and not set("".join(row)) <= set("-:")]
    assert len(heads) == 4 and all(head[-1] == "terms" for head in heads)
    assert len(bodies) > 30
    for row in bodies:
        assert row[-1] in TERMS, f"{row[0]} {row[1]}: {row[-1]!r} is none of {sorted(TERMS)}"


def test_the_published_collision_errors_never_stand_without_their_doubt():
    """They may belong to the process as released, and our best ones are of the process as described."""
    for page in (PAGE, PAGE.parents[1] / "README.md"):
        for line in page.read_text().splitlines():
            if "52.2 / 36.7 / 26.7" in line:
                assert "as described" in line and ("see below" in line or "of one of the two" in line), (
                    page.name,
                    line,
                )


def test_each_table_with_published_collision_errors_says_which_process_is_whose():
    """A section with a row of collision beside a published column has a sentence on the two processes."""
    sections = [
        part for part in re.split(r"\n(?=\*\*|## )", PAGE.read_text()) if re.search(r"\| object collision", part, re.I)
    ]
    assert len(sections) > 1
    for part in sections:
        prose = " ".join(line for line in part.splitlines() if line[:1] != "|")
        assert "released" in prose and "describe" in prose, part[:80]


def test_no_row_of_the_results_beats_published_collision_errors():
    for line in (PAGE.parent / "results.md").read_text().splitlines():
        if re.search(r"published[^|]*(52\.2|36\.7|26\.7)%", line):
            assert "perhaps of the other process" in line and ": won" not in line, line[:120]


def test_the_readme_says_of_how_many_runs_its_figures_are_and_against_what():
    text = (PAGE.parents[1] / "README.md").read_text()
    results = text[text.index("## Results") : text.index("## Beside other ways")]
    first = text.index("Figures on this page are of one run each.")
    assert first < min(match.start() for match in re.finditer(r"\d(\.\d+)?[x%]", text)), "a figure before it"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in results.splitlines() if line[:1] == "|"]
    assert rows[0] == ["what", "ours", "rival"] and len(rows) > 6
    assert all(re.search("[a-z]{4}", rival) for _, _, rival in rows[2:]), "a row without a rival"
    prose = " ".join(line for line in text.splitlines() if line[:1] != "|")
    ratios = [sentence for sentence in re.split(r"[.:] ", prose) if re.search(r"\d(\.\d+)?x\b", sentence)]
    assert len(ratios) > 1
    for sentence in ratios:
        assert re.search(r"\b(than|against|the time of)\b", sentence), (
            f"a ratio that does not say against what: {sentence}"
        )
