"""Checkpoints: complete or absent, checked by sha256, unable to run code.

`load_decoder("runs/mine")` is the model of a run, for use in code of your own; training writes and reads whole snapshots.

    checkpoints/step-00000200/
      model.safetensors      the decoder's weights
      optimizer.safetensors  the optimizers' tensors; plain values as JSON in the file's metadata
      memory.safetensors     what each row remembers, random generators, unlogged metrics; memory-1... for further processes
      state.json             step, place in the data, budget controller, generators of the host
      checksums.json         sha256 of every other file, written last

The folder is built under a hidden name, synced and renamed, so that a crash leaves the whole checkpoint or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from expire_span.config import RunConfig
from expire_span.models.decoder import Decoder
from expire_span.models.state import pack, unpack
from expire_span.runs import RunError, RunFolder, UserError, describe, sync_folder, to_json, write_synced

Warn = Callable[[str], None]


@dataclass
class Snapshot:
    """All that a run needs to go on."""

    step: int
    state: dict[str, Any]
    """Plain JSON values."""
    worker: Any
    """Nested tensors and values that belong to this process: memories, device generators."""
    model: dict[str, Tensor] = field(default_factory=dict)
    """Weights; may be empty on all processes but the first."""
    optimizer: dict[str, Any] = field(default_factory=dict)


def folder_of(run: RunFolder, step: int) -> Path:
    return run.checkpoints / f"step-{step:08d}"


def list_checkpoints(run: RunFolder) -> list[Path]:
    """Complete checkpoint folders, newest first; whether their content is sound is another question."""
    return sorted(run.checkpoints.glob("step-*"), key=lambda path: path.name, reverse=True)


def save(
    run: RunFolder, snapshot: Snapshot, *, keep: int, rank: int = 0, barrier: Callable[[], None] = lambda: None
) -> Path:
    """Write a checkpoint and drop the oldest beyond `keep`. All processes call this; each writes its own memory."""
    final = folder_of(run, snapshot.step)
    building = final.with_name(f".{final.name}.tmp")
    try:
        if rank == 0:
            _check_finite(run, snapshot)
            remove_unfinished(run)
            building.mkdir(parents=True)
        barrier()
        write_synced(building / _memory_name(rank), _tree_bytes(snapshot.worker))
        barrier()
        if rank == 0 and not final.exists():
            _write_shared(run, building, final, snapshot)
            _prune(run, keep)
    except OSError as error:
        shutil.rmtree(building, ignore_errors=True)
        raise RunError(_failed(run, snapshot.step, error)) from error
    finally:
        if rank == 0:
            shutil.rmtree(building, ignore_errors=True)
    return final


def load(
    run: RunFolder, *, rank: int = 0, warn: Warn | None = None, device: torch.device | str = "cpu"
) -> Snapshot | None:
    """The newest sound checkpoint, or None where there is none at all; damaged newer ones are named through `warn`."""
    folder = newest_sound(run, warn)
    if folder is None:
        return None
    memory = folder / _memory_name(rank)
    state = json.loads((folder / "state.json").read_bytes())
    return Snapshot(
        step=state["step"],
        state=state,
        worker=_read_tree(memory, device) if memory.exists() else None,
        model=safetensors.torch.load_file(folder / "model.safetensors"),
        optimizer=_read_tree(folder / "optimizer.safetensors", "cpu"),
    )


def load_model(
    run: RunFolder, device: torch.device | str = "cpu", warn: Warn | None = None
) -> tuple[Decoder, RunConfig]:
    """The decoder of a run's newest sound checkpoint, in eval mode, and the run's config."""
    folder = newest_sound(run, warn)
    if folder is None:
        raise UserError(f"run {run.path} has no checkpoint yet; train it with: expire-span resume {run.path}")
    decoder = Decoder(run.config.model)
    decoder.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
    return decoder.to(device).eval(), run.config


def load_decoder(run: str | os.PathLike[str], device: torch.device | str = "cpu") -> Decoder:
    """The decoder of a run folder's newest sound checkpoint, in eval mode: `load_decoder("runs/mine")`."""
    return load_model(RunFolder.open(Path(run)), device)[0]


