"""The paper's efficiency table in one command: `python -m benchmarks.efficiency --seconds 60 --enwik8 FILE --books FOLDER`.

Three tasks (enwik8, books, object collision) x memory systems: score, device memory in training, milliseconds per batch, bytes
per row. Within a task every system has the same parameters, batch and training time; each is trained in a process of its own by
the code of `expire-span compare`, so that an interrupted table continues where it stopped. Systems that do not fit are left out
of the table and named below it.

Published figures are listed beside ours. They come from the authors' code, batch and hardware, so only their order is
comparable.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from expire_span.lab.compare.conduct import conduct
from expire_span.lab.compare.outcome import read_outcome
from expire_span.lab.compare.plan import Comparison, list_systems, parse_mixers
from expire_span.lab.compare.prepare import describe_plan, prepare
from expire_span.lab.compare.table import write_table
from expire_span.recipes import enwik8, text_tiny
from expire_span.recipes.tasks import collision_mixed, collision_tiny
from expire_span.settings.run import RunConfig, TextTask
from expire_span.settings.tasks import BooksTask, CollisionTask
from expire_span.view.efficiency import Row, format_score, measure, show_count, show_score

from .record import save

MIXERS = "expire_span,adaptive_span,compressive,full"
PUBLISHED: dict[str, dict[str, tuple[str, int, int]]] = {
    "enwik8": {
        "transformer_xl": ("1.06", 27, 649),
        "compressive": ("1.05", 21, 838),
        "adaptive_span": ("1.04", 20, 483),
        "expire_span": ("1.03", 15, 408),
    },
    "books": {
        "compressive": ("1.07", 17, 753),
        "adaptive_span": ("1.07", 13, 427),
        "expire_span": ("1.07", 15, 388),
    },
    "collision": {
        "compressive": ("63.8%", 12, 327),
        "adaptive_span": ("59.8%", 17, 365),
        "expire_span": ("52.2%", 12, 130),
    },
}
"""Score, GB and ms a batch of the paper's table: bits per byte, bits per character (PG-19), error."""


def enwik8_run(path: str) -> RunConfig:
    base = enwik8()
    return replace(base, task=TextTask(path=path))


def books_run(path: str) -> RunConfig:
    """The enwik8 recipe's model and training on characters of books."""
    return replace(enwik8(), task=BooksTask(path=path))


def collision_run(path: str) -> RunConfig:
    """The recipe collision_mixed: 4 layers of 256, spans up to 16k, windows of 16,384 tokens."""
    base = collision_mixed()
    return replace(base, task=replace(base.task, path=path, eval_frames=200_000))


TASKS: dict[str, Callable[[str], RunConfig]] = {"enwik8": enwik8_run, "books": books_run, "collision": collision_run}


def with_one_evaluation(config: RunConfig, rows: int = 32, batches: int = 8) -> RunConfig:
    """The run with one evaluation, at the end, from an empty memory on: as many tokens per row as a training window, and five
    times as many for collision, most of whose answers lie further back than a window that has just begun."""
    never, block = 10**6, config.train.block // batches
    windows = 5 if isinstance(config.task, CollisionTask) else 1
    train = replace(
        config.train, eval_every=never, checkpoint_every=never, eval_batches=1, test_batches=windows * batches
    )
    return replace(config, train=replace(train, eval_batch=rows, eval_block=block))


def shrink(task: str, path: str) -> RunConfig:
    """A run of the same kind that takes seconds on any computer."""
    small = collision_tiny() if task == "collision" else text_tiny()
    sources = {"enwik8": TextTask(path=path), "books": BooksTask(path=path), "collision": CollisionTask(size=8)}
    mixer = replace(small.model.mixer, max_span=64, ramp=8)
    model = replace(small.model, dim=32, layers=1, heads=2, ff_dim=32, mixer=mixer)
    train = replace(small.train, batch=2, block=64, log_every=1, carry=False, warmup=1)
    source = replace(sources[task], eval_frames=200) if task == "collision" else sources[task]
    return RunConfig(source, model, train)


def write_sample(folder: Path) -> dict[str, str]:
    """Write small files of random words, for --tiny: a text, and a folder of books."""
    draw = random.Random(0)
    words = ["memory", "span", "expires", "Egypt", "the", "of", "1984", "\n"]
    books = folder / "books"
    books.mkdir(parents=True, exist_ok=True)
    for n in range(9):
        (books / f"{n}.txt").write_text(" ".join(draw.choices(words, k=400)))
    (folder / "text.txt").write_text(" ".join(draw.choices(words, k=6000)))
    return {"enwik8": str(folder / "text.txt"), "books": str(books), "collision": ""}


