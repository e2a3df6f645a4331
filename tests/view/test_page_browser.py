"""The page of a running server in a real browser: reading, comparing, writing, saving; a quiet console throughout."""

from __future__ import annotations

import re
import shutil
import time
import xml.etree.ElementTree

import pytest
from PIL import Image

from benchmarks import view_pictures
from expire_span.runs import RunFolder
from expire_span.shipped import SHIPPED
from expire_span.train.supervised import train
from expire_span.view.server import Source
from expire_span.view.tracer import Tracer
from tests.browser import Watched, serving, wait_until
from tests.tiny import tiny_config, write_text

TEXT = "Egypt <script>alert(1)</script> is far, \U0001f600 é far away.\nEgypt again."
PASTE = """(size) => { const data = new DataTransfer(), options = { clipboardData: data, bubbles: true, cancelable: true };
    data.setData("text/plain", "x".repeat(size));
    return !document.getElementById("es-text").dispatchEvent(new ClipboardEvent("paste", options)); }"""
"""Pastes so many bytes into the text field; whether the page refused them."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    run = train(tiny_config(write_text(folder), steps=2), folder / "runs" / "tiny", shown=False)
    generate = Tracer.generate

    def unhurried(*args):  # a fast model writes its thousand tokens before a busy page could press a button
        for step in generate(*args):
            time.sleep(0.1)
            yield step

    source = Source(run)
    with pytest.MonkeyPatch.context() as patch, serving(source) as (port, app):
        patch.setattr(Tracer, "generate", unhurried)
        patch.setattr("expire_span.view.server.SAMPLE_TOKENS", 120)  # each test opens with the sample
        yield f"http://127.0.0.1:{port}/", app, source


@pytest.fixture(scope="module")
def shared(browser, server):
    watched = Watched(browser)
    yield watched
    watched.close(server[0])


@pytest.fixture
def tab(shared, server):
    """The page as it is when it opens."""
    shared.open(server[0])
    yield shared
    shared.check(server[0])


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
    before, after = map(float, re.search(r"all layers: ([\d.]+) → ([\d.]+)", tab.text("sums")).groups())
    assert after < before
    assert all("-" in text for text in tab.page.locator("#es-moved small").all_inner_texts())
    tab.page.fill("#es-limit", "")
    tab.page.fill("#es-budget", "6")
    tab.press("compare")
    wait_until(lambda: tab.page.is_hidden("#es-status"))
    tab.page.locator("#es-moved button").first.click()  # shows the other trace
    header, *steps = tab.view("view.state.trace.lines")
    living = [sum(step["live"]) / header["layers"] for step in steps]
    assert header["budget"] == 6 and 3 < sum(living) / len(steps) <= 6 * 1.02
    most = max(sum(step["live"]) for step in steps)
    assert f" → {most:.0f}. " in tab.text("sums")
    assert tab.page.input_value("#es-side-pick") == "after" and "6 memories alive" in tab.text("after-title")
    tab.press("link")
    tab.open(tab.page.url)
    assert tab.page.input_value("#es-side-pick") == "after" and tab.view("view.state.trace.header.budget") == 6
    tab.page.select_option("#es-side-pick", "before")
    tab.rest()
    assert tab.view("view.state.trace.header.budget ?? 0") == 0, "back at what was read"
    tab.page.fill("#es-budget", "0")
    tab.press("compare")
    said = '"memories alive in a layer, on average" must be a whole number from 1 to'
    assert said in tab.text("status") and "the field holds 0" in tab.text("status")


def test_our_example_and_the_change_to_try(tab, server):
    """The model that ships opens with it; any other model of text can read it."""
    assert tab.page.input_value("#es-text") == tab.page.input_value("#es-other") != "", "what was read, to be changed"
    assert not server[2].describe()["example"] and Source(RunFolder.open(SHIPPED)).describe()["example"]
    tab.press("example")
    tab.wait("Number(view.dataset.read) > 1500")
    text, other = (tab.page.input_value(f"#es-{name}") for name in ("text", "other"))
    assert other == text.replace("Pembroke", "sea", 1) != text and tab.page.is_visible("#es-hint")
    tab.press("compare")
    wait_until(lambda: re.match(r"Pembroke stays [\d,]+ steps, sea [\d,]+ \(layer \d", tab.text("changed")))
    assert tab.page.locator("#es-both rect").count() >= 2 and tab.page.locator("#es-both-held path").count() == 2
    tab.page.fill("#es-other", "")
    tab.press("compare")
    assert "the box of the other text is empty" in tab.text("status") and tab.page.is_hidden("#es-hint")


def test_writing_live(tab, server):
    sessions = server[1].state.sessions
    tab.page.fill("#es-text", "")
    tab.press("read")
    assert tab.page.is_visible("#es-status"), "the text is empty"
    tab.page.fill("#es-text", "one two ")
    tab.press("write")
    assert tab.page.is_hidden("#es-status"), "what was wrong before is no longer said"
    tab.wait("Number(view.dataset.written) > 12")
    assert tab.page.input_value("#es-other") == "one two ", "nothing is left of the text that was read before"
    tab.press("pause")
    wait_until(lambda: sessions.open and not next(iter(sessions.open.values())).running)
    tab.page.wait_for_timeout(150)
    size = tab.view("view.state.trace.size")
    tab.page.wait_for_selector(f"#es-live text:text-is('{size - 1}')", timeout=9000)  # the charts wait for their turn
    tab.press("step")
    tab.wait(f"view.state.trace.size === {size + 1}")
    tab.page.wait_for_timeout(150)
    assert tab.view("view.state.trace.size") == size + 1 and tab.text("pause") == "Resume"
    tab.press("pause")
    tab.wait(f"view.state.trace.size > {size + 2}")
    tab.press("stop")
    wait_until(lambda: not sessions.open)
    assert tab.page.is_disabled("#es-stop") and int(tab.text("at")) >= size
    written = tab.view("new TextDecoder().decode(Uint8Array.from(view.state.trace.token))")
    assert written == tab.page.input_value("#es-other") == tab.view("view.state.text"), "what a link takes"
    tab.wait("view.delays.length === view.state.trace.size - 'one two '.length")  # the last ones with a last frame
    assert min(tab.view("view.delays")) > 0
    shown = "nodes => nodes.map((x) => [x.textContent, x.dataset.i, x.dataset.end])"
    grown = tab.page.eval_on_selector_all("#es-tokens span", shown)
    tab.page.evaluate("document.getElementById('es-tokens').key = ''")
    tab.page.focus("#es-stage")
    tab.page.keyboard.press("b")
    tab.rest()
    assert tab.page.eval_on_selector_all("#es-tokens span", shown) == grown, "as if it had been filled at once"


REACHABLE = """() => [...document.querySelectorAll("#es-view :is(a, button, input, select, textarea, summary, [tabindex])")]
    .filter((x) => !x.disabled && x.tabIndex >= 0 && x.checkVisibility()).map((x, n) => { x.dataset.stop = n; return n; })"""
"""Marks what Tab should stop at, in the order of the page."""
STOP = """() => { const x = document.activeElement, name = x.getAttribute("aria-label") || x.title || x.labels?.[0]?.innerText;
    const seen = getComputedStyle(x.classList.contains("es-away") ? x.parentElement : x).outlineStyle !== "none";
    return [x.dataset.stop ?? "", name || x.innerText || x.placeholder || "", seen]; }"""
"""Number and name of what has the focus, and whether that can be seen."""


def test_every_control_is_reached_by_keyboard(tab):
    read(tab, "Egypt is far away. " * 4)
    tab.press("compare")
    wait_until(lambda: tab.page.is_visible("#es-verdict"))
    tab.rest()
    assert tab.page.evaluate("document.getAnimations().length") == 0, "nothing moves unless it is asked to"
    wanted, stops = tab.page.evaluate(REACHABLE), []
    tab.page.evaluate("document.body.tabIndex = -1")
    tab.page.focus("body")
    for _ in wanted:
        tab.page.keyboard.press("Tab")
        stops.append(tab.page.evaluate(STOP))
    assert [stop for stop, _, _ in stops] == [str(n) for n in wanted], [stop[:2] for stop in stops]
    assert [stop for stop in stops if not stop[1] or not stop[2]] == [], (
        "each has a name, and is seen to have the focus"
    )
    stops = tab.page.eval_on_selector_all("#es-living button", "nodes => nodes.map((x) => x.tabIndex)")
    assert stops == [0] + [-1] * (len(stops) - 1) and len(stops) > 1, "a list of tokens is one stop"
    tab.page.focus("#es-living button")
    at = tab.text("at")
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.evaluate("document.activeElement === document.querySelectorAll('#es-living button')[1]")
    assert tab.text("at") == at, "the cursor stays until Enter"
    tab.page.keyboard.press("Enter")
    tab.rest()
    assert tab.text("at") != at and tab.page.evaluate("document.activeElement.parentElement.id") == "es-living"


def test_two_tabs_and_a_closed_one_stops_its_writing(tab, browser, server):
    other = Watched(browser)
    other.open(server[0])
    other.press("write")
    read(tab, "first tab")
    other.wait("Number(view.dataset.written) > 10")
    assert tab.view("view.state.trace.size") == len("first tab") and server[1].state.sessions.open
    other.close(server[0])
    wait_until(lambda: not server[1].state.sessions.open)


def test_bad_input_is_said_in_the_page(tab):
    tab.page.fill("#es-text", "")
    tab.press("read")
    assert "the text box is empty" in tab.text("status")
    tab.page.evaluate("document.getElementById('es-text').value = 'x'.repeat(300000)")
    for button in ("read", "write"):
        tab.page.evaluate("document.getElementById('es-status').textContent = ''")
        tab.press(button)
        assert "at most 200,000 bytes" in tab.text("status") and "300,000" in tab.text("status")
    tab.page.fill("#es-text", "")
    assert tab.page.evaluate(PASTE, 10 * 1024 * 1024), "refused before the field takes it"
    assert "at most 200,000 bytes" in tab.text("status") and "10,485,760" in tab.text("status")
    assert "expire-span trace" in tab.text("status") and tab.page.input_value("#es-text") == ""
    assert not tab.page.evaluate(PASTE, 1000)
    for field, value, words in (
        ("heat", "-1", '"temperature" must be a number'),
        ("seed", "1e30", '"seed" must be a whole number'),
    ):
        usual = tab.page.input_value(f"#es-{field}")
        tab.page.fill(f"#es-{field}", value)
        tab.page.click("#es-write")
        wait_until(lambda words=words: words in tab.text("status"))
        assert tab.page.is_disabled("#es-stop")
        tab.page.fill(f"#es-{field}", usual)
    tab.page.set_input_files("#es-file", {"name": "a.bin", "mimeType": "text/plain", "buffer": b"\xff\xfe<b>\x00"})
    tab.wait("view.dataset.read === '6'")
    tab.rest()
    assert tab.page.locator("#es-tokens span").all_inner_texts() == ["\\xff", "\\xfe", "<", "b", ">", "\\x00"]
    read(tab, "still here")


def test_a_server_that_is_gone_is_said_in_the_page(tab):
    tab.page.route("**/api/trace", lambda route: route.abort())
    tab.page.fill("#es-text", "anyone there?")
    tab.press("read")
    wait_until(lambda: "the server does not answer; is expire-span view still running?" in tab.text("status"))
    tab.page.unroute("**/api/trace")
    read(tab, "back again")
    tab.page.evaluate("() => { ReadableStreamDefaultReader.prototype.read = async () => { throw new TypeError(); }; }")
    tab.press("read")
    wait_until(lambda: "the server stopped before the end of its answer; is expire-span view" in tab.text("status"))


@pytest.fixture
def young(server, tmp_path):
    """A run that trains while the page is open; it has no checkpoint yet, and `add` gives it one, sound or cut short."""
    source, whole = server[2], server[2].run
    held = tmp_path / "held"
    shutil.copytree(whole.path, tmp_path / "young")
    (tmp_path / "young" / "result.json").unlink()
    shutil.move(tmp_path / "young" / "checkpoints", held)
    (tmp_path / "young" / "checkpoints").mkdir()

    def add(step: int, sound: bool = True) -> None:
        folder = tmp_path / "young" / "checkpoints" / f"step-{step:08d}"
        shutil.copytree(next(held.iterdir()), folder)
        if not sound:
            (folder / "model.safetensors").write_bytes(b"half")

    source.run = RunFolder.open(tmp_path / "young")
    yield add
    source.run, source.trace = whole, None


def test_a_run_in_training_shows_its_last_good_checkpoint(young, shared, server, tmp_path):
    tab = shared
    tab.open(server[0])
    assert "has no checkpoint yet" in tab.text("status") and tab.page.is_hidden("#es-input")
    for step, sound, shown in ((3, True, 3), (4, False, 3), (5, True, 5)):
        young(step, sound)
        tab.open(server[0])
        assert f"has not finished training; this is its checkpoint step-{shown:08d}" in tab.text("status")
        assert tab.view("view.state.trace.size") > 100 and tab.page.is_visible("#es-input")
    tab.page.route("**/api/sample", lambda route: route.fulfill(status=400, json={"error": "its data has moved"}))
    tab.open(server[0])
    assert tab.text("status") == "its data has moved" and tab.page.is_visible("#es-input")
    tab.page.unroute("**/api/sample")
    source = server[2]
    source.run, source.trace = None, tmp_path / "old.jsonl"
    source.trace.write_text('{"kind": "header", "version": 9}\n')
    tab.open(server[0])
    assert "has version 9, this version of expire-span reads version 2" in tab.text("status")
    tab.check(server[0])


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
    other.page.goto(f"{server[0]}#layer=1&text=another")  # in the same tab, where only the fragment differs
    wait_until(lambda: other.page.input_value("#es-text") == "another")
    other.page.wait_for_selector("#es-view[data-ready=yes]")
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


def test_pictures_of_the_readme_are_drawn(tab, tmp_path, monkeypatch):
    monkeypatch.setattr(view_pictures, "STRIDE", 2)
    view_pictures.draw_still(tab, tmp_path / "a.png")
    view_pictures.draw_moving(tab, "one two ", tmp_path / "a.gif", frames=2)
    tab.page.unroute("**/api/generate")
    with Image.open(tmp_path / "a.png") as still, Image.open(tmp_path / "a.gif") as moving:
        assert still.width == tab.page.viewport_size["width"] and moving.n_frames == 2
        assert moving.width == view_pictures.GIF_WIDE


def test_page_is_saved(tab, browser, tmp_path):
    read(tab, TEXT)
    tab.page.fill("#es-scrub", "17")
    tab.page.fill("#es-layer", "1")
    tab.page.select_option("#es-layout", "birth")
    tab.rest()
    with tab.page.expect_download() as caught:
        tab.page.click("#es-export")
    caught.value.save_as(tmp_path / "saved.html")
    frozen = Watched(browser)
    frozen.open((tmp_path / "saved.html").as_uri())
    assert frozen.view("view.state.trace.token") == list(TEXT.encode())
    assert frozen.page.is_hidden("#es-input") and frozen.text("name") == "tiny"
    assert frozen.view("view.timeline.mode") == "2d"
    assert frozen.view("[view.state.cursor, view.state.layer, view.state.layout]") == [17, 0, "birth"], "as it was seen"
    assert frozen.page.is_hidden("#es-what"), "nothing was compared"
    frozen.close("file:")


def test_both_sides_of_a_comparison_are_saved(tab, browser, tmp_path):
    """And saved once more from the saved page, which cannot ask a model."""
    read(tab, TEXT)
    tab.page.fill("#es-limit", "2")
    tab.press("compare")
    tab.page.wait_for_selector("#es-verdict:not([hidden])")
    tab.page.select_option("#es-side-pick", "after")
    tab.rest()
    shown = [tab.text(name) for name in ("old", "new", "sums", "after-title", "moved")]
    spans = tab.view("view.state.trace.lines.slice(1).map((line) => line.spans)")
    page, address = tab, None
    for number in (1, 2):
        with page.page.expect_download() as caught:
            page.page.click("#es-export")
        caught.value.save_as(tmp_path / f"{number}.html")
        if address:
            page.close("file:")
        page, address = Watched(browser), (tmp_path / f"{number}.html").as_uri()
        page.open(address)
        assert [page.text(name) for name in ("old", "new", "sums", "after-title", "moved")] == shown
        assert page.page.is_visible("#es-verdict") and page.page.is_hidden("#es-what-ask")
        assert page.view("view.state.trace.lines.slice(1).map((line) => line.spans)") == spans, (
            "the side that was shown"
        )
        page.page.select_option("#es-side-pick", "before")
        page.rest()
        assert page.view("view.state.trace.lines.slice(1).map((line) => line.spans)") != spans
        page.page.select_option("#es-side-pick", "after")
        page.rest()
    page.close("file:")
