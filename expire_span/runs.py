"""The run folder: the only interface between training, evaluation, generation and reports. Standard library only.

runs/<name>/
  config.json      format, version, recipe, config, environment, fingerprint of the data; and a checksum of all of it
  metrics.jsonl    one line per log or evaluation; deterministic values only
  speed.jsonl      wall-clock values, kept apart so that metrics.jsonl can be compared byte for byte
  checkpoints/     step-00000200/ ...
  tensorboard/     the same scalars for a viewer
  tokenizer.json   a copy of the tokenizer that the text is read with, where one is
  result.json      the final evaluation; its presence means that the run is finished
  report.html      written by `expire-span report`
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import glob
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from expire_span.disk.files import (
    SEAL,
    check_line,
    check_plain,
    check_seal,
    hash_file,
    parse_json,
    read_json,
    seal,
    seal_line,
    sweep,
    sync_folder,
    to_json,
    write_atomic,
    write_synced,
)
from expire_span.disk.records import METRICS, SPEED, check_record
from expire_span.errors import RunError, StorageError, UserError, describe
from expire_span.settings.run import FORMAT_VERSION, RunConfig, from_dict, to_dict
from expire_span.shipped import SHIPPED

__all__ = [
    "RunError",
    "RunFolder",
    "StorageError",
    "UserError",
    "check_name",
    "check_new",
    "describe",
    "find_run",
    "sync_folder",
    "to_json",
    "write_atomic",
    "write_synced",
]

TOKENIZER = "tokenizer.json"
"""The run folder's copy of the tokenizer that its text is read with, where one is."""
LONGEST_NAME = 200
"""Largest number of bytes of a run's name: file systems allow 255, and temporary names are longer than the name."""


def _lock(handle: int, path: Path) -> None:
    """Lock an open folder, or refuse if another process has locked it; where folders cannot be locked, do nothing."""
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


def check_name(name: str) -> None:
    """Refuse a name that is not a plain folder name."""
    if not name or name.startswith(".") or Path(name).name != name:
        raise UserError(f"a run name must be a plain folder name without slashes or a leading dot, got {name!r}")
    if not name.isprintable():
        raise UserError(f"a run name must consist of printable characters, got {name!r}")
    if len(name.encode()) > LONGEST_NAME:
        raise UserError(f"a run name must have at most {LONGEST_NAME} bytes, got {len(name.encode())}")


def check_new(path: Path, option: str = "--name") -> None:
    """Refuse a folder that is already there, since a run is never overwritten, and a place that cannot hold a folder.

    option: what names the folder in the command that asks.
    """
    if path.exists() or path.is_symlink():
        raise UserError(
            f"run folder {path} already exists; give another {option}, or go on with: expire-span resume {path}"
        )
    check_holds_folders(path.parent)


def check_holds_folders(folder: Path) -> None:
    """Refuse a folder that could not be made or written to."""
    found = next(place for place in (folder, *folder.parents, Path(".")) if place.exists())
    if not found.is_dir():
        raise UserError(f"{folder} cannot hold run folders: {found} is a file; give another --runs-dir, or --out")
    if not os.access(found, os.W_OK | os.X_OK):
        raise UserError(f"{folder} cannot hold run folders: {found} is not writable; give another --runs-dir, or --out")


