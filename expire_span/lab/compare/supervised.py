"""What is particular to comparisons on supervised tasks: checks of the data and the device, and how the score is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from expire_span.disk.sizes import show_bytes
from expire_span.memories import state_bytes
from expire_span.models.systems import find
from expire_span.runs import UserError
from expire_span.settings.run import SupervisedRunConfig
from expire_span.store.device_memory import device_bytes
from expire_span.tasks.contract import Split, Task
from expire_span.tasks.registry import build_task
from expire_span.train.devices import check_device
from expire_span.train.estimate import check_arithmetic, check_size

COPIES = 2.5
"""Peak bytes of a growing store per byte that it holds: it has spare slots, and is copied when it grows."""


def survey(base: SupervisedRunConfig) -> tuple[SupervisedRunConfig, dict[str, Any], Callable[[Any], None]]:
    """The recipe with the task's vocabulary, the score, and a function that refuses a system's run that cannot work."""
    device = check_device(base.train.device)
    check_arithmetic(base, device)
    task = build_task(base.task)
    base = replace(base, model=replace(base.model, vocab=task.codec.size))
    longest = _check_splits(task, base)

    def check(config: SupervisedRunConfig) -> None:
        check_size(config, device)
        check_memory(config, longest, device)

    return base, asdict(task.score), check


def _check_splits(task: Task, config: SupervisedRunConfig) -> int:
    """Refuse splits that are too short; returns the largest number of tokens per row in an evaluation."""
    train = config.train
    task.stream("train", batch=train.batch, block=train.block, seed=config.seed)
    block, carried = train.eval_block or train.block, 0
    caps: dict[Split, int | None] = {"valid": train.eval_batches, "test": train.test_batches}
    for split, batches in caps.items():
        stream = task.stream(split, batch=train.eval_batch or train.batch, block=block, seed=config.seed)
        whole = getattr(stream, "longest", block)
        carried = max(carried, whole if batches is None else min(whole, batches * block))
    return carried


def check_memory(config: SupervisedRunConfig, steps: int, device: torch.device) -> None:
    """Refuse a system whose memory would not fit on the device in the evaluation, before it is trained."""
    train = config.train
    kind = next((m.kind for m in config.model.mixers if not find(m.kind).bounded), None)
    if kind is None:
        return
    element = 2 if train.precision == "bf16" else 4
    need = COPIES * (train.eval_batch or train.batch) * state_bytes(config.model, steps, element)
    have = device_bytes(device)
    if need > have:
        raise UserError(
            f"{kind} never forgets: carried through {steps:,} steps of the evaluation it would need up to "
            f"{show_bytes(need)}, and {device} has {show_bytes(have)}; cap it with --train.test-batches "
            f"and --train.eval-batches, or give fewer rows with --train.eval-batch"
        )


def describe_length(config: SupervisedRunConfig) -> str:
    """How long each system is trained, where the recipe says it."""
    return f"{config.train.steps:,} steps each"


def describe_score(config: SupervisedRunConfig, score: str, better: str) -> str:
    """On what the score is measured, and of what bytes are counted."""
    train = config.train
    part = "the whole test split" if train.test_batches is None else f"the first {train.test_batches} batches of test"
    rows, block = train.eval_batch or train.batch, train.eval_block or train.block
    over = f"over {part} in {rows} rows of {block}-token blocks, memory carried"
    return f"{score} ({better} is better) {over}. Bytes are of one row over all layers."
