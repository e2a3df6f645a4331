"""Playing in the terminal, with a script in place of a person."""

from __future__ import annotations

import io

import pytest

from expire_span.cli import main
from expire_span.tasks.gridworlds.levels import build_engine, level_config


def play(monkeypatch, capsys, world: str, script: str, *options: str) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO(script))
    assert main(["play", world, "--colour", "False", *options]) == 0
    return capsys.readouterr().out


def expert_script(name: str, seed: int) -> str:
    engine = build_engine(level_config(name, "Easy"), 1)
    engine.reset(seed)
    lines = []
    while not engine.over[0]:
        action = int(engine.optimal_action()[0])
        if action >= 4:
            hidden = engine.describe_hidden(0).removeprefix("to do: ").split(" at the")[0]
            lines.append(hidden)
        else:
            lines.append("adws"[action])
        engine.step([action])
    return "\n".join(lines) + "\nq\n"


@pytest.mark.parametrize("world", ["corridor", "portal", "instruction"])
def test_the_expert_wins_by_keys(monkeypatch, capsys, world):
    out = play(monkeypatch, capsys, world, expert_script(world.capitalize(), 3), "--seed", "3")
    assert "success after" in out and "@" in out


def test_several_keys_hidden_state_and_nonsense(monkeypatch, capsys):
    out = play(monkeypatch, capsys, "corridor", "dd\n?\nxyz\n\nq\nd\n")
    assert out.count("@") == 3 and "door is right" in out and "cannot read 'xyz'" in out


def test_the_end_of_the_input_ends_the_game(monkeypatch, capsys):
    assert "keys:" in play(monkeypatch, capsys, "portal", "")


def test_unknown_worlds_are_refused(capsys):
    assert main(["play", "portl"]) == 2 and "did you mean portal" in capsys.readouterr().err
    assert main(["play"]) == 2 and main(["play", "--help"]) == 0
