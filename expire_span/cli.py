"""The command line. Each verb imports what it needs inside: help and bad input answer without loading torch."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from expire_span import __version__
from expire_span.config import RunConfig
from expire_span.mixer_configs import mixer_config
from expire_span.recipes import RECIPES, get_recipe, summary
from expire_span.runs import RunError, UserError, check_name, check_new, find_run

PROGRAM = "expire-span"


@dataclass(frozen=True)
class Train:
    """Train a recipe; every field of it can be changed with an option."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    name: str | None = None
    """Name of the run folder; the recipe's name by default."""
    runs_dir: Path = Path("runs")
    """Folder that holds the run folders."""
    mixer: str | None = None
    """Memory system to take in place of the recipe's, with its default settings; see expire-span memories."""


@dataclass(frozen=True)
class OnRun:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Name of a run under --runs-dir, or the path of its folder."""
    runs_dir: Path = Path("runs")
    """Folder that holds the run folders."""


@dataclass(frozen=True)
class Resume(OnRun):
    """Go on with an interrupted run from its newest sound checkpoint."""


@dataclass(frozen=True)
class Eval(OnRun):
    """Score a run's newest checkpoint and print the result as JSON."""

    split: Literal["valid", "test", "train"] = "test"
    """Which part of the data."""
    batches: int | None = None
    """Stop after so many batches; None reads the whole split."""
    batch: int | None = None
    """Rows side by side; None takes the training's. One row carries its memory through the whole split."""
    block: int | None = None
    """Tokens per row and forward pass; None takes the training's."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""


@dataclass(frozen=True)
class Generate(OnRun):
    """Write text with a run's newest checkpoint, byte by byte, in bounded memory."""

    prompt: str = ""
    """Text to go on from."""
    max_tokens: int | None = 256
    """How many bytes to write; None never stops."""
    samples: int = 1
    """How many continuations to write; with more than one they are printed one after another at the end."""
    temperature: float = 1.0
    """Below 1 sharpens the distribution; 0 takes the likeliest byte."""
    top_k: int | None = None
    """Draw from the k likeliest bytes only."""
    top_p: float | None = None
    """Draw from the smallest set of bytes that holds this share of the probability."""
    seed: int = 0
    """Seed of the draws."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""


@dataclass(frozen=True)
class Report(OnRun):
    """Write the run's report.html: curves, live memories, spans over a sample."""


@dataclass(frozen=True)
class Demo:
    """Train the recall recipe, write its report, and say what was remembered at what price."""

    runs_dir: Path = Path("runs")
    """Folder that holds the run folders; the run is called demo, demo-2, ..."""


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


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors of the user are one sentence on stderr, never a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(argv)
    except RunError as error:
        return _fail(str(error), error.exit_code)
    except ValueError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def _fail(message: str, code: int) -> int:
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    return code


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"{PROGRAM} {__version__}")
        return 0
    verb, rest = argv[0], argv[1:]
    if verb not in VERBS:
        raise UserError(f"unknown command {verb!r}; {_nearest(verb, list(VERBS))}")
    return VERBS[verb][1](rest)


def _overview() -> str:
    verbs = "\n".join(f"  {name:<10}{text}" for name, (text, _) in VERBS.items())
    return (
        f"usage: {PROGRAM} COMMAND [OPTIONS]\n\n"
        "Models that learn when each memory expires, and pay only for the ones that live.\n\n"
        f"commands:\n{verbs}\n\n"
        f"{PROGRAM} COMMAND --help explains a command; {PROGRAM} train RECIPE --help lists every field of a recipe.\n"
        f"Several processes or machines: accelerate launch -m expire_span train RECIPE ..."
    )


