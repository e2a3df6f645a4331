"""The tasks of the suites by name, and their prompts: the same for every method, by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

from expire_span.errors import UserError

from .haystack import Haystack
from .lists import make_common, make_frequent, make_tracking
from .needles import VARIANTS, make_needles, make_pairs, make_passkey
from .prompts import Frame, Prompt, Sample
from .rules import make_conduct

Maker = Callable[[Frame, Haystack, int, int, random.Random], Prompt]
RULER: dict[str, Maker] = {
    **{name: partial(make_needles, name) for name in VARIANTS},
    "tracking": make_tracking,
    "common_words": make_common,
    "frequent_words": make_frequent,
}
"""The synthetic tasks of RULER, over which its average is taken."""
BESIDE: dict[str, Maker] = {"passkey": make_passkey, "pairs": make_pairs, "conduct": make_conduct}
"""Tasks that are asked beside them."""
TASKS = {**RULER, **BESIDE}


def check_tasks(names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise UserError(f"unknown task {unknown[0]!r}; known are {', '.join(TASKS)}")


def make_samples(
    frame: Frame, names: Sequence[str], haystack: Haystack, *, context: int, count: int, seed: int
) -> list[Sample]:
    """`count` prompts of each task."""
    check_tasks(names)
    prompts = (_make(frame, name, haystack, context, n, seed) for name in names for n in range(count))
    return [frame.to_sample(prompt, context) for prompt in prompts]


def _make(frame: Frame, name: str, haystack: Haystack, context: int, index: int, seed: int) -> Prompt:
    try:
        return TASKS[name](frame, haystack, context, index, random.Random(f"{seed}/{name}/{index}"))
    except UserError as error:
        raise UserError(f"the task {name} cannot be asked: {error}, or leave it out of --tasks") from error
