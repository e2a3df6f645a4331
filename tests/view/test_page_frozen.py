"""The page as a file in a real browser: every picture and control of a trace, without a server."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from benchmarks.page import measure_frames
from expire_span.lab.study.counter import run_counter
from expire_span.lab.study.leaky import run_leaky, weights_of
from expire_span.lab.study.tanh_stack import detect
from expire_span.lab.study.word_rnn import find_stretches
from expire_span.view.episodes import encode_png
from expire_span.view.frame import show
from expire_span.view.trace import Trace
from tests.browser import Watched, made_trace, write_page


@pytest.fixture(scope="module")
def shared(browser):
    watched = Watched(browser)
    yield watched
    watched.close("file:")


@pytest.fixture
def tab(shared):
    yield shared
    shared.check("file:")


@pytest.fixture
def made(tab, tmp_path):
    """A frozen page of a made trace, and that trace."""
    trace = made_trace(300, layers=3, longest=60)
    tab.open(write_page(tmp_path, trace) + "#gl=on")
    return tab, trace


def alive(trace: Trace, cursor: int, layer: int) -> set[int]:
    """By the definition."""
    spans, ramp = trace.spans[layer].max(0), trace.header["ramp"]
    return {i for i in range(cursor + 1) if spans[i] + ramp - (cursor - i) > 0}


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
        assert tab.text("alive") == f"{len(expected)} memories" and 5 < len(expected) < 100
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


def test_a_damaged_link_still_opens(tab, tmp_path):
    address = write_page(tmp_path, made_trace(30, layers=2))
    tab.open(address)
    own = tab.view("view.state.layer")
    for link, shown in (
        ("#layer=abc&cursor=1e99&head=77&from=NaN&to=-5&layout=zz", [29, own]),
        ("#layer=99&cursor=-3&head=-8&from=Infinity", [0, 1]),
    ):
        tab.open(address + link)
        assert tab.view("[view.state.cursor, view.state.layer]") == shown and tab.page.is_hidden("#es-status")
        assert tab.view("[view.state.head, view.state.layout]") in ([0, "packed"], [-1, "packed"])


def test_two_fingers_zoom(made):
    tab, _ = made
    box = tab.page.locator("#es-stage").bounding_box()
    middle, height = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    touch = tab.context.new_cdp_session(tab.page)

    def fingers(kind: str, *places: float) -> None:
        points = [{"x": x, "y": height, "id": n} for n, x in enumerate(places)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    cursor = tab.text("at")
    fingers("touchStart", middle - 100)
    fingers("touchStart", middle - 100, middle + 100)
    for apart in (150, 200):
        fingers("touchMove", middle - apart, middle + apart)
    fingers("touchEnd")
    tab.rest()
    first, last = tab.view("[view.timeline.from, view.timeline.to]")
    assert last - first == pytest.approx(300 * 100 / 200, rel=0.03)
    assert (first + last) / 2 == pytest.approx(150, abs=5), "what is between the fingers stays there"
    assert tab.text("at") == cursor, "to zoom is not to click"


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
    tab.page.keyboard.press("l")
    assert tab.page.is_hidden("#es-tip"), "another layer is shown now"


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


def test_three_ways_of_drawing_agree(tab, tmp_path):
    """WebGL2, plain rectangles and density show the same memories in the same places."""
    trace = made_trace(400, longest=60)
    address = write_page(tmp_path, trace)
    drawn = {}
    for mode, fragment in (("webgl2", "#layout=birth&gl=on"), ("2d", "#layout=birth&gl=off")):
        tab.open(address + fragment)
        assert tab.view("view.timeline.mode") == mode
        drawn[mode] = pixels(tab)
        if mode == "2d":
            tab.page.evaluate(
                """() => { const { timeline } = document.getElementById("es-view"), draw = timeline.drawDensity.bind(timeline);
                    timeline.drawPlain = (...all) => draw(...all); }"""
            )
            drawn["density"] = pixels(tab)
    flat = {mode: [x for row in grid for x in row] for mode, grid in drawn.items()}
    covered = sum(flat["webgl2"])
    assert 0.02 < covered / len(flat["webgl2"]) < 0.6
    for mode in ("2d", "density"):
        differ = sum(a != b for a, b in zip(flat[mode], flat["webgl2"]))
        assert differ < 0.25 * covered, f"{mode} differs in {differ} of {covered} places"  # edges of bars only


def test_narrow_and_dark(tab, tmp_path):
    usual = tab.page.viewport_size
    tab.page.set_viewport_size({"width": 360, "height": 700})
    trace = made_trace(200, layers=2)
    for step in trace.steps:
        step |= {"text": "a door in sight, and beside it a green niche", "spans": [[12.3456]] * 2}
    wide = [step | {name: [row * 5 for row in step[name]] for name in ("spans", "dies")} for step in trace.steps]
    tab.open(write_page(tmp_path, Trace(trace.header | {"heads": 5, "vocabulary": "symbols"}, wide)))
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for within, node in (("#es-pictures > section:nth-of-type(2)", "#es-facts"), ("#es-living button", "small")):
        edges = "([a, b]) => [a, b].map((x) => document.querySelector(x).getBoundingClientRect().right)"
        outer, inner = tab.page.evaluate(edges, [within, f"{within} {node}"])
        assert inner <= outer, "nothing is cut off"
    for scheme in ("dark", "light"):
        tab.page.emulate_media(color_scheme=scheme)
        tab.rest()
        back = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", back))) < 200) == (scheme == "dark")
        assert ("Bright" if scheme == "dark" else "Dark") in tab.text("intro"), "what the shades mean"
    tab.page.set_viewport_size(usual)


GROW = """async (steps) => {
  const { trace } = document.getElementById("es-view").state, box = document.getElementById("es-tokens");
  const held = new Set(box.children);
  for (const step of steps) {
    trace.push(step);
    document.getElementById("es-after").click();  // fills the text again
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    for (const node of box.children) held.add(node);
  }
  return { texts: [...box.children].map((node) => node.textContent), held: held.size };
}"""
"""Adds steps to the trace one by one; returns the text as it is shown, and how many elements the box has held."""


def test_text_that_grows_byte_by_byte_is_the_same(tab, tmp_path):
    raw = "it é€\U0001f600".encode() + b"\xe2\x82(\xf0\x9fa\xff\xc3"  # the last ones are no characters
    shown = [*"it é€\U0001f600", "\\xe2", "\\x82", "(", "\\xf0", "\\x9f", "a", "\\xff", "\\xc3"]
    made = 3 + (2 + 4 + 7) + (1 + 2 + 3) + (1 + 2 + 3 + 4) + 2  # until a character is whole, its elements are made anew
    trace = made_trace(len(raw))
    for step, byte in zip(trace.steps, raw):
        step |= {"token": byte, "text": chr(byte) if byte < 128 else f"\\x{byte:02x}", "spans": [[9.0]]}
    tab.open(write_page(tmp_path, Trace(trace.header, trace.steps[:1])))
    assert tab.page.evaluate(GROW, trace.steps[1:]) == {"texts": shown, "held": made}


def test_a_longer_page_is_not_drawn_again_but_a_wider_or_higher_picture_is(tab, tmp_path):
    tab.open(write_page(tmp_path, made_trace(200, layers=2)))
    usual = tab.page.viewport_size

    def redraws(change):
        tab.view("document.getElementById('es-live').append(document.createElement('g'))")
        change()
        tab.rest()
        return tab.page.query_selector("#es-live > g") is None

    tab.page.set_viewport_size({"width": 1280, "height": 600})
    tab.rest()
    assert not redraws(lambda: tab.page.click("#es-help")), "the list of keys makes the page longer"
    assert redraws(lambda: tab.page.set_viewport_size({"width": 800, "height": 600}))
    assert redraws(lambda: tab.page.set_viewport_size({"width": 800, "height": 700}))
    stage, ink = (f"document.getElementById('es-{name}')" for name in ("stage", "ink"))
    assert tab.view(f"[{stage}.clientWidth, {stage}.clientHeight]") == tab.view(f"[{ink}.width, {ink}.height]")
    tab.page.set_viewport_size(usual)


def test_frames_and_states_have_their_place(tab, tmp_path):
    """A trace may carry what an agent saw and a recurrent state."""
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    trace = made_trace(40)
    for n, step in enumerate(trace.steps):
        step |= {"image": pixel, "hidden": [[(-1) ** (n // 10) * 0.9, 0.1 * (n % 10), -0.5]]}
    tab.open(write_page(tmp_path, trace))
    assert tab.page.is_visible("#es-image") and tab.page.is_visible("#es-hidden")
    assert "unit 1: 0.900" in tab.text("stretches") and "10 steps" in tab.text("stretches")
    painted = "view.querySelector('#es-hidden').toDataURL()"
    whole = tab.view(painted)
    tab.page.check("#es-still")
    tab.rest()
    assert tab.view(painted) != whole
    plain = Trace(
        trace.header | {"memory_bytes": None, "max_span": None},
        [step | {"spans": None, "dies": None, "deaths": []} for step in trace.steps],
    )
    tab.open(write_page(tmp_path, plain))
    assert tab.page.is_hidden("#es-stage") and tab.page.is_visible("#es-live")


def test_an_episode_is_played(tab, tmp_path):
    trace = made_trace(40)
    for n, step in enumerate(trace.steps):
        image = np.full((4, 4, 3), 6 * n, np.uint8)
        step |= {"image": encode_png(image), "action": f"go {n}", "text": "niche red", "reward": n / 10}
    tab.open(write_page(tmp_path, trace))
    first = tab.page.get_attribute("#es-image", "src")
    tab.page.click("#es-play")
    tab.wait("view.state.cursor > 2 && view.state.cursor < 39")
    assert tab.text("play") == "Stop" and tab.page.get_attribute("#es-image", "src") != first
    assert re.search(r"niche red → go \d+", tab.text("doing"))
    tab.page.select_option("#es-speed", "80")
    tab.wait("view.state.cursor === 39")
    tab.wait("view.querySelector('#es-play').textContent === 'Play'")
    tab.rest()
    assert "go 39" in tab.text("facts") and "3.90" in tab.text("facts")
    tab.page.evaluate("document.getElementById('es-speed').value = '2'")
    tab.page.locator("#es-stage").press("p")
    tab.wait("view.state.cursor < 30")
    tab.page.keyboard.press("Escape")
    assert tab.text("play") == "Play"


def test_memories_made_by_hand_are_those_of_the_studies(tab, tmp_path):
    trace = made_trace(30)
    states = np.sin(np.arange(30)[:, None] / [3.0, 40.0])
    for step, state in zip(trace.steps, states):
        step["hidden"] = [state.tolist()]
    tab.open(write_page(tmp_path, trace))
    tab.page.click("#es-studies summary")
    tab.page.wait_for_selector("#es-study-stack path")
    series = np.array(tab.view("view.studies.makeSeries(7)"))
    rows = np.array(tab.view("view.studies.runCounter(view.studies.makeSeries(7))")).T
    assert (rows == run_counter(series)).all() and str(rows[1, -1]) in tab.text("study-count")
    for steep in (5.0, 20.0):
        ours = tab.view(f"view.studies.makeSeries(7).map((x) => view.studies.detect(x, {steep}))")
        np.testing.assert_allclose(ours, detect(series, steep), atol=1e-12)
    leaky = tab.view("view.studies.runLeaky([0.9, 0, 0, 0.9, 0], ...view.studies.weightsOf(8))")
    np.testing.assert_allclose(leaky, run_leaky(np.array([0.9, 0, 0, 0.9, 0]), *weights_of(8.0)), atol=1e-12)
    for unit in (0, 1):
        found = tab.page.evaluate(
            "(x) => document.getElementById('es-view').studies.stretchLengths(x)", states[:, unit].tolist()
        )
        assert found == find_stretches(states[:, unit]).tolist()
    before = tab.page.inner_html("#es-study-leaky")
    tab.page.fill("#es-study-ratio", "5")
    assert tab.page.inner_html("#es-study-leaky") != before and "0.97" in tab.text("study-ratio-name")


def test_a_notebook_shows_the_page_in_a_frame(tab, tmp_path):
    (tmp_path / "cell.html").write_text("<!doctype html><meta charset=utf-8>" + show(made_trace(30))._repr_html_())
    tab.page.goto((tmp_path / "cell.html").as_uri())
    frame = tab.page.frames[1]
    frame.wait_for_selector("#es-view[data-ready=yes]")
    assert frame.is_hidden("#es-link"), "a frame has no address that could be copied"
    with tab.page.expect_download() as caught:
        frame.click("#es-export")
    assert caught.value.suggested_filename == "made.html"


def test_a_foreign_trace_is_refused_in_the_page(tab, tmp_path):
    trace = made_trace(5)
    trace.header["version"] = 9
    tab.page.goto(write_page(tmp_path, trace))
    tab.page.wait_for_selector("#es-status:not([hidden])")
    assert "version 9, this page reads version 2" in tab.text("status")


# Speed


def test_many_memories_are_drawn(browser, tmp_path):
    result = measure_frames(browser, tmp_path, 3_000, 36, quads=1_000)
    assert result["modes"] == ["2d", "density"]


@pytest.mark.long
def test_a_hundred_thousand_memories_stay_smooth(browser, tmp_path):
    result = measure_frames(browser, tmp_path, 100_000, 240)
    print(json.dumps(result))
    assert result["modes"] == ["2d", "density"]
    assert result["busy_milliseconds"] < 1000 / 30, result  # the busiest process of the browser, a frame
