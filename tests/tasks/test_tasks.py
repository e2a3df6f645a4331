"""Tasks: what a row sees, what is scored, and that a saved place is the same place."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expire_span.recipes.tasks import collision, collision_dense, collision_lessons, collision_mixed, collision_sparse
from expire_span.settings.run import EntrancesTask, RecallTask, TextTask, WordsTask
from expire_span.tasks import datasets
from expire_span.tasks.collision import Collision
from expire_span.tasks.contract import Batch
from expire_span.tasks.entrances import Entrances, Series, count_entrances
from expire_span.tasks.recall import EVAL_EPISODES, Recall
from expire_span.tasks.registry import build_task
from expire_span.tasks.tales import SHE, tell_tales
from expire_span.tasks.text import Text
from expire_span.tasks.words import Words, split_words


def text_file(folder: Path, size: int) -> tuple[Text, bytes]:
    content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    (folder / "a.bin").write_bytes(content)
    return Text(TextTask(path=str(folder / "a.bin"), valid_share=0.1, test_share=0.2)), content


def take(stream, count: int) -> list[Batch]:
    return [next(stream) for _ in range(count)]


def assert_same(left: Batch, right: Batch) -> None:
    for name in ("x", "y", "mask", "fresh"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name


# Text


def test_splits_are_disjoint_and_nothing_is_dropped(tmp_path):
    task, content = text_file(tmp_path, 1003)
    parts = [task.split(split).tobytes() for split in ("train", "valid", "test")]
    assert b"".join(parts) == content
    assert [len(p) for p in parts] == [703, 100, 200]


def test_folder_is_joined_in_sorted_order(tmp_path):
    for name, content in (("b/2.txt", b"22\r\n"), ("a.txt", b"1\n"), ("c.txt", b"\x00\xff")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert Text(TextTask(path=str(tmp_path))).data.tobytes() == b"1\n22\r\n\x00\xff"


@given(size=st.integers(100, 400), batch=st.integers(1, 5), block=st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_training_rows_run_forward_and_wrap(tmp_path_factory, size, batch, block):
    task, _ = text_file(tmp_path_factory.mktemp("text"), size)
    train = task.split("train").tobytes()
    place = [row * len(train) // batch for row in range(batch)]
    for number, out in enumerate(take(task.stream("train", batch=batch, block=block, seed=3), 2 * len(train) // block)):
        for row in range(batch):
            assert bool(out.fresh[row]) == (number == 0 or place[row] == 0)
            count = int(out.mask[row].sum())
            assert out.mask[row, :count].all() and count >= 1
            assert bytes(out.x[row, :count].tolist()) == train[place[row] : place[row] + count]
            assert bytes(out.y[row, :count].tolist()) == train[place[row] + 1 : place[row] + 1 + count]
            place[row] += count
            assert count == block or place[row] == len(train) - 1
            place[row] = 0 if place[row] == len(train) - 1 else place[row]


@pytest.mark.parametrize(("batch", "block"), [(1, 7), (3, 16), (4, 1000), (300, 5)])
def test_valid_bytes_are_predicted_once_each(tmp_path, batch, block):
    task, _ = text_file(tmp_path, 1003)
    valid = task.split("valid").tobytes()
    rows_x, rows_y = [b""] * batch, [b""] * batch
    for number, out in enumerate(task.stream("valid", batch=batch, block=block, seed=0)):
        assert bool(out.fresh.all()) == (number == 0) and bool(out.fresh.any()) == (number == 0)
        for row in range(batch):
            rows_x[row] += bytes(out.x[row][out.mask[row]].tolist())
            rows_y[row] += bytes(out.y[row][out.mask[row]].tolist())
    assert b"".join(rows_x) == valid[:-1] and b"".join(rows_y) == valid[1:]


def test_text_errors_name_both_values(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"missing\.txt is neither a file nor a folder"):
        Text(TextTask(path=str(tmp_path / "missing.txt")))
    with pytest.raises(
        ValueError, match=r"data enwik8 --to \S+shipped/enwik8, and expire-span data books --from FOLDER"
    ):
        Text(TextTask(path=str(tmp_path / "shipped")))
    with pytest.raises(ValueError, match="holds 0 bytes, but text needs at least 2"):
        Text(TextTask(path=str(tmp_path / "empty.txt")))
    with pytest.raises(ValueError, match="empty path"):
        Text(TextTask())
    task, _ = text_file(tmp_path, 100)
    with pytest.raises(
        ValueError, match=r"100 bytes leave 70 for train.* 4 rows of 32 bytes needs 129; give about \d+"
    ):
        task.stream("train", batch=4, block=32, seed=0)


def test_advised_size_is_enough(tmp_path):
    task, _ = text_file(tmp_path, 100)
    with pytest.raises(ValueError) as error:
        task.stream("train", batch=4, block=32, seed=0)
    advised = int(str(error.value).split("give about ")[1].split()[0])
    text_file(tmp_path, advised)[0].stream("train", batch=4, block=32, seed=0)


def test_bytes_have_visible_labels(tmp_path):
    task, _ = text_file(tmp_path, 100)
    assert task.codec.show(torch.tensor([65, 32, 10, 200])) == ["A", "␣", "⏎", "\\xc8"]
    assert task.score_of(nll=np.log(2) * 30, correct=0, count=10) == pytest.approx(3.0)


# Recall

SHORT = RecallTask(min_length=3, max_length=9, colours=3, distractors=4, distractor_prob=0.4, blank_prob=0.2)


def episodes_of_rows(task: Recall, batches: list[Batch]) -> list[list[list[str]]]:
    """Slow reading of packed rows: labels, split after every question."""
    rows = []
    for row in range(len(batches[0].x)):
        episodes: list[list[str]] = [[]]
        for label in (label for out in batches for label in task.codec.show(out.x[row])):
            episodes[-1].append(label)
            if label == "which?":
                episodes.append([])
        rows.append(episodes)
    return rows


def check_episode(task: Recall, labels: list[str]) -> None:
    assert labels[0].startswith(("cue ", "wall ")) and labels[-1] == "which?"
    assert task.config.min_length <= len(labels) - 2 <= task.config.max_length
    assert all(label.startswith(("niche ", "wall ")) for label in labels[1:-1])


@pytest.mark.parametrize("block", [1, 4, 10, 11, 40])
@pytest.mark.parametrize("split", ["train", "valid"])
def test_targets_against_a_slow_reading(block, split):
    """The target at each question is the cue since the question before it, or none, and nothing else is scored."""
    task = Recall(SHORT)
    batches = take(task.stream(split, batch=5, block=block, seed=1), 20)
    last = ["none"] * 5
    for out in batches:
        for row in range(5):
            for token, target, scored in zip(out.x[row], out.y[row], out.mask[row]):
                (label,) = task.codec.show(token[None])
                last[row] = label if label.startswith("cue") else last[row]
                assert bool(scored) == (label == "which?")
                assert not scored or task.codec.show(target[None]) == [last[row]]
                last[row] = "none" if scored else last[row]


def test_packed_rows_are_whole_episodes_across_blocks():
    task = Recall(SHORT)
    batches = take(task.stream("train", batch=4, block=7, seed=0), 60)
    assert [bool(out.fresh.all()) for out in batches] == [True] + [False] * 59
    for row in episodes_of_rows(task, batches):
        assert len(row) > 30
        for episode in row[:-1]:
            check_episode(task, episode)


def test_whole_episodes_are_padded_behind_the_question():
    task = Recall(SHORT)
    for out in take(task.stream("train", batch=6, block=task.longest, seed=0), 40):
        assert out.fresh.all() and out.mask.sum() == 6 and out.x.shape[1] <= task.longest
        assert (out.x[:, -1] != task.pad).any(), "a block is no wider than its longest episode"
        for row in out.x:
            labels = task.codec.show(row)
            end = labels.index("which?") + 1
            check_episode(task, labels[:end])
            assert set(labels[end:]) <= {"pad"}


@pytest.mark.parametrize("block", [7, 11])
@pytest.mark.parametrize("batch", [5, 64, 600])
def test_valid_is_finite_and_holds_its_episodes(block, batch):
    task = Recall(SHORT)
    batches = list(task.stream("valid", batch=batch, block=block, seed=0))
    assert sum(int(out.mask.sum()) for out in batches) == EVAL_EPISODES


def test_statistics_of_recall():
    task = Recall(RecallTask(min_length=5, max_length=30, colours=4, distractors=8, distractor_prob=0.3))
    lengths, cues, corridor = [], [], []
    for out in take(task.stream("train", batch=128, block=task.longest, seed=0), 64):
        lengths.append(out.mask.int().argmax(1) - 1)
        cues.append(out.x[:, 0])
        corridor.append(out.x[(out.x >= 4) & (out.x < task.question)])
    counts = torch.bincount(torch.cat(lengths))[5:]
    assert len(counts) == 26 and (counts > 230).all() and (counts < 410).all()  # 8192 / 26 = 315, five sigma = 88
    shares = torch.bincount(torch.cat(cues)) / 8192
    assert torch.allclose(shares, torch.full((4,), 0.25), atol=0.025)
    kinds = torch.bincount(torch.cat(corridor), minlength=task.question)[4:] / len(torch.cat(corridor))
    assert torch.allclose(kinds[:4], torch.full((4,), 0.075), atol=0.005)
    assert torch.allclose(kinds[4:], torch.full((8,), 0.0875), atol=0.005)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_share_of_blank_episodes(share):
    task = Recall(RecallTask(min_length=2, max_length=4, blank_prob=share))
    batches = take(task.stream("train", batch=500, block=task.longest, seed=0), 8)
    blank = torch.cat([out.y[out.mask] == task.none for out in batches]).float().mean()
    assert abs(float(blank) - share) < 0.03
    cues = torch.cat([out.x[:, 0] for out in batches])
    assert abs(float((cues >= 4).float().mean()) - share) < 0.03


def test_splits_and_seeds_draw_other_episodes():
    task = Recall(RecallTask(min_length=40, max_length=60))
    rows: set[bytes] = set()
    for split, seed in (("train", 0), ("valid", 0), ("test", 0), ("train", 1), ("valid", 1)):
        for out in take(task.stream(split, batch=64, block=task.longest, seed=seed), 8):
            rows.update(row[:40].numpy().tobytes() for row in out.x)
    assert len(rows) == 5 * 8 * 64


def test_recall_labels_and_score():
    task = Recall(RecallTask(colours=10, distractors=2))
    labels = task.codec.show(torch.arange(task.codec.size))
    assert labels[:2] == ["cue red", "cue blue"] and labels[9] == "cue colour 9" and labels[11] == "niche blue"
    assert labels[20:] == ["wall 0", "wall 1", "which?", "none", "pad"]
    assert task.score_of(nll=1.0, correct=3, count=4) == 0.75


# Both


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("kind", ["text", "packed", "whole"])
def test_place_is_saved_and_restored_exactly(tmp_path, kind, split):
    text_file(tmp_path, 9003)
    config = TextTask(path=str(tmp_path / "a.bin")) if kind == "text" else SHORT
    task = build_task(config)
    make = lambda: task.stream(split, batch=4, block=11 if kind == "whole" else 5, seed=2)  # noqa: E731
    stream = make()
    take(stream, 1)
    for skip in (0, 1, 6):
        saved = json.loads(json.dumps(stream.state_dict()))
        expected = take(stream, 1 + skip)
        again = make()
        again.load_state_dict(saved)
        for left, right in zip(expected, take(again, 1 + skip)):
            assert_same(left, right)


@pytest.mark.parametrize("config", [TextTask(path="pyproject.toml"), SHORT])
def test_place_of_another_batch_is_refused(config):
    task = build_task(config)
    saved = task.stream("train", batch=4, block=5, seed=0).state_dict()
    with pytest.raises(ValueError, match="4 rows but the batch is 3"):
        task.stream("train", batch=3, block=5, seed=0).load_state_dict(saved)


# Entrances


def entrances(**fields) -> tuple[Entrances, Series]:
    config = EntrancesTask(**{"min_length": 3, "max_length": 9, **fields})
    return Entrances(config), Series(config, "test", 4)


def count_runs(values: list[float]) -> int:
    return sum(inside for inside, _ in itertools.groupby(values, lambda x: 0 <= x <= 1))


def test_every_step_asks_for_the_count_so_far():
    task, series = entrances()
    for number, out in enumerate(take(task.stream("test", batch=1, block=10, seed=4), 16)):
        found = [n for n in range(16) if int(series.lengths(np.array([n]))[0]) == out.x.shape[1] - 1]
        matches = []
        for n in found:
            values = series.whole(np.array([n]), out.x.shape[1] - 1)[0]
            truth = [task.first_answer + count_runs(values[: t + 1].tolist()) for t in range(len(values))]
            matches.append(out.y[0, 1:].tolist() == truth and out.x[0, 1:].tolist() == task.to_levels(values).tolist())
        assert any(matches), number
        assert out.x[0, 0] == task.begin and not out.mask[0, 0] and out.mask[0, 1:].all()


def test_levels_never_mix_inside_and_outside():
    task, series = entrances(max_length=200)
    values = series.whole(np.arange(50), 200).ravel()
    for level, value in zip(task.codec.show(torch.from_numpy(task.to_levels(values))), values):
        assert level.startswith("inside" if 0 <= value <= 1 else "outside"), (level, value)
    assert (np.abs(values) >= 0.2 - 1e-12).all() and (np.abs(values - 1) >= 0.2 - 1e-12).all()


def test_packed_series_are_the_same_series():
    task, _ = entrances()
    packed = take(task.stream("train", batch=2, block=7, seed=4), 6)
    row = torch.cat([out.x[1] for out in packed]).tolist()
    answers = torch.cat([out.y[1] for out in packed]).tolist()
    own = Series(task.config, "train", 4)
    want, counts = [], []
    for n in (1, 3, 5, 7, 9, 11, 13):
        values = own.whole(np.array([n]), int(own.lengths(np.array([n]))[0]))[0]
        want += [task.begin, *task.to_levels(values).tolist()]
        counts += [0, *(task.first_answer + count_entrances(values)).tolist()]
    assert row == want[: len(row)] and answers == counts[: len(answers)]


def test_saved_place_of_entrances_is_the_same_place():
    task, _ = entrances()
    for block in (10, 4):
        stream, other = (task.stream("train", batch=3, block=block, seed=1) for _ in range(2))
        take(stream, 5)
        other.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        for left, right in zip(take(stream, 4), take(other, 4)):
            assert_same(left, right)


# Words


def test_words_are_ranked_and_rare_ones_unknown(tmp_path):
    (tmp_path / "t.txt").write_text("Don't stop, she said.\n\nShe said: stop! " * 200 + "rare once unseen")
    task = Words(WordsTask(path=str(tmp_path / "t.txt"), words=6))
    assert (
        task.names[0] == "<unknown>"
        and set(task.names[1:4]) == {"said", "she", "stop"}
        and task.codec.size == 7
        and "¶" in split_words("a\n \nb")
    )
    assert task.codec.show(torch.from_numpy(task.split("test")[-2:])) == ["<unknown>", "<unknown>"]
    assert split_words("Don't stop, she said.") == ["don't", "stop", ",", "she", "said", "."]
    out = next(iter(task.stream("train", batch=2, block=5, seed=0)))
    assert torch.equal(out.x[:, 1:], out.y[:, :-1])


def test_tales_agree_with_themselves():
    tales = tell_tales(40).split("\n\n")
    assert tales == tell_tales(40).split("\n\n") and len(set(tales)) == 40
    for tale in tales:
        name, trade, home = re.match(r"This is the tale of (\w+), the (\w+) from the (\w+)\.", tale).groups()
        assert tale.rstrip().endswith(f"That was the tale of {name}, the {trade} from the {home}.")
        she = name in SHE
        assert bool(re.search(r"\b(she|her)\b", tale)) == she and bool(re.search(r"\b(he|his)\b", tale)) != she
        assert re.search(r"took \w+ (\w+)", tale)[1] == re.search(r"put down \w+ (\w+)", tale)[1]


def test_progress_of_a_simulation_is_told_on_the_way(tmp_path):
    frames, told = 60_000, []
    datasets.make_collision(tmp_path / "c", frames, lambda done, total: told.append((done, total)))
    done = [x for x, _ in told]
    assert done == sorted(done) and done[-1] == frames and {total for _, total in told} == {frames}
    assert max(later - earlier for earlier, later in itertools.pairwise([0, *done])) < frames / 4


@pytest.mark.parametrize("recipe", [collision_dense, collision_sparse, collision_lessons, collision_mixed, collision])
def test_missing_collisions_name_the_command_of_the_guide(recipe, monkeypatch, tmp_path):
    guide = (Path(__file__).parent.parent.parent / "docs" / "tasks.md").read_text()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is missing; make it with: ") as error:
        Collision(recipe().task).stream("train", batch=1, block=8, seed=0)
    command = str(error.value).split("make it with: ")[1]
    assert command.removesuffix(" --to data/collision") + "\n" in guide, command
