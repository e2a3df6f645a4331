"""`expire-span verify`: runs a model with deletion and without, and prints the largest difference of its outputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from expire_span.checks import at_least
from expire_span.runs import UserError, find_run

from .bars import steady_progress
from .parsing import PROGRAM, parse, warn
from .runs import OnAnyRun

if TYPE_CHECKING:
    from expire_span.stream.verify import Verdict
    from expire_span.tasks.contract import Codec

Opened = tuple[str, Any, "Codec | None"]
"""What is said of a model before the result, the model, and how its tokens are written; None where no text is given."""


@dataclass(frozen=True)
class Verify(OnAnyRun):
    """Stream tokens with deletion and without it, and print the largest difference between the logits.

    Of an adapter folder: check also that it is whole and belongs to its base model.
    """

    run: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN|ADAPTER]")] = None
    """Name of a run under --runs-dir, or the path of its folder, or of an adapter folder; without it, the model that ships with
    the package."""
    model: str | None = None
    """Of an adapter: its base model; None takes the one that the adapter names."""
    file: Path | None = None
    """Text to stream; random tokens by default."""
    tokens: Annotated[int, at_least(2)] | None = None
    """How many of them; None takes three times the model's longest memory, at most 4096 (512 of an adapter)."""
    device: str = "cpu"
    """auto, cpu, cuda or cuda:N. On a GPU float32 sums are taken in another order, and differ by more."""


def run_verify(args: list[str]) -> int:
    """Verify a run's model or an adapter folder."""
    command = parse(Verify, args, f"{PROGRAM} verify")
    adapter = _find_adapter(command)
    raw = None if command.file is None else command.file.read_bytes()
    about, model, codec = _open_run(command) if adapter is None else _open_adapter(adapter, command)
    from expire_span.stream.verify import verify

    text = None if raw is None or codec is None else codec.encode(raw, str(command.file)).tolist()
    with steady_progress("verify", unit="tokens", seldom=True) as show:
        found = verify(model, text, command.tokens, lambda done, total: show("", done, total))
    print(
        f"{about}{found.tokens} tokens streamed with deletion, and read at once without: the largest difference between "
        f"logits is {found.difference:.2e}; {describe_deletions(found)}"
    )
    exact = found.difference <= found.allowed or found.evicted > 0
    verdict = "exact but for the cap's evictions" if found.evicted else "exact to rounding" if exact else "NOT exact"
    print(f"{verdict} (allowed are {found.allowed:.0e})")
    return 0 if exact else 1


def _find_adapter(command: Verify) -> Path | None:
    """The folder that is named, where it holds no run and is no run's name: of an adapter, or to be refused; else None."""
    if command.run is None:
        return None
    path = Path(command.run)
    is_run = any((place / "config.json").exists() for place in (path, command.runs_dir / path))
    return path if path.is_dir() and not is_run else None


def _open_run(command: Verify) -> Opened:
    run = find_run(command.run, command.runs_dir)
    if command.model is not None:
        raise UserError(f"--model {command.model} is for adapters; {run.path} is a run, which has a model of its own")
    from expire_span.checkpoint import load_model
    from expire_span.tasks.registry import text_codec
    from expire_span.train.devices import check_device

    decoder, config = load_model(run, check_device(command.device), warn)
    return "", decoder, None if command.file is None else text_codec(config.task, "--file")


def _open_adapter(folder: Path, command: Verify) -> Opened:
    from expire_span.hf.adapter import read_head, read_weights
    from expire_span.hf.loading import open_base
    from expire_span.hf.pieces import Pieces
    from expire_span.hf.retrofitted import load_adapter

    read_weights(folder, read_head(folder))  # before a large model is loaded
    name, model, tokenizer = open_base(folder, command.model, command.device)
    retrofitted = load_adapter(model, folder)
    return f"{folder}: intact, made for {name}; ", retrofitted, Pieces(retrofitted, tokenizer)


def describe_deletions(found: Verdict) -> str:
    """How many memories were deleted, in words."""
    if not found.born:  # a recurrent state, or a system that sums memories up
        return "the memories of this model are not counted one by one"
    return f"{found.deleted} of {found.born} memories were deleted, {found.evicted} by the cap"
