"""Which runs a comparison consists of, and the folder that holds them.

runs/<name>/
  compare.json     what is compared: recipe, config, mixers, budgets, seeds, and every run's own config
  <system>/        one run folder per memory system, budget and seed: see runs.py
  table.json, table.md, compare.html, curve.png    the outcome so far

It needs the standard library only, so that wrong input is refused before torch is loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from expire_span import __version__
from expire_span.disk.files import check_seal, read_json, seal, to_json, write_atomic
from expire_span.errors import StorageError, UserError, describe
from expire_span.models.systems import SYSTEMS
from expire_span.runs import RunFolder, check_name
from expire_span.settings.run import RunConfig, from_dict, to_dict

from .budgets import allowed_spans, default_memories, has_knob, split_hybrid, with_budget

COMPARE_FORMAT = 2
"""Version of compare.json."""
SWEEP = (0.5, 1.0, 4.0, 16.0)
"""Budgets of a sweep, as multiples of the recipe's."""


@dataclass(frozen=True)
class System:
    """One run of a comparison."""

    kind: str
    budget: int | None
    """Number of memories; None takes what the recipe says, or stands for a system without such a setting."""
    seed: int

    @property
    def label(self) -> str:
        """Label of the table's row, which is the mean over seeds."""
        return self.kind if self.budget is None else f"{self.kind}-{self.budget}"

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return f"{self.label}-seed{self.seed}"


def parse_mixers(text: str) -> list[str]:
    """A list of kinds and hybrids as the command line has it: a,b,3xa+b."""
    kinds = [word.strip() for word in text.split(",") if word.strip()]
    known = ", ".join(SYSTEMS)
    if not kinds:
        raise UserError(f"compare needs at least one memory system, got none; give --mixers a,b,c of: {known}")
    for kind in kinds:
        parts = split_hybrid(kind)
        for count, part in parts:
            if part not in SYSTEMS:
                raise UserError(f"unknown mixer {part!r}{_near(part)}; known are: {known}")
            if count < 1:
                raise UserError(f"a hybrid has at least one layer of each system, got {count} of {part} in {kind}")
        if len(parts) > 2 or (len(parts) == 1 and parts[0] != (1, kind)):
            raise UserError(f"a hybrid is of two systems, like 3xgated_deltanet+expire_span, got {kind}")
        if kinds.count(kind) > 1:
            raise UserError(f"each memory system is compared once, got {kind} {kinds.count(kind)} times in --mixers")
    return kinds


def _near(kind: str) -> str:
    import difflib

    near = difflib.get_close_matches(kind, SYSTEMS, n=1)
    return f", did you mean {near[0]}?" if near else ""


def parse_budgets(text: str | None, sweep: bool, config: RunConfig) -> list[int]:
    """The budgets of the command line, or those of a sweep; an empty list means what the recipe says."""
    if text is None:
        base = default_memories(config)
        low, high = allowed_spans(config).ramp, allowed_spans(config).max_span
        return sorted({min(max(round(base * times), low), high) for times in SWEEP}) if sweep else []
    try:
        budgets = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise UserError(f"budgets are whole numbers of memories, like 8,32,128, got {text!r}") from error
    for budget in budgets:
        if budget < 1:
            raise UserError(f"a budget must be at least 1 memory, got {budget}")
        if budgets.count(budget) > 1:
            raise UserError(f"each budget is tried once, got {budget} {budgets.count(budget)} times in --budgets")
    return sorted(budgets)


def list_systems(kinds: Sequence[str], budgets: Sequence[int], seeds: Sequence[int]) -> list[System]:
    """All runs, ordered by seed first, so that an interrupted comparison has runs of every system."""
    points = [(kind, budget) for kind in kinds for budget in (budgets if budgets and has_knob(kind) else [None])]
    return [System(kind, budget, seed) for seed in seeds for kind, budget in points]


def config_of(system: System, base: RunConfig) -> RunConfig:
    """The run of one system before its parameters are matched."""
    return replace(with_budget(base, system.kind, system.budget), seed=system.seed)


@dataclass(frozen=True)
class ScoreEntry:
    """The task's score as compare.json has it."""

    name: str
    higher_is_better: bool


