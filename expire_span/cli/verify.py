"""`expire-span verify`: runs a model with deletion and without, and prints the largest difference of its outputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from expire_span.checks import at_least
from expire_span.runs import RunFolder, UserError, find_run

from .parsing import PROGRAM, parse, warn
from .retrofit import run_verify as verify_adapter
from .runs import OnAnyRun

if TYPE_CHECKING:
    from expire_span.stream.verify import Verdict


@dataclass(frozen=True)
class Verify(OnAnyRun):
    """Stream tokens with deletion and without it, and print the largest difference between the logits.

    Of an adapter folder: check also that it is whole and belongs to its base model; with `model`, `tokens` and `device` alone.
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
    if command.run is not None and _holds_no_run(Path(command.run), command.runs_dir):
        return verify_adapter(args)
    run = find_run(command.run, command.runs_dir)
    if command.model is not None:
        raise UserError(f"--model {command.model} is for adapters; {run.path} is a run, which has a model of its own")
    from expire_span.checkpoint import load_model
    from expire_span.stream.verify import verify
    from expire_span.train.devices import check_device

    decoder, _ = load_model(run, check_device(command.device), warn)
    found = verify(decoder, None if command.file is None else _tokens_of(command.file, run), command.tokens)
    print(
        f"{found.tokens} tokens streamed one by one with deletion, and read at once without: the largest difference between "
        f"logits is {found.difference:.2e}; {describe_deletions(found)}"
    )
    exact = found.difference <= found.allowed or found.evicted > 0
    verdict = "exact but for the cap's evictions" if found.evicted else "exact to rounding" if exact else "NOT exact"
    print(f"{verdict} (allowed are {found.allowed:.0e})")
    return 0 if exact else 1


def _holds_no_run(path: Path, runs_dir: Path) -> bool:
    """Whether this is a folder without a run, and no run's name: an adapter's, or one that is to be refused as such."""
    return path.is_dir() and not any((place / "config.json").exists() for place in (path, runs_dir / path))


def describe_deletions(found: Verdict) -> str:
    """How many memories were deleted, in words."""
    if not found.born:  # a recurrent state, or a system without slots
        return "the memories of this model are not counted one by one"
    return f"{found.deleted} of {found.born} memories were deleted, {found.evicted} by the cap"


def _tokens_of(file: Path, run: RunFolder) -> list[int]:
    """The tokens of a file for the run's model."""
    from expire_span.tasks.registry import text_codec

    return text_codec(run.config.task, "--file").encode(file.read_bytes(), str(file)).tolist()
