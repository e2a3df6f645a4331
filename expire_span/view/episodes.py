"""Episodes of grid worlds for display: a picture and a few words for every step."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expire_span.tasks.contract import SPLITS
from expire_span.tasks.gridworlds import build_engine
from expire_span.tasks.gridworlds.engine import BALL, COLOURS, DOOR, MOVES, WorldEngine
from expire_span.tasks.gridworlds.render import render_rgb
from expire_span.tasks.gridworlds.sentences import OBJECTS, VERBS, read_sentence
from expire_span.tasks.twins import ROLL, TWINS, Twin, demonstrate

from .trace import Line

LEGENDS = {
    "corridor": "In the picture the triangle is the agent, the disc the cue, squares are niches; dark cells are out of sight."
}
"""How to read the picture of a world, by its name."""


def picture_of(engine: WorldEngine, row: int = 0) -> str:
    """What the agent sees, as a PNG in base64."""
    return encode_png(render_rgb(engine, row))


def encode_png(image: np.ndarray) -> str:
    """An RGB image [H, W, 3], uint8, as a small PNG in base64."""
    from PIL import Image  # comes with matplotlib

    out = io.BytesIO()
    Image.fromarray(image).quantize(64).save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def name_action(engine: WorldEngine, action: int) -> str:
    """An action in words."""
    if action < len(MOVES):
        return f"go {MOVES[action]}"
    verb, thing = divmod(action - len(MOVES), len(OBJECTS))
    return f"{VERBS[verb]} {OBJECTS[thing]}"


class Describer:
    """What an agent of a grid world sees, in the words of the world's supervised twin."""

    def __init__(self, engine: WorldEngine) -> None:
        self.engine = engine
        try:
            self.twin: Twin | None = TWINS[engine.name](engine.config)  # type: ignore[arg-type]
        except (
            KeyError,
            ValueError,
        ):  # T-mazes, and worlds whose expert may need more steps than an episode, have no twin
            self.twin = None

    def words(self) -> str:
        observation = self.engine.observe()
        if "text" in observation:
            return read_sentence(self.engine.arrays.to_numpy(observation["text"][0]).tolist()) or "silence"
        if self.twin is None:
            return "a step"
        labels = [self.twin.label(int(token)) for token in self.twin.observe(self.engine)[0]]
        seen = [*self._in_sight(observation), *(label for label in labels if label != "wall")]
        return ", ".join(seen) or "corridor"

    def _in_sight(self, observation: dict[str, Any]) -> list[str]:
        """In a corridor, the cues and doors in view that are not beside the agent, which the twin's labels leave out."""
        if self.engine.name != "corridor":
            return []
        image = self.engine.arrays.to_numpy(observation["image"][0])
        away = np.delete(image, image.shape[1] // 2, axis=1)
        cues = sorted({COLOURS[int(cell[1])] for cell in away[away[..., 0] == BALL]})
        return [f"cue {colour} in sight" for colour in cues] + ["door in sight"] * bool((away[..., 0] == DOOR).any())


def replay_twin(twin: Any, tokens: Tensor, seed: int) -> list[Line] | None:
    """Picture and action for each token of an expert's test episode; None if it is not one of the first episodes."""
    base = seed * len(SPLITS) + SPLITS.index("test")
    engine = build_engine(twin.config, ROLL)
    engine.reset(base)
    played = demonstrate(twin, engine)
    wanted = tokens.numpy()
    found = [n for n, width in enumerate(played.widths) if np.array_equal(played.tokens[n, :width], wanted)]
    return _play_again(twin, found[0], base) if found else None


def _play_again(twin: Any, number: int, seed: int) -> list[Line]:
    engine = build_engine(twin.config, 1)
    engine.reset(seed, environments=[number])
    twin.start(engine)
    out: list[Line] = []
    while not engine.over.all():
        action = twin.act(engine)
        shown = {"image": picture_of(engine), "action": name_action(engine, int(action[0]))}
        out += [shown] * int((twin.observe(engine)[0] >= 0).sum())
        engine.step(action)
    return out


def is_twin(task: Any) -> bool:
    return isinstance(task, Twin)


def to_row(observation: dict[str, Tensor]) -> dict[str, Tensor]:
    """Observations of one environment, [1, ..], as a block of one step, [1, 1, ..]."""
    return {name: torch.as_tensor(x).unsqueeze(1) for name, x in observation.items()}
