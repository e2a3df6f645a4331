"""`expire-span play`: a person plays a grid world in the terminal and sees exactly what a model would see."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal

from expire_span.checks import Seed
from expire_span.runs import UserError

from .parsing import PROGRAM, nearest, parse, take_name

WORLDS = {"corridor": "Corridor", "portal": "Portal", "instruction": "Instruction", "tmaze": "EndlessTMaze"}
GOALS = {
    "corridor": "Remember the colour of the ball at the start, walk right to the end, and go through the door of that colour.",
    "portal": "Pass all rooms: one door of each leads on, the other back to the start. Remember which was right.",
    "instruction": "Walk about and listen; when you stand at the place that an instruction named, do what it asked.",
    "tmaze": "Turn up at the end of a corridor that began with a red ball, down after a green one; then comes the next.",
}
"""What a player has to do in each world."""
SIGNS = "signs: @ you, ● ball, ■ box, D door, █ wall, ▒ coloured floor, · empty cell"
KEYS = {"a": 0, "d": 1, "w": 2, "s": 3, "h": 0, "l": 1, "k": 2, "j": 3}
"""Moves by key: left, right, up, down; either wasd or hjkl."""


@dataclass(frozen=True)
class Play:
    """Play a grid world in the terminal: wasd moves, ? shows the hidden state, q ends."""

    level: Literal["Easy", "Medium", "Hard"] = "Easy"
    """How long the corridor is, how many rooms or instructions there are."""
    seed: Seed = 0
    """Seed of the episodes."""
    colour: bool = True
    """Draw with the terminal's colours."""


def run_play(args: list[str]) -> int:
    taken = take_name(args, "play", "world", WORLDS, _usage)
    if taken is None:
        return 0
    world, rest = taken
    if world not in WORLDS:
        raise UserError(f"unknown world {world!r}; {nearest(world, list(WORLDS))}")
    command = parse(Play, rest, f"{PROGRAM} play {world}")
    from expire_span.tasks.gridworlds.levels import build_engine, level_config

    engine = build_engine(level_config(WORLDS[world], command.level), 1)
    engine.reset(command.seed)
    print(f"{GOALS[world]}\n{SIGNS}\n{_keys(world)}")
    return _loop(engine, command)


def _usage() -> str:
    goals = "\n".join(f"  {world:<13}{goal}" for world, goal in GOALS.items())
    return f"usage: {PROGRAM} play WORLD [--level Easy|Medium|Hard] [--seed N] [--no-colour]\n\n{goals}\n\n{SIGNS}\n{_keys('')}"


def _keys(world: str) -> str:
    acts = '; an act is typed in words, like "open box"' if world == "instruction" else ""
    return f"keys: w up, a left, s down, d right (or hjkl), ? hidden state, q quit; end each line with Enter{acts}"


def _loop(engine: Any, command: Play) -> int:
    """Read a line, make its moves and draw the view, until the player quits; several keys on one line are several moves."""
    from expire_span.tasks.gridworlds.render import render_ansi

    total = 0.0
    print(render_ansi(engine, colour=command.colour))
    for line in sys.stdin:
        word = line.strip()
        if word == "q":
            break
        if word == "?":
            print(engine.describe_hidden(0))
            continue
        actions = _read(word, engine)
        if actions is None:
            print(f"cannot read {word!r}; {_keys(engine.name)}")
            continue
        for action in actions:
            total += float(engine.step([action]).reward[0])
            print(render_ansi(engine, colour=command.colour))
            if bool(engine.over[0]):
                break
        if bool(engine.over[0]):
            outcome = "success" if bool(engine.success[0]) else "failed"
            steps, oracle = int(engine.steps[0]), int(engine.oracle_steps()[0])
            print(f"{outcome} after {steps} steps (an expert needs {oracle}), return {total:.2f}\n")
            engine.reset()
            total = 0.0
            print(render_ansi(engine, colour=command.colour))
    return 0


def _read(word: str, engine: Any) -> list[int] | None:
    """Actions of one line, or None where it cannot be read."""
    if engine.name == "instruction":
        from expire_span.tasks.gridworlds.sentences import OBJECTS, VERBS

        parts = [part for part in word.split() if part != "the"]
        if len(parts) == 2 and parts[0] in VERBS and parts[1] in OBJECTS:
            return [4 + VERBS.index(parts[0]) * len(OBJECTS) + OBJECTS.index(parts[1])]
    if word and all(key in KEYS for key in word):
        return [KEYS[key] for key in word]
    return None
