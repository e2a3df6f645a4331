"""`show(trace)`: the whole view inside a notebook's cell, or as one HTML file that needs nothing else."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

from expire_span.runs import write_atomic

from .assets import render_page
from .trace import Trace


@dataclass(frozen=True)
class Frame:
    """The view as an iframe that a notebook displays, so that the styles of page and notebook do not affect each other."""

    page: str
    height: int

    def _repr_html_(self) -> str:
        inside = html.escape(self.page, quote=True)
        style = f"width:100%;height:{self.height}px;border:0"
        return f'<iframe sandbox="allow-scripts allow-downloads" srcdoc="{inside}" style="{style}"></iframe>'

    def save(self, path: Path) -> None:
        write_atomic(Path(path), self.page.encode())


def show(trace: Trace, height: int = 900) -> Frame:
    """The view of a trace, for Jupyter: `show(Trace.load("file.jsonl"))`."""
    return Frame(render_page(trace), height)
