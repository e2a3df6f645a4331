"""Playing in the terminal, with a script in place of a person; strips of frames for documents."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from expire_span.cli import main
from expire_span.settings.tasks import InstructionTask
from expire_span.tasks.gridworlds.levels import build_engine, level_config
from expire_span.tasks.gridworlds.render import caption_of, render_ansi, render_rgb, save_strip


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
    assert out.count("@") == 3 + out.count("@ you") and "go through the door of that colour" in out
    assert "door is right" in out and "cannot read 'xyz'" in out


def test_the_end_of_the_input_ends_the_game(monkeypatch, capsys):
    assert "keys:" in play(monkeypatch, capsys, "portal", "")


def test_unknown_worlds_are_refused(capsys):
    assert main(["play", "portl"]) == 2 and "did you mean portal" in capsys.readouterr().err
    assert main(["play"]) == 2 and main(["play", "--help"]) == 0


def test_a_strip_has_its_frames_and_the_sentences_below(tmp_path):
    engine = build_engine(InstructionTask(instructions=1, talk=6), 1)
    engine.reset(seed=0)
    frames, captions = [], []
    for _ in range(3):
        frames.append(render_rgb(engine))
        captions.append(caption_of(engine))
        assert captions[-1] and captions[-1] in render_ansi(engine)
        engine.step(engine.optimal_action())
    side = frames[0].shape[0]
    shown = np.asarray(Image.open(save_strip(tmp_path / "a.png", frames, captions, scale=2)))
    assert np.array_equal(shown[: 2 * side : 2, : 2 * side : 2], frames[0]) and shown.shape[1] == 3 * 2 * side + 2 * 8
    assert shown[2 * side + 8 :].min() < 100 and np.all(shown[2 * side : 2 * side + 8] == 255)
    assert Image.open(save_strip(tmp_path / "b.png", frames)).size == (9 * side + 2 * 8, 3 * side + 8)
    for given, told, words in (
        (frames, ["one"], "one caption for each frame, got 1 for 3"),
        ([], [], "1 frame, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            save_strip(tmp_path / "c.png", given, told)
    assert not (tmp_path / "c.png").exists()
