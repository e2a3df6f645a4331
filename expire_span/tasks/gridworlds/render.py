"""Pictures of grid worlds: text for a terminal, RGB arrays, PNG strips and GIFs for documents.

What is drawn is the agent's own view, so a person sees neither more nor less than a model. The debug rendering adds the hidden
state and which observations the agent still remembers.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .engine import BALL, BOX, DOOR, EMPTY, FLOOR, UNSEEN, WALL, WorldEngine
from .sentences import PLACES, read_sentence

RGB = np.array(
    [(220, 60, 60), (70, 170, 80), (70, 110, 220), (150, 80, 190), (230, 200, 60), (120, 120, 120)], np.uint8
)
"""Colours by MiniGrid's number."""
_ANSI = (31, 32, 34, 35, 33, 90)
_GLYPHS = {UNSEEN: " ", EMPTY: "·", WALL: "█", FLOOR: "▒", DOOR: "D", BALL: "●", BOX: "■"}
_LETTERS = "rgbpy "
TILE = 16
"""Pixels of a cell's side."""


def render_ansi(
    engine: WorldEngine, row: int = 0, *, colour: bool = True, debug: bool = False, memories: Sequence[int] = ()
) -> str:
    """The view of one environment as text, the agent as @; with `debug` also hidden state and remembered steps."""
    observation = engine.observe()
    image = engine.arrays.to_numpy(observation["image"][row])
    lines = ["".join(_draw_cell(image, y, x, colour) for x in range(image.shape[1])) for y in range(image.shape[0])]
    if "text" in observation:
        place = PLACES[int(engine.place[row])]  # type: ignore[attr-defined]
        lines += [f'"{caption_of(engine, row)}"', f"(you stand at the {place})"]
    if debug:
        lines.append(engine.describe_hidden(row))
        lines.append("remembered steps: " + (" ".join(str(step) for step in memories) or "none"))
    return "\n".join(lines)


def _draw_cell(image: np.ndarray, y: int, x: int, colour: bool) -> str:
    """Two characters for a cell: its sign, and without colours the letter of its colour."""
    kind, shade, _ = (int(n) for n in image[y, x])
    if (y, x) == (image.shape[0] // 2, image.shape[1] // 2):
        return "@ "
    sign = _GLYPHS.get(kind, "?")
    coloured = kind in (DOOR, BALL, BOX)
    if colour and (coloured or kind in (WALL, FLOOR)):
        return f"\x1b[{_ANSI[shade]}m{sign} \x1b[0m" if kind != WALL else f"\x1b[{_ANSI[shade]}m██\x1b[0m"
    return sign + (_LETTERS[shade] if coloured else sign if kind == WALL else " ")


def render_rgb(engine: WorldEngine, row: int = 0) -> np.ndarray:
    """The view of one environment as an image [V * TILE, V * TILE, 3], uint8."""
    image = engine.arrays.to_numpy(engine.observe()["image"][row])
    size = image.shape[0]
    out = np.zeros((size * TILE, size * TILE, 3), np.uint8)
    for y in range(size):
        for x in range(size):
            out[y * TILE : (y + 1) * TILE, x * TILE : (x + 1) * TILE] = _tile(*(int(n) for n in image[y, x]))
    _put_agent(out, (size // 2) * TILE)
    return out


def _tile(kind: int, shade: int, state: int) -> np.ndarray:
    tile = np.full((TILE, TILE, 3), 245 if kind not in (UNSEEN, WALL) else 40 if kind == UNSEEN else 150, np.uint8)
    yy, xx = np.mgrid[:TILE, :TILE] - (TILE - 1) / 2
    if kind == BALL:
        tile[yy**2 + xx**2 <= 30] = RGB[shade]
    elif kind == BOX:
        tile[np.maximum(abs(yy), abs(xx)) <= 5] = RGB[shade]
        tile[np.maximum(abs(yy), abs(xx)) <= 3 - min(state, 2)] = 245
    elif kind == DOOR:
        tile[abs(xx) <= 5] = RGB[shade]
        tile[(abs(yy) <= 1) & (abs(xx - 3) <= 1)] = 20
    elif kind == FLOOR:
        tile[:] = (RGB[shade].astype(int) + (2 - min(state, 2)) * 255) // (3 - min(state, 2))
    tile[0], tile[:, 0] = tile[0] // 2 + 90, tile[:, 0] // 2 + 90
    return tile


def _put_agent(picture: np.ndarray, corner: int) -> None:
    yy, xx = np.mgrid[:TILE, :TILE] - (TILE - 1) / 2
    picture[corner : corner + TILE, corner : corner + TILE][abs(xx) * 2 + yy <= 4] = (20, 20, 20)


def save_gif(path: Path | str, frames: Sequence[np.ndarray], *, seconds: float = 0.3) -> Path:
    """Frames one after another as an endless GIF."""
    from PIL import Image

    _check_frames(frames)
    first, *others = (Image.fromarray(frame) for frame in frames)
    first.save(path, "GIF", save_all=True, append_images=others, duration=int(seconds * 1000), loop=0)
    return Path(path)


def save_strip(path: Path | str, frames: Sequence[np.ndarray], captions: Sequence[str] = (), *, scale: int = 3) -> Path:
    """Frames side by side as one PNG, each with its caption below, in lines as wide as the frame."""
    from PIL import Image, ImageDraw

    _check_frames(frames)
    if captions and len(captions) != len(frames):
        raise ValueError(f"a strip needs one caption for each frame, got {len(captions)} for {len(frames)} frames")
    side, gap, letter, line = max(f.shape[1] for f in frames) * scale, 8, 6, 13
    texts = [textwrap.wrap(text, max(1, side // letter)) for text in captions] or [[] for _ in frames]
    foot = line * max(len(text) for text in texts)
    strip = Image.new("RGB", (len(frames) * (side + gap) - gap, side + gap + foot), "white")
    for index, (frame, text) in enumerate(zip(frames, texts, strict=True)):
        place = index * (side + gap)
        strip.paste(Image.fromarray(frame).resize((side, side), Image.Resampling.NEAREST), (place, 0))
        for row, words in enumerate(text):
            ImageDraw.Draw(strip).text((place, side + gap + row * line), words, fill=(40, 40, 40))
    strip.save(path, "PNG")
    return Path(path)


def caption_of(engine: WorldEngine, row: int = 0) -> str:
    """The sentence that an environment says at this step; empty in worlds without text."""
    observation = engine.observe()
    return read_sentence(observation["text"][row].tolist()) if "text" in observation else ""


def _check_frames(frames: Sequence[np.ndarray]) -> None:
    if not len(frames):
        raise ValueError("a picture needs at least 1 frame, got 0; render the environment before saving")