def newest_sound(run: RunFolder, warn: Warn | None = None) -> Path | None:
    """The newest checkpoint whose files match their checksums."""
    folders = list_checkpoints(run)
    for folder in folders:
        fault = find_fault(folder)
        if fault is None:
            return folder
        if warn is not None:
            warn(f"checkpoint {folder} is damaged ({fault}); it is skipped and the one before it is tried")
    if folders:
        raise RunError(
            f"no checkpoint of run {run.path} is sound ({len(folders)} tried); delete {run.checkpoints} to start anew"
        )
    return None


def find_fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file, or None."""
    try:
        sums = json.loads((folder / "checksums.json").read_bytes())
        for name, expected in sums.items():
            if _sha256(folder / name) != expected:
                return f"{name} does not match its checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, AttributeError):
        return "checksums.json is unreadable"
    return None if {"model.safetensors", "state.json"} <= set(sums) else "checksums.json is incomplete"


def remove_damaged(run: RunFolder) -> None:
    """Delete damaged checkpoints newer than the newest sound one, so that training can write them again."""
    for folder in list_checkpoints(run):
        if find_fault(folder) is None:
            return
        shutil.rmtree(folder)


def remove_unfinished(run: RunFolder) -> None:
    """Delete what a killed process was still building."""
    for folder in run.checkpoints.glob(".step-*.tmp"):
        shutil.rmtree(folder, ignore_errors=True)


def _memory_name(rank: int) -> str:
    return "memory.safetensors" if rank == 0 else f"memory-{rank}.safetensors"


def _write_shared(run: RunFolder, building: Path, final: Path, snapshot: Snapshot) -> None:
    run.sync_metrics()
    write_synced(building / "model.safetensors", safetensors.torch.save(snapshot.model))
    write_synced(building / "optimizer.safetensors", _tree_bytes(snapshot.optimizer))
    write_synced(building / "state.json", to_json({"step": snapshot.step, **snapshot.state}))
    sums = {path.name: _sha256(path) for path in sorted(building.iterdir())}
    write_synced(building / "checksums.json", to_json(sums))
    sync_folder(building)
    os.rename(building, final)
    sync_folder(final.parent)


def _prune(run: RunFolder, keep: int) -> None:
    for folder in list_checkpoints(run)[keep:]:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


def _check_finite(run: RunFolder, snapshot: Snapshot) -> None:
    for name, x in snapshot.model.items():
        if x.is_floating_point() and not bool(x.isfinite().all()):
            raise RunError(
                f"weight {name} is not finite at step {snapshot.step}, so no checkpoint was written; "
                f"{last_good(run)}; lower --train.lr or --train.clip"
            )


def last_good(run: RunFolder) -> str:
    """Where the run can go on from, in words."""
    folders = list_checkpoints(run)
    return f"the last checkpoint is {folders[0]}" if folders else "there is no earlier checkpoint"


def _failed(run: RunFolder, step: int, error: OSError) -> str:
    advice = f"once that is mended, go on with: expire-span resume {run.path}"
    return f"cannot write the checkpoint of step {step}: {describe(error)}; {last_good(run)}; {advice}"


def _tree_bytes(tree: Any) -> bytes:
    """Nested tensors and values as one safetensors file: the skeleton is JSON in its metadata."""
    tensors, skeleton = pack(tree)
    return safetensors.torch.save({name: x.cpu() for name, x in tensors.items()}, {"skeleton": json.dumps(skeleton)})


def _read_tree(path: Path, device: torch.device | str) -> Any:
    with safetensors.safe_open(path, framework="pt", device=str(device)) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        return unpack(tensors, json.loads(file.metadata()["skeleton"]))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