def find_run(run: str | None, runs_dir: Path) -> RunFolder:
    """A run by its name under `runs_dir`, or by its path. Leftovers of killed processes in it are deleted.

    None is the model that ships with the package, which can also be named.
    """
    if run is None:
        return RunFolder.open(SHIPPED)
    for path in (runs_dir / run, Path(run)):
        if (path / "config.json").is_file():
            found = RunFolder.open(path)
            found.sweep()
            return found
    if run == SHIPPED.name:
        return RunFolder.open(SHIPPED)
    if (Path(run) / "adapter.json").is_file():
        raise UserError(
            f"{run} holds an adapter and no run; it goes with its model: expire-span generate or chat MODEL --adapter {run}"
        )
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
    data: dict[str, Any] = field(default_factory=dict)
    """Fingerprint of the data with which the run began; empty if the data is generated."""
    origin: dict[str, Any] = field(default_factory=dict)
    """Where the initial weights came from; empty if they were random."""

    @classmethod
    def create(
        cls,
        path: Path,
        config: RunConfig,
        *,
        recipe: str,
        environment: dict[str, Any],
        data: dict[str, Any] | None = None,
        origin: dict[str, Any] | None = None,
        fill: Callable[[Path], None] = lambda folder: None,
    ) -> RunFolder:
        """Make the folder, atomically and with its config.json; an existing one is refused.

        fill: may write more into the folder before it gets its name, such as a first checkpoint.
        """
        from expire_span import __version__

        check_name(path.name)
        check_new(path)
        head = {"format": FORMAT_VERSION, "version": __version__, "recipe": recipe, "config": to_dict(config)}
        head |= {"environment": environment, "data": data or {}, "origin": origin or {}}
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            sweep(path.parent, f".{glob.escape(path.name)}.*.tmp")
            (temporary / "checkpoints").mkdir(parents=True)
            write_synced(temporary / "config.json", to_json(seal(head)))
            fill(temporary)
            sync_folder(temporary)
            os.rename(temporary, path)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                check_new(path)
            raise StorageError(f"cannot create run folder {path}: {describe(error)}") from error
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_folder(path.parent)
        return cls.open(path)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """A context in which no other process can train this run. The lock ends with the process, however that ends."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            _lock(handle, self.path)
            yield
        finally:
            os.close(handle)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        path = Path(path)
        file = path / "config.json"
        if not file.is_file():
            raise UserError(f"no run at {path}: it has no config.json")
        head = read_json(file)
        version = head.get("format")
        if version is None and "model_type" in head:
            raise UserError(
                f"{path} holds a Hugging Face model ({head['model_type']}) and no run; teach it to forget with: expire-span "
                "retrofit, which writes a run and an adapter"
            )
        if version != FORMAT_VERSION:
            raise UserError(
                f"run folder {path} has format {version} (written by version {head.get('version')}), this version "
                f"reads format {FORMAT_VERSION}; use the version that wrote it, or train again"
            )
        check_seal(head, file)
        try:
            config = from_dict(RunConfig, _table(head, "config"))
            recipe = head.get("recipe", "")
            if not isinstance(recipe, str):
                raise ValueError(f"recipe must be text, got {recipe!r}")
            tables = {name: _table(head, name) for name in ("environment", "data", "origin")}
            return cls(path, with_own_tokenizer(config, path, tables["data"]), recipe, **tables)
        except ValueError as error:
            raise UserError(f"{file}: {error}") from error

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def is_shipped(self) -> bool:
        """Whether it lies in the installed package, where no command writes."""
        return self.path.resolve().is_relative_to(SHIPPED.parent.resolve())

    @property
    def adapter(self) -> Path:
        """The folder in which a retrofit's run saves what it learned."""
        return self.path / "adapter"

    @property
    def finished(self) -> bool:
        return (self.path / "result.json").is_file()

    def check_can(self, use: str) -> None:
        """Refuse what cannot be done with a run of this kind, like "eval"; `RunKind.cannot` has the sentences."""
        sentence = self.config.kind.cannot.get(use)
        if sentence is not None:
            raise UserError(sentence.format(path=self.path, task=self.config.task))

    def sweep(self) -> None:
        """Delete what killed processes left half-written, unless the run is being trained or cannot be written to."""
        with contextlib.suppress(OSError, RunError), self.lock():
            self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Delete what killed processes left half-written; the caller holds the lock. Nothing outside of the folder is touched:
        links are not followed."""
        sweep(self.path)
        if not self.adapter.is_symlink():
            sweep(self.adapter)
        sweep(self.path.parent, f".{glob.escape(self.name)}.*.tmp")
        self.remove_unfinished()

    def remove_unfinished(self) -> None:
        """Delete checkpoints that a killed process had not finished."""
        if not self.checkpoints.is_symlink():
            for folder in self.checkpoints.glob(".step-*.tmp"):
                shutil.rmtree(folder, ignore_errors=True)

    def check_own_checkpoints(self) -> None:
        """Refuse to train where `checkpoints` is a link: training would write and delete in another place than this folder."""
        if self.checkpoints.is_symlink():
            raise UserError(
                f"{self.checkpoints} is a link to {os.readlink(self.checkpoints)}, and training writes and deletes nothing "
                "outside of its run folder; put that folder in the place of the link, or move the whole run folder there"
            )

    def append_metrics(self, line: dict[str, Any]) -> None:
        self._append("metrics.jsonl", line)

    def append_speed(self, line: dict[str, Any]) -> None:
        self._append("speed.jsonl", line)

    def read_metrics(self) -> list[dict[str, Any]]:
        return [line for line, _ in self._read_lines("metrics.jsonl")]

    def read_speed(self) -> list[dict[str, Any]]:
        return [line for line, _ in self._read_lines("speed.jsonl")]

    def truncate(self, step: int) -> None:
        """Delete all metrics after `step`, and a line that a crash cut short, so that a resumed run writes them again."""
        names = [name for name in ("metrics.jsonl", "speed.jsonl") if os.path.lexists(self.path / name)]
        kept = {name: [data for line, data in self._read_lines(name) if line["step"] <= step] for name in names}
        for name, lines in kept.items():  # both are intact: neither is written where the other is damaged
            with self._resumable(name):
                write_atomic(self.path / name, b"".join(lines))

    def sync_metrics(self) -> None:
        """Wait until the metrics are on the disk: a checkpoint must not be newer than they are."""
        for name in ("metrics.jsonl", "speed.jsonl"):
            if (self.path / name).exists():
                with open(self.path / name, "ab") as file:
                    os.fsync(file.fileno())

    def write_result(self, result: dict[str, Any]) -> None:
        with self._resumable("result.json"):
            write_atomic(self.path / "result.json", to_json(seal(result)))

    def read_result(self, *needed: str) -> dict[str, Any] | None:
        """The final evaluation, or None before the run has finished. Fields that the caller needs must be there."""
        if not self.finished:
            return None
        result = read_json(self.path / "result.json")
        check_seal(result, self.path / "result.json")
        del result[SEAL]
        scored = ("score",) if "score" in result else ()
        check_record(result, (*scored, *needed), str(self.path / "result.json"))
        return result

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with self._resumable(name), open(self.path / name, "ab") as file:
            file.write(seal_line(json.dumps(line).encode()))

    @contextlib.contextmanager
    def _resumable(self, name: str) -> Iterator[None]:
        """Turn a failed write into StorageError, with a sentence that says how to continue later."""
        try:
            yield
        except OSError as error:
            advice = f"once that is fixed, continue with: expire-span resume {self.path}"
            raise StorageError(f"cannot write {self.path / name}: {describe(error)}; {advice}") from error

    def _read_lines(self, name: str) -> list[tuple[dict[str, Any], bytes]]:
        """The lines that were written to their end, each with its bytes; a damaged one is refused."""
        path = self.path / name
        if not os.path.lexists(path):
            return []
        check_plain(path)
        lines = path.read_bytes().splitlines(keepends=True)
        out = []
        for number, line in enumerate(lines, 1):
            if line.endswith(b"\n"):
                where = f"line {number} of {path}"
                value = check_line(parse_json(line, where), line, where)
                check_record(value, SPEED if name == "speed.jsonl" else METRICS, where)
                out.append((value, line))
        return out


def copy_tokenizer(config: RunConfig, folder: Path) -> None:
    """Copy the tokenizer file of a run on text into its folder, so that the run can be used without the original."""
    tokenizer = getattr(config.task, "tokenizer", "")
    if tokenizer:
        write_synced(folder / TOKENIZER, Path(tokenizer).read_bytes())


def with_own_tokenizer(config: RunConfig, path: Path, data: dict[str, Any]) -> RunConfig:
    """The config of a run with the tokenizer in its folder instead of the original."""
    task, own = config.task, path / TOKENIZER
    if not getattr(task, "tokenizer", "") or not own.is_file():
        return config
    was, now = data.get("tokenizer"), hash_file(own)
    if was is not None and was != now:
        raise UserError(
            f"{own} is not the tokenizer that the run was trained with (sha256 {was!s:.12}, now {now:.12}); "
            "put that one back"
        )
    return replace(config, task=replace(task, tokenizer=str(own)))


def _table(head: dict[str, Any], name: str) -> dict[str, Any]:
    value = head.get(name, {})
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a table of fields, got {value!r:.60}")
    return value
