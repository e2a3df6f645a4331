"""A real browser for the tests of the page, and a real server for it to ask."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expire_span.view.server import Source, bind_port, serve
from expire_span.view.trace import Trace

FLAGS = ["--no-sandbox", "--enable-unsafe-swiftshader"]
"""Drawing by the processor alone, so that every machine draws the same."""


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")
    path = find_chromium()
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@contextlib.contextmanager
def serving(source: Source) -> Iterator[tuple[int, Any]]:
    """The port and the app of a server in a thread of this process."""
    servers: list[Any] = []
    sock = bind_port(8800)
    thread = threading.Thread(target=serve, args=(source, sock), kwargs={"ready": servers.append}, daemon=True)
    thread.start()
    wait_until(lambda: servers and servers[0].started)
    try:
        yield sock.getsockname()[1], servers[0].config.app
    finally:
        servers[0].should_exit = True
        thread.join(10)


def wait_until(true: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


class Watched:
    """A browser page that records its requests and its console messages."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 720}, accept_downloads=True, **options)
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: request.url == "about:blank" or self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._hear)
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.page.set_default_timeout(60_000)

    def _hear(self, message: Any) -> None:
        # The browser itself writes down answers that refuse, and what it thinks of drawing without a graphics card.
        own = ("Failed to load resource", "GL Driver Message")
        if message.type in ("error", "warning") and not any(words in message.text for words in own):
            self.complaints.append(message.text)

    def open(self, address: str) -> Any:
        """Load the page, anew if it is there already."""
        self.page.goto("about:blank")  # an address that differs in its fragment only would not be loaded again
        self.page.goto(address)
        self.page.wait_for_selector("#es-view[data-ready=yes]")
        self.rest()
        return self.page

    def rest(self) -> None:
        """Wait until the page has drawn everything that was requested."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        wait_until(lambda: self.view("view.resting()"))

    def view(self, expression: str) -> Any:
        return self.page.evaluate(f"() => {{ const view = document.getElementById('es-view'); return {expression}; }}")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true. It is polled from outside, since the page's CSP forbids evaluating strings."""
        wait_until(lambda: self.view(expression), 60)

    def text(self, name: str) -> str:
        return self.page.inner_text(f"#es-{name}")

    def press(self, name: str) -> None:
        self.page.click(f"#es-{name}")
        self.rest()

    def check(self, home: str) -> None:
        """Assert that there were no errors since the last check, and no requests outside `home`."""
        complaints, asked = self.complaints[:], self.asked[:]
        self.complaints.clear()
        self.asked.clear()
        assert complaints == [], complaints
        assert [url for url in asked if not url.startswith((home, "data:", "blob:"))] == []

    def close(self, home: str) -> None:
        self.context.close()
        self.check(home)


def made_trace(count: int, *, layers: int = 1, longest: int = 800, seed: int = 0) -> Trace:
    """A trace without a model: random lifetimes, a few of them very long."""
    draw = np.random.default_rng(seed)
    spans = np.round(np.exp(draw.uniform(0, np.log(longest), (count, layers))), 4)
    header = {"kind": "header", "version": 2, "name": "made", "task": "text", "about": "", "system": "expire_span"}
    header |= {"layers": layers, "heads": 1, "max_span": longest, "ramp": 16.0, "cap": None, "vocabulary": "bytes"}
    header |= {"memory_bytes": 100, "full_bytes": 100}
    dies = np.arange(count)[:, None] + np.ceil(spans + 16).astype(int)
    due: dict[int, list[list[int]]] = {}
    alive, steps = [0] * layers, []
    for i in range(count):
        for layer in range(layers):
            alive[layer] += 1
            due.setdefault(int(dies[i, layer]), []).append([layer, 0, i])
        deaths = due.pop(i, [])
        for layer, _, _ in deaths:
            alive[layer] -= 1
        step = {
            "kind": "step",
            "i": i,
            "token": 97 + i % 26,
            "text": chr(97 + i % 26),
            "bits": 2.0,
            "top": [["a", 0.5]],
        }
        step |= {"spans": [[float(x)] for x in spans[i]], "dies": [[int(x)] for x in dies[i]], "deaths": deaths}
        steps.append(step | {"live": list(map(float, alive)), "bytes": [100 * x for x in alive]})
    return Trace(header, steps)


def write_page(folder: Path, trace: Trace) -> str:
    """A frozen page in a file; returns its address."""
    from expire_span.view.assets import render_page

    path = folder / "page.html"
    path.write_text(render_page(trace), encoding="utf-8")
    return path.as_uri()
