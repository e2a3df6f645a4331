"""Data sets by name: downloaded or generated, checked, and stored where the recipes look for them."""

from __future__ import annotations

import base64
import bz2
import gzip
import json
import lzma
import os
import shutil
import tarfile
import tempfile
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from expire_span.errors import StorageError, UserError, describe
from expire_span.files import read_json, write_atomic
from expire_span.task_configs import CollisionTask

from .collision import FRAME, Collision, Simulation
from .contract import SPLITS
from .download import CHUNK, TIMEOUT, Check, Report, fetch, hold_lock, open_source
from .episodes import key_of

ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
ENWIK8 = Check(length=100_000_000, sha256="2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8")
PG19_URL = "https://storage.googleapis.com/storage/v1/b/deepmind-gutenberg/o"
"""Listing of the bucket in which PG-19 was released: train, validation and test with one .txt file a book."""
PG19_SPLITS = ("train", "validation", "test")
SHARES = {"train": 10, "valid": 1, "test": 1}
"""Relative numbers of frames of the saved collision splits."""
ROWS = {"train": 256, "valid": 64, "test": 64}
"""Number of simulations that run side by side while a split is saved; the file holds one after another."""
WARM_FRAMES = 16_384
"""Frames that a simulation runs before it is saved, so that the ages of collisions have reached their stationary distribution;
at most four times as many as are saved of it."""


def make_enwik8(target: Path, source: str | None, report: Report, *, check: Check = ENWIK8) -> Path:
    """The first 10^8 bytes of English Wikipedia as one file."""
    with hold_lock(target):
        if target.exists() and check.fault_of(target) is None:
            return target
        given = source or ENWIK8_URL
        packed = open_source(given, target.parent, Check(), report)
        part = target.with_name(target.name + ".unpacked")
        with unpack(packed) as stream, part.open("wb") as out:
            shutil.copyfileobj(stream, out, CHUNK)
        fault = check.fault_of(part)
        if fault is not None:
            part.unlink()
            if "://" in given:
                packed.unlink()
            raise UserError(f"{given} is not enwik8: {fault}; give another source with --from")
        os.replace(part, target)
        if "://" in given:
            packed.unlink()
    return target


def unpack(path: Path) -> IO[bytes]:
    """The bytes of a file, or of the only file inside a compressed one."""
    try:
        if path.suffix == ".zip":
            archive = zipfile.ZipFile(path)
            names = [name for name in archive.namelist() if not name.endswith("/")]
            if len(names) != 1:
                raise UserError(f"{path} holds {len(names)} files, expected 1; unpack it and give the file with --from")
            return archive.open(names[0])  # type: ignore[return-value]
        openers = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
        return openers[path.suffix](path, "rb") if path.suffix in openers else path.open("rb")  # type: ignore[return-value]
    except (zipfile.BadZipFile, IsADirectoryError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); give the file itself or a .zip, .xz, .gz or .bz2 of it"
        ) from error


# Books


def make_books(
    target: Path, source: str | None, report: Report, *, limit: int | None = None, listing: str = PG19_URL
) -> Path:
    """PG-19 from its public bucket, or a folder or archive of .txt files from elsewhere."""
    if source is None:
        return _fetch_pg19(target, listing, report, limit)
    if target.exists() and any(target.iterdir()):
        raise UserError(f"{target} already exists and is not empty; remove it, or name another folder with --to")
    with hold_lock(target):
        given = open_source(source, target.parent, Check(), report)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            fresh = Path(folder) / "books"
            if given.is_dir():
                _copy_books(given, fresh)
            else:
                _unpack_books(given, fresh)
            if not any(fresh.rglob("*.txt")):
                raise UserError(f"{source} holds no .txt file; give a folder or an archive of books")
            if target.exists():
                target.rmdir()
            os.replace(fresh, target)
    return target


def _copy_books(folder: Path, target: Path) -> None:
    for book in sorted(folder.rglob("*.txt")):
        place = target / book.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(book, place)
        except OSError as error:  # a full disk names the source, and only the file that is made is lost
            raise StorageError(f"cannot copy {book} into {target.parent.parent}: {describe(error)}") from error


def _unpack_books(archive: Path, target: Path) -> None:
    """Only regular .txt files are unpacked, and none outside the target."""
    target.mkdir(parents=True)
    try:
        with tarfile.open(archive) as files:
            members = [m for m in files if m.isfile() and m.name.endswith(".txt")]
            files.extractall(target, members, filter="data")
    except (tarfile.TarError, EOFError, lzma.LZMAError, OSError) as error:
        raise UserError(
            f"{archive} cannot be unpacked ({error}); give a folder or a .tar, .tar.gz or .tar.xz"
        ) from error


