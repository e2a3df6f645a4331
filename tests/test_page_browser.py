"""The page in a real browser: every interaction, a quiet console, and no request that leaves the machine."""

from __future__ import annotations

import contextlib
import json
import re
import time
import xml.etree.ElementTree

import pytest

from expire_span.train.supervised import train
from expire_span.view.server import Source
from expire_span.view.trace import Trace
from expire_span.view.tracer import Tracer
from tests.browser import Watched, made_trace, open_browser, serving, wait_until, write_page
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


@pytest.fixture
def made(browser, tmp_path):
    """A frozen page of a made trace, and that trace."""
    trace = made_trace(300, layers=3, longest=60)
    watched = Watched(browser)
    watched.open(write_page(tmp_path, trace) + "#gl=on")
    yield watched, trace
    watched.close("file:")


def read(tab: Watched, text: str) -> None:
    tab.page.fill("#es-text", text)
    tab.page.click("#es-read")
    size = len(text.encode())
    tab.wait(f"view.dataset.read === '{size}'")
    tab.rest()


def alive(trace: Trace, cursor: int, layer: int) -> set[int]:
    """By the definition."""
    spans, ramp = trace.spans[layer].max(0), trace.header["ramp"]
    return {i for i in range(cursor + 1) if spans[i] + ramp - (cursor - i) > 0}


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


def test_cursor_shows_who_lives(made):
    tab, trace = made
    tab.page.focus("#es-stage")
    for key, place in (("Home", 0), ("ArrowRight", 1), ("Shift+ArrowRight", 11), ("ArrowLeft", 10), ("End", 299)):
        tab.page.keyboard.press(key)
        tab.rest()
        assert tab.text("at") == str(place)
    for layer, cursor in ((0, 150), (2, 77)):
        tab.page.evaluate(
            """([layer, cursor]) => { for (const [id, value] of [["layer", layer + 1], ["scrub", cursor]]) {
                const node = document.getElementById("es-" + id);
                node.value = value;
                node.dispatchEvent(new Event("input")); } }""",
            [layer, cursor],
        )
        tab.rest()
        expected = alive(trace, cursor, layer)
        assert tab.text("alive") == str(len(expected)) and 5 < len(expected) < 100
        lit = tab.page.eval_on_selector_all("#es-tokens .es-alive", "nodes => nodes.map(x => Number(x.dataset.i))")
        assert set(lit) == expected
        assert f"{trace.steps[cursor]['spans'][layer][0]:.3g}" in tab.text("facts")
        assert int(trace.steps[cursor]["live"][layer]) == len(expected)
    assert "50.0%" in tab.text("top")


def test_layers_and_rows_change_the_picture(made):
    tab, _ = made
    picture = lambda: tab.view("view.querySelector('#es-gl').toDataURL()")  # noqa: E731
    colours = lambda: tab.page.eval_on_selector_all(  # noqa: E731
        "#es-tokens span", "nodes => nodes.map(x => x.style.backgroundColor).join()"
    )
    seen, tints = {picture()}, {colours()}
    for _ in range(3):
        tab.page.keyboard.press("l")
        tab.rest()
        seen.add(picture())
        tints.add(colours())
    tab.page.keyboard.press("b")
    tab.rest()
    seen.add(picture())
    assert len(seen) == 5 and len(tints) == 4
    assert tab.page.input_value("#es-layout") == "birth"


def test_zoom_pan_and_click(made):
    tab, _ = made
    window = lambda: tab.view("[view.timeline.from, view.timeline.to]")  # noqa: E731
    box = tab.page.locator("#es-stage").bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tab.page.mouse.move(*middle)
    before = window()
    tab.page.mouse.wheel(0, -600)
    tab.rest()
    after = window()
    assert after[1] - after[0] < before[1] - before[0]
    assert abs(sum(after) / 2 - sum(before) / 2) < 5, "zooms around the pointer"
    tab.page.mouse.down()
    tab.page.mouse.move(middle[0] + 200, middle[1], steps=4)
    tab.page.mouse.up()
    tab.rest()
    assert window()[0] < after[0] and abs((window()[1] - window()[0]) - (after[1] - after[0])) < 1e-6
    tab.page.mouse.click(middle[0], middle[1])
    tab.rest()
    assert abs(int(tab.text("at")) - sum(window()) / 2) <= 1
    for button, larger in (("in", False), ("out", True)):
        was = window()
        tab.press(button)
        assert ((window()[1] - window()[0]) > (was[1] - was[0])) == larger
    tab.press("fit")
    assert window()[0] == 0 and window()[1] >= 300


def test_hovering_a_line_names_its_memory(made):
    tab, _ = made
    tab.page.keyboard.press("b")
    tab.rest()
    place = tab.page.evaluate(
        """() => { const { timeline } = document.getElementById("es-view"), { area, wide, high } = timeline.shown;
            const box = timeline.stage.getBoundingClientRect(), i = 120;
            const x = (i + 1 - area[0]) / (area[1] - area[0]), y = (i + 0.5 - area[2]) / (area[3] - area[2]);
            return [box.left + x * wide, box.top + y * high]; }"""
    )
    tab.page.mouse.move(*place)
    step = int(re.search(r"step (\d+)", tab.text("tip"))[1])
    assert abs(step - 120) <= 1


