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


def test_the_readme_says_of_how_many_runs_its_figures_are_and_against_what():
    text = (PAGE.parents[1] / "README.md").read_text()
    results = text[text.index("## Results") : text.index("## Beside other ways")]
    assert "Each figure here is of one run" in results or "seeds" in results
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
