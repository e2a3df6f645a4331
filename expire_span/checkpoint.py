"""Checkpoints: written whole or not at all, checked by sha256, and loaded without running any code.

`load_decoder("runs/mine")` loads the model of a run, for use in your own code; training writes and reads whole snapshots.

    checkpoints/step-00000200/
      model.safetensors      the decoder's weights
      optimizer.safetensors  the optimizers' tensors; plain values as JSON in the file's metadata
      memory.safetensors     the memories of each row, random generators, unlogged metrics; memory-1... for further processes
      state.json             step, place in the data, budget controller, generators of the host
      checksums.json         sha256 of every other file, written last

A checkpoint of step 0 may hold weights alone (model.safetensors, state.json), where a run starts from given weights instead of
random ones. Optimizers, memories and the position in the data are then those of a new run.

The folder is built under a hidden name, synced and renamed, so that a crash leaves the whole checkpoint or none.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from expire_span.disk.files import check_plain, hash_file, sync_folder, to_json, write_synced
from expire_span.errors import RunError, StorageError, UserError, describe
from expire_span.models.decoder import Decoder
from expire_span.models.policy import Policy
from expire_span.models.state import pack, unpack
from expire_span.runs import RunFolder
from expire_span.settings.run import RunConfig
from expire_span.shipped import SHIPPED

Warn = Callable[[str], None]


@dataclass
class Snapshot:
    """Everything that a run needs to continue."""

    step: int
    state: dict[str, Any]
    """Plain JSON values."""
    worker: Any
    """Nested tensors and values that belong to this process: memories, device generators."""
    model: dict[str, Tensor] = field(default_factory=dict)
    """Weights; may be empty on all processes but the first."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    weights_only: bool = False
    """Whether it holds weights only: the start of a run from given weights."""
    read_workers: Callable[[], list[Any]] = list
    """Reads what every process saved as its `worker`, where a run goes on with another number of processes."""

    @classmethod
    def of_weights(cls, model: dict[str, Tensor], step: int = 0) -> Snapshot:
        return cls(step, {}, None, model, weights_only=True)

    @property
    def best_weights(self) -> dict[str, Tensor]:
        """The weights by which the run is judged: the best ones if it keeps them, as agents do, else the newest."""
        best = self.worker.get("best") if isinstance(self.worker, dict) else None
        return best["weights"] if best is not None else self.model


def folder_of(run: RunFolder, step: int) -> Path:
    return run.checkpoints / f"step-{step:08d}"


def list_checkpoints(run: RunFolder) -> list[Path]:
    """Checkpoint folders, newest first, intact or damaged. Anything that is not a checkpoint is ignored."""
    if os.path.lexists(run.checkpoints) and not run.checkpoints.is_dir():
        raise StorageError(f"{run.checkpoints} must be a folder, and is none; put the folder back, or remove it")
    found = [
        path for path in run.checkpoints.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir()
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def save(
    run: RunFolder, snapshot: Snapshot, *, keep: int, rank: int = 0, barrier: Callable[[], None] = lambda: None
) -> Path:
    """Write a checkpoint and drop the oldest beyond `keep`. All processes call this; each writes its own memory."""
    final = folder_of(run, snapshot.step)
    building = final.with_name(f".{final.name}.tmp")
    try:
        if rank == 0:
            _check_finite(run, snapshot)
            run.remove_unfinished()
            building.mkdir(parents=True)
        barrier()
        write_synced(building / _memory_name(rank), _tree_bytes(snapshot.worker))
        barrier()
        if rank == 0 and not final.is_dir():
            _write_shared(run, building, final, snapshot)
            prune(run, keep)
    except OSError as error:
        shutil.rmtree(building, ignore_errors=True)
        raise StorageError(_failed(run, snapshot.step, error)) from error
    finally:
        if rank == 0:
            shutil.rmtree(building, ignore_errors=True)
    return final


def load(
    run: RunFolder, *, rank: int = 0, warn: Warn | None = None, device: torch.device | str = "cpu"
) -> Snapshot | None:
    """The newest intact checkpoint, or None if there is no checkpoint; `warn` is called for damaged newer ones."""
    folder = newest_sound(run, warn)
    if folder is None:
        return None
    with _readable(folder):
        return _read_snapshot(folder, rank, device)


def _read_snapshot(folder: Path, rank: int, device: torch.device | str) -> Snapshot:
    state = json.loads((folder / "state.json").read_bytes())
    step, model = int(state.pop("step")), safetensors.torch.load_file(folder / "model.safetensors")
    if state.pop("weights_only", False):
        return Snapshot.of_weights(model, step)
    memory = folder / _memory_name(rank)
    worker = _read_tree(memory, device) if memory.exists() else None
    optimizer = _read_tree(folder / "optimizer.safetensors", "cpu")
    return Snapshot(step, state, worker, model, optimizer, read_workers=lambda: _read_workers(folder, device))


def _read_workers(folder: Path, device: torch.device | str) -> list[Any]:
    """What every process saved as its own, in their order."""
    count = len(list(folder.glob("memory*.safetensors")))
    return [_read_tree(folder / _memory_name(rank), device) for rank in range(count)]


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turn errors of reading a checkpoint into StorageError: it matches its checksums, so another program must have written
    it."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise StorageError(
            f"checkpoint {folder} is not one that this version can read ({error}); move it away"
        ) from error


