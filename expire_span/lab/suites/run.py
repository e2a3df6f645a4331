"""Running a suite: every method at every budget answers every prompt once; what a record holds already is not asked again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expire_span.errors import UserError
from expire_span.hf import Retrofit
from expire_span.hf.adapter import list_budgets, use_folder
from expire_span.hf.loading import end_tokens
from expire_span.lab.caches.evaluate import check_methods, count_bytes, find_dial, held_bytes, method, peak_tokens, read

from .asking import allocated_bytes, ask, in_batches
from .prompts import Sample
from .record import PERPLEXITY, Record

Tell = Callable[[str, int, int], None]
"""Called with what is being done, the number of prompts that are answered, and the number of all."""


@dataclass(frozen=True)
class Job:
    """A method at a budget."""

    method: str
    budget: float


@dataclass(frozen=True)
class Suite:
    """What is asked, and how."""

    samples: Sequence[Sample]
    documents: Sequence[Tensor]
    """Documents [n] of equal length whose perplexity is measured; may be empty."""
    context: int
    """Number of tokens whose full cache the budgets are shares of."""
    chunk: int
    """Tokens per forward pass while a context is read."""
    rows: int
    """Largest number of contexts that are read side by side."""
    adapter: Path | None = None
    """The adapter's folder, whose further budgets are used where they are asked for."""

    @property
    def size(self) -> int:
        return len(self.samples) + len(self.documents)


def list_jobs(methods: Sequence[str], budgets: Sequence[float]) -> list[Job]:
    """The full cache is asked once, every other method at every budget."""
    check_methods(methods)
    return [Job(name, share) for name in methods for share in (budgets if name != "none" else (1.0,))]


def run_suite(
    retrofitted: Retrofit, tokenizer: Any, suite: Suite, jobs: Sequence[Job], record: Record, tell: Tell
) -> None:
    """Ask what the record does not hold yet."""
    ends = end_tokens(retrofitted.model, tokenizer)
    total, done = suite.size * len(jobs), sum(count_known(suite, job, record) for job in jobs)
    for job in jobs:
        samples = [x for x in suite.samples if (job.method, job.budget, x.prompt.task, x.prompt.index) not in record]
        documents = [
            (n, x) for n, x in enumerate(suite.documents) if (job.method, job.budget, PERPLEXITY, n) not in record
        ]
        if not samples and not documents:
            continue
        told = f"{job.method} at {job.budget:g}"
        tell(f"{told}: preparing", done, total)
        with _open(retrofitted, suite, job, record) as new_cache:
            for n, ids in documents:
                tell(f"{told}: {PERPLEXITY}", done, total)
                record.add([_read_document(retrofitted, new_cache(), job, n, ids, suite.chunk)])
                done += 1
            for batch in in_batches(samples, suite.rows):
                tell(f"{told}: {batch[0].prompt.task}", done, total)
                outcomes = ask(retrofitted.model, new_cache(), batch, tokenizer, ends, suite.chunk)
                record.add_outcomes(job.method, job.budget, batch, outcomes)
                done += len(batch)
        tell(f"{told}: done", done, total)


def count_known(suite: Suite, job: Job, record: Record) -> int:
    keys = [(x.prompt.task, x.prompt.index) for x in suite.samples]
    keys += [(PERPLEXITY, n) for n in range(len(suite.documents))]
    return sum((job.method, job.budget, *key) in record for key in keys)


def _open(retrofitted: Retrofit, suite: Suite, job: Job, record: Record) -> AbstractContextManager[Callable[[], Any]]:
    tokens, budget = peak_tokens(retrofitted, job.budget, suite.context)
    if job.method != "expire":
        return method(retrofitted, job.method, tokens)
    if job.budget not in record.dials:
        contexts = dial_contexts(retrofitted, suite)
        name = "" if suite.adapter is None else choose_folder(retrofitted, suite.adapter, contexts, budget, suite.chunk)
        _use(retrofitted, suite, name)
        dial = find_dial(retrofitted, contexts, budget, suite.chunk, kept=True)
        if dial == 0:
            raise UserError(
                f"the adapter cannot meet a budget of {job.budget:g}: contexts of {suite.context} tokens keep more than "
                f"{budget:,} bytes even with spans of 0; give a larger budget"
            )
        record.add([{"method": "expire", "budget": job.budget, "dial": dial, "folder": name}])
    dial, name = record.dials[job.budget]
    _use(retrofitted, suite, name)
    return method(retrofitted, "expire", tokens, dial)


def _use(retrofitted: Retrofit, suite: Suite, name: str) -> None:
    if suite.adapter is not None:
        use_folder(retrofitted, suite.adapter / name)


def choose_folder(retrofitted: Retrofit, adapter: Path, contexts: list[Tensor], budget: int, chunk: int) -> str:
    """The subfolder of an adapter (empty for its own folder) whose spans, as they are, keep the number of bytes that is nearest
    to `budget`, as a ratio: contexts shorter than in training keep more of their tokens."""
    found = {}
    for folder in (folders := list_budgets(adapter)):
        name = "" if folder == adapter else folder.name
        if len(folders) == 1:
            return name
        use_folder(retrofitted, folder)
        found[name] = abs(math.log(count_bytes(retrofitted, contexts, chunk, 1.0, kept=True) / budget))
    return min(found, key=lambda name: found[name])


def dial_contexts(retrofitted: Retrofit, suite: Suite) -> list[Tensor]:
    """A document, and the first prompt of each task: rows [B, n] of at most `suite.rows` contexts of one length."""
    device = next(retrofitted.model.parameters()).device
    found = [x[None] for x in suite.documents[:1]]
    first = list({x.prompt.task: x for x in reversed(suite.samples)}.values())[::-1]
    found += [torch.tensor([x.context], device=device) for x in first]
    alike = [torch.cat([x for x in found if x.shape[1] == n]) for n in dict.fromkeys(x.shape[1] for x in found)]
    return [part for rows in alike for part in rows.split(suite.rows)]


def _read_document(retrofitted: Retrofit, cache: Any, job: Job, index: int, ids: Tensor, chunk: int) -> dict[str, Any]:
    losses, peak = read(retrofitted.model, cache, ids[None], chunk)
    line: dict[str, Any] = {"method": job.method, "budget": job.budget, "task": PERPLEXITY, "index": index}
    line |= {
        "score": float(losses.double().mean()),
        "kept_bytes": int(held_bytes(cache)[0]),
        "peak_bytes": int(peak[0]),
    }
    return line | {"held_bytes": allocated_bytes(cache)}