def list_bucket(listing: str, split: str, limit: int | None) -> Iterator[tuple[str, str, Check]]:
    """Name, address and checks of every book of a split."""
    token, count = None, 0
    while True:
        query = {"prefix": f"{split}/", "maxResults": "1000", **({"pageToken": token} if token else {})}
        with urllib.request.urlopen(f"{listing}?{urllib.parse.urlencode(query)}", timeout=TIMEOUT) as answer:
            page = json.load(answer)
        for item in page.get("items", []):
            if item["name"].endswith(".txt") and (limit is None or count < limit):
                count += 1
                digest = base64.b64decode(item["md5Hash"]).hex()
                yield item["name"], item["mediaLink"], Check(length=int(item["size"]), md5=digest)
        token = page.get("nextPageToken")
        if not token or (limit is not None and count >= limit):
            return


def _fetch_pg19(target: Path, listing: str, report: Report, limit: int | None) -> Path:
    try:
        books = [book for split in PG19_SPLITS for book in list_bucket(listing, split, limit)]
    except OSError as error:
        advice = "give a folder or an archive of .txt books with --from"
        raise StorageError(
            f"the list of PG-19 books at {listing} cannot be read ({error}); try again, or {advice}"
        ) from error
    for number, (name, link, check) in enumerate(books, 1):
        fetch(link, target / name, check)
        report(number, len(books))
    return target


# Collision


def make_collision(
    target: Path, frames: int, report: Report, *, meet_probs: Sequence[float] = (0.0,), seed: int = 0
) -> Path:
    """Save simulations as train.npy, valid.npy and test.npy: [frames, 9] bytes, eight tokens and the label.

    meet_probs: chance per frame that the particles of the training split are made to meet. Several stand for as many
    equal parts of the split, one after another, so that a batch whose rows are cut from it has rows of every kind.
    """
    least = sum(SHARES.values())
    if frames < least:
        raise UserError(f"--frames must be at least {least}, got {frames}")
    _check_room(target, frames)
    if not meet_probs:
        raise UserError("--meet-prob needs at least one probability, got none; 0 is the published game")
    task = Collision(CollisionTask(meet_probs=tuple(meet_probs)))
    target.mkdir(parents=True, exist_ok=True)
    _check_game(target, list(meet_probs))
    done = 0
    for split in SPLITS:
        count = frames * SHARES[split] // least
        path = target / f"{split}.npy"
        with hold_lock(path):
            if path.exists():
                _check_count(path, count)
            else:
                rows = min(ROWS[split], count)
                _save_frames(task, path, count, Simulation(task.config_of(split), rows, key=key_of(split, seed)))
        done += count
        report(done, frames)
    return target


def _check_room(target: Path, frames: int) -> None:
    """Refuse what the disk cannot hold before anything is simulated."""
    place = next(parent for parent in (target.absolute(), *target.absolute().parents) if parent.exists())
    need, free = frames * (FRAME + 1), shutil.disk_usage(place).free
    if need > free:
        raise UserError(
            f"--frames {frames:,} need {need / 1e9:,.1f} GB and {place} has {free / 1e9:,.1f} GB free; give fewer frames"
        )


def _check_game(target: Path, meet_probs: list[float]) -> None:
    """Write the meeting probabilities beside the frames; refuse a folder that was made with others."""
    asked = {"meet_prob": meet_probs if len(meet_probs) > 1 else meet_probs[0]}
    note = target / "game.json"
    try:
        found = read_json(note) if note.exists() else None
    except UserError as error:
        raise UserError(f"{error}; remove {target} and repeat the command") from error
    if found is None and any((target / f"{split}.npy").exists() for split in SPLITS):
        found = {"meet_prob": 0.0}  # saved before particles could be made to meet
    if found is not None and found != asked:
        given = " ".join(f"{share:g}" for share in meet_probs)
        raise UserError(f"{target} was made with {found}, and --meet-prob is {given}; give another --to")
    write_atomic(note, json.dumps(asked).encode())


def _check_count(path: Path, count: int) -> None:
    """Refuse a file that was saved with another number of frames."""
    try:
        found = len(np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, OSError, EOFError, TypeError) as error:
        raise UserError(f"{path} is not a file of frames ({error}); remove it and repeat the command") from error
    if found != count:
        raise UserError(f"{path} holds {found:,} frames, and {count:,} were asked for; remove it, or give another --to")


def _save_frames(task: Collision, path: Path, count: int, simulation: Simulation) -> None:
    """Write the simulations one after another, so that consecutive frames in the file are consecutive in time."""
    length = -(-count // simulation.rows)
    warm, parts = min(WARM_FRAMES, 4 * length), []
    for start in range(0, warm, 256):
        simulation.run(min(256, warm - start))
    for start in range(0, length, 256):
        out = simulation.run(min(256, length - start))
        tokens = task.to_tokens(out).reshape(simulation.rows, -1, FRAME)
        parts.append(np.concatenate([tokens, out.label.T[..., None]], -1).astype(np.uint8))
    data = np.concatenate(parts, 1).reshape(-1, FRAME + 1)[:count]
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            np.save(file, data, allow_pickle=False)
        os.replace(part, path)
    except OSError as error:  # a full disk: what was written is of no use
        part.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