def compare(task: str, config: RunConfig, kinds: list[str], seconds: float, folder: Path) -> dict[str, Any]:
    """Train the systems of one task that are not trained yet; returns its rows, and the reasons of failed ones."""
    path, left_out, systems = folder / task, {}, list_systems(kinds, [], [config.seed])
    parts = []
    for system in systems:
        try:
            parts.append(prepare(path, task, config, [system], seconds))
        except ValueError as error:  # it does not fit, or cannot have so many parameters
            left_out[system.kind] = str(error)
    if not parts:
        return {"task": task, "score": {"name": "score"}, "rows": [], "left_out": left_out}
    comparison = parts[0]
    for part in parts[1:]:
        comparison = comparison.join(part)
    if (path / "compare.json").exists():
        comparison = Comparison.open(path).join(comparison)
    comparison.write()
    print(describe_plan(comparison), flush=True)
    failed = conduct(comparison, lambda name: _outcome(comparison, name))
    outcome = read_outcome(comparison)
    write_table(outcome)
    return {"task": task, "score": comparison.score, "rows": outcome.rows, "left_out": left_out | failed}


def _outcome(comparison: Comparison, name: str) -> str:
    run = comparison.run_of(name)
    assert run is not None
    found = measure(run, comparison.parameters[name])
    score = comparison.score["name"]
    return f"{score} {format_score(found['score'], score)}, {found['ms_per_step']:.1f} ms a batch"


def as_markdown(results: list[dict[str, Any]]) -> str:
    """One table over all tasks; the last column has the published score, GB and ms."""
    heads = ("task", "system", "score", "GB", "ms a batch", "bytes a row", "alive", "steps", "published: score, GB, ms")
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * (len(heads) - 2)]
    for result in results:
        lines += [_line(result, row) for row in result["rows"]]
    for result in results:
        lines += ["", *(f"{result['task']}, {name}: {why}" for name, why in result["left_out"].items())]
    return "\n".join(lines).rstrip() + "\n"


def _line(result: dict[str, Any], row: Row) -> str:
    task, name = result["task"], result["score"]["name"]
    published = PUBLISHED[task].get(row.kind)
    told = "" if published is None else f"{published[0]}, {published[1]}, {published[2]}"
    cells = (task, row.label, f"{name} {show_score(row, name)}", f"{row.device_bytes / 1e9:.1f}")
    cells = (*cells, show_count(row.ms_per_step), f"{row.bytes / 1e6:.2f} MB", show_count(row.live))
    return "| " + " | ".join((*cells, f"{row.steps:,.0f}", told)) + " |"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/efficiency"))
    parser.add_argument("--seconds", type=float, default=60.0, help="training time of each system on each task")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--mixers", default=MIXERS)
    parser.add_argument("--enwik8", default="data/enwik8", help="file of enwik8")
    parser.add_argument("--books", default="data/books", help="folder of books")
    parser.add_argument("--collision", default="", help="folder of saved simulations; without it they are made")
    parser.add_argument("--tiny", action="store_true", help="tiny models and made-up data, on any machine")
    args = parser.parse_args(argv)
    chosen = [task for task in args.tasks.split(",") if task]
    unknown = [task for task in chosen if task not in TASKS]
    if unknown or not chosen:
        raise SystemExit(f"--tasks takes {', '.join(TASKS)}, got {args.tasks!r}")
    paths = {task: getattr(args, task) for task in TASKS}
    if args.tiny:
        paths = write_sample(args.runs_dir / "data")
    results = []
    for task in chosen:
        config = shrink(task, paths[task]) if args.tiny else TASKS[task](paths[task])
        config = with_one_evaluation(config, *((2, 2) if args.tiny else ()))
        results.append(compare(task, config, parse_mixers(args.mixers), args.seconds, args.runs_dir))
        told = [{**result, "rows": [asdict(row) for row in result["rows"]]} for result in results]
        path = save("efficiency", {"seconds": args.seconds, "tiny": args.tiny, "tasks": told}, args.out)
        (args.out / "efficiency.md").write_text(as_markdown(results))
    print(as_markdown(results))
    print("written to", path)


if __name__ == "__main__":
    main()
