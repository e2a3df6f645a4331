"""Attacks on the command line: options that do not fit a run, numbers beyond all bounds, files of the wrong kind.

One tiny run of each kind is made once; every command on it must end with exit code 2 and one sentence that names the value.
"""

from __future__ import annotations

import os
import shutil
import threading

import pytest

from expire_span.cli import main
from expire_span.disk.files import write_atomic
from expire_span.tasks.download import hold_lock
from expire_span.train import actor_critic, supervised
from tests.tiny import tiny_config, write_text

pytest.importorskip("gymnasium")

from tests.tiny_agents import tiny_agent

REFUSED = [
    ("eval walker --file text.txt", "--file text.txt does nothing here: run runs/walker is an agent"),
    ("eval walker --batches 1", "--batches 1 does nothing here: run runs/walker is an agent"),
    ("eval walker --path text.txt", "--path text.txt does nothing here"),
    ("eval reader --control forget", "--control forget does nothing here: run runs/reader is of task text, not an agent"),
    ("eval reader --episodes 5", "--episodes 5 does nothing here"),
    ("trace reader --episode 1", "--episode 1 is for agents, which play episodes; reader reads a sample"),
    ("trace reader --max-span inf", "the longest span must be 0 or more and finite, got inf"),
    ("trace reader --live inf", "the budget must be at least 1 living memory and finite, got inf"),
    ("figure cut reader --max-span -1 --out runs/a.png", "the longest span must be 0 or more and finite, got -1.0"),
    (f"figure ages reader --needed {10**40} --out runs/a.png", f"must be less than 2**63 in size, got {10**40}"),
    ("figure growth --max-span 999999999999", "--max-span counts in cut only, got 999999999999.0 for the figure growth"),
    ("figure growth --longest 999999999999", "--longest must lie between 1 and 1,048,576 steps, got 999999999999"),
    ("ship reader --data w --out runs/b --sample empty.txt", "--sample empty.txt is empty"),
    ("trace reader --tokens 3 --out missing/x.jsonl", "--out missing/x.jsonl lies in missing, and there is no such folder"),
    ("trace reader --tokens 3 --out runs", "--out runs is a folder; give the name of a file in it"),
    ("trace reader --tokens 3 --out .", "--out . names no file to write"),
    ("trace reader --tokens 3 --out a\0b", "a name holds a character that no file name can have"),
    ("figure spans reader --out runs/a.exe", "a figure is written as pdf, png, svg, got runs/a.exe"),
    ("data books --to runs/d --from runs", "runs holds no .txt file"),
    ("data enwik8 --to runs/d --from text.txt", "text.txt is not enwik8: it has 3000 bytes instead of 100000000"),
    ("eval broken", "no checkpoint of run runs/broken is intact (1 tried; of step-00000002, model.safetensors does not"),
    ("data collision --to runs/c --frames 999999999999999", "--frames 999,999,999,999,999 need 9000 TB, and "),
]  # fmt: skip
TAKEN = [
    f"trace reader --tokens 3 --max-span {10**39}",
    f"ship reader --data w --out runs/b --batches {2**62}",
    "figure ages reader --needed 1099511627776 --out runs/a.svg",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with a text and two finished runs: one of text, and an agent's."""
    folder = tmp_path_factory.mktemp("attacked")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        text = write_text(folder)
        (folder / "empty.txt").touch()
        config = tiny_config(text, {"dim": 8, "layers": 1, "ff_dim": 8}, steps=2, test_batches=1, tracker="none")
        supervised.train(config, folder / "runs" / "reader", shown=False)
        shutil.copytree(folder / "runs" / "reader", folder / "runs" / "broken")
        next((folder / "runs" / "broken").rglob("model.safetensors")).write_bytes(b"cut")
        actor_critic.train(tiny_agent(steps=1, tracker="none"), folder / "runs" / "walker", shown=False)
    return folder


@pytest.mark.parametrize(("command", "words"), REFUSED, ids=lambda text: text[:50])
def test_refused_in_one_sentence(folder, monkeypatch, capsys, command, words):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    assert main(command.split()) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("expire-span: ") and words in said, said
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("command", TAKEN, ids=lambda text: text[:50])
def test_numbers_beyond_what_there_is_mean_all_of_it(folder, monkeypatch, capsys, command):
    monkeypatch.chdir(folder)
    assert main(command.split()) == 0, capsys.readouterr().err


def test_a_file_that_the_user_names_may_be_a_link_or_a_pipe(folder, monkeypatch, tmp_path):
    """A rename would put a plain file in their place, which as root has cost people their /dev/null."""
    monkeypatch.chdir(folder)
    (tmp_path / "real.jsonl").touch()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "real.jsonl")
    assert main(["trace", "reader", "--tokens", "3", "--out", str(tmp_path / "link.jsonl")]) == 0
    assert (tmp_path / "link.jsonl").is_symlink() and len((tmp_path / "real.jsonl").read_text().splitlines()) == 4
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()), daemon=True)
    reader.start()
    assert main(["trace", "reader", "--tokens", "3", "--out", str(tmp_path / "pipe")]) == 0
    reader.join(20)
    assert read == [(tmp_path / "real.jsonl").read_bytes()] and (tmp_path / "pipe").is_fifo()
    with pytest.raises(OSError, match="not a plain file"):
        write_atomic(tmp_path / "pipe", b"x")


def test_a_lock_leaves_nothing_and_lets_one_in_at_a_time(tmp_path):
    inside, most = [], []

    def work() -> None:
        for _ in range(20):
            with hold_lock(tmp_path / "data"):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(most) == 80 and set(most) == {1} and not list(tmp_path.iterdir())
