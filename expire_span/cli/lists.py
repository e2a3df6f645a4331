"""`expire-span recipes` and `expire-span memories`: list the recipes and the memory systems."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from expire_span.recipe_facts import FACTS
from expire_span.recipes import RECIPES, summary

from .parsing import PROGRAM, parse, spell_out


@dataclass(frozen=True)
class Memories:
    """List the memory systems that a decoder can use, each with its rule and the size of its state."""

    json: bool = False
    """Print everything that each system declares, as JSON."""


@dataclass(frozen=True)
class Recipes:
    """List the recipes with what to expect of each: size, hardware, time, score."""

    json: bool = False
    """Print names, summaries, expectations and full configs as JSON."""


def run_memories(args: list[str]) -> int:
    from expire_span.memories import describe
    from expire_span.models.systems import SYSTEMS

    command = parse(Memories, spell_out(args), f"{PROGRAM} memories")
    if command.json:
        print(json.dumps([describe(kind) for kind in SYSTEMS], indent=2))
        return 0
    for kind, memory in SYSTEMS.items():
        print(f"  {kind:<17}{memory.rule}\n{'':<19}state: {memory.state}")
    print("\nn steps so far, H heads, Hkv key/value heads, D head dim, e bytes of a number; per row and layer")
    return 0


def run_recipes(args: list[str]) -> int:
    from expire_span.config import to_dict

    command = parse(Recipes, spell_out(args), f"{PROGRAM} recipes")
    if command.json:
        print(json.dumps({name: _describe(name, to_dict(r())) for name, r in RECIPES.items()}, indent=2))
    else:
        print(recipe_table())
    return 0


def _describe(name: str, config: dict[str, Any]) -> dict[str, Any]:
    facts = asdict(FACTS[name]) if name in FACTS else {}
    return {"summary": summary(RECIPES[name]), **facts, "config": config}


def recipe_table() -> str:
    """Every recipe in two lines: what to expect of it, and what it is."""
    width, lines = max(map(len, RECIPES)) + 2, []
    for name, recipe in RECIPES.items():
        facts = FACTS.get(name)
        told = f"{facts.size:<7}{facts.hardware}, {facts.time}; {facts.score}" if facts else "nothing known"
        lines += [f"  {name:<{width}}{told}", f"  {'':<{width}}{summary(recipe)}"]
    return "\n".join(lines)


def recipe_lines() -> str:
    width = max(map(len, RECIPES)) + 2
    return "\n".join(f"  {name:<{width}}{summary(recipe)}" for name, recipe in RECIPES.items())
