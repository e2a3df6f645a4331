"""Draws the documentation's pictures of the page: `python -m benchmarks.view_pictures [RUN] [--agent RUN] [--out docs/img]`.

- view.png: the page as it opens, with its own example, in the layer with the longest lifetimes
- view_after.png, view_before.png: one typed text on the layer that the page chooses, and on the one with the longest life
- view.gif: memories that appear and expire while the model continues a short prompt
- view_agent.png, only with --agent: an episode of a trained agent, such as a run of `expire-span train agent_corridor`

Needs Chromium and playwright. Text, seed and steps are fixed, so the same model draws the same pictures again.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import Image

from expire_span.runs import RunFolder, find_run
from expire_span.shipped import SAMPLE, SHIPPED
from expire_span.view.server import Source
from tests.browser import Watched, open_browser, serving

WIDE = 1100
"""Width of the page in pixels; the animation is smaller."""
PROMPT = slice(328, 525)
"""The prompt of the animation: a sentence or two of the sample's prose."""
FRAMES, STRIDE, LASTING = 16, 14, 350
"""Number of frames of the animation, tokens generated between two frames, milliseconds per frame."""
GIF_WIDE, COLOURS = 680, 64
"""Width in pixels and number of colours of the animation, which must load quickly."""
LOW = "#es-tokens { height: calc(6 * 1.65em); } "
LOW += "#es-token-title, #es-strips, #es-token-box .es-row, .es-now { display: none !important; }"
"""The animation shows the last lines of the text, right below the timeline."""
TYPED = (
    "Marie Curie was born in Warsaw in 1867. She studied physics in Paris, and there she met Pierre. Together they found two "
    "new elements, polonium and radium, and in 1903 they won the Nobel Prize. Years later Curie went back to Warsaw."
)
LONGEST = 4
"""Index of the layer in which every memory of so short a text lives to its end."""
WINDOW, SMALL = {"width": 1280, "height": 800}, (800, 500)
"""Window of the two pictures of the typed text, and their size."""
EPISODE, CURSOR = 0, 40
"""Number of the agent's episode, and the step at which it is shown; in a shorter episode, its last step."""
LAYER = 6
"""Layer of the animation: most of its memories expire within the picture, and a few words stay."""


def choose(tab: Watched, layer: int) -> None:
    """Move the slider of layers, if there are several layers."""
    if tab.page.is_visible("#es-layer"):
        tab.page.fill("#es-layer", str(layer))
    tab.rest()


def shoot(tab: Watched, first: str, last: str, *, below: int = 0) -> bytes:
    """The page as PNG, from one element's upper edge to another's lower edge, or `below` it."""
    edge = "(id) => { const box = document.getElementById('es-' + id).getBoundingClientRect(); return [box.top, box.bottom]; }"
    scrolled = tab.page.evaluate("scrollY")
    top, bottom = tab.page.evaluate(edge, first)[0] + scrolled - 8, tab.page.evaluate(edge, last)[1] + scrolled + below
    wide = tab.page.viewport_size["width"]
    return tab.page.screenshot(full_page=True, clip={"x": 0, "y": top, "width": wide, "height": bottom - top})


def draw_still(tab: Watched, path: Path) -> None:
    """Save what the page shows now."""
    tab.page.evaluate("document.getElementById('es-tokens').scrollTop = 0")
    picture = Image.open(io.BytesIO(shoot(tab, "choice", "strips", below=200)))
    picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def draw_typed(tab: Watched, address: str, folder: Path) -> list[Path]:
    """The first screen after a text was typed, on the layer that the page chooses and on the one with the longest life."""
    tab.page.set_viewport_size(WINDOW)
    paths = []
    for name, layer in (("view_after.png", ""), ("view_before.png", f"&layer={LONGEST}")):
        tab.page.goto("about:blank")  # another address of an open page would only move it
        tab.open(f"{address}#text={quote(TYPED)}{layer}")
        tab.rest()
        paths.append(folder / name)
        picture = Image.open(io.BytesIO(tab.page.screenshot())).convert("RGB").resize(SMALL, Image.Resampling.LANCZOS)
        picture.quantize(128, dither=Image.Dither.NONE).save(paths[-1], optimize=True)
    return paths


