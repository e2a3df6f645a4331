"""`expire-span compare`: memory systems side by side on one recipe."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic

import tyro

from expire_span.checks import Duration, between
from expire_span.lab.compare.plan import (
    Comparison,
    System,
    check_place,
    config_of,
    list_systems,
    parse_budgets,
    parse_mixers,
)
from expire_span.recipes import RECIPES, get_recipe
from expire_span.runs import RunError, UserError, check_name

from .lists import recipe_lines
from .parsing import PROGRAM, parse, take_name
from .runs import Settings, check_given
from .short_help import show_usual

if TYPE_CHECKING:
    from expire_span.lab.compare.suite import Suite

MOST_SEEDS = 1000
"""Largest number of seeds: every run is planned, and its folder named, before the first begins."""
MOST_JOBS = 1024
"""Largest number of runs at once."""


@dataclass(frozen=True)
class Compare(Generic[Settings]):
    """Train memory systems on the same recipe with equal parameters, one after the other, and write the table."""

    config: Annotated[Settings, tyro.conf.arg(name="")]
    mixers: str = ""
    """The memory systems, like full,transformer_xl,expire_span; see expire-span memories. A hybrid of two has layers of both in
    turn, like 3xgated_deltanet+expire_span."""
    seeds: Annotated[int, between(1, MOST_SEEDS)] = 1
    """Runs of each system: seeds from the recipe's on."""
    sweep: bool = False
    """Try several budgets of memory with the systems that have a memory knob."""
    budgets: str | None = None
    """The budgets, in memories, like 8,32,128; without it, what the recipe says (or a sweep around it)."""
    train_seconds: Duration | None = None
    """Seconds to train every system, instead of the recipe's steps."""
    envs: str | None = None
    """Environments of agents, like a,b,module:c: the systems are compared in each of them, side by side on all cores."""
    jobs: Annotated[int, between(1, MOST_JOBS)] | None = None
    """With --envs, the number of runs in training at once, one thread each; by default one for each core, or one on a GPU."""
    name: str | None = None
    """Name of the comparison's folder; compare-RECIPE by default. The same name continues it, or adds systems to it."""
    runs_dir: Path = Path("runs")
    """Folder that holds the comparison's folder."""


USUAL = ("mixers", "budgets", "sweep", "seeds", "train-seconds", "envs", "name")
"""Options of compare that most people need, beside those of the kind of run."""


def run_compare(args: list[str]) -> int:
    taken = take_name(args, "compare", "recipe", RECIPES, _usage)
    if taken is None:
        return 0
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"compare runs its systems one after the other, got {os.environ['WORLD_SIZE']} processes; start one"
        )
    recipe, rest = taken[0], taken[1]
    command = _parse(recipe, rest)
    systems = _systems(command)
    name = command.name or f"compare-{recipe}"
    check_name(name)
    path = command.runs_dir / name
    if command.envs is not None:
        return _compare_environments(command, recipe, path, systems)
    if command.jobs is not None:
        why = "runs of one environment or data set are made one after the other, so that their times can be compared"
        raise UserError(f"{why}; leave out --jobs {command.jobs}, or list several --envs")
    check_place(path)
    from expire_span.lab.compare.prepare import prepare

    comparison = prepare(path, recipe, command.config, systems, command.train_seconds)
    if (path / "compare.json").exists():
        comparison = Comparison.open(path).join(comparison)
    for name in comparison.runs:
        comparison.run_of(name)  # a folder of another run is refused before anything is trained
    return _compare(comparison)


def _usage() -> str:
    """Help on compare without a recipe: the usual options, all recipes by group."""
    return show_usual(f"{PROGRAM} compare RECIPE", Compare(get_recipe("recall")()), USUAL) + "\n\n" + recipe_lines()


def _parse(recipe: str, args: list[str]) -> Compare:
    config = get_recipe(recipe)()
    kind, prog = config.kind, f"{PROGRAM} compare {recipe}"
    usual = (*USUAL, *kind.load("command").USUAL_TO_COMPARE)
    command = parse(config.typed(Compare), args, prog, Compare(config), usual)
    if command.envs is None:
        check_given(command.config, f"compare {recipe}")
    return command


