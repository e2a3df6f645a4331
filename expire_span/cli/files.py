"""`expire-span eval RUN --file FILE`: scores a file of any length in bounded memory, by one process or several."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expire_span.errors import UserError
from expire_span.runs import RunFolder

from .bars import progress_bar
from .parsing import is_first_process, warn

if TYPE_CHECKING:
    import torch

    from expire_span.models.decoder import Decoder


def eval_file(run: RunFolder, path: Path, device: str) -> int:
    """Print bits per byte, token, character or word of a file and the number of living memories along it, as JSON.

    Processes of `accelerate launch` read the file together; the first one prints.
    """
    from expire_span.checkpoint import load_model
    from expire_span.stream.scoring import score_file
    from expire_span.tasks.registry import text_codec

    codec, first = text_codec(run.config.task, "--file"), is_first_process()
    place, context = _join_processes(device)
    decoder, _ = load_model(run, place, warn if first else None)
    if context is not None:
        _check_shared(decoder, context.size)
    with progress_bar(path.name, shown=first) as report, open(path, "rb") as file:
        size = path.stat().st_size if codec.unit == "byte" else 0  # the number of other tokens is known at the end
        found = score_file(decoder, codec, file, str(path), lambda done: report(done, size or None), context)
    if first:
        print(json.dumps({"file": str(path), **found}, indent=2))
    return 0


def _join_processes(device: str) -> tuple[torch.device, Any]:
    """This process's device, and the group of all processes, or None where it is the only one."""
    from expire_span.train.devices import build_accelerator, check_device

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return check_device(device), None
    from expire_span.ops.context import ContextGroup

    return build_accelerator(device).device, ContextGroup(None)


def _check_shared(decoder: Decoder, processes: int) -> None:
    """Refuse, by name, a model that several processes cannot read one file with."""
    for mixer in (block.mixer for block in decoder.layers()):
        rules = getattr(mixer, "rules", None)
        refused = {
            f"the memory system {mixer.settings.kind}": not mixer.reads_parts,
            "cap": getattr(rules, "cap", None) is not None,
            "paper.initial_memories": getattr(rules, "initial_memories", 0) > 0,
        }
        for name, found in refused.items():
            if found:
                raise UserError(f"{name} needs the whole file in one process, got {processes}; start one process")