@dataclass(frozen=True)
class Comparison:
    """A comparison's folder and what compare.json says."""

    path: Path
    recipe: str
    config: RunConfig
    """The recipe with the command line's options and the task's vocabulary."""
    train_seconds: float | None
    """Seconds that every system trains, instead of the recipe's steps; None: the recipe's steps."""
    score: dict[str, Any]
    """Name of the task's score, and which way is better."""
    parameters: dict[str, int]
    """Parameters by run name; "reference" is the recipe's own."""
    runs: dict[str, tuple[System, RunConfig]]
    """Every run by name, in the order in which they are made."""

    @classmethod
    def open(cls, path: Path) -> Comparison:
        file = path / "compare.json"
        if not file.exists():
            raise UserError(f"{path} is no comparison: it has no compare.json")
        told = read_json(file)
        version = told.get("format")
        if version != COMPARE_FORMAT:
            raise UserError(
                f"comparison {path} has format {version} (written by version {told.get('version')}), "
                f"this version reads format {COMPARE_FORMAT}; use the version that wrote it, or another --name"
            )
        check_seal(told, file)
        try:
            return cls._parse(path, told)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            cause = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise UserError(f"{file} is not a comparison that this version can read: {cause}") from error

    @classmethod
    def _parse(cls, path: Path, told: dict[str, Any]) -> Comparison:
        runs = {
            name: (from_dict(System, run["system"], name), from_dict(RunConfig, run["config"]))
            for name, run in told["runs"].items()
        }
        for name in runs:
            check_name(name)
        seconds, score = told["train_seconds"], from_dict(ScoreEntry, told["score"])
        if seconds is not None and not (isinstance(seconds, (int, float)) and seconds > 0):
            raise ValueError(f"train_seconds must be greater than 0, got {seconds!r}")
        parameters = {name: int(count) for name, count in told["parameters"].items()}
        return cls(
            path, str(told["recipe"]), from_dict(RunConfig, told["config"]), seconds, asdict(score), parameters, runs
        )

    def write(self) -> None:
        runs = {
            name: {"system": asdict(system), "config": to_dict(config)} for name, (system, config) in self.runs.items()
        }
        head = {"format": COMPARE_FORMAT, "version": __version__, "recipe": self.recipe}
        head |= {"train_seconds": self.train_seconds, "score": self.score, "parameters": self.parameters}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomic(
                self.path / "compare.json", to_json(seal({**head, "config": to_dict(self.config), "runs": runs}))
            )
        except OSError as error:
            with contextlib.suppress(OSError):
                self.path.rmdir()  # where it is empty
            raise StorageError(f"cannot write {self.path / 'compare.json'}: {describe(error)}") from error

    def join(self, new: Comparison) -> Comparison:
        """This comparison with the new one's runs added; runs that exist already are kept as they are."""
        check_same(self, new)
        return replace(self, parameters=self.parameters | new.parameters, runs=self.runs | new.runs)

    def run_of(self, name: str) -> RunFolder | None:
        """A run's folder, or None if the run was not started; a folder that belongs to another run is refused."""
        path = self.path / name
        if not path.exists():
            return None
        run = RunFolder.open(path)
        check_belongs(run, self.runs[name][1], self.train_seconds)
        return run


def check_place(path: Path) -> None:
    """Refuse a folder that holds something other than a comparison."""
    if (path / "config.json").exists():
        raise UserError(f"{path} is the folder of a run, not of a comparison; give another --name")
    if path.is_file() or (path.is_dir() and any(path.iterdir()) and not (path / "compare.json").exists()):
        raise UserError(f"{path} is there already and is no comparison; give another --name")


def check_same(old: Comparison, new: Comparison) -> None:
    """Refuse to continue a comparison with other settings, since its rows would not be comparable."""
    advice = "give another --name, or repeat the first settings"
    if old.recipe != new.recipe:
        raise UserError(f"comparison {old.path} is of recipe {old.recipe}, got {new.recipe}; {advice}")
    if old.train_seconds != new.train_seconds:
        given = f"train seconds {old.train_seconds}, got {new.train_seconds}"
        raise UserError(f"comparison {old.path} was made with {given}; {advice}")
    change = find_change(to_dict(old.config), to_dict(new.config))
    if change is not None:
        raise UserError(f"comparison {old.path} was made with {change}; {advice}")
    for name, (_, config) in new.runs.items():
        change = find_change(to_dict(old.runs[name][1]), to_dict(config)) if name in old.runs else None
        if change is not None:
            raise UserError(f"{name} of comparison {old.path} was made with {change}; {advice}")


def check_belongs(run: RunFolder, config: RunConfig, train_seconds: float | None) -> None:
    """Refuse a run folder whose config is not the planned one; with train_seconds its number of steps may differ."""
    if train_seconds is not None:
        config = replace(config, train=replace(config.train, steps=run.config.train.steps))
    if run.data.get("tokenizer"):  # the run reads the copy in its own folder
        config = replace(config, task=replace(config.task, tokenizer=run.config.task.tokenizer))
    if getattr(config.task, "previous_action", False) is None:  # the run decided it by its environment
        config = replace(config, task=replace(config.task, previous_action=run.config.task.previous_action))
    change = find_change(to_dict(run.config), to_dict(config))
    if change is not None:
        raise UserError(f"run folder {run.path} belongs to another run: it has {change}; move it away, or give --name")


def find_change(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> str | None:
    """The first field that differs, in words."""
    for name in {**old, **new}:
        was, now = old.get(name), new.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            deeper = find_change(was, now, f"{prefix}{name}.")
            if deeper is not None:
                return deeper
        elif _plain(was) != _plain(now):
            return f"{prefix}{name} {was}, got {now}"
    return None


def _plain(value: Any) -> Any:
    """Tuples come back from JSON as lists."""
    return list(value) if isinstance(value, tuple) else value