def load_model(
    run: RunFolder, device: torch.device | str = "cpu", warn: Warn | None = None
) -> tuple[Decoder, RunConfig]:
    """The decoder of a run's newest intact checkpoint, in eval mode, and the run's config."""
    run.check_can("read tokens")
    folder = _newest(run, warn)
    with _readable(folder):
        weights = safetensors.torch.load_file(folder / "model.safetensors")
    return _fill(Decoder(run.config.model), weights, str(folder)).to(device).eval(), run.config


def load_policy(run: RunFolder, device: torch.device | str = "cpu", warn: Warn | None = None) -> Policy:
    """The policy of an agent's run, in eval mode, with the best weights of its newest intact checkpoint."""
    run.check_can("play")
    folder = _newest(run, warn)
    with _readable(folder):
        weights = _read_snapshot(folder, 0, "cpu").best_weights
    return _fill(Policy(run.config.model), weights, str(run.path)).to(device).eval()


def _newest(run: RunFolder, warn: Warn | None) -> Path:
    """The newest intact checkpoint; a run without any is refused."""
    folder = newest_sound(run, warn)
    if folder is None:
        raise UserError(f"run {run.path} has no checkpoint yet; train it with: expire-span resume {run.path}")
    return folder


def _fill(model: Any, weights: dict[str, Tensor], source: str) -> Any:
    """The model with these weights; weights that are not its own are refused."""
    check_weights(weights, model.state_dict(), source)
    model.load_state_dict(weights)
    return model


def check_weights(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], source: str) -> None:
    """Refuse weights whose names or shapes are not the model's, naming the first that differs."""
    for name in sorted({*given, *wanted}):
        if name not in given:
            raise UserError(
                f"{source} lacks the weight {name} of this model; its settings must be those it was trained with"
            )
        if name not in wanted:
            raise UserError(f"{source} has the weight {name}, which this model has no place for; give its own settings")
        if given[name].shape != wanted[name].shape:
            shapes = f"{tuple(given[name].shape)}, and this model's {tuple(wanted[name].shape)}"
            raise UserError(f"weight {name} of {source} has the shape {shapes}; give the settings it was trained with")


def load_decoder(run: str | os.PathLike[str] = SHIPPED, device: torch.device | str = "cpu") -> Decoder:
    """The decoder of a run folder's newest intact checkpoint, in eval mode: `load_decoder("runs/mine")`.

    Without a folder, it is the model that ships with the package, whose tokens are bytes.
    """
    return load_model(RunFolder.open(Path(run)), device)[0]