def _systems(command: Compare) -> list[System]:
    """The runs that the options ask for; everything that can be checked without data or device is checked here."""
    kinds = parse_mixers(command.mixers)
    budgets = parse_budgets(command.budgets, command.sweep, command.config)
    first = command.config.seed
    systems = list_systems(kinds, budgets, range(first, first + command.seeds))
    for system in systems:
        config_of(system, command.config)
    return systems


def _compare(comparison: Comparison) -> int:
    """Train the runs that are not finished, then write and print the table; failed runs are reported too."""
    from expire_span.lab.compare.conduct import conduct
    from expire_span.lab.compare.outcome import read_outcome, score_name
    from expire_span.lab.compare.page import write_page
    from expire_span.lab.compare.prepare import describe_plan
    from expire_span.lab.compare.table import print_table, write_table
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
    outcome = read_outcome(comparison)
    write_table(outcome)
    page = write_page(outcome)
    print_table(outcome)
    print(f"page {page}, table {comparison.path / 'table.md'}")
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise RunError(f"{len(failed)} of {len(comparison.runs)} runs failed ({reasons}); the same command tries again")
    return 0


def _compare_environments(command: Compare, recipe: str, path: Path, systems: list[System]) -> int:
    """Compare the systems in several environments, and write one table and one picture."""
    from expire_span.lab.compare.suite import Suite, check_suite_place, parse_environments

    task: Any = command.config.task
    given: Any = get_recipe(recipe)().task
    if "task.env" not in command.config.kind.required:
        raise UserError(f"--envs lists environments of agents, got the recipe {recipe}; give agent")
    if task.env != given.env:
        raise UserError(f"--envs lists all environments, got --task.env {task.env} too; leave it out")
    named, before = parse_environments(command.envs or ""), check_suite_place(path, recipe)
    from expire_span.lab.compare.prepare import prepare

    comparisons = {name: Comparison.open(path / name) for name in before}
    for name, env in named.items():
        config = replace(command.config, task=replace(task, env=env))
        comparison = prepare(path / name, recipe, config, systems, command.train_seconds)
        comparisons[name] = comparisons[name].join(comparison) if name in comparisons else comparison
        for run in comparisons[name].runs:
            comparisons[name].run_of(run)  # a folder of another run is refused before anything is trained
    return _run_suite(Suite(path, recipe, comparisons), command.jobs or _cores(command.config.train.device))


def _cores(device: str) -> int:
    """Runs at once: one for each core that this process may use, or one where a GPU trains."""
    from expire_span.train.devices import check_device

    if check_device(device).type != "cpu":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_suite(suite: Suite, jobs: int) -> int:
    """Train the runs that are not finished, then write the table and the picture; failed runs are reported too."""
    from expire_span.lab.compare.conduct import Conductor
    from expire_span.lab.compare.random_play import random_score
    from expire_span.lab.compare.suite_outcome import read_suite, write_suite

    def describe(comparison: Comparison, name: str) -> str:
        run = comparison.run_of(name)
        result = (run.read_result() if run is not None else None) or {}
        return f"{result['score_name']} {result['score']:.4f}"

    suite.write()
    count = len(suite.list_runs())
    print(f"{count} runs in {len(suite.comparisons)} environments in {suite.path}, {jobs} at once", flush=True)
    for name, comparison in suite.comparisons.items():
        chance: Any = random_score(comparison.path, comparison.config)  # type: ignore[arg-type]
        print(f"  {name}: random play {chance['score_name']} {chance['score']:.4f}", flush=True)
    runs = {f"{comparison.path.name}/{name}": (comparison, name) for comparison, name in suite.list_runs()}
    one_thread = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    failed = Conductor(runs, jobs, describe, one_thread).run()
    outcome = read_suite(suite)
    write_suite(suite, outcome)
    print(f"{outcome.as_markdown()}\ntable {suite.path / 'table.md'}, picture {suite.path / 'curves.png'}")
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise RunError(f"{len(failed)} of {count} runs failed ({reasons}); the same command tries again")
    return 0
