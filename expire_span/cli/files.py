"""`expire-span eval RUN --file FILE`: scores a file of any length in bounded memory."""

from __future__ import annotations

import json
from pathlib import Path

from expire_span.runs import RunFolder, UserError
from expire_span.task_configs import BooksTask

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
    if isinstance(task, BooksTask):
        from expire_span.tasks.books import Books

        found = scoring.score_characters(decoder, Books(task).encode(path))
    elif tokenizer:
        from expire_span.tasks.tokens import Tokenizer

        ids, sizes = Tokenizer(tokenizer).encode(path.read_bytes(), str(path))
        found = scoring.score_tokens(decoder, ids, sizes)
    else:
        with open(path, "rb") as file:
            found = scoring.score_bytes(decoder, file)
    print(json.dumps({"file": str(path), **found}, indent=2))
    return 0
