"""Downloads against a server of our own: whole, resumed, short, corrupt, by two processes; and the data verb."""

from __future__ import annotations

import base64
import bz2
import contextlib
import gzip
import hashlib
import http.server
import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
import threading
import time
import zipfile

import numpy as np
import pytest

from expire_span.cli import main
from expire_span.runs import RunError, UserError
from expire_span.settings.tasks import TextTask
from expire_span.tasks import datasets
from expire_span.tasks.books import find_books
from expire_span.tasks.download import Check, fetch
from expire_span.tasks.text import Text

CONTENT = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8).tobytes()
GOOD = Check(len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves `server.files`; /short/NAME breaks off, /slow/NAME rests after its first bytes, /plain/NAME ignores ranges."""

    def do_GET(self):
        self.server.seen.append((self.path, self.headers.get("Range")))  # type: ignore[attr-defined]
        kind, name = self.path.split("?")[0].lstrip("/").split("/", 1)
        body = self.server.files.get(name)  # type: ignore[attr-defined]
        if callable(body):
            body = body(self.path)
        if body is None:
            return self.send_error(404)
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1]) if kind != "plain" else 0
        if start >= len(body) > 0:
            return self.send_error(416)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start : start + 100_000])
        if kind == "slow":
            time.sleep(0.2)
        if kind != "short":
            with contextlib.suppress(OSError):  # a client that has gone
                self.wfile.write(body[start + 100_000 :])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.seen = {"a.bin": CONTENT}, []  # type: ignore[attr-defined]
    server.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_file_is_fetched_once_and_progress_is_told(server, tmp_path):
    told: list[tuple[int, int | None]] = []
    for _ in range(2):
        path = fetch(f"{server.url}/all/a.bin", tmp_path / "deep" / "a.bin", GOOD, lambda *x: told.append(x))
    assert path.read_bytes() == CONTENT and told[-1] == (len(CONTENT), len(CONTENT))
    assert len(server.seen) == 1


def test_a_broken_download_goes_on_where_it_stopped(server, tmp_path):
    target = tmp_path / "a.bin"
    with pytest.raises(RunError, match=r"stopped after 100000 (of 300000 )?bytes.* the same command goes on"):
        fetch(f"{server.url}/short/a.bin", target, GOOD)
    assert not target.exists() and (tmp_path / "a.bin.part").stat().st_size == 100_000
    assert fetch(f"{server.url}/all/a.bin", target, GOOD).read_bytes() == CONTENT
    assert server.seen[-1][1] == "bytes=100000-" and not (tmp_path / "a.bin.part").exists()


def test_a_stopped_download_keeps_what_has_arrived(server, tmp_path):
    def stop(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(f"{server.url}/slow/a.bin", tmp_path / "a.bin", GOOD, stop)
    kept = (tmp_path / "a.bin.part").stat().st_size
    assert 0 < kept <= 100_000 and [path.name for path in tmp_path.iterdir()] == ["a.bin.part"]
    assert fetch(f"{server.url}/all/a.bin", tmp_path / "a.bin", GOOD).read_bytes() == CONTENT
    assert server.seen[-1][1] == f"bytes={kept}-"


@pytest.mark.parametrize("kind", ["plain", "all"])
def test_a_server_without_ranges_and_a_finished_part_are_fine(server, tmp_path, kind):
    (tmp_path / "a.bin.part").write_bytes(CONTENT if kind == "all" else CONTENT[:5000])
    assert fetch(f"{server.url}/{kind}/a.bin", tmp_path / "a.bin", GOOD).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (CONTENT[:-1], "it has 299999 bytes instead of 300000"),
        (CONTENT[:-1] + b"\0", "its sha256 is .* instead of"),
    ],
)
def test_a_damaged_download_is_deleted_and_said(server, tmp_path, content, words):
    assert content != CONTENT
    server.files["a.bin"] = content
    with pytest.raises(RunError, match=f"is damaged: {words}"):
        fetch(f"{server.url}/all/a.bin", tmp_path / "a.bin", GOOD)
    assert [p.name for p in tmp_path.iterdir()] == []


def test_a_wrong_file_at_the_target_is_replaced(server, tmp_path):
    (tmp_path / "a.bin").write_bytes(b"old")
    assert fetch(f"{server.url}/all/a.bin", tmp_path / "a.bin", GOOD).read_bytes() == CONTENT


def test_missing_files_and_dead_servers_are_one_sentence(server, tmp_path):
    with pytest.raises(RunError, match=r"answered 404 .*--from"):
        fetch(f"{server.url}/all/none", tmp_path / "a", GOOD)
    with pytest.raises(RunError, match=r"x cannot be downloaded \(Connection refused\); try again"):
        fetch("http://127.0.0.1:9/x", tmp_path / "a", GOOD)


def test_two_processes_fetch_one_file(server, tmp_path):
    code = (
        "import sys; from pathlib import Path; from expire_span.tasks.download import Check, fetch\n"
        "fetch(sys.argv[1], Path(sys.argv[2]), Check(300000, sys.argv[3]))"
    )
    command = [sys.executable, "-c", code, f"{server.url}/all/a.bin", str(tmp_path / "a.bin"), str(GOOD.sha256)]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and len(server.seen) == 1


# enwik8


def packed(kind: str) -> bytes:
    if kind == "zip":
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr("enwik8", CONTENT)
        return out.getvalue()
    pack = {"xz": lzma.compress, "gz": gzip.compress, "bz2": bz2.compress}
    return pack[kind](CONTENT) if kind in pack else CONTENT


@pytest.mark.parametrize("kind", ["zip", "xz", "raw"])
@pytest.mark.parametrize("remote", [True, False])
def test_enwik8_is_unpacked_and_checked(server, tmp_path, kind, remote):
    name = {"zip": "e.zip", "xz": "e.xz", "raw": "e"}[kind]
    server.files[name] = packed(kind)
    (tmp_path / name).write_bytes(packed(kind))
    source = f"{server.url}/all/{name}" if remote else str(tmp_path / name)
    path = datasets.make_enwik8(tmp_path / "data" / "enwik8", source, lambda *_: None, check=GOOD)
    assert path.read_bytes() == CONTENT and (tmp_path / name).exists()
    assert [p.name for p in path.parent.iterdir()] == ["enwik8"]


def cut_short(content: bytes) -> bytes:
    return content[: len(content) // 2]


def changed(content: bytes) -> bytes:
    return content[:50_000] + bytes([content[50_000] ^ 255]) + content[50_001:]


@pytest.mark.parametrize("damage", [cut_short, changed])
@pytest.mark.parametrize("kind", ["zip", "xz", "gz", "bz2"])
def test_a_damaged_archive_is_one_sentence_and_is_downloaded_again(server, tmp_path, kind, damage):
    """The URL ends like the target, which once made the download wait for its own lock."""
    server.files["enwik8"] = damage(packed(kind))
    target, url = tmp_path / "data" / "enwik8", f"{server.url}/all/enwik8"
    with pytest.raises(UserError, match=r"all/enwik8 cannot be unpacked \(.+\); give the file itself"):
        datasets.make_enwik8(target, url, lambda *_: None, check=GOOD)
    assert not list(target.parent.iterdir())
    server.files["enwik8"] = packed(kind)
    assert datasets.make_enwik8(target, f"{url}?raw=1", lambda *_: None, check=GOOD).read_bytes() == CONTENT


def test_a_source_without_end_and_a_file_of_the_user_are_refused(tmp_path, capsys):
    def run(*words: str) -> str:
        assert main(["data", *words]) == 2
        return capsys.readouterr().err

    os.mkfifo(tmp_path / "pipe")
    for source in ("/dev/zero", str(tmp_path / "pipe")):
        for name in ("enwik8", "books"):
            assert "it is not a plain file" in run(name, "--from", source, "--to", str(tmp_path / "a"))
    (tmp_path / "bomb").write_bytes(gzip.compress(b"x" * 5_000_000))
    with pytest.raises(UserError, match=r"it has 300001 bytes instead of 300000"):
        datasets.make_enwik8(tmp_path / "a", str(tmp_path / "bomb"), lambda *_: None, check=GOOD)
    (tmp_path / "mine").write_text("my work")
    said = run("enwik8", "--from", str(tmp_path / "bomb"), "--to", str(tmp_path / "mine"))
    assert "exists and is not enwik8: it has 7 bytes" in said and (tmp_path / "mine").read_text() == "my work"
    assert "is a folder, not a file" in run("enwik8", "--from", str(tmp_path), "--to", str(tmp_path / "a"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bomb", "mine", "pipe"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["books", "--frames", "5"], "--frames is an option of collision, and books does not take it"),
        (["enwik8", "--books", "5"], "--books is an option of books, and enwik8 does not take it"),
        (["pg19", "--meet-prob", "0.5"], "--meet-prob is an option of collision"),
        (["pg19", "--books", "5", "--from", "mine"], "--books limits the download of PG-19 and takes no --from"),
        (["books", "--from", ""], "an empty name does not exist"),
        (["enwik8", "--from", "http://[::1"], "http://[::1 is not a URL (Invalid IPv6 URL)"),
    ],
)
def test_an_option_that_a_data_set_does_not_use_is_refused(tmp_path, capsys, words, said):
    assert main(["data", *words, "--to", str(tmp_path / "a")]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_verb_refuses_another_file_as_enwik8(tmp_path, capsys):
    (tmp_path / "x").write_bytes(b"not it")
    assert main(["data", "enwik8", "--from", str(tmp_path / "x"), "--to", str(tmp_path / "enwik8")]) == 2
    assert "is not enwik8: it has 6 bytes instead of 100000000; give another source" in capsys.readouterr().err
    assert not (tmp_path / "enwik8").exists() and (tmp_path / "x").exists()
    assert main(["data", "enwik8", "--from", str(tmp_path / "none"), "--to", str(tmp_path / "enwik8")]) == 2
    assert "does not exist; give an existing file" in capsys.readouterr().err
    assert main(["data", "enwik9"]) == 2 and "did you mean enwik8" in capsys.readouterr().err
    assert main(["data"]) == 2 and main(["data", "--help"]) == 0


def test_a_recipe_without_its_data_names_the_command(tmp_path):
    with pytest.raises(ValueError, match="get it with: expire-span data enwik8"):
        Text(TextTask(path=str(tmp_path / "enwik8")))


# Books


def test_books_come_from_a_folder_or_an_archive(tmp_path, capsys):
    folder = tmp_path / "mine" / "train"
    folder.mkdir(parents=True)
    (folder / "1.txt").write_text("one")
    (folder / "notes.md").write_text("no book")
    (folder / "folder.txt").mkdir()
    with tarfile.open(tmp_path / "b.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "mine", "mine")
    for number, source in enumerate((tmp_path / "mine", tmp_path / "b.tar.xz")):
        target = tmp_path / f"out{number}"
        assert main(["data", "books", "--from", str(source), "--to", str(target)]) == 0
        assert [str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()] == ["train/1.txt"]
    assert main(["data", "books", "--from", str(tmp_path / "mine"), "--to", str(target)]) == 2
    assert "already exists and is not empty" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no \.txt file"):
        datasets.make_books(tmp_path / "out3", str(tmp_path / "empty"), lambda *_: None)
    (tmp_path / "bad.tar").write_bytes(b"x" * 1000)
    with pytest.raises(UserError, match="cannot be unpacked"):
        datasets.make_books(tmp_path / "out3", str(tmp_path / "bad.tar"), lambda *_: None)
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "b.tar.xz", "out0", "out1", "empty", "bad.tar"}
    with pytest.raises(ValueError, match=r"has the folder train but not validation, test; .*: expire-span data books"):
        find_books(str(target))


def test_books_from_a_url_leave_only_the_books(server, tmp_path):
    with tarfile.open(tmp_path / "b.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("1.txt"))
    target, url = tmp_path / "data" / "books", f"{server.url}/all/books"
    server.files["books"] = b"<html>no archive</html>"
    for _ in range(2):
        with pytest.raises(UserError, match=r"all/books cannot be unpacked \(it is no tar archive\); give a folder"):
            datasets.make_books(target, url, lambda *_: None)
        assert not list(target.parent.iterdir())
    server.files["books"] = (tmp_path / "b.tar").read_bytes()
    datasets.make_books(target, url, lambda *_: None)
    assert [path.name for path in target.parent.rglob("*")] == ["books", "1.txt"]


def test_pg19_is_fetched_book_by_book_from_its_listing(server, tmp_path):
    texts = {f"{split}/{n}.txt": f"{split} book {n}".encode() for split in datasets.PG19_SPLITS for n in range(3)}

    def listing(path: str) -> bytes:
        split = path.split("prefix=")[1].split("%2F")[0]
        names = [name for name in texts if name.startswith(split)]
        second = "pageToken" in path
        items = [
            {
                "name": name,
                "mediaLink": f"{server.url}/all/{name}",
                "size": str(len(texts[name])),
                "md5Hash": base64.b64encode(hashlib.md5(texts[name]).digest()).decode(),
            }
            for name in (names[2:] if second else names[:2])
        ]
        return json.dumps({"items": items, **({} if second else {"nextPageToken": "2"})}).encode()

    server.files |= {**texts, "o": listing}

    def make(limit):
        link = f"{server.url}/all/o"
        return datasets.make_books(tmp_path / "pg", None, lambda *_: None, limit=limit, listing=link)

    make(1)
    assert len(list((tmp_path / "pg").rglob("*.txt"))) == 3
    make(None)
    assert {str(p.relative_to(tmp_path / "pg")): p.read_bytes() for p in (tmp_path / "pg").rglob("*.txt")} == texts
    server.files["test/2.txt"] = b"changed"
    (tmp_path / "pg" / "test" / "2.txt").unlink()
    with pytest.raises(RunError, match="is damaged"):
        make(None)
    with pytest.raises(RunError, match=r"list of PG-19 books at .* cannot be read"):
        datasets.make_books(tmp_path / "pg2", None, lambda *_: None, listing=f"{server.url}/all/none")
    outside = {"name": "train/../../x.txt", "mediaLink": f"{server.url}/all/train/1.txt", "size": "1", "md5Hash": ""}
    for odd in (b"<html>", b"[]", b'{"items": [{}]}', json.dumps({"items": [outside]}).encode()):
        server.files["odd"] = odd
        with pytest.raises(RunError, match=r"list of PG-19 books at .* cannot be read \(.+\); try again"):
            datasets.make_books(tmp_path / "pg2" / "in", None, lambda *_: None, listing=f"{server.url}/all/odd")
    assert not (tmp_path / "pg2").exists()
