"""Snapshots of what requests have read, so that a request whose beginning is known goes on from there.

A memory that has forgotten cannot be taken back to an earlier token, so a snapshot serves exactly one length: those prompts
that begin with all tokens it has read, under the same marks. The longest such beginning is taken. The pool is bounded:
snapshots that were not used for longest leave the memory first, to a folder if there is one. Nothing is shared between owners.
"""

from __future__ import annotations

import hashlib
import queue
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from expire_span.disk.files import sweep, sweep_own
from expire_span.errors import StorageError, UserError, describe
from expire_span.models.marks import FREE
from expire_span.models.state import bytes_of, move, pack, unpack
from expire_span.stream import Prefilled
from expire_span.stream.decoders import model_of
from expire_span.stream.saved import read_saved, write_saved

MOST_BEHIND = 32
"""Snapshots that wait to be written; further ones are not."""


@dataclass(eq=False)
class Snapshot:
    """A memory at the end of some tokens. Its tensors are on the host, and never changed."""

    key: str
    """Names owner, tokens and marks."""
    length: int
    """Number of tokens read."""
    owner: str | None = None
    """None while it has only been seen in the folder."""
    read: Prefilled | None = None
    """None while it is on disk only."""
    places: list[dict[str, Any]] = field(default_factory=list)
    """Where the messages of its chat stand, in the words of `/v1/memory`."""
    size: int = 0
    """Bytes in memory."""
    file_size: int = 0
    """Bytes on disk; 0 while it is not there."""
    waits: bool = False
    """Whether it waits to be written."""