def _nearest(word: str, known: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are: {', '.join(known)}"


# Parsing


def _parse(kind: Any, args: list[str], prog: str, default: Any = None) -> Any:
    """Read options into a dataclass; what tyro says about bad ones becomes one sentence."""
    said = io.StringIO()
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                kind, args=args, prog=prog, config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff), **options
            )
    except SystemExit as stop:
        if not stop.code:
            raise
    raise UserError(_one_sentence(said.getvalue(), prog))


def _spell_out(args: list[str]) -> list[str]:
    """A bare --json means --json True."""
    return [*args, "True"] if args[-1:] == ["--json"] else args


def _one_sentence(said: str, prog: str) -> str:
    """The message inside tyro's box, without its frame (drawn, or in ASCII under a title) and the help below it."""
    drawn = "╭" in said
    lines = [line.strip("│ ") for line in said.splitlines() if not line.startswith(("╭", "╰"))]
    parts = re.split(r"\n[─-]{4,}\n", "\n".join(lines))[0 if drawn else 1 :]
    message = " ".join(parts[0].split()).replace("Error parsing --", "--")
    message = re.sub(r"^Error parsing [\w.]*: ", "", message)
    unknown = re.match(r"Unrecognized options: ([^\s,]+)", message)
    if not unknown:
        return f"{message.removesuffix('.')}; see {prog} --help"
    near = re.search(r"--(?!help)\S+", " ".join(parts[1:])) if unknown[1].startswith("--") else None
    return f"unknown option {unknown[1]}; " + (f"did you mean {near[0]}?" if near else f"see {prog} --help")


def _train(args: list[str]) -> int:
    if not args or args[0].startswith("-"):
        if args and args[0] in ("-h", "--help"):
            print(f"usage: {PROGRAM} train RECIPE [OPTIONS]\n\nrecipes:\n{_recipe_lines()}")
            return 0
        raise UserError(f"train needs a recipe before its options; known are: {', '.join(RECIPES)}")
    recipe, rest = args[0], args[1:]
    config = _with_mixer(get_recipe(recipe)(), rest)
    command = _parse(Train, rest, f"{PROGRAM} train {recipe}", Train(config))
    name = command.name or recipe
    check_name(name)
    path = command.runs_dir / name
    if _is_first_process():
        check_new(path)
    from expire_span.train.supervised import train

    return _finish(train(command.config, path, recipe=recipe))


def _with_mixer(config: RunConfig, args: list[str]) -> RunConfig:
    """The recipe with the memory system that --mixer names, so that its own fields become options."""
    text = " ".join(args)
    named = re.search(r"(?:^| )--mixer[ =](\S+)", text)
    if not named or named[1] == config.model.mixer.kind:
        return config
    return replace(config, model=replace(config.model, mixer=mixer_config(named[1])))


def _is_first_process() -> bool:
    import os

    return os.environ.get("RANK", "0") == "0"


def _finish(run: Any) -> int:
    """Say how a finished run did."""
    result = run.read_result()
    if _is_first_process():
        live = " ".join(f"{x:.1f}" for x in result["live"])
        print(
            f"{run.name}: test {result['score_name']} {result['score']:.4f}, loss {result['loss']:.4f}, live memories {live} "
            f"({result['live_share']:.1%} of those seen), run folder {run.path}"
        )
    return 0


def _resume(args: list[str]) -> int:
    command = _parse(Resume, args, f"{PROGRAM} resume")
    run = find_run(command.run, command.runs_dir)
    if run.finished:
        raise UserError(f"run {run.path} is finished ({run.config.train.steps} steps); nothing to resume")
    from expire_span.train.supervised import resume

    return _finish(resume(run))


