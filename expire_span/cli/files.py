"""`expire-span eval RUN --file FILE`: scores a file of any length in bounded memory."""

from __future__ import annotations

import json
from pathlib import Path

from expire_span.runs import RunFolder, UserError
from expire_span.task_configs import BooksTask

from .bars import progress_bar
from .parsing import warn


def eval_file(run: RunFolder, path: Path, device: str) -> int:
    """Print bits per byte, token or character of a file and the number of living memories along it, as JSON."""
    task = run.config.task
    tokenizer = getattr(task, "tokenizer", "")
    if not tokenizer and not isinstance(task, BooksTask) and getattr(run.config.model, "vocab", None) != 256:
        raise UserError(f"--file needs a run of text or books, got a run of task {task.kind}")
    from expire_span.checkpoint import load_model
    from expire_span.stream import scoring
    from expire_span.train.devices import check_device

    decoder, _ = load_model(run, check_device(device), warn)
    with progress_bar(path.name) as report:
        if isinstance(task, BooksTask):
            from expire_span.tasks.books import Books

            ids = Books(task).encode(path)
            found = scoring.score_characters(decoder, ids, lambda done: report(done, len(ids)))
        elif tokenizer:
            from expire_span.tasks.tokens import Tokenizer

            ids, sizes = Tokenizer(tokenizer).encode(path.read_bytes(), str(path))
            found = scoring.score_tokens(decoder, ids, sizes, lambda done: report(done, len(ids)))
        else:
            with open(path, "rb") as file:
                size = path.stat().st_size or None  # unknown for a pipe
                found = scoring.score_bytes(decoder, file, lambda done: report(done, size))
    print(json.dumps({"file": str(path), **found}, indent=2))
    return 0
