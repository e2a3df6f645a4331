"""One self-contained page for a study: sections of words, pictures and tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure

from expire_span import __version__
from expire_span.runs import write_atomic
from expire_span.view.assets import environment
from expire_span.view.pictures import to_svg


@dataclass
class Section:
    """One finding: what was done and what came out, in plain words, with pictures."""

    heading: str
    text: str
    pictures: list[tuple[str, Figure]] = field(default_factory=list)
    """Captions and figures."""
    table: list[list[str]] = field(default_factory=list)
    """Rows of cells; the first row holds the headings."""


def write_page(
    path: Path,
    *,
    title: str,
    lead: str,
    facts: list[tuple[str, str]],
    sections: list[Section],
    headline: str = "",
    quick: bool = False,
) -> Path:
    """Write the page as one file that refers to nothing outside it; `quick` marks numbers that say little."""
    drawn = [
        {
            "heading": section.heading,
            "text": section.text,
            "table": section.table,
            "pictures": [(text, to_svg(figure, f"s{n}p{m}")) for m, (text, figure) in enumerate(section.pictures)],
        }
        for n, section in enumerate(sections)
    ]
    page = {"title": title, "lead": lead, "facts": facts, "sections": drawn, "version": __version__}
    page |= {"headline": headline, "quick": quick}
    write_atomic(path, environment().get_template("study.html").render(page).encode())
    return path
