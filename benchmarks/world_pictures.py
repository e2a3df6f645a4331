"""Draw the grid worlds for the guide: `python -m benchmarks.world_pictures` writes docs/img/world_*.png, an expert's steps.

Instruction's frames have their sentences below them, the instruction among them.
"""

from __future__ import annotations

from pathlib import Path

from expire_span.settings.tasks import CorridorTask, InstructionTask, PortalTask
from expire_span.tasks.gridworlds import build_engine
from expire_span.tasks.gridworlds.render import caption_of, render_rgb, save_strip

FRAMES = 6
"""Frames of a strip, evenly chosen among the expert's steps, the first and the last included."""
WORLDS = {
    "corridor": CorridorTask(min_length=9, max_length=9),
    "portal": PortalTask(rooms=4),
    "instruction": InstructionTask(instructions=1, talk=6),
}


def draw(name: str, folder: Path, *, seed: int = 0) -> Path:
    engine = build_engine(WORLDS[name], 1)
    engine.reset(seed=seed)
    seen = []
    while not engine.over.all():
        seen.append((render_rgb(engine), caption_of(engine)))
        engine.step(engine.optimal_action())
    steps = {round(i * (len(seen) - 1) / (FRAMES - 1)) for i in range(FRAMES)}
    steps |= {step for step, (_, caption) in enumerate(seen) if caption.startswith("when")}  # the instruction itself
    frames, captions = zip(*(seen[step] for step in sorted(steps)), strict=True)
    return save_strip(folder / f"world_{name}.png", frames, captions if any(captions) else ())


if __name__ == "__main__":
    for world in WORLDS:
        print(draw(world, Path("docs/img")))