class Sessions:
    """The pool. Any thread may call it."""

    def __init__(
        self, model: Any, most_bytes: int, folder: Path | None = None, most_disk: int = 10_000_000_000
    ) -> None:
        """most_bytes: of snapshots in memory; folder: where others go, up to `most_disk` bytes of files; None drops them."""
        self.most_bytes, self.most_disk = most_bytes, most_disk
        self.counts: Counter[str] = Counter()
        """How often something happened: hits, misses, evictions, written, failed."""
        self._held: OrderedDict[str, Snapshot] = OrderedDict()
        """By key, those that were used last at the end."""
        self._lock = threading.Lock()
        self._queue: queue.Queue[Snapshot | None] = queue.Queue(MOST_BEHIND)
        self._told = -float("inf")
        self._folder: Path | None = None
        if folder is not None:
            self._identity = _identify(model)
            self._folder = folder / self._identity[:16]
            self._open_folder(self._folder)
            self._writer = threading.Thread(target=self._write_all, daemon=True, name="expire-span-sessions")
            self._writer.start()

    # Use

    def find(self, owner: str, tokens: Sequence[int], marks: Sequence[int] | None, *, load: bool) -> Snapshot | None:
        """The snapshot of the longest known beginning of these tokens. load: look into the folder too, which takes time."""
        with self._lock:
            lengths = sorted({x.length for x in self._held.values() if x.length <= len(tokens)})
        for key in reversed(list(name_beginnings(owner, tokens, marks, lengths))):
            found = self._take(key, load)
            if found is not None:
                return found
        return None

    def look(self, owner: str, key: str) -> Snapshot | None:
        """The snapshot of this key, if it is this owner's."""
        found = self._take(key, load=True)
        return found if found is not None and found.owner == owner else None

    def put(
        self,
        owner: str,
        tokens: Sequence[int],
        marks: Sequence[int] | None,
        read: Callable[[], Prefilled],
        places: list[dict[str, Any]],
        *,
        lasting: bool = False,
    ) -> str:
        """Keep what was read after these tokens; `read` is called if it is not known yet. Returns its key. lasting: write it to
        the folder soon, and not only when it has to leave the memory."""
        (key,) = name_beginnings(owner, tokens, marks, [len(tokens)])
        known = self._take(key, load=False)
        if known is not None:
            known.places = places or known.places
            return key
        kept = read()
        kept = Prefilled(kept.logits.cpu(), move(kept.state, "cpu"))
        size = bytes_of(kept.state) + bytes_of(kept.logits)
        if size > self.most_bytes:
            return key
        with self._lock:
            old = self._held.pop(key, None)
            file_size = 0 if old is None else old.file_size
            new = self._held[key] = Snapshot(key, len(tokens), owner, kept, places, size, file_size)
            if lasting:
                self._ask_to_write(new)
            self._shrink()
        return key

    def bytes_held(self) -> tuple[int, int]:
        """Bytes of the snapshots in memory, and of those in the folder."""
        with self._lock:
            return self._in_memory(), sum(x.file_size for x in self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def flush(self) -> None:
        """Wait until all that waits to be written is on disk."""
        self._queue.join()

    # Inside; the lock is held by the caller unless a function takes it

    def _in_memory(self) -> int:
        return sum(x.size for x in self._held.values() if x.read is not None)

    def _take(self, key: str, load: bool) -> Snapshot | None:
        """The snapshot with this key, if it is in memory or can be read into it."""
        with self._lock:
            found = self._held.get(key)
            if found is None or (found.read is None and not load):
                return None
            self._held.move_to_end(key)
            if found.read is not None:
                return found
        read = self._read(found)
        with self._lock:
            if read is None:
                self._drop(found)
                return None
            found.read, found.size = read, bytes_of(read.state) + bytes_of(read.logits)
            self._shrink(but=found)
            return found if found.read is not None else None

    def _shrink(self, but: Snapshot | None = None) -> None:
        """Let snapshots leave the memory until the rest fits."""
        size = self._in_memory()
        for each in list(self._held.values()):
            if size <= self.most_bytes:
                return
            if each.read is None or each is but:
                continue
            size -= each.size
            self.counts["evictions"] += 1
            if each.file_size:
                each.read = None
            elif not self._ask_to_write(each):
                self._drop(each)

    def _ask_to_write(self, each: Snapshot) -> bool:
        """Let a snapshot be written, unless too many wait; it stays in memory until then."""
        if self._folder is None:
            return False
        try:
            if not each.waits and not each.file_size:
                self._queue.put_nowait(each)
                each.waits = True
        except queue.Full:
            return False
        return True

    def _drop(self, each: Snapshot) -> None:
        self._held.pop(each.key, None)
        if each.file_size and self._folder is not None:
            _path(self._folder, each).unlink(missing_ok=True)
            each.file_size = 0

    # The folder

    def _open_folder(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            sweep(folder)
            sweep_own(folder)
            files = sorted(folder.glob("*-*.safetensors"), key=lambda path: path.stat().st_mtime)
            for path in files:
                length, _, key = path.stem.partition("-")
                if length.isdecimal() and len(key) == 64:
                    self._held[key] = Snapshot(key, int(length), file_size=path.stat().st_size)
        except OSError as error:
            raise UserError(
                f"--session-folder {folder.parent} cannot be used: {describe(error)}; name another"
            ) from error

    def _write_all(self) -> None:
        while (each := self._queue.get()) is not None:
            try:
                self._write(each)
            finally:
                self._queue.task_done()

    def _write(self, each: Snapshot) -> None:
        assert self._folder is not None and each.read is not None
        tensors, skeleton = pack(each.read.state)
        meta = {"skeleton": skeleton, "key": each.key, "owner": each.owner, "places": each.places}
        path, size = _path(self._folder, each), 0
        try:
            write_saved(path, self._identity, tensors | {"logits": each.read.logits}, meta)
            size = path.stat().st_size
            path.chmod(0o600)
        except (StorageError, OSError, UserError) as error:
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
            said = describe(cause) if isinstance(cause, OSError) else str(cause)
            self._complain(f"sessions cannot be written to {self._folder}: {said}; they are kept in memory only")
        with self._lock:
            each.waits, each.file_size = False, size
            self.counts["written" if size else "failed"] += 1
            if each.key not in self._held:
                self._drop(each)
            elif self._in_memory() > self.most_bytes:
                each.read = None
                if not size:
                    self._drop(each)
            self._shrink_folder()

    def _shrink_folder(self) -> None:
        size = sum(x.file_size for x in self._held.values())
        for each in list(self._held.values()):
            if size <= self.most_disk:
                return
            size -= each.file_size
            if each.file_size and each.read is not None:
                _path(self._folder, each).unlink(missing_ok=True)  # type: ignore[arg-type]
                each.file_size = 0
            elif each.file_size:
                self._drop(each)

    def _read(self, each: Snapshot) -> Prefilled | None:
        """What a file holds; None where it is damaged or gone, as if nothing had been known."""
        assert self._folder is not None
        try:
            tensors, meta = read_saved(_path(self._folder, each), self._identity)
            if meta["key"] != each.key:
                raise UserError(f"{_path(self._folder, each)} holds another session than its name says")
            state = unpack(tensors, meta["skeleton"])
            each.owner, each.places = meta["owner"], meta["places"]
            return Prefilled(tensors["logits"], state)
        except (UserError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            self.counts["failed"] += 1
            self._complain(f"a session could not be read ({error}); its text is read again")
            return None

    def _complain(self, words: str) -> None:
        """Say what is wrong with the folder, once a minute."""
        if time.monotonic() - self._told > 60:
            self._told = time.monotonic()
            print(words, file=sys.stderr, flush=True)


def name_beginnings(
    owner: str, tokens: Sequence[int], marks: Sequence[int] | None, lengths: Iterable[int]
) -> Iterator[str]:
    """For each length, in rising order, the key of that beginning of the tokens and their marks."""
    both = np.full((len(tokens), 2), FREE, dtype="<i8")
    both[:, 0] = tokens
    if marks is not None:
        both[:, 1] = marks
    digest, done = hashlib.sha256(f"{len(owner)} {owner}".encode()), 0
    for length in lengths:
        digest.update(both[done:length].tobytes())
        done = length
        yield digest.copy().hexdigest()


def _path(folder: Path, each: Snapshot) -> Path:
    return folder / f"{each.length}-{each.key}.safetensors"


def _identify(model: Any) -> str:
    """A hash of everything that a memory depends on beside the tokens."""
    kind = next(iter(model.parameters())).dtype
    told = f"{model_of(model).fingerprint()} {model.config} {getattr(model, 'dial', 1.0)} {kind}"
    return hashlib.sha256(told.encode()).hexdigest()
