"""Supervised runs on the command line: their part of train, resume, eval and compare."""

from __future__ import annotations

from typing import Any

from expire_span.runs import RunFolder

from .parsing import warn
from .runs import with_data

USUAL = (
    *("name", "task.path", "mixer", "train.steps", "train.batch", "train.block", "train.lr", "train.budget.live"),
    *("train.device", "seed", "init-from", "stage"),
)
"""Options of train that most people need; the others have defaults that fit the recipe."""
USUAL_TO_COMPARE = ("task.path", "train.steps", "train.batch", "train.device")
"""The same of compare, beside those of every kind of run."""


def evaluate(run: RunFolder, command: Any) -> dict[str, Any]:
    """The score of a run's newest checkpoint on a split of its task. command: the `Eval` of runs.py."""
    run = with_data(run, command.path)
    from expire_span.checkpoint import load_model
    from expire_span.store.device_memory import check_fits
    from expire_span.tasks.registry import build_task
    from expire_span.train.devices import check_device
    from expire_span.train.estimate import TOKEN_BYTES
    from expire_span.train.evaluate import evaluate

    train = run.config.train
    rows = command.batch or train.eval_batch or train.batch
    block = command.block or train.eval_block or train.block
    tokens = rows * block
    check_fits(tokens * TOKEN_BYTES, f"a batch of {tokens:,} tokens", f"--batch {rows:,}", check_device("cpu"))
    decoder, config = load_model(run, check_device(command.device), warn)
    batches = command.batches or (train.eval_batches if command.split == "train" else None)
    settings: dict[str, Any] = dict(batch=rows, block=block, batches=batches, seed=config.seed)
    settings |= dict(precision=train.precision)
    return evaluate(decoder, build_task(config.task), command.split, **settings).per_row()


def tell(run: RunFolder, result: dict[str, Any]) -> str:
    """The result of a finished run in a sentence."""
    live = " ".join(f"{x:.1f}" for x in result["live"])
    return (
        f"{run.name}: test {result['score_name']} {result['score']:.4f}, loss {result['loss']:.4f}, live memories {live} "
        f"({result['live_share']:.1%} of those seen), run folder {run.path}"
    )
