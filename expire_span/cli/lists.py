"""Verbs that list what there is: recipes and memories."""

from __future__ import annotations

import json
from dataclasses import dataclass

from expire_span.recipes import RECIPES, summary

from .parsing import PROGRAM, parse, spell_out


@dataclass(frozen=True)
class Memories:
    """List the memory systems that a decoder can have: rule and state, one each."""

    json: bool = False
    """Print all that is known of each as JSON."""


@dataclass(frozen=True)
class Recipes:
    """List the recipes, one line each."""

    json: bool = False
    """Print names, summaries and full configs as JSON."""


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
        table = {name: {"summary": summary(r), "config": to_dict(r())} for name, r in RECIPES.items()}
        print(json.dumps(table, indent=2))
    else:
        print(recipe_lines())
    return 0


def recipe_lines() -> str:
    width = max(map(len, RECIPES)) + 2
    return "\n".join(f"  {name:<{width}}{summary(recipe)}" for name, recipe in RECIPES.items())
