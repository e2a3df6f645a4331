"""The verbs train, resume, eval, report and demo, which make or read a run."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import tyro

from expire_span.checks import Count
from expire_span.memories import find_limits
from expire_span.recipes import RECIPES, get_recipe, stages_of
from expire_span.runs import RunFolder, UserError, find_run
from expire_span.settings.kinds import KINDS
from expire_span.settings.run import RunConfig

from .files import eval_file
from .lists import recipe_lines
from .parsing import PROGRAM, is_first_process, parse, take_name, warn
from .short_help import show_usual
from .stages import plan_stages, train_stages

Settings = TypeVar("Settings", bound=RunConfig)


@dataclass(frozen=True)
class Train(Generic[Settings]):
    """Train a recipe; every field of it can be changed with an option."""

    config: Annotated[Settings, tyro.conf.arg(name="")]
    name: str | None = None
    """Name of the run folder; the recipe's name by default."""
    runs_dir: Path = Path("runs")
    """Folder that holds the run folders."""
    mixer: str | None = None
    """Memory system to take in place of the recipe's, with its default settings; see expire-span memories. A hybrid like
    gru+expire_span has layers of both in turn, and its first system's settings are --model.partner."""
    init_from: str | None = None
    """A run whose newest weights (of an agent its best) are the initial weights: its name under --runs-dir, or its path. The
    shapes must match."""
    stage: int | None = None
    """Of a recipe with several stages: train this one alone, from --init-from; None trains all in turn."""


@dataclass(frozen=True)
class OnRun:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Name of a run under --runs-dir, or the path of its folder."""
    runs_dir: Path = Path("runs")
    """Folder that holds the run folders."""


@dataclass(frozen=True)
class OnAnyRun:
    run: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None
    """Name of a run under --runs-dir, or the path of its folder; without it, the model that ships with the package."""
    runs_dir: Path = Path("runs")
    """Folder that holds the run folders."""


@dataclass(frozen=True)
class Resume(OnRun):
    """Continue an interrupted run from its newest intact checkpoint."""

    allow_changed_data: bool = False
    """Continue even if the data has changed since the run began."""
    context_parallel: int | None = None
    """Number of processes that share each row from now on, where the run goes on with another number of processes; None
    leaves it as the run was begun."""


@dataclass(frozen=True)
class Eval(OnRun):
    """Score a run's newest checkpoint and print the result as JSON.

    Of an agent: its best weights on fresh episodes, with `episodes`, `greedy`, `options`, `control` and `device` alone.
    """

    split: Literal["valid", "test", "train"] = "test"
    """Which part of the data."""
    batches: Count | None = None
    """Number of batches to score; None scores the whole split."""
    batch: Count | None = None
    """Number of rows; None takes the training's. With one row, memory is carried through the whole split."""
    block: Count | None = None
    """Tokens per row and forward pass; None takes the training's."""
    path: str | None = None
    """A file or folder to score instead of the run's own data; for runs on text and words."""
    episodes: Count = 1000
    """Least number of whole episodes of an agent."""
    greedy: bool = False
    """Let an agent take the likeliest actions; off, they are drawn, as in training."""
    options: str | None = None
    """Other arguments of an agent's environment, as JSON; None takes the training's."""
    control: Literal["none", "forget", "forget_expiring", "forget_recurrent", "delete", "swap"] = "none"
    """Change what an agent remembers while it plays; see docs/agents.md."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    file: Path | None = None
    """Score this file instead, of any length, in bounded memory: bits per byte and living memories. Several processes of
    accelerate launch read it together."""


@dataclass(frozen=True)
class Report(OnRun):
    """Write the run's report.html: curves, live memories, spans over a sample, what it costs, what `analyse` found."""


@dataclass(frozen=True)
class Demo:
    """Train the recall recipe, write its report, and print what was remembered and how many bytes it took."""

    runs_dir: Path = Path("runs")
    """Folder that holds the run folders; the run is called demo, demo-2, ..."""


def find_adapter(name: str | None) -> Path | None:
    """The adapter folder with this path, or inside the run folder of a retrofit with this path; None if it is neither."""
    places = () if name is None else (Path(name), Path(name) / "adapter")
    return next((place for place in places if (place / "adapter.json").is_file()), None)


def run_train(args: list[str]) -> int:
    taken = take_name(args, "train", "recipe", RECIPES, _train_usage)
    if taken is None:
        return 0
    recipe, rest = taken
    configs = [_with_mixer(stage(), rest) for stage in stages_of(recipe)]
    kind, prog = configs[-1].kind, f"{PROGRAM} train {recipe}"
    usual = kind.load("command").USUAL
    last, *lessons = [parse(config.typed(Train), rest, prog, Train(config), usual) for config in configs[::-1]]
    check_given(last.config, f"train {recipe}")
    stages = plan_stages(recipe, [*lessons[::-1], last])
    if is_first_process():
        for limit in dict.fromkeys(limit for stage in stages for limit in find_limits(stage.command.config)):
            warn(limit)
    trainer = kind.load("trainer")
    return [_finish(run) for run in train_stages(recipe, stages, trainer.train, trainer.resume)][-1]


