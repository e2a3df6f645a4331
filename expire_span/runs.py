"""The run folder: the only interface between training, evaluation, generation and reports. Standard library only.

runs/<name>/
  config.json      format, version, recipe, config, environment
  metrics.jsonl    one line per log or evaluation; deterministic values only
  speed.jsonl      wall-clock values, kept apart so that metrics.jsonl can be compared byte for byte
  checkpoints/     step-00000200/ ...
  tensorboard/     the same scalars for a viewer
  result.json      the final evaluation; its presence means that the run is finished
  report.html      written by `expire-span report`
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expire_span.config import FORMAT_VERSION, RunConfig, from_dict, to_dict


class RunError(Exception):
    """A run cannot go on; the message says why and what to do. The command line prints it and exits with `exit_code`."""

    exit_code = 1


class UserError(RunError, ValueError):
    """What was asked for cannot be done: bad names, values or folders."""

    exit_code = 2


def describe(error: OSError) -> str:
    """The cause of a failed write in words."""
    return "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` at once: a reader, or a crash, sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _lock(handle: int, path: Path) -> None:
    """Lock an open folder, or refuse if another process has; where folders cannot be locked, nothing happens."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return
        raise UserError(f"run {path} is being trained by another process; wait for it, or stop it first") from error


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def check_name(name: str) -> None:
    if not name or name.startswith(".") or Path(name).name != name:
        raise UserError(f"a run name must be a plain folder name without slashes or a leading dot, got {name!r}")


def check_new(path: Path) -> None:
    """Refuse a folder that is already there: a run is never overwritten."""
    if path.exists():
        raise UserError(
            f"run folder {path} already exists; give another --name, or go on with: expire-span resume {path}"
        )


def find_run(run: str, runs_dir: Path) -> RunFolder:
    """A run by its name under `runs_dir`, or by its path."""
    for path in (runs_dir / run, Path(run)):
        if (path / "config.json").is_file():
            return RunFolder.open(path)
    known = sorted(p.parent.name for p in runs_dir.glob("*/config.json"))
    near = difflib.get_close_matches(run, known, n=1)
    advice = f"did you mean {near[0]}?" if near else f"known runs: {', '.join(known) or 'none'}"
    raise UserError(f"no run {run!r} under {runs_dir} and no run folder at that path; {advice}")


@dataclass(frozen=True)
class RunFolder:
    path: Path
    config: RunConfig
    recipe: str
    environment: dict[str, Any]

    @classmethod
    def create(cls, path: Path, config: RunConfig, *, recipe: str, environment: dict[str, Any]) -> RunFolder:
        """Make the folder at once, complete with config.json; an existing one is refused."""
        from expire_span import __version__

        check_name(path.name)
        check_new(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {"format": FORMAT_VERSION, "version": __version__, "recipe": recipe}
        head |= {"config": to_dict(config), "environment": environment}
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            (temporary / "checkpoints").mkdir(parents=True)
            write_synced(temporary / "config.json", to_json(head))
            sync_folder(temporary)
            os.rename(temporary, path)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                check_new(path)
            raise RunError(f"cannot create run folder {path}: {describe(error)}") from error
        sync_folder(path.parent)
        return cls.open(path)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other processes from training this run meanwhile. A process that dies, however it dies, holds nothing."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            _lock(handle, self.path)
            yield
        finally:
            os.close(handle)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        path = Path(path)
        if not (path / "config.json").is_file():
            raise UserError(f"no run at {path}: it has no config.json")
        try:
            head = json.loads((path / "config.json").read_bytes())
        except ValueError as error:
            raise UserError(f"{path / 'config.json'} is not valid JSON: {error}") from error
        if head.get("format") != FORMAT_VERSION:
            raise UserError(
                f"run folder {path} has format {head.get('format')} (written by version {head.get('version')}), "
                f"this version reads format {FORMAT_VERSION}; use the version that wrote it"
            )
        return cls(path, from_dict(RunConfig, head["config"]), head.get("recipe", ""), head.get("environment", {}))

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def finished(self) -> bool:
        return (self.path / "result.json").is_file()

    def append_metrics(self, line: dict[str, Any]) -> None:
        self._append("metrics.jsonl", line)

    def append_speed(self, line: dict[str, Any]) -> None:
        self._append("speed.jsonl", line)

    def read_metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._whole_lines("metrics.jsonl")]

    def read_speed(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._whole_lines("speed.jsonl")]

    def truncate(self, step: int) -> None:
        """Forget every metric after `step`, and a line that a crash cut short, so that a resumed run writes them anew."""
        for name in ("metrics.jsonl", "speed.jsonl"):
            if (self.path / name).exists():
                kept = [line for line in self._whole_lines(name) if json.loads(line)["step"] <= step]
                write_atomic(self.path / name, b"".join(kept))

    def sync_metrics(self) -> None:
        """Wait until the metrics are on the disk: a checkpoint must not be newer than they are."""
        for name in ("metrics.jsonl", "speed.jsonl"):
            if (self.path / name).exists():
                with open(self.path / name, "ab") as file:
                    os.fsync(file.fileno())

    def write_result(self, result: dict[str, Any]) -> None:
        write_atomic(self.path / "result.json", to_json(result))

    def read_result(self) -> dict[str, Any] | None:
        return json.loads((self.path / "result.json").read_bytes()) if self.finished else None

    def _append(self, name: str, line: dict[str, Any]) -> None:
        try:
            with open(self.path / name, "ab") as file:
                file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            advice = f"once that is mended, go on with: expire-span resume {self.path}"
            raise RunError(f"cannot write {self.path / name}: {describe(error)}; {advice}") from error

    def _whole_lines(self, name: str) -> list[bytes]:
        """The lines that were written to their end."""
        path = self.path / name
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [line for line in lines if line.endswith(b"\n")]
