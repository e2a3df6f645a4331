"""Builds the page: markup, style and scripts of the folder `page` inline, and a trace inside it, if there is one."""

from __future__ import annotations

import base64
import gzip
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader

from .trace import Trace, encode

SCRIPTS = (
    *(
        "trace",
        "words",
        "colours",
        "timeline",
        "labels",
        "forgetting",
        "tokens",
        "charts",
        "studies",
        "answer",
        "whatif",
    ),
    *("server", "download", "example", "fields", "reading", "address", "controls", "main"),
)
"""Scripts in the order in which they are concatenated; each defines names that later ones use."""
FOLDER = Path(__file__).parent / "page"


@cache
def environment(folder: str = "view") -> Environment:
    """Templates of a folder of this package, which may include those of `view`: style.html, settings.html."""
    loader = ChoiceLoader([PackageLoader("expire_span", place) for place in dict.fromkeys((folder, "view"))])
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)


@cache
def parts() -> dict[str, str]:
    """Markup, style and script of the view, to be put into any page."""
    script = "\n".join((FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    body, style = ((FOLDER / name).read_text(encoding="utf-8") for name in ("body.html", "page.css"))
    return {"view_body": body, "view_style": style, "view_script": f'(() => {{\n"use strict";\n{script}\n}})();'}


def pack_trace(trace: Trace) -> str:
    """The trace's lines, compressed and encoded in characters that have no meaning in HTML."""
    data = b"".join(encode(line) for line in trace.lines())
    return base64.b64encode(gzip.compress(data, mtime=0)).decode()


def render_page(trace: Trace | None = None, *, live: bool = False, nonce: str = "") -> str:
    """The whole view as one page. live: a server answers its requests; otherwise the page sends none."""
    values: dict[str, Any] = {**parts(), "live": live, "nonce": nonce, "packed": pack_trace(trace) if trace else ""}
    values["name"] = trace.header["name"] if trace else "view"
    return environment().get_template("page/index.html").render(values)
