"""Saved collisions: those of the simulation, one game a folder, one kind a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from expire_span.cli import main
from expire_span.runs import UserError
from expire_span.settings.tasks import CollisionTask
from expire_span.tasks import datasets
from expire_span.tasks.collision import Collision


def test_saved_collision_is_the_simulation(tmp_path):
    assert main(["data", "collision", "--to", str(tmp_path / "c"), "--frames", "2400"]) == 0
    task = Collision(CollisionTask(path=str(tmp_path / "c")))
    live = Collision(CollisionTask())
    for split, warm in (("train", 4 * 8), ("valid", 4 * 4)):  # 256 simulations of 8 frames, 64 of 4
        saved = next(task.stream(split, batch=4, block=8, seed=0))
        simulated = next(live.stream(split, batch=1, block=8 * (warm + 1), seed=0))
        assert np.array_equal(saved.x[0], simulated.x[0, -8:]) and saved.fresh.all()
    stream = task.stream("test", batch=4, block=80, seed=0)
    assert sum(out.x.shape[1] for out in stream) == 8 * 50
    again = task.stream("train", batch=4, block=800, seed=0)
    batches = [next(again) for _ in range(7)]
    assert [bool(out.fresh.all()) for out in batches] == [True, *[False] * 4, True, False]
    other = task.stream("train", batch=4, block=800, seed=0)
    other.load_state_dict(again.state_dict())
    assert np.array_equal(next(other).x, next(again).x)
    with pytest.raises(UserError, match=r"train.npy holds 2,000 frames, and 1,000 were asked for; remove it"):
        datasets.make_collision(tmp_path / "c", 1200, lambda *_: None)
    (tmp_path / "c" / "train.npy").write_bytes(b"no frames")
    with pytest.raises(UserError, match=r"train.npy is not a file of frames"):
        datasets.make_collision(tmp_path / "c", 2400, lambda *_: None)
    with pytest.raises(ValueError, match=r"none/train.npy is missing; make it with: expire-span data collision"):
        Collision(CollisionTask(path=str(tmp_path / "none"))).stream("train", batch=1, block=8, seed=0)


def test_a_folder_of_collisions_is_of_one_game(tmp_path, capsys):
    command = ["data", "collision", "--to", str(tmp_path / "c"), "--frames", "2400"]
    assert main([*command, "--meet-prob", "0.3"]) == main([*command, "--meet-prob", "0.3"]) == 0
    capsys.readouterr()
    assert main(command) == 2
    assert "was made with --easy latest --meet-prob 0.3, not --easy latest --meet-prob 0;" in capsys.readouterr().err
    (tmp_path / "c" / "game.json").write_text('{"meet_prob": 0.3}')  # as of a folder saved before there were two kinds
    assert main([*command, "--meet-prob", "0.3", "--easy", "now"]) == 2 and "not --easy now" in capsys.readouterr().err
    assert main([*command, "--meet-prob", "0.3"]) == 0
    (tmp_path / "c" / "game.json").unlink()  # as of a folder that was saved before meetings could be forced
    assert main([*command, "--meet-prob", "0.3"]) == 2 and main(command) == 0
    for damage in ("{", "[" * 100_000):
        (tmp_path / "c" / "game.json").write_text(damage)
        assert main(command) == 2 and "game.json is not valid JSON" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"expire-span data collision --meet-prob 0.3 --frames 16000000 --to \S*none"):
        Collision(CollisionTask(path=str(tmp_path / "none"), meet_prob=0.3)).stream("train", batch=1, block=8, seed=0)


def test_saved_collisions_of_one_kind_are_refused_as_the_other(tmp_path):
    """Who trains on `now` must not read `latest` unnoticed; the sentence names both kinds and the command that helps."""
    folder, old = tmp_path / "c", tmp_path / "old"
    for place, kind in ((folder, ["--easy", "now"]), (old, [])):
        assert main(["data", "collision", "--to", str(place), "--frames", "24000", "--meet-prob", "0.5", *kind]) == 0
    (old / "game.json").unlink()  # saved before anything was noted: latest
    x = {place: next(rows(place, easy)).x.numpy() for place, easy in ((folder, "now"), (old, "latest"))}
    different = (x[folder] != x[old]).reshape(-1, 8).any(0)
    assert not different[:6].any() and different[6:].all()  # only the questions differ
    with pytest.raises(ValueError, match=r"c was made with --easy now, and --task.easy is latest; set --task.easy now"):
        rows(folder, "latest")
    with pytest.raises(
        ValueError, match=r"old was made with --easy latest.*--easy now --frames 16000000 --to \S*old-now"
    ):
        rows(old, "now")


def rows(folder, easy):
    return Collision(CollisionTask(path=str(folder), easy=easy)).stream("train", batch=4, block=800, seed=0)


def test_several_meeting_chances_are_parts_of_one_training_split(tmp_path, capsys):
    command = ["data", "collision", "--to", str(tmp_path / "c"), "--frames", "24000", "--meet-prob", "0.5", "0"]
    assert main(command) == 0

    def share_of_meetings(split: str, batch: int) -> list[float]:
        rows = Collision(CollisionTask(path=str(tmp_path / "c"))).stream(split, batch=batch, block=8000, seed=0)
        x = next(rows).x.numpy().reshape(batch, -1, 8)
        return [float(v) for v in ((x[..., 0] == x[..., 3]) & (x[..., 1] == x[..., 4])).mean(1)]

    dense, game = share_of_meetings("train", 2)
    assert 0.4 < dense < 0.6 and game < 0.1 and max(share_of_meetings("test", 2)) < 0.1
    capsys.readouterr()
    assert main(command[:-2]) == 2 and "at least one probability" in capsys.readouterr().err
    assert (
        main(command[:-1]) == 2
        and "made with --easy latest --meet-prob 0.5 0, not --easy latest --meet-prob 0.5;" in capsys.readouterr().err
    )


def test_collision_takes_no_source_and_needs_frames(tmp_path, capsys):
    assert main(["data", "collision", "--from", "x"]) == 2 and "takes no --from" in capsys.readouterr().err
    assert main(["data", "collision", "--frames", "5", "--to", str(tmp_path / "c")]) == 2
    assert "--frames must be at least 12, got 5" in capsys.readouterr().err
    assert not list(Path(tmp_path).iterdir())
