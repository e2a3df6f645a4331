"""The page of a running server in a real browser: reading, comparing, writing, saving; a quiet console throughout."""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree

import pytest

from expire_span.train.supervised import train
from expire_span.view.server import Source
from expire_span.view.tracer import Tracer
from tests.browser import Watched, open_browser, serving, wait_until
from tests.tiny import tiny_config, write_text

TEXT = "Egypt <script>alert(1)</script> is far, \U0001f600 é far away.\nEgypt again."


@pytest.fixture(scope="module")
def browser():
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    run = train(tiny_config(write_text(folder), steps=2), folder / "runs" / "tiny", shown=False)
    generate = Tracer.generate

    def unhurried(*args):  # a fast model writes its thousand tokens before a busy page could press a button
        for step in generate(*args):
            time.sleep(0.1)
            yield step

    with pytest.MonkeyPatch.context() as patch, serving(Source(run)) as (port, app):
        patch.setattr(Tracer, "generate", unhurried)
        yield f"http://127.0.0.1:{port}/", app


@pytest.fixture
def tab(browser, server):
    watched = Watched(browser)
    watched.open(server[0])
    yield watched
    watched.close(server[0])


def read(tab: Watched, text: str) -> None:
    tab.page.fill("#es-text", text)
    tab.page.click("#es-read")
    size = len(text.encode())
    tab.wait(f"view.dataset.read === '{size}'")
    tab.rest()


def test_text_is_read_and_shown_as_text(tab):
    assert tab.view("view.state.trace.size") > 100, "begins with the sample"
    read(tab, TEXT)
    shown = tab.page.locator("#es-tokens span")
    assert "".join(shown.all_inner_texts()).replace("⏎", "").replace("\n", "") == TEXT.replace("\n", "")
    assert shown.count() == len(TEXT), "the bytes of a character stand together"
    assert tab.view("view.timeline.mode") == "2d", "the processor plays the graphics card here"
    assert tab.page.locator("#es-view script").count() == 0
    shown.nth(0).hover()
    tip = tab.text("tip")
    assert tip.startswith("E   step 0") and "span" in tip and "cursor" in tip
    shown.nth(1).hover()
    assert re.search(r"[\d.]+ bits, probability [\d.]+", tab.text("tip"))


def test_what_if_a_word_or_the_limit_changes(tab):
    read(tab, "Egypt is far away and so is Egypt. " * 4)
    tab.page.fill("#es-other", "Humpty is far away and so is Egypt. " + "Egypt is far away and so is Egypt. " * 3)
    tab.press("compare")
    tab.page.wait_for_selector("#es-verdict:not([hidden])")
    changed = "".join(tab.page.locator("#es-new .es-changed").all_inner_texts())
    assert changed == "Humpty" and "".join(tab.page.locator("#es-old .es-changed").all_inner_texts()) == "Egypt"
    tab.page.fill("#es-limit", "1")
    tab.press("compare")
    wait_until(lambda: "→" in tab.text("sums") and tab.page.locator("#es-moved button").count() > 5)
    before, after = map(float, re.search(r"at once ([\d.]+) → ([\d.]+)", tab.text("sums")).groups())
    assert after < before
    assert all("-" in text for text in tab.page.locator("#es-moved small").all_inner_texts())


def test_writing_live(tab, server):
    sessions = server[1].state.sessions
    tab.page.fill("#es-text", "one two ")
    tab.press("write")
    tab.wait("Number(view.dataset.written) > 20")
    tab.press("pause")
    wait_until(lambda: sessions.open and not next(iter(sessions.open.values())).running)
    tab.page.wait_for_timeout(150)
    size = tab.view("view.state.trace.size")
    tab.press("step")
    tab.wait(f"view.state.trace.size === {size + 1}")
    tab.page.wait_for_timeout(150)
    assert tab.view("view.state.trace.size") == size + 1 and tab.text("pause") == "Resume"
    tab.press("pause")
    tab.wait(f"view.state.trace.size > {size + 5}")
    tab.press("stop")
    wait_until(lambda: not sessions.open)
    assert tab.page.is_disabled("#es-stop") and int(tab.text("at")) >= size


def test_a_closed_tab_stops_the_writing(browser, server):
    other = Watched(browser)
    other.open(server[0])
    other.press("write")
    wait_until(lambda: server[1].state.sessions.open)
    other.close(server[0])
    wait_until(lambda: not server[1].state.sessions.open)


def test_two_tabs(tab, browser, server):
    other = Watched(browser)
    other.open(server[0])
    other.press("write")
    read(tab, "first tab")
    other.wait("Number(view.dataset.written) > 10")
    assert tab.view("view.state.trace.size") == len("first tab")
    other.close(server[0])


def test_bad_input_is_said_in_the_page(tab):
    tab.press("read")
    assert "the text is empty" in tab.text("status")
    tab.page.evaluate("document.getElementById('es-text').value = 'x'.repeat(1024 * 1024)")
    tab.press("read")
    assert "at most 200,000 bytes" in tab.text("status") and "1,048,576" in tab.text("status")
    tab.page.set_input_files("#es-file", {"name": "a.bin", "mimeType": "text/plain", "buffer": b"\xff\xfe<b>\x00"})
    tab.wait("view.dataset.read === '6'")
    tab.rest()
    assert tab.page.locator("#es-tokens span").all_inner_texts() == ["\\xff", "\\xfe", "<", "b", ">", "\\x00"]
    read(tab, "still here")


def test_link_opens_the_same_view(tab, browser, server):
    read(tab, TEXT * 5)
    tab.page.select_option("#es-layout", "birth")
    tab.page.keyboard.press("Escape")
    tab.page.focus("#es-stage")
    tab.page.keyboard.press("Home")
    for key in ("Shift+ArrowRight", "l", "+", "+"):
        tab.page.keyboard.press(key)
    tab.rest()
    tab.press("link")
    window = "view.timeline.from.toFixed(1), view.timeline.to.toFixed(1)"
    values = f"[view.state.cursor, view.state.layer, view.state.layout, {window}, view.state.trace.token.join()]"
    other = Watched(browser)
    other.open(tab.page.url)
    assert other.view(values) == tab.view(values)
    other.close(server[0])


def test_pictures_are_saved(tab, tmp_path):
    read(tab, TEXT)
    for name in ("timeline", "tokens", "live", "bytes", "bits"):
        for kind in ("png", "svg"):
            with tab.page.expect_download() as caught:
                tab.page.click(f'[data-save="{name}"][data-as="{kind}"]')
            path = tmp_path / f"{name}.{kind}"
            caught.value.save_as(path)
            data = path.read_bytes()
            assert len(data) > 500 and data.startswith(b"\x89PNG" if kind == "png" else b"<svg xmlns=")
            if kind == "svg":
                assert xml.etree.ElementTree.fromstring(data).tag.endswith("svg")


def test_page_is_saved(tab, browser, tmp_path):
    read(tab, TEXT)
    with tab.page.expect_download() as caught:
        tab.page.click("#es-export")
    caught.value.save_as(tmp_path / "saved.html")
    frozen = Watched(browser)
    frozen.open((tmp_path / "saved.html").as_uri())
    assert frozen.view("view.state.trace.token") == list(TEXT.encode())
    assert frozen.page.is_hidden("#es-input") and frozen.text("name") == "tiny"
    assert frozen.view("view.timeline.mode") == "2d"
    frozen.close("file:")
