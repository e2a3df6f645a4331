"""`expire-span recipes` and `expire-span memories`: list the recipes and the memory systems."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from expire_span.recipes import RECIPES, names_by_purpose, stages_of, summary
from expire_span.recipes.facts import FACTS

from .parsing import PROGRAM, parse

MEANING = """TASK is the recommended run: on one GPU, unless the task is so small that two CPU cores do.
TASK_tiny takes minutes on two CPU cores. TASK_paper is the published setting."""


@dataclass(frozen=True)
class Memories:
    """List the memory systems that a decoder can use, each with its rule and the size of its state."""

    json: bool = False
    """Print everything that each system declares, as JSON."""


@dataclass(frozen=True)
class Recipes:
    """List the recipes by what they are for, with what to expect of each: hardware, time, score."""

    json: bool = False
    """Print names, summaries, expectations and full configs as JSON."""


def run_memories(args: list[str]) -> int:
    from expire_span.memories import describe
    from expire_span.models.systems import SYSTEMS

    command = parse(Memories, args, f"{PROGRAM} memories")
    if command.json:
        print(json.dumps([describe(kind) for kind in SYSTEMS], indent=2))
        return 0
    for kind, memory in SYSTEMS.items():
        print(f"  {kind:<17}{memory.rule}\n{'':<19}state: {memory.state}")
    print("\nn steps so far, H heads, Hkv key/value heads, D head dim, e bytes of a number; per row and layer")
    return 0


def run_recipes(args: list[str]) -> int:
    command = parse(Recipes, args, f"{PROGRAM} recipes")
    if command.json:
        print(json.dumps({name: _describe(name) for name in RECIPES}, indent=2))
    else:
        print(recipe_table())
    return 0


def _describe(name: str) -> dict[str, Any]:
    from expire_span.settings.run import to_dict

    group = next(purpose for purpose, names in names_by_purpose().items() if name in names)
    about = {"group": group, "summary": summary(RECIPES[name]), **(asdict(FACTS[name]) if name in FACTS else {})}
    return about | {"config": to_dict(RECIPES[name]()), "stages": [to_dict(stage()) for stage in stages_of(name)[:-1]]}


def recipe_table() -> str:
    """The recipes by what they are for, each in two lines: what to expect of it, and what it is; then its lessons."""
    width, lines = max(map(len, RECIPES)) + 4, [MEANING]
    for purpose, names in names_by_purpose().items():
        lines.append(f"\nto {purpose}:")
        for name in names:
            facts = FACTS.get(name)
            told = f"{facts.hardware}, {facts.time}; {facts.score}" if facts else "nothing known"
            lines += [f"  {name:<{width - 2}}{told}", f"{'':<{width}}{summary(RECIPES[name])}"]
            lessons = stages_of(name)[:-1]
            lines += [f"{'':<{width}}stage {n}: {summary(lesson)}" for n, lesson in enumerate(lessons, 1)]
    return "\n".join(lines)


START_HERE = ("recall", "text_tiny", "agent_corridor_tiny")
"""A recipe of each kind that needs nothing but two CPU cores and a few minutes."""


def recipe_lines() -> str:
    """All recipes by what they are for, a line each, those to start with first."""
    purposes = {f"to {purpose}": names for purpose, names in names_by_purpose().items()}
    return "\n\n".join(_recipe_group(f"{t}:", names) for t, names in {"start here": START_HERE, **purposes}.items())


def _recipe_group(title: str, names: Iterable[str]) -> str:
    width = max(map(len, RECIPES)) + 2
    return "\n".join([title, *(f"  {name:<{width}}{summary(RECIPES[name])}" for name in names)])