def draw_agent(tab: Watched, address: str, path: Path, episode: int = EPISODE) -> None:
    """An episode: what the agent saw at the cursor, the timeline of its memories, and what is alive."""
    tab.open(f"{address}#episode={episode}&cursor={CURSOR}")
    tab.rest()
    picture = Image.open(io.BytesIO(shoot(tab, "life-title", "living-box", below=8)))
    picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def write_step_by_step(tab: Watched, text: str) -> None:
    """Start generating in the paused state, so that the page advances only when the step button is pressed."""

    def hold(route: Any) -> None:
        route.continue_(post_data=json.dumps(json.loads(route.request.post_data) | {"paused": True}))

    tab.page.route("**/api/generate", hold)
    tab.page.fill("#es-text", text)
    tab.page.click("#es-write")
    tab.wait(f"Number(view.dataset.written) === {len(text.encode())}")
    choose(tab, LAYER)


def draw_moving(tab: Watched, text: str, path: Path, frames: int = FRAMES) -> None:
    tab.page.add_style_tag(content=LOW)
    write_step_by_step(tab, text)
    pictures = []
    for _ in range(frames):
        size = tab.view("view.state.trace.size") + STRIDE
        for _ in range(STRIDE):
            tab.page.click("#es-step")
        tab.wait(f"view.state.trace.size === {size}")
        tab.rest()
        pictures.append(Image.open(io.BytesIO(shoot(tab, "stage", "tokens", below=8))).convert("RGB"))
    tab.page.click("#es-stop")
    save_gif(pictures, path)


def save_gif(pictures: list[Image.Image], path: Path) -> None:
    """Save all frames with the palette of the last one, which has every colour; unchanged areas are not stored again."""
    wide, high = pictures[0].width, min(picture.height for picture in pictures)
    shape = (GIF_WIDE, round(high * GIF_WIDE / wide))
    small = [picture.crop((0, 0, wide, high)).resize(shape, Image.Resampling.LANCZOS) for picture in pictures]
    palette = small[-1].quantize(COLOURS)
    first, *rest = (picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in small)
    first.save(path, save_all=True, append_images=rest, duration=LASTING, loop=0, optimize=True)


def sample_of(run: RunFolder) -> str:
    own = run.path / SAMPLE
    return (own if own.is_file() else SHIPPED / SAMPLE).read_text(encoding="utf-8", errors="replace")


def draw_agents_picture(run: RunFolder, folder: Path, episode: int = EPISODE) -> Path:
    """The picture of an agent, with a server and a browser of its own."""
    path = folder / "view_agent.png"
    folder.mkdir(parents=True, exist_ok=True)
    with open_browser() as browser, serving(Source(run)) as (port, _):
        tab = Watched(browser, color_scheme="light")
        tab.page.set_viewport_size({"width": WIDE, "height": 860})
        draw_agent(tab, f"http://127.0.0.1:{port}/", path, episode)
        tab.close(f"http://127.0.0.1:{port}/")
    return path


def draw_pictures(run: RunFolder, folder: Path, frames: int = FRAMES) -> list[Path]:
    """All pictures of a model of text, with a server and a browser of their own."""
    paths = [folder / "view.png", folder / "view.gif"]
    folder.mkdir(parents=True, exist_ok=True)
    text = sample_of(run)
    with open_browser() as browser, serving(Source(run)) as (port, _):
        tab = Watched(browser, color_scheme="light")
        tab.page.set_viewport_size({"width": WIDE, "height": 860})
        tab.open(f"http://127.0.0.1:{port}/")
        draw_still(tab, paths[0])
        draw_moving(tab, text[PROMPT], paths[1], frames)
        paths += draw_typed(tab, f"http://127.0.0.1:{port}/", folder)
        tab.close(f"http://127.0.0.1:{port}/")
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default=SHIPPED.name, help="name or folder of a run of bytes")
    parser.add_argument("--agent", help="name or folder of an agent's run; without it view_agent.png is left as it is")
    parser.add_argument("--episode", type=int, default=EPISODE, help="number of the agent's episode")
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    args = parser.parse_args()
    paths = draw_pictures(find_run(args.run, Path("runs")), args.out)
    if args.agent:
        paths.append(draw_agents_picture(find_run(args.agent, Path("runs")), args.out, args.episode))
    for path in paths:
        print(f"{path}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
