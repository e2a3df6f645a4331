"""Data sets by name: downloaded or generated, checked, and stored where the recipes look for them."""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from expire_span.disk.files import sweep, write_atomic
from expire_span.disk.sizes import show_bytes
from expire_span.errors import StorageError, UserError
from expire_span.settings.tasks import CollisionTask

from .collision import FRAME, GAME, Collision, Simulation, read_game
from .contract import SPLITS
from .download import TIMEOUT, Check, Report, cause_of, fetch, hold_lock, open_source
from .episodes import key_of
from .unpacking import copy_books, unpack_books, unpack_file

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
    given = source if source is not None else ENWIK8_URL
    with hold_lock(target):
        if target.exists():
            fault = check.fault_of(target)
            if fault is None:
                return target
            raise UserError(f"{target} exists and is not enwik8: {fault}; remove it, or give another place with --to")
        part = target.with_name(target.name + ".unpacked")
        try:
            with open_source(given, target, report) as packed:
                with part.open("wb") as out:
                    unpack_file(packed, given, out, None if check.length is None else check.length + 1)
                fault = check.fault_of(part)
                if fault is not None:
                    raise UserError(f"{given} is not enwik8: {fault}; give another source with --from")
                os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    return target


# Books


def make_books(
    target: Path, source: str | None, report: Report, *, limit: int | None = None, listing: str = PG19_URL
) -> Path:
    """PG-19 from its public bucket, or a folder or archive of .txt files from elsewhere."""
    if source is None:
        return _fetch_pg19(target, listing, report, limit)
    with hold_lock(target):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UserError(f"{target} already exists and is not empty; remove it, or name another folder with --to")
        sweep(target.parent, f".{target.name}.*.tmp")
        fresh = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with open_source(source, target, report) as given:
                _gather_books(given, source, fresh / "books")
                if target.exists():
                    target.rmdir()
                os.replace(_inside(fresh / "books"), target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return target


def _gather_books(given: Path, source: str, target: Path) -> None:
    if given.is_dir():
        copy_books(given, target)
    else:
        unpack_books(given, source, target)
    if not any(target.rglob("*.txt")):
        raise UserError(f"{source} holds no .txt file; give a folder or an archive of books")


def _inside(folder: Path) -> Path:
    """The folder itself, or the one that has train, validation and test, if it lies alone in others, as in an archive."""
    while len(inner := list(folder.iterdir())) == 1 and inner[0].is_dir() and inner[0].name not in PG19_SPLITS:
        folder = inner[0]
    return folder


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
                if Path(item["name"]).parent != Path(split):  # the list comes from outside, and names where we write
                    raise ValueError(f"a book of {split} is called {item['name']}")
                digest = base64.b64decode(item["md5Hash"]).hex()
                yield item["name"], item["mediaLink"], Check(length=int(item["size"]), md5=digest)
        token = page.get("nextPageToken")
        if not token or (limit is not None and count >= limit):
            return


def _fetch_pg19(target: Path, listing: str, report: Report, limit: int | None) -> Path:
    try:
        books = [book for split in PG19_SPLITS for book in list_bucket(listing, split, limit)]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
        advice = "give a folder or an archive of .txt books with --from"
        raise StorageError(
            f"the list of PG-19 books at {listing} cannot be read ({cause_of(error)}); try again, or {advice}"
        ) from error
    for number, (name, link, check) in enumerate(books, 1):
        fetch(link, target / name, check)
        report(number, len(books))
    return target


# Collision


def make_collision(
    target: Path,
    frames: int,
    report: Report,
    *,
    meet_probs: Sequence[float] = (0.0,),
    easy: Literal["latest", "now"] = "latest",
    seed: int = 0,
) -> Path:
    """Save simulations as train.npy, valid.npy and test.npy: [frames, 9] bytes, eight tokens and the label.

    meet_probs: chance per frame that the particles of the training split are made to meet. Several stand for as many
    equal parts of the split, one after another, so that a batch whose rows are cut from it has rows of every kind.
    easy: what the easy questions of every split ask about, see `CollisionTask`.
    """
    least = sum(SHARES.values())
    if frames < least:
        raise UserError(f"--frames must be at least {least}, got {frames}")
    _check_room(target, frames)
    if not meet_probs:
        raise UserError("--meet-prob needs at least one probability, got none; 0 is the published game")
    task = Collision(CollisionTask(meet_probs=tuple(meet_probs), easy=easy))
    target.mkdir(parents=True, exist_ok=True)
    with hold_lock(target / GAME):
        _check_game(target, list(meet_probs), easy)
    done = 0
    for split in SPLITS:
        count = frames * SHARES[split] // least
        path = target / f"{split}.npy"
        with hold_lock(path):
            if path.exists():
                _check_count(path, count)
            else:
                rows = min(ROWS[split], count)
                simulation = Simulation(task.config_of(split), rows, key=key_of(split, seed))
                _save_frames(task, path, count, simulation, lambda now, before=done: report(before + now, frames))
        done += count
        report(done, frames)
    return target


def _check_room(target: Path, frames: int) -> None:
    """Refuse what the disk cannot hold before anything is simulated."""
    place = next(parent for parent in (target.absolute(), *target.absolute().parents) if parent.exists())
    need, free = frames * (FRAME + 1), shutil.disk_usage(place).free
    if need > free:
        raise UserError(
            f"--frames {frames:,} need {show_bytes(need)}, and {place} has {show_bytes(free)} free; give fewer frames"
        )


def _check_game(target: Path, meet_probs: list[float], easy: str) -> None:
    """Write how the frames are made beside them; refuse a folder that was made otherwise."""
    asked = {"easy": easy, "meet_prob": meet_probs if len(meet_probs) > 1 else meet_probs[0]}
    try:
        found = read_game(target)
    except UserError as error:
        raise UserError(f"{error}; remove {target} and repeat the command") from error
    if found is None and any((target / f"{split}.npy").exists() for split in SPLITS):
        found = {"easy": "latest", "meet_prob": 0.0}  # saved before particles could be made to meet
    if found is not None and found != asked:
        raise UserError(f"{target} was made with {_options(found)}, not {_options(asked)}; give another --to")
    write_atomic(target / GAME, json.dumps(asked).encode())


def _options(game: dict[str, Any]) -> str:
    """How frames are made, as options of the command."""
    shares = game.get("meet_prob")
    told = " ".join(
        f"{x:g}" if isinstance(x, int | float) else str(x) for x in (shares if isinstance(shares, list) else [shares])
    )
    return f"--easy {game['easy']} --meet-prob {told}"


def _check_count(path: Path, count: int) -> None:
    """Refuse a file that was saved with another number of frames."""
    try:
        found = len(np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, OSError, EOFError, TypeError) as error:
        raise UserError(f"{path} is not a file of frames ({error}); remove it and repeat the command") from error
    if found != count:
        raise UserError(f"{path} holds {found:,} frames, and {count:,} were asked for; remove it, or give another --to")


def _save_frames(
    task: Collision, path: Path, count: int, simulation: Simulation, report: Callable[[int], None]
) -> None:
    """Write the simulations one after another, so that consecutive frames in the file are consecutive in time.

    report: called on the way with the part of `count` that is done; warming up counts as work.
    """
    length = -(-count // simulation.rows)
    warm, parts = min(WARM_FRAMES, 4 * length), []
    for start in range(0, warm, 256):
        simulation.run(min(256, warm - start))
        report(count * start // (warm + length))
    for start in range(0, length, 256):
        report(count * (warm + start) // (warm + length))
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
