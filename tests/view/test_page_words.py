"""Words on the page in a real browser: lines, names, chips and hover texts of whole words; what is kept for good; keys."""

from __future__ import annotations

import re

import numpy as np
import pytest

from expire_span.view.sample import Sample, long_words
from expire_span.view.trace import Trace
from tests.browser import Watched, made_trace, open_browser, write_page

TEXT = "Egypt is far, and so it is. " * 3
SPANS = {"Egypt": 70.0, "far": 30.0}
"""Of the second letter of each; all other tokens live for a step."""


def spoken_trace(*, kept: int = 0) -> Trace:
    """A trace of TEXT in two layers; only the second one keeps words, and the first `kept` tokens for good."""
    trace = made_trace(len(TEXT), layers=2)
    trace.header["ramp"] = 4.0
    longs = {m.start() + 1: span for word, span in SPANS.items() for m in re.finditer(word, TEXT)}
    for i, step in enumerate(trace.steps):
        span = 2.0**28 if i < kept else longs.get(i, 1.0)
        step |= {"token": ord(TEXT[i]), "text": TEXT[i], "spans": [[1.0], [span]], "deaths": []}
        step["dies"] = [[i + 5], [i + int(span) + 4]]
    return trace


@pytest.fixture(scope="module")
def tab():
    with open_browser() as browser:
        watched = Watched(browser)
        yield watched
        watched.close("file:")


def go_to(tab: Watched, step: int) -> None:
    tab.page.evaluate(
        """(step) => { const node = document.getElementById("es-scrub");
            node.value = step; node.dispatchEvent(new Event("input")); }""",
        step,
    )
    tab.rest()


def test_words_are_lines_with_names(tab, tmp_path):
    tab.open(write_page(tmp_path, spoken_trace()))
    assert tab.view("[view.state.layout, view.state.layer]") == ["words", 1], "the layer that keeps words"
    assert "2 of 2, where forgetting shows best" in tab.text("layer-name") and "reads a byte" in tab.text("intro")
    lines = tab.view("view.timeline.ranked.map((i) => [view.timeline.nameOf(i), i, view.timeline.death[i]])")
    assert lines[:3] == [["Egypt", n, n + 1 + 74] for n in (0, 28, 56)]
    assert {name for name, _, _ in lines} == {"Egypt", "is", "far", ",", "and", "so", "it", "."}, "no spaces"
    go_to(tab, 40)
    chips = tab.page.locator("#es-living button").all_inner_texts()
    assert [re.sub(r"\s+", " ", chip) for chip in chips[:3]] == ["Egypt 63", "Egypt 35", "far 32"]
    assert chips == list(dict.fromkeys(chips)), "a word once, however many of its bytes live"
    place = tab.view(
        """(() => { const { area, wide, high } = view.timeline.shown, box = view.timeline.stage.getBoundingClientRect();
            const row = (view.timeline.rows[28] + 0.5 - area[2]) / (area[3] - area[2]);
            return [box.left + (45 - area[0]) / (area[1] - area[0]) * wide, box.top + row * high]; })()"""
    )
    tab.page.mouse.move(*place)
    assert tab.text("tip").startswith("Egypt   step 28") and "span 70 steps (its longest)" in tab.text("tip")


def test_saved_timeline_has_names_and_axes(tab, tmp_path):
    tab.open(write_page(tmp_path, spoken_trace()))
    with tab.page.expect_download() as caught:
        tab.page.click('[data-save="timeline"][data-as="svg"]')
    caught.value.save_as(tmp_path / "timeline.svg")
    drawn = (tmp_path / "timeline.svg").read_text()
    assert drawn.count(">Egypt</text>") >= 2 and "words held ↓" in drawn and "step →" in drawn


def test_what_is_kept_for_good_is_no_length_of_time(tab, tmp_path):
    tab.open(write_page(tmp_path, spoken_trace(kept=3)))
    assert tab.text("longest") == "70 steps", "the scale is of those that end"
    assert tab.page.locator("#es-living button small").first.inner_text() == "for good"
    tab.page.locator("#es-tokens span").first.hover()
    assert "kept for good" in tab.text("tip") and "alive at the cursor" in tab.text("tip")


def test_spans_that_are_nearly_the_same_look_so(tab, tmp_path):
    trace = spoken_trace()
    for i, step in enumerate(trace.steps):
        step["spans"] = [[40.0 + 0.1 * (i % 2)]] * 2
    tab.open(write_page(tmp_path, trace))
    colours = tab.page.eval_on_selector_all("#es-tokens span", "nodes => nodes.map((x) => x.style.backgroundColor)")
    channels = np.array([[int(x) for x in re.findall(r"\d+", colour)] for colour in set(colours)])
    assert np.ptp(channels, axis=0).max() < 10


def test_every_control_takes_its_own_keys(tab, tmp_path):
    """Space and Home belong to the focused box or slider, not to the timeline."""
    trace = spoken_trace()
    for n, step in enumerate(trace.steps):
        step["hidden"] = [[0.9, -0.2], [0.5, 0.1 * (n % 10)]]
    tab.open(write_page(tmp_path, trace))
    tab.page.focus("#es-still")
    tab.page.keyboard.press("Space")
    assert tab.page.is_checked("#es-still")
    cursor = tab.view("view.state.cursor")
    tab.page.focus("#es-layer")
    tab.page.keyboard.press("Home")
    tab.rest()
    assert tab.view("[view.state.layer, view.state.cursor]") == [-1, cursor]
    tab.page.focus("#es-studies summary")
    tab.page.keyboard.press("Space")
    assert tab.page.get_attribute("#es-studies", "open") is not None
    tab.page.locator("#es-hidden").hover(position={"x": 5, "y": 5})
    assert tab.text("tip").startswith("unit 1 is 0.900")
    tab.page.keyboard.press("b")
    tab.page.keyboard.press("b")
    tab.rest()
    assert tab.view("view.state.layout") == "birth"


def test_signs_that_turn_the_direction_are_written_as_numbers(tab, tmp_path):
    """Else the text would not stand in the order in which the model read it."""
    trace = made_trace(4)
    for step, text in zip(trace.steps, ("a", "b\u202e", "c", "\u200bd")):
        step["text"] = text
    tab.open(write_page(tmp_path, Trace(trace.header | {"vocabulary": "pieces"}, trace.steps)))
    assert tab.page.locator("#es-tokens span").all_inner_texts() == ["a", "b\\u202e", "c", "\\u200bd"]
    assert "\\u202e" in tab.text("living") and "\u202e" not in tab.page.inner_text("#es-pictures")
    tab.open(write_page(tmp_path, made_trace(1)))
    assert tab.text("alive") == "1 memory" and tab.page.locator("#es-live circle").count() == 2, "a line of one point"


def test_a_text_without_words_has_one_line_a_memory(tab, tmp_path):
    tab.open(write_page(tmp_path, made_trace(60)))
    assert tab.view("view.state.layout") == "packed" and "memories at once" in tab.text("rows")


def test_report_names_the_words_kept_longest():
    tokens = np.frombuffer(TEXT.encode(), np.uint8).astype(int)
    spans = np.array([[step["spans"][1][0] for step in spoken_trace().steps]])
    sample = Sample(tokens, list(TEXT), spans, spans, "bytes")
    found = long_words(sample, 0, len(TEXT), count=3)
    assert found == {1: "Egypt", 29: "Egypt", 57: "Egypt"}
