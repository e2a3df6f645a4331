"""What the page shows in each of its states, on the page itself and in screenshots of it, with the model that ships."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from expire_span.runs import RunFolder
from expire_span.shipped import SHIPPED
from expire_span.view.server import Source
from tests.browser import Watched, open_browser, serving, wait_until

TEXTS = (
    "Marie Curie was born in Warsaw in 1867. She studied physics in Paris, and there she met Pierre. Together they found "
    "two new elements, polonium and radium, and in 1903 they won the Nobel Prize. Years later Curie went back to Warsaw.",
    "Dear Anna,\n\nthank you for your letter of last week. I was in Lisbon for a few days and did not have the time to "
    "write. The house is nearly done now; only the roof is still to be mended before the winter. Come and see us in May, "
    "if you can, and bring Thomas. The children ask for him every day.\n\nYours, Peter",
    "Take two eggs, a cup of flour and a little milk. Mix the flour and the milk, then add the eggs one after the other. "
    "Let it rest for an hour. Heat the butter in a pan, pour in a thin layer, and turn it when the edge is brown.",
)
SIZES = [(1280, "light"), (1280, "dark"), (1920, "light"), (1920, "dark"), (390, "light"), (390, "dark")]
LIVES = """(() => { const { death, end } = view.timeline, lives = Array.from(death, (x, i) => x - i);
    return [lives.filter((x) => x > 0), lives.filter((x, i) => x > 0 && death[i] < end).length]; })()"""
"""Lives of the drawn lines, and how many of them end within the drawn time."""
LABELS = """(() => { const { wide, high, area } = view.timeline.shown, context = view.timeline.ink.getContext("2d");
    context.font = "11px system-ui, sans-serif";
    return view.timeline.labels.map(({ x, y, text }) => [x, y - 5, x + context.measureText(text).width, y + 5]); })()"""
CONTRAST = """() => {
    const WHITE = [255, 255, 255];
    const shade = (x) => { x /= 255; return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; };
    const light = ([r, g, b]) => 0.2126 * shade(r) + 0.7152 * shade(g) + 0.0722 * shade(b);
    const parse = (text) => { const found = text.match(/[\\d.]+/g).map(Number); return found[3] === 0 ? null : found; };
    const back = (node) => (node && (parse(getComputedStyle(node).backgroundColor) || back(node.parentElement))) || WHITE;
    const low = [], walk = document.createTreeWalker(document.getElementById("es-view"), NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const node = walk.currentNode.parentElement;
        const shown = walk.currentNode.textContent.trim() && node.checkVisibility();
        if (!shown || node.closest("svg, :disabled, option")) continue;
        const [a, b] = [light(parse(getComputedStyle(node).color)), light(back(node))].sort((x, y) => y - x);
        if ((a + 0.05) / (b + 0.05) < 4.5) low.push([node.textContent.slice(0, 30), (a + 0.05) / (b + 0.05)]);
    }
    return low; }"""
"""Pieces of text whose contrast with what is behind them is too low."""


@pytest.fixture(scope="module")
def served():
    with open_browser() as browser, serving(Source(RunFolder.open(SHIPPED))) as (port, _):
        yield browser, f"http://127.0.0.1:{port}/"


def open_at(served, wide: int, scheme: str) -> Watched:
    tab = Watched(served[0], color_scheme=scheme)
    tab.page.set_viewport_size({"width": wide, "height": 844})
    tab.open(served[1])
    return tab


def read(tab: Watched, text: str) -> None:
    tab.page.fill("#es-text", text)
    tab.page.click("#es-read")
    tab.wait(f"view.dataset.read === '{len(text.encode())}'")
    tab.rest()


def check_forgetting(tab: Watched) -> None:
    """Some of what is drawn goes and some stays, and the headline says what is held instead of what."""
    lives, ended = tab.view(LIVES)
    assert 0.3 <= ended / len(lives) <= 0.9, (ended, len(lives))
    assert max(lives) >= 4 * np.median(lives), (max(lives), np.median(lives))
    size = tab.view("view.state.trace.size")
    assert tab.text("headline").startswith(f"After {size:,} bytes, this model holds ")
    assert " MB instead of " in tab.text("headline") and "where forgetting shows best" in tab.text("layer-name")


def check_looks(tab: Watched) -> None:
    """No horizontal scroll, no text of low contrast, no labels over one another, and both lines and gaps in the picture."""
    assert tab.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert tab.page.evaluate(CONTRAST) == []
    boxes = tab.view(LABELS)
    for n, (a, b, c, d) in enumerate(boxes):
        over = [box for box in boxes[:n] if box[0] < c and a < box[2] and box[1] < d and b < box[3]]
        assert not over, (over, boxes[n])
    picture = np.array(Image.open(io.BytesIO(tab.page.locator("#es-stage").screenshot())).convert("RGB"), int)
    card = picture[-2, 2]
    drawn = (np.abs(picture - card).sum(-1) > 24).mean()
    assert 0.1 < drawn < 0.97, drawn


def check_generating(tab: Watched) -> None:
    """The text that is generated is within the first screen, or scrolled into it."""
    tab.page.evaluate("scrollTo(0, 0)")
    tab.page.click("#es-write")
    tab.wait("document.getElementById('es-newest').textContent.length > 8")
    box = tab.page.locator("#es-written").bounding_box()
    assert box and box["y"] >= 0 and box["y"] + box["height"] <= 844
    tab.page.click("#es-stop")
    tab.rest()


def check_answer(tab: Watched) -> None:
    tab.page.click("#es-example")
    tab.wait("Number(view.dataset.read) > 1500")
    tab.page.click("#es-compare")
    wait_until(lambda: tab.text("changed").startswith("Pembroke stays "))
    tab.rest()
    words = tab.text("changed").split()
    stays, other = (int(words[n].replace(",", "")) for n in (2, 5))
    assert words[4] == "sea" and stays > 4 * other, words
    assert tab.page.locator("#es-both").bounding_box()["width"] > 200 and tab.page.is_visible("#es-both-held")
    chips = tab.page.locator("#es-worse button span").all_inner_texts()
    text = tab.page.input_value("#es-other")
    whole = set("".join(c if c.isalnum() else " " for c in text).split())
    cut = [c for c in chips if not set("".join(x if x.isalnum() else " " for x in c).split()) <= whole]
    assert not cut, cut
    assert tab.page.evaluate(
        "[...document.querySelectorAll('.es-chips span')].every((x) => x.scrollWidth <= x.clientWidth + 1)"
    )


def test_the_example_and_a_typed_text_show_forgetting(served):
    tab = open_at(served, 1280, "light")
    check_forgetting(tab)
    check_looks(tab)
    assert tab.page.locator("#es-stay b").count() == tab.page.locator("#es-go s").count() == 5
    for text in TEXTS:
        read(tab, text)
        check_forgetting(tab)
    check_generating(tab)
    check_answer(tab)
    tab.close(served[1])


def test_escape_closes_and_the_address_holds_the_state(served):
    tab = open_at(served, 390, "dark")
    check_looks(tab)
    tab.press("help")
    tab.page.keyboard.press("Escape")
    assert tab.page.is_hidden("#es-keys") and tab.page.get_attribute("#es-help", "aria-expanded") == "false"
    read(tab, TEXTS[0])
    tab.page.focus("#es-stage")
    for key in ("Home", "ArrowRight", "b"):
        tab.page.keyboard.press(key)
    tab.rest()
    address = "location.hash"
    wait_until(lambda: "layout=" in tab.page.evaluate(address) and "cursor=1" in tab.page.evaluate(address))
    values = "[view.state.cursor, view.state.layout, view.state.layer, view.state.trace.size]"
    seen = tab.view(values)
    tab.open(tab.page.url)
    assert tab.view(values) == seen and tab.page.input_value("#es-text") == TEXTS[0]
    tab.close(served[1])


@pytest.mark.long
@pytest.mark.parametrize(("wide", "scheme"), SIZES)
def test_every_state_at_every_width_and_theme(served, wide, scheme):
    tab = open_at(served, wide, scheme)
    check_forgetting(tab)
    check_looks(tab)
    for text in TEXTS:
        read(tab, text)
        check_forgetting(tab)
        check_looks(tab)
    check_generating(tab)
    check_answer(tab)
    check_looks(tab)
    tab.press("help")
    check_looks(tab)
    tab.close(served[1])