def newest_sound(run: RunFolder, warn: Warn | None = None) -> Path | None:
    """The newest checkpoint whose files match their checksums."""
    folders = list_checkpoints(run)
    for number, folder in enumerate(folders, 1):
        fault = find_fault(folder)
        if fault is None:
            return folder
        if number == len(folders):
            raise StorageError(
                f"no checkpoint of run {run.path} is intact ({number} tried; of {folder.name}, {fault}); "
                f"delete {run.checkpoints} to start again"
            )
        if warn is not None:
            warn(f"checkpoint {folder} is damaged ({fault}); it is skipped and the one before it is tried")
    return None


def find_fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file, or None."""
    try:
        check_plain(folder / "checksums.json")
        sums = json.loads((folder / "checksums.json").read_bytes())
        for name, expected in sums.items():
            check_plain(folder / name)
            if hash_file(folder / name) != expected:
                return f"{name} does not match its checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{Path(str(error.filename)).name} cannot be read: {describe(error)}"
    except (ValueError, AttributeError, TypeError, RecursionError):
        return "checksums.json is unreadable"
    return None if {"model.safetensors", "state.json"} <= set(sums) else "checksums.json is incomplete"


def remove_damaged(run: RunFolder) -> None:
    """Delete damaged checkpoints newer than the newest intact one, so that training can write them again."""
    for folder in list_checkpoints(run):
        if find_fault(folder) is None:
            return
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise StorageError(f"cannot delete the damaged checkpoint {folder}: {describe(error)}") from error


def _memory_name(rank: int) -> str:
    return "memory.safetensors" if rank == 0 else f"memory-{rank}.safetensors"


def write_weights(folder: Path, weights: dict[str, Tensor], step: int = 0) -> None:
    """Write a checkpoint that holds only weights into a run folder that is still being built."""
    final = folder / "checkpoints" / f"step-{step:08d}"
    final.mkdir(parents=True)
    write_synced(final / "model.safetensors", safetensors.torch.save(weights))
    write_synced(final / "state.json", to_json({"step": step, "weights_only": True}))
    _write_sums(final)


def _write_shared(run: RunFolder, building: Path, final: Path, snapshot: Snapshot) -> None:
    run.sync_metrics()
    write_synced(building / "model.safetensors", safetensors.torch.save(snapshot.model))
    write_synced(building / "optimizer.safetensors", _tree_bytes(snapshot.optimizer))
    write_synced(building / "state.json", to_json({"step": snapshot.step, **snapshot.state}))
    _write_sums(building)
    os.rename(building, final)
    sync_folder(final.parent)


def _write_sums(building: Path) -> None:
    sums = {path.name: hash_file(path) for path in sorted(building.iterdir())}
    write_synced(building / "checksums.json", to_json(sums))
    sync_folder(building)


def prune(run: RunFolder, keep: int) -> None:
    """Delete the oldest checkpoints beyond `keep`."""
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
    """In words, from which checkpoint the run can continue."""
    folders = list_checkpoints(run)
    return f"the last checkpoint is {folders[0]}" if folders else "there is no earlier checkpoint"


def _failed(run: RunFolder, step: int, error: OSError) -> str:
    advice = f"once that is fixed, continue with: expire-span resume {run.path}"
    return f"cannot write the checkpoint of step {step}: {describe(error)}; {last_good(run)}; {advice}"


def _tree_bytes(tree: Any) -> bytes:
    """Nested tensors and values as one safetensors file: the skeleton is JSON in its metadata."""
    tensors, skeleton = pack(tree)
    return safetensors.torch.save({name: x.cpu() for name, x in tensors.items()}, {"skeleton": json.dumps(skeleton)})


def _read_tree(path: Path, device: torch.device | str) -> Any:
    with safetensors.safe_open(path, framework="pt", device=str(device)) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        return unpack(tensors, json.loads(file.metadata()["skeleton"]))
