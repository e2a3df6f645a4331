"""`expire-span compare`: memory systems side by side on one recipe."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from expire_span.agent_configs import AgentRunConfig
from expire_span.compare.plan import (
    Comparison,
    System,
    check_place,
    config_of,
    list_systems,
    parse_budgets,
    parse_mixers,
)
from expire_span.config import RunConfig
from expire_span.recipes import RECIPES, get_recipe
from expire_span.runs import RunError, UserError, check_name

from .lists import recipe_lines
from .parsing import PROGRAM, parse, spell_out, take_name


@dataclass(frozen=True)
class Compare:
    """Train memory systems on the same recipe with equal parameters, one after the other, and write the table."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    mixers: str = ""
    """The memory systems, like full,transformer_xl,expire_span; see expire-span memories. A hybrid of two has layers of both in
    turn, like 3xgated_deltanet+expire_span."""
    seeds: int = 1
    """Runs of each system: seeds from the recipe's on."""
    sweep: bool = False
    """Try several budgets of memory with the systems that have a memory knob."""
    budgets: str | None = None
    """The budgets, in memories, like 8,32,128; without it, what the recipe says (or a sweep around it)."""
    train_seconds: float | None = None
    """Seconds to train every system, instead of the recipe's steps."""
    name: str | None = None
    """Name of the comparison's folder; compare-RECIPE by default. The same name continues it, or adds systems to it."""
    runs_dir: Path = Path("runs")
    """Folder that holds the comparison's folder."""


MOST_SEEDS = 1000
"""Largest number of seeds: every run is planned, and its folder named, before the first begins."""


@dataclass(frozen=True)
class CompareAgents(Compare):
    """Train agents with different memory systems in the same environment with equal parameters, and write the table."""

    config: Annotated[AgentRunConfig, tyro.conf.arg(name="")]


USUAL = (
    "mixers",
    "budgets",
    "sweep",
    "seeds",
    "train-seconds",
    "name",
    "task.path",
    "train.steps",
    "train.batch",
    "train.device",
)
"""Options of compare that most people need."""
USUAL_OF_AGENTS = (*USUAL[:6], "task.env", "task.options", "train.steps", "train.envs", "train.device")
"""The same for agents."""


def run_compare(args: list[str]) -> int:
    usage = f"usage: {PROGRAM} compare RECIPE --mixers a,b,c [OPTIONS]\n\nrecipes:\n{recipe_lines()}"
    taken = take_name(args, "compare", "recipe", RECIPES, usage)
    if taken is None:
        return 0
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"compare runs its systems one after the other, got {os.environ['WORLD_SIZE']} processes; start one"
        )
    recipe, rest = taken[0], spell_out(taken[1], "--sweep")
    command = _parse(recipe, rest)
    systems = _systems(command)
    name = command.name or f"compare-{recipe}"
    check_name(name)
    path = command.runs_dir / name
    check_place(path)
    from expire_span.compare.prepare import prepare

    comparison = prepare(path, recipe, command.config, systems, command.train_seconds)
    if (path / "compare.json").exists():
        comparison = Comparison.open(path).join(comparison)
    for name in comparison.runs:
        comparison.run_of(name)  # a folder of another run is refused before anything is trained
    return _compare(comparison)


def _parse(recipe: str, args: list[str]) -> Compare:
    config = get_recipe(recipe)()
    if not isinstance(config, AgentRunConfig):
        return parse(Compare, args, f"{PROGRAM} compare {recipe}", Compare(config), USUAL)
    command = parse(CompareAgents, args, f"{PROGRAM} compare {recipe}", CompareAgents(config), USUAL_OF_AGENTS)
    if not command.config.task.env:
        raise UserError("compare agent needs an environment; give --task.env, like ExpireSpan/Corridor-Easy-v0")
    return command


def _systems(command: Compare) -> list[System]:
    """The runs that the options ask for; everything that can be checked without data or device is checked here."""
    kinds = parse_mixers(command.mixers)
    if not 1 <= command.seeds <= MOST_SEEDS:
        raise UserError(f"--seeds must lie between 1 and {MOST_SEEDS:,}, got {command.seeds:,}")
    if command.train_seconds is not None and not 0 < command.train_seconds < float("inf"):
        raise UserError(f"--train-seconds must be greater than 0 and finite, got {command.train_seconds:g}")
    budgets = parse_budgets(command.budgets, command.sweep, command.config)
    first = command.config.seed
    systems = list_systems(kinds, budgets, range(first, first + command.seeds))
    for system in systems:
        config_of(system, command.config)
    return systems


def _compare(comparison: Comparison) -> int:
    """Train the runs that are not finished, then write and print the table; failed runs are reported too."""
    from expire_span.compare.conduct import conduct
    from expire_span.compare.page import write_page
    from expire_span.compare.prepare import describe_plan
    from expire_span.compare.table import collect_rows, print_table, score_name, with_found_score, write_table
    from expire_span.view.efficiency import measure, show_count

    def describe(name: str) -> str:
        run = comparison.run_of(name)
        assert run is not None
        numbers = measure(run, comparison.parameters[name])
        called = score_name(run) or comparison.score["name"]
        return f"{called} {numbers['score']:.4f}, {show_count(numbers['live'])} memories alive"

    comparison.write()
    print(describe_plan(comparison), flush=True)
    failed = conduct(comparison, describe)
    comparison = with_found_score(comparison)
    rows = collect_rows(comparison)
    write_table(comparison, rows)
    page = write_page(comparison, rows)
    print_table(comparison, rows)
    print(f"page {page}, table {comparison.path / 'table.md'}")
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise RunError(f"{len(failed)} of {len(comparison.runs)} runs failed ({reasons}); the same command tries again")
    return 0
