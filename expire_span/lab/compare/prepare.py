"""Plans a comparison: the config of every run, with equal parameters. Nothing is written here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from expire_span.memories import find_limits
from expire_span.settings.run import RunConfig
from expire_span.train.estimate import count_parameters

from .matched import match_parameters
from .plan import Comparison, System, config_of


def prepare(
    path: Path, recipe: str, base: RunConfig, systems: Sequence[System], train_seconds: float | None = None
) -> Comparison:
    """Check the data and the device, match every system's parameters, and refuse what cannot run."""
    base, score, check = base.kind.load("comparison").survey(base)
    target = count_parameters(base.model)
    parameters, runs = {"reference": target}, {}
    for system in systems:
        config = config_of(system, base)
        config = replace(config, model=match_parameters(config.model, target))
        check(config)
        runs[system.name] = (system, config)
        parameters[system.name] = count_parameters(config.model)
    return Comparison(path, recipe, base, train_seconds, score, parameters, runs)


def describe_plan(comparison: Comparison) -> str:
    """Every system with its parameters, and what it cannot do on this task, before anything is trained."""
    reference = comparison.parameters["reference"]
    lines = [f"recipe {comparison.recipe}: {reference:,} parameters; {len(comparison.runs)} runs in {comparison.path}"]
    seen: dict[str, str] = {}
    for name, (system, config) in comparison.runs.items():
        count = comparison.parameters[name]
        off, width = count / reference - 1, config.model.ff_dim
        line = f"  {system.label:<22}{count:>13,} parameters ({off:+.2%}), ff_dim {width}"
        seen.setdefault(system.label, "\n".join([line, *(f"    note: {limit}" for limit in find_limits(config))]))
    return "\n".join([*lines, *seen.values()])
