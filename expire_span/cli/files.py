"""`expire-span eval RUN --file FILE`: scores a file of any length in bounded memory."""

from __future__ import annotations

import json
from pathlib import Path

from expire_span.runs import RunFolder

from .bars import progress_bar
from .parsing import warn


def eval_file(run: RunFolder, path: Path, device: str) -> int:
    """Print bits per byte, token, character or word of a file and the number of living memories along it, as JSON."""
    from expire_span.checkpoint import load_model
    from expire_span.stream.scoring import score_file
    from expire_span.tasks.registry import text_codec
    from expire_span.train.devices import check_device

    codec = text_codec(run.config.task, "--file")
    decoder, _ = load_model(run, check_device(device), warn)
    with progress_bar(path.name) as report, open(path, "rb") as file:
        size = path.stat().st_size if codec.unit == "byte" else 0  # the number of other tokens is known at the end
        found = score_file(decoder, codec, file, str(path), lambda done: report(done, size or None))
    print(json.dumps({"file": str(path), **found}, indent=2))
    return 0