def check_given(config: RunConfig, verb: str) -> None:
    """Refuse settings without what their kind of run cannot do without."""
    for option, needed in config.kind.required.items():
        part, name = option.split(".")
        if not getattr(getattr(config, part), name):
            raise UserError(f"{verb} needs {needed}")


def _train_usage() -> str:
    """Help on train without a recipe: where to start, the usual options, all recipes by group."""
    config = get_recipe("text_tiny")()
    usual = config.kind.load("command").USUAL
    return show_usual(f"{PROGRAM} train RECIPE", Train(config), usual) + "\n\n" + recipe_lines()


def _with_mixer(config: RunConfig, args: list[str]) -> RunConfig:
    """The recipe with the memory system that --mixer names, so that its own fields become options."""
    text = " ".join(args)
    named = re.search(r"(?:^| )--mixer[ =](\S+)", text)
    return replace(config, model=config.model.with_mixer(named[1])) if named else config


def _finish(run: RunFolder) -> int:
    """Print the result of a finished run."""
    if is_first_process():
        print(run.config.kind.load("command").tell(run, run.read_result() or {}))
    return 0


def run_resume(args: list[str]) -> int:
    command = parse(Resume, args, f"{PROGRAM} resume")
    run = find_run(command.run, command.runs_dir)
    kind = run.config.kind
    if command.context_parallel is not None and not hasattr(run.config.train, "context_parallel"):
        given = f"got --context-parallel {command.context_parallel}"
        what = kind.called.format(task=run.config.task)
        raise UserError(f"run {run.path} is {what}, and shares no rows among processes, {given}; leave it out")
    if run.finished:
        more = kind.trained_on.format(path=run.path)
        raise UserError(f"run {run.path} is finished ({run.config.train.steps} steps); nothing to resume{more}")
    check_data_is_there(run, "put it back, or go to the folder that the training began in")
    options: dict[str, Any] = {"allow_changed_data": command.allow_changed_data}
    if command.context_parallel is not None:
        options["context_parallel"] = command.context_parallel
    return _finish(kind.load("trainer").resume(run, **options))


def _check_fits_run(command: Eval, run: RunFolder) -> None:
    """Refuse options that this kind of run would ignore."""
    known, own = {option for kind in KINDS for option in kind.eval_options}, run.config.kind.eval_options
    for name in (field.name for field in fields(Eval)):
        if name in known - set(own) and getattr(command, name) != getattr(Eval, name):
            what = run.config.kind.called.format(task=run.config.task)
            raise UserError(
                f"--{name} {getattr(command, name)} does nothing here: run {run.path} is {what}; its options are "
                f"{', '.join(f'--{option}' for option in own)}"
            )


def run_eval(args: list[str]) -> int:
    command = parse(Eval, args, f"{PROGRAM} eval")
    run = find_run(command.run, command.runs_dir)
    run.check_can("eval")
    _check_fits_run(command, run)
    if command.file is not None:
        return eval_file(run, command.file, command.device)
    print(json.dumps(run.config.kind.load("command").evaluate(run, command), indent=2))
    return 0


def check_data_is_there(run: RunFolder, advice: str) -> None:
    """Refuse a run whose data has moved; the task itself would advise an option that its command may not have."""
    own = getattr(run.config.task, "path", "")
    if own and not os.path.exists(own):
        raise UserError(f"run {run.path} reads {own}, which is not there; {advice}")


def with_data(run: RunFolder, path: str | None) -> RunFolder:
    """The run with its task's data at `path`; None leaves it as it is, if the data is there."""
    task: Any = run.config.task
    if path is None:
        check_data_is_there(run, "say where its data is with --path")
        return run
    if not hasattr(task, "path"):
        raise UserError(f"--path needs a run whose task reads a file, got task {task.kind}")
    if path and not os.path.exists(path):
        raise UserError(f"--path {path} is neither a file nor a folder; give an existing one")
    return replace(run, config=replace(run.config, task=replace(task, path=path)))


def run_report(args: list[str]) -> int:
    command = parse(Report, args, f"{PROGRAM} report")
    run = find_run(command.run, command.runs_dir)
    from expire_span.view.report import write_report

    print(write_report(run))
    return 0


def run_demo(args: list[str]) -> int:
    command = parse(Demo, args, f"{PROGRAM} demo")
    names = ["demo", *(f"demo-{n}" for n in range(2, 1000))]
    path = next(command.runs_dir / name for name in names if not (command.runs_dir / name).exists())
    from expire_span.train.progress import show_bytes
    from expire_span.train.supervised import train
    from expire_span.view.report import write_report

    run = train(get_recipe("recall")(), path, recipe="recall")
    result = run.read_result() or {}
    live, share = ", ".join(f"{x:.1f}" for x in result["live"]), result["mean_bytes"] / result["full_bytes"]
    print(f"success rate    {result['score']:.1%} of the colours recalled")
    print(f"live memories   {live} per layer: {result['live_share']:.1%} of those seen")
    held, full = (show_bytes(result[name] / result["rows"]) for name in ("mean_bytes", "full_bytes"))
    print(f"memory per row  {held}, {share:.1%} of the {full} that never forgetting would hold")
    print(f"report          {write_report(run)}")
    return 0