def pixels(tab: Watched) -> list[list[bool]]:
    """Which parts of the timeline are covered, on a coarse grid, cursor aside."""
    return tab.page.evaluate(
        """() => { const { timeline } = document.getElementById("es-view"), canvas = document.createElement("canvas");
            const wide = 128, high = 40; canvas.width = wide; canvas.height = high;
            const context = canvas.getContext("2d"), tall = timeline.ink.height - 16;
            timeline.cursor = 1e9; timeline.draw();
            for (const from of [timeline.glCanvas, timeline.ink]) {
                context.drawImage(from, 0, 0, from.width, tall, 0, 0, wide, high);
            }
            const data = context.getImageData(0, 0, wide, high).data, at = (x, y) => data[4 * (y * wide + x) + 3] > 8;
            return Array.from({ length: high }, (_, y) => Array.from({ length: wide }, (_, x) => at(x, y))); }"""
    )


def test_three_ways_of_drawing_agree(browser, tmp_path):
    """WebGL2, plain rectangles and density show the same memories in the same places."""
    trace = made_trace(400, longest=60)
    address = write_page(tmp_path, trace)
    drawn = {}
    for mode, fragment in (("webgl2", "#layout=birth&gl=on"), ("2d", "#layout=birth&gl=off")):
        tab = Watched(browser)
        tab.open(address + fragment)
        assert tab.view("view.timeline.mode") == mode
        drawn[mode] = pixels(tab)
        if mode == "2d":
            tab.page.evaluate(
                """() => { const { timeline } = document.getElementById("es-view"), draw = timeline.drawDensity.bind(timeline);
                    timeline.drawPlain = (...all) => draw(...all); }"""
            )
            drawn["density"] = pixels(tab)
        tab.close("file:")
    flat = {mode: [x for row in grid for x in row] for mode, grid in drawn.items()}
    covered = sum(flat["webgl2"])
    assert 0.02 < covered / len(flat["webgl2"]) < 0.6
    for mode in ("2d", "density"):
        differ = sum(a != b for a, b in zip(flat[mode], flat["webgl2"]))
        assert differ < 0.25 * covered, f"{mode} differs in {differ} of {covered} places"  # edges of bars only


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_and_dark(browser, tmp_path, scheme):
    tab = Watched(browser, color_scheme=scheme)
    tab.page.set_viewport_size({"width": 375, "height": 700})
    tab.open(write_page(tmp_path, made_trace(200, layers=2)))
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    back = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", back))) < 200) == (scheme == "dark")
    tab.close("file:")


def test_frames_and_states_have_their_place(browser, tmp_path):
    """A trace may carry what an agent saw and a recurrent state."""
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    trace = made_trace(40)
    for n, step in enumerate(trace.steps):
        step |= {"image": pixel, "hidden": [[(-1) ** (n // 10) * 0.9, 0.1 * (n % 10), -0.5]]}
    tab = Watched(browser)
    tab.open(write_page(tmp_path, trace))
    assert tab.page.is_visible("#es-image") and tab.page.is_visible("#es-hidden")
    painted = "view.querySelector('#es-hidden').toDataURL()"
    whole = tab.view(painted)
    tab.page.check("#es-still")
    tab.rest()
    assert tab.view(painted) != whole
    plain = Trace(
        trace.header | {"memory_bytes": None, "max_span": None},
        [step | {"spans": None, "deaths": []} for step in trace.steps],
    )
    tab.open(write_page(tmp_path, plain))
    assert tab.page.is_hidden("#es-stage") and tab.page.is_visible("#es-live")
    tab.close("file:")


def test_a_foreign_trace_is_refused_in_the_page(browser, tmp_path):
    trace = made_trace(5)
    trace.header["version"] = 9
    tab = Watched(browser)
    tab.page.goto(write_page(tmp_path, trace))
    tab.page.wait_for_selector("#es-status:not([hidden])")
    assert "version 9, this page reads version 1" in tab.text("status")
    tab.close("file:")


# Speed

SCRUB = """async (frames) => {
  const view = document.getElementById("es-view"), { timeline } = view, end = timeline.end, modes = new Set();
  const scrub = document.getElementById("es-scrub"), began = performance.now();
  for (let n = 0; n < frames; n++) {
    const wide = end * Math.pow(0.93, n % 60), from = end * (n % 17) / 20;
    timeline.move(from, from + wide);
    scrub.value = Math.floor(from + wide / 2);
    scrub.dispatchEvent(new Event("input"));
    await new Promise(requestAnimationFrame);
    modes.add(timeline.mode);
  }
  return { frames_per_second: 1000 * frames / (performance.now() - began), modes: [...modes].sort() };
}"""
"""Zooms, pans and scrubs at once, as fast as frames come."""


def measure(browser, tmp_path, count: int, frames: int, quads: int) -> dict:
    tab = Watched(browser)
    tab.open(write_page(tmp_path, made_trace(count)))
    tab.view(f"view.timeline.mostQuads = {quads}")
    before = processor_seconds()
    result = tab.page.evaluate(SCRUB, frames)
    result["busy_milliseconds"] = (
        max(now - before.get(pid, 0) for pid, now in processor_seconds().items()) * 1000 / frames
    )
    tab.close("file:")
    return result


def processor_seconds() -> dict[int, float]:
    """Of each process that this one has started, and of theirs: what a busy machine changes little."""
    import psutil

    out = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            out[child.pid] = times.user + times.system
    return out


def test_many_memories_are_drawn(browser, tmp_path):
    result = measure(browser, tmp_path, 4_000, 60, quads=1_000)
    assert result["modes"] == ["2d", "density"]


@pytest.mark.long
def test_a_hundred_thousand_memories_stay_smooth(browser, tmp_path):
    result = measure(browser, tmp_path, 100_000, 240, quads=6_000)
    print(json.dumps(result))
    assert result["modes"] == ["2d", "density"]
    assert result["busy_milliseconds"] < 1000 / 30, result  # the busiest process of the browser, a frame
