"""`expire-span eval RUN --file FILE`: any file, of any length, in bounded memory."""

from __future__ import annotations

import json
from pathlib import Path

from expire_span.runs import RunFolder, UserError

from .parsing import warn


def eval_file(run: RunFolder, path: Path, device: str) -> int:
    """Print bits per byte of a file and how many memories lived, as JSON."""
    tokenizer = getattr(run.config.task, "tokenizer", "")
    if not tokenizer and getattr(run.config.model, "vocab", None) != 256:
        raise UserError(f"--file needs a run of text, got a run of task {run.config.task.kind}")
    from expire_span.checkpoint import load_model
    from expire_span.stream.scoring import score_bytes, score_tokens
    from expire_span.train.devices import check_device

    decoder, _ = load_model(run, check_device(device), warn)
    if tokenizer:
        from expire_span.tasks.tokens import Tokenizer

        ids, sizes = Tokenizer(tokenizer).encode(path.read_bytes(), str(path))
        found = score_tokens(decoder, ids, sizes)
    else:
        with open(path, "rb") as file:
            found = score_bytes(decoder, file)
    print(json.dumps({"file": str(path), **found}, indent=2))
    return 0
