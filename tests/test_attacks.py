"""Attacks on the command line: options that do not fit a run, numbers beyond all bounds, files of the wrong kind.

One tiny run of each kind is made once; every command on it must end with exit code 2 and one sentence that names the value.
"""

from __future__ import annotations

import pytest

from expire_span.cli import main
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
    (f"figure ages reader --needed {10**40} --out runs/a.png", f"for the figure ages, got {10**40} for ages"),
    ("figure growth --longest 999999999999", "--longest must lie between 1 and 1,048,576 steps, got 999,999,999,999"),
    ("ship reader --data w --out runs/b --sample empty.txt", "--sample empty.txt is empty"),
    ("data collision --to runs/c --frames 999999999999999", "--frames 999,999,999,999,999 need 9,000,000.0 GB and "),
]  # fmt: skip
TAKEN = [
    f"trace reader --tokens 3 --max-span {10**39}",
    f"ship reader --data w --out runs/b --batches {10**40}",
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
        actor_critic.train(tiny_agent(steps=1, tracker="none"), folder / "runs" / "walker", shown=False)
    return folder


@pytest.mark.parametrize(("command", "words"), REFUSED, ids=lambda text: text[:50])
def test_refused_in_one_sentence(folder, monkeypatch, capsys, command, words):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    assert main(command.split()) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("expire-span: ") and words in said and len(said.splitlines()) == 1, said
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("command", TAKEN, ids=lambda text: text[:50])
def test_numbers_beyond_what_there_is_mean_all_of_it(folder, monkeypatch, capsys, command):
    monkeypatch.chdir(folder)
    assert main(command.split()) == 0, capsys.readouterr().err