def _eval(args: list[str]) -> int:
    command = _parse(Eval, args, f"{PROGRAM} eval")
    run = find_run(command.run, command.runs_dir)
    for name in ("batches", "batch", "block"):
        value = getattr(command, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} must be at least 1, got {value}")
    from expire_span.tasks.task import build_task
    from expire_span.train.checkpoint import load_model
    from expire_span.train.devices import check_device
    from expire_span.train.evaluate import evaluate

    decoder, config = load_model(run, check_device(command.device), _warn)
    batches = command.batches or (config.train.eval_batches if command.split == "train" else None)
    result = evaluate(
        decoder,
        build_task(config.task),
        command.split,
        batch=command.batch or config.train.batch,
        block=command.block or config.train.block,
        batches=batches,
        seed=config.seed,
        precision=config.train.precision,
    )
    print(json.dumps(result.to_dict(), indent=2))
    return 0


def _generate(args: list[str]) -> int:
    command = _parse(Generate, args, f"{PROGRAM} generate")
    run = find_run(command.run, command.runs_dir)
    if run.config.model.vocab != 256:
        raise UserError(f"generate needs a run of bytes, got a run of task {run.config.task.kind}")
    if command.samples > 1 and command.max_tokens is None:
        raise UserError(f"several samples need --max-tokens, got samples {command.samples} and max-tokens None")
    from expire_span.generate import Sampling, generate_bytes
    from expire_span.train.checkpoint import load_model
    from expire_span.train.devices import check_device

    sampling = Sampling(command.temperature, command.top_k, command.top_p, command.seed)
    decoder, _ = load_model(run, check_device(command.device), _warn)
    prompt = command.prompt.encode()
    steps = generate_bytes(decoder, prompt, sampling, max_tokens=command.max_tokens, samples=command.samples)
    if command.samples == 1:
        _write(prompt)
        for (byte,) in steps:
            _write(byte)
        _write(b"\n")
        return 0
    for text in zip(*steps):
        _write(prompt + b"".join(text) + b"\n\n")
    return 0


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _report(args: list[str]) -> int:
    command = _parse(Report, args, f"{PROGRAM} report")
    run = find_run(command.run, command.runs_dir)
    from expire_span.view.report import write_report

    print(write_report(run))
    return 0


def _demo(args: list[str]) -> int:
    command = _parse(Demo, args, f"{PROGRAM} demo")
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
    print(
        f"bytes held      {show_bytes(result['mean_bytes'])}, {share:.1%} of the {show_bytes(result['full_bytes'])} "
        "that never forgetting would hold"
    )
    print(f"report          {write_report(run)}")
    return 0


def _memories(args: list[str]) -> int:
    from expire_span.memories import MEMORIES, describe

    command = _parse(Memories, _spell_out(args), f"{PROGRAM} memories")
    if command.json:
        print(json.dumps([describe(kind) for kind in MEMORIES], indent=2))
        return 0
    for kind, memory in MEMORIES.items():
        print(f"  {kind:<17}{memory.rule}\n{'':<19}state: {memory.state}")
    print("\nn steps so far, H heads, Hkv key/value heads, D head dim, e bytes of a number; per row and layer")
    return 0


def _recipes(args: list[str]) -> int:
    from expire_span.config import to_dict

    command = _parse(Recipes, _spell_out(args), f"{PROGRAM} recipes")
    if command.json:
        table = {name: {"summary": summary(r), "config": to_dict(r())} for name, r in RECIPES.items()}
        print(json.dumps(table, indent=2))
    else:
        print(_recipe_lines())
    return 0


def _recipe_lines() -> str:
    return "\n".join(f"  {name:<14}{summary(recipe)}" for name, recipe in RECIPES.items())


def _warn(message: str) -> None:
    print(f"{PROGRAM}: {message}", file=sys.stderr)


VERBS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "train": ("train a recipe: expire-span train RECIPE [--field value ...]", _train),
    "resume": ("go on with an interrupted run", _resume),
    "eval": ("score a run's newest checkpoint", _eval),
    "generate": ("write text with a run's newest checkpoint", _generate),
    "report": ("write a run's report.html", _report),
    "demo": ("train the recall recipe and show what it remembers", _demo),
    "recipes": ("list the recipes", _recipes),
    "memories": ("list the memory systems", _memories),
}
