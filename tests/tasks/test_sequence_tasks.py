"""Collision, copy, the twins of the grid worlds and books: compared with slow implementations, restored exactly, refusals."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from expire_span.settings.tasks import BooksTask, CollisionTask, CopyTask, CorridorTask, InstructionTask, PortalTask
from expire_span.tasks import twins
from expire_span.tasks.books import Books
from expire_span.tasks.collision import ASK, COLOUR, MEET, SPEED, START, Collision, Simulation
from expire_span.tasks.copying import Copy
from expire_span.tasks.episodes import EVAL_EPISODES, key_of
from expire_span.tasks.hashing import mix
from expire_span.tasks.registry import build_task
from expire_span.tasks.twins import demonstrate, make_dataset


def take(stream, count):
    return [next(stream) for _ in range(count)]


def number(value) -> int:
    return int(np.asarray(value).reshape(-1)[0])


# Collision


class SlowCollision:
    """One simulation in plain Python, frame by frame, from the description."""

    def __init__(self, config: CollisionTask, row: int, key: int) -> None:
        self.config, self.key, self.frame = config, self.mix(key + row), 0
        start = [self.unit(self.draw(START, n)) * (config.size - 1) for n in range(4)]
        self.places, self.speeds = [start[:2], start[2:]], [None, None]
        self.colours = [(self.draw(COLOUR, n) >> 32) * config.colours >> 32 for n in range(2)]
        self.seen: dict[tuple[int, int], tuple[int, int]] = {}
        self.latest = None

    @staticmethod
    def mix(x: int) -> int:
        return number(mix(np.uint64(x % 2**64)))

    @staticmethod
    def unit(draw: int) -> float:
        return (draw >> 11) / 2**53

    def draw(self, purpose: int, place: int) -> int:
        return self.mix(self.mix(self.key + purpose) + place)

    def inside(self, place) -> bool:
        return all(0 < x < self.config.size - 1 for x in place)

    def step(self):
        self.frame += 1
        config = self.config
        for n in range(2):
            speed, attempt = self.speeds[n], 0
            while speed is None or not self.inside([p + v for p, v in zip(self.places[n], speed)]):
                first = self.mix(self.draw(SPEED, 2 * self.frame + n) + attempt)
                radius = math.sqrt(-2 * math.log1p(-self.unit(first))) * config.speed
                angle = 2 * math.pi * self.unit(self.mix(first + 1))
                speed, attempt = [radius * math.cos(angle), radius * math.sin(angle)], attempt + 1
            self.speeds[n] = speed
            self.places[n] = [p + v for p, v in zip(self.places[n], speed)]
            draw = self.draw(COLOUR, 2 * self.frame + n)
            if (draw >> 32) < config.colour_prob * 2**32:
                self.colours[n] = ((draw & 0xFFFFFFFF) * config.colours) >> 32
        cells = [[round(x) for x in place] for place in self.places]
        if (self.draw(MEET, self.frame) >> 32) < config.meet_prob * 2**32:
            cells[1] = cells[0]
        if cells[0] == cells[1]:
            self.latest = tuple(self.colours)
            half = config.size // 2
            self.seen[self.latest] = (2 * (cells[0][0] >= half) + (cells[0][1] >= half), self.frame)
        draw = self.draw(ASK, self.frame)
        asked = divmod(((draw & 0xFFFFFFFF) * config.colours**2) >> 32, config.colours)
        if self.latest is not None and (draw >> 32) < config.latest_prob * 2**32:
            asked = self.latest if config.easy == "latest" else tuple(self.colours)
        answer = self.seen.get(asked)
        tokens = [
            x for n in range(2) for x in (cells[n][0], cells[n][1] + config.size, self.colours[n] + 2 * config.size)
        ]
        first = 2 * config.size + config.colours
        return tokens + [a + first for a in asked], 0 if answer is None else 1 + answer[0]


@pytest.mark.parametrize(
    "config",
    [
        CollisionTask(),
        CollisionTask(size=4, colours=2, colour_prob=0.3),
        CollisionTask(meet_prob=0.3),
        CollisionTask(easy="now", size=4, colours=2, colour_prob=0.3),
        CollisionTask(easy="now", meet_prob=0.3),
    ],
)
def test_collision_against_the_slow_reference_frame_by_frame(config):
    task = Collision(config)
    batches = take(task.stream("train", batch=3, block=8 * 50, seed=4), 6)
    scored = 0
    for row in range(3):
        slow = SlowCollision(config, row, number(key_of("train", 4)))
        for out in batches:
            for frame in range(50):
                tokens, label = slow.step()
                at = slice(8 * frame, 8 * frame + 8)
                assert out.x[row, at].tolist() == tokens
                assert out.mask[row, at].tolist() == [False] * 7 + [label > 0]
                assert not label or out.y[row, 8 * frame + 7] == task.first_answer + label - 1
                scored += label > 0
    assert scored > 50
    assert [bool(out.fresh.all()) for out in batches] == [True] + [False] * 5


def test_meetings_are_forced_in_training_only():
    def batch(split, share):
        return next(Collision(CollisionTask(meet_prob=share)).stream(split, batch=4, block=1600, seed=0))

    often = batch("train", 0.3).x
    met = (often[:, 0::8] == often[:, 3::8]) & (often[:, 1::8] == often[:, 4::8])
    assert 0.25 < met.float().mean() < 0.36  # 800 frames: three standard deviations are 0.05
    assert torch.equal(batch("test", 0.3).x, batch("test", 0.0).x)


def shares(rows, before, after, spans):
    simulation = Simulation(CollisionTask(), rows, key=key_of("train", 0))
    for _ in range(before // 500):
        simulation.run(500)
    ages = np.concatenate([(f.age[f.age >= 0]) for f in (simulation.run(500) for _ in range(after // 500))]) * 8
    return [float((ages > span).mean()) for span in spans]


def test_collision_answers_are_as_old_as_published():
    """Of the answers younger than 16k tokens, the published shares are older than 1k and 8k.

    Among young answers the shares settle as soon as the simulation is as old as they are; the long twin waits for all.
    """
    old, older, oldest = shares(256, 2500, 500, (1024, 8192, 16_384))
    young = 1 - oldest
    assert abs((old - oldest) / young - (0.886 - 0.491) / 0.509) < 0.03
    assert abs((older - oldest) / young - (0.576 - 0.491) / 0.509) < 0.03


@pytest.mark.long
def test_collision_answers_are_as_old_as_published_far_back():
    published = {1024: 0.886, 8192: 0.576, 16384: 0.491, 32768: 0.398, 65536: 0.264}
    found = shares(256, 60_000, 4000, tuple(published))
    assert all(abs(a - b) < 0.03 for a, b in zip(found, published.values())), found


def test_hints_ask_for_the_frames_own_collision_in_training_only():
    """At the sixth token: the quadrant where both particles stand, if it is one cell; all else is as without hints."""
    plain, hinted = (Collision(CollisionTask(size=4, colours=2, hints=hints)) for hints in (False, True))
    for split in ("train", "test"):
        a, b = (next(t.stream(split, batch=2, block=800, seed=0)) for t in (plain, hinted))
        assert torch.equal(a.x, b.x) and not a.mask[:, 5::8].any()
        assert torch.equal(a.y[:, 7::8], b.y[:, 7::8]) and torch.equal(a.mask[:, 7::8], b.mask[:, 7::8])
        assert bool(b.mask[:, 5::8].all()) == bool(b.mask[:, 5::8].any()) == (split == "train")
        if split == "train":
            row, column, other = b.x[:, 0::8], b.x[:, 1::8] - 4, b.x[:, 3::8]
            met = (row == other) & (b.x[:, 1::8] == b.x[:, 4::8])
            want = torch.where(met, hinted.first_answer + 2 * (row >= 2) + (column >= 2), hinted.no_collision)
            assert met.any() and torch.equal(b.y[:, 5::8], want)
    assert hinted.label(hinted.no_collision) == "no collision"


def test_talk_grows_in_training_and_is_whole_in_the_test(monkeypatch):
    """The first groups of episodes have the least talk; later ones any doubling up to the whole; the test has all of it."""
    talks: list[int] = []

    def note(twin, engine):
        talks.append(engine.config.talk)
        return demonstrate(twin, engine)

    monkeypatch.setattr(twins, "demonstrate", note)
    twin = twins.InstructionTwin(InstructionTask(instructions=1, talk=12, least_talk=4))
    train, test = (twins.RolledEpisodes(twin, split, 0) for split in ("train", "test"))
    for group, allowed in ((0, {4}), (twins.STAGE, {4, 8}), (2 * twins.STAGE, {4, 8, 12})):
        talks.clear()
        train.widths((group + np.arange(twins.STAGE)) * twins.ROLL)
        assert set(talks) == allowed
    talks.clear()
    test.widths(np.arange(4) * twins.ROLL)
    assert set(talks) == {12}
    with pytest.raises(ValueError, match=r"least_talk must be 0 or lie in 2..16, got 1"):
        InstructionTask(instructions=1, talk=16, least_talk=1)


def test_collision_refusals_labels_and_score():
    task = Collision(CollisionTask())
    with pytest.raises(ValueError, match="whole frames of 8 tokens, got block 12"):
        task.stream("train", batch=2, block=12, seed=0)
    with pytest.raises(ValueError, match=r"speed must lie in \(0, size / 4 = 4\], got 9"):
        CollisionTask(speed=9)
    with pytest.raises(ValueError, match="size must be at least 2, got 1"):
        CollisionTask(size=1)
    labels = task.codec.show(torch.tensor([3, 17, 32, 37, 42, 45]))
    assert labels == ["row 3", "column 1", "colour 0", "asked colour 0", "answer top left", "answer bottom right"]
    assert task.codec.size == 47 and task.score_of(0, 3, 4) == 0.25


# Copy


@pytest.mark.parametrize("block", [64, 13])
def test_copy_asks_for_the_number_of_a_tokens(block):
    task = Copy(CopyTask(min_length=10, max_length=64))
    rows: list[list] = [[] for _ in range(4)]
    for out in take(task.stream("train", batch=4, block=block, seed=0), 40):
        for row in range(4):
            if out.fresh[row]:
                rows[row] = []
            rows[row] += out.x[row].tolist()
            for at in out.mask[row].nonzero()[:, 0].tolist():
                seen = task.codec.show(torch.tensor(rows[row][: len(rows[row]) - out.x.shape[1] + at + 1]))
                assert seen[0] == "start" and seen[-1] == "how many?" and 10 <= len(seen) <= 64
                assert task.codec.show(out.y[row, at][None]) == [f"count {seen.count('A')}"]


def test_copy_is_evaluated_at_full_length_and_grows_in_training():
    task = Copy(CopyTask(min_length=10, max_length=80, growth=100))
    assert {out.x.shape[1] for out in task.stream("valid", batch=64, block=80, seed=0)} == {80}
    assert sum(int(out.mask.sum()) for out in task.stream("test", batch=50, block=33, seed=0)) == EVAL_EPISODES
    widths = task.stream("train", batch=4, block=80, seed=0).episodes.widths
    assert widths(np.arange(100)).max() <= 20 and 40 < widths(np.arange(300, 700)).max() <= 80
    with pytest.raises(ValueError, match=r"min_length must hold .* 10, got 9"):
        CopyTask(min_length=9)


# Twins


def test_corridor_twin_asks_for_the_door_of_the_cue():
    data, task = make_dataset(CorridorTask(max_length=12), 200), build_task(CorridorTask(max_length=12))
    for row in range(200):
        labels = task.codec.show(torch.from_numpy(data.tokens[row, : data.widths[row]]))
        assert data.scored[row].nonzero()[0].tolist() == [data.widths[row] - 1]
        door = labels[-2:].index(labels[0].replace("cue", "door"))
        assert task.codec.label(int(data.targets[row, data.widths[row] - 1])) == ("go up", "go down")[door]


def test_portal_twin_asks_only_in_known_rooms_and_the_past_has_the_answer():
    config = PortalTask(rooms=5)
    data, task = make_dataset(config, 100), build_task(config)
    for row in range(100):
        labels = task.codec.show(torch.from_numpy(data.tokens[row, : data.widths[row]]))
        visits = [
            (labels[n], labels[n + 2], labels[n + 3].split()[1] if n + 3 < len(labels) else "6", n)
            for n in range(0, len(labels), 3)
        ]
        right: dict[str, str] = {}
        for entrance, door, following, at in visits:
            room, left = entrance.split()[1], entrance.split()[2]
            side = "left" if door.endswith("0,0") else "right"
            colour = left if side == "left" else {"red": "blue", "blue": "red"}[left]
            assert bool(data.scored[row, at]) == (room in right)
            if room in right:
                assert colour == right[room] and task.codec.label(int(data.targets[row, at])) == f"go {side}"
            passed = following == str(int(room) + 1)
            right.setdefault(room, colour if passed else {"red": "blue", "blue": "red"}[colour])
    assert data.scored.sum() > 300


def test_instruction_twin_asks_at_places_that_were_mentioned():
    config = InstructionTask(instructions=3, talk=20, cancel_prob=0.4, replace_prob=0.3)
    data, task = make_dataset(config, 100), build_task(config)
    walked = 0
    for row in range(100):
        labels = task.codec.show(torch.from_numpy(data.tokens[row, : data.widths[row]]))
        for at in data.scored[row].nonzero()[0]:
            place, past = labels[at], " ".join(labels[: at + 1])
            target = task.codec.label(int(data.targets[row, at]))
            told = past.rfind(f"reach the {place} ")
            assert labels[at - 4 : at] == ["you", "are", "at", "the"] and told >= 0
            told = max(told, past.rfind(f"at the {place} {target.split()[0]} the {target.split()[-1]} instead"))
            cancelled = past.rfind(f"never mind the {place}") > told
            assert (target == "walk on") == cancelled or "well done" in past
            walked += target == "walk on"
            if not cancelled and target != "walk on":
                words = past[told:].split()
                assert target.split()[0] in words[:8] and target.split()[1] in words[:8]
    assert walked > 10


@pytest.mark.parametrize(
    "config",
    [
        CollisionTask(size=4, colours=2, eval_frames=400),
        CopyTask(min_length=10, max_length=40),
        CorridorTask(max_length=9),
        PortalTask(rooms=3),
        InstructionTask(instructions=2, talk=8),
    ],
    ids=lambda c: c.kind,
)
@pytest.mark.parametrize("whole", [True, False])
def test_places_are_saved_exactly_and_evaluation_ends(config, whole):
    task = build_task(config)
    block = (task.longest if task.longest < 1000 else 16) if whole else 8
    for split in ("train", "valid"):
        stream, other = (task.stream(split, batch=3, block=block, seed=1) for _ in range(2))
        take(stream, 4)
        other.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        for left, right in zip(take(stream, 3), take(other, 3)):
            for name in ("x", "y", "mask", "fresh"):
                assert torch.equal(getattr(left, name), getattr(right, name))
    batches = list(task.stream("test", batch=64, block=block, seed=0))
    assert all(int(out.x.max()) < task.codec.size and int(out.y.max()) < task.codec.size for out in batches)
    assert sum(int(out.mask.sum()) for out in batches) > 50


def test_twin_refuses_a_chain_that_its_expert_cannot_finish():
    with pytest.raises(ValueError, match="may need 132 steps for 8 rooms and 1 laps, but max_steps is 100"):
        build_task(PortalTask(max_steps=100))
    with pytest.raises(ValueError, match="at least 1 episode, got 0"):
        make_dataset(PortalTask(), 0)


# Books


def write_books(folder, count=20, size=90, text="the quick brown fox é\r\n"):
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        book = f"book {n:02d}: " + text * size
        (folder / f"{n:02d}.txt").write_bytes(book[: 200 + 37 * n].encode())
    return folder


@pytest.mark.parametrize("batch", [3, 30])
def test_books_are_read_whole_and_memory_is_emptied_between_them(tmp_path, batch):
    task = Books(BooksTask(path=str(write_books(tmp_path / "b"))))
    known = {book.tobytes(): n for n, book in enumerate(task.split("train"))}
    rows: list[list[int]] = [[] for _ in range(batch)]
    read = []
    for out in take(task.stream("train", batch=batch, block=50, seed=0), 90):
        for row in range(batch):
            if out.fresh[row] and rows[row]:
                read.append(np.array(rows[row], np.uint16))
                rows[row] = []
            x, y = out.x[row][out.mask[row]].tolist(), out.y[row][out.mask[row]].tolist()
            rows[row] = [*rows[row][:-1], *x, y[-1]]
    whole = [known[book.tobytes()] for book in read if book.tobytes() in known]
    assert len(whole) >= len(read) - batch * (batch > 18) and set(whole) == set(range(len(known)))
    if batch == 3:
        assert sorted(whole[: len(known) - 3]) == sorted(set(whole[: len(known) - 3])), (
            "no book twice before all were read"
        )


def test_books_are_split_by_book_and_evaluated_once(tmp_path):
    task = Books(BooksTask(path=str(write_books(tmp_path / "b"))))
    names = {split: [path.stem for path in files] for split, files in task.files.items()}
    assert names["valid"] == ["00", "16"] and names["test"] == ["01", "17"] and len(names["train"]) == 16
    for batch in (1, 2, 5):
        count = sum(int(out.mask.sum()) for out in task.stream("test", batch=batch, block=64, seed=0))
        assert count == sum(len(book) - 1 for book in task.split("test"))
    for split, folder in (("train", "train"), ("valid", "validation"), ("test", "test")):
        write_books(tmp_path / "pg" / folder, count=2, size=len(split))
    assert {s: len(f) for s, f in Books(BooksTask(path=str(tmp_path / "pg"))).files.items()} == dict(
        train=2, valid=2, test=2
    )


def test_rare_characters_share_a_token(tmp_path):
    task = Books(BooksTask(path=str(write_books(tmp_path / "b")), characters=4))
    assert task.codec.size == 5 and task.codec.label(0) == "rare"
    assert "␣" in task.codec.show(torch.arange(5)) and (task.split("train")[0] == 0).any()
    assert task.score_of(nll=math.log(2) * 6, correct=0, count=3) == pytest.approx(2)


def test_place_in_books_is_saved_exactly(tmp_path):
    task = Books(BooksTask(path=str(write_books(tmp_path / "b"))))
    for split in ("train", "test"):
        stream, other = (task.stream(split, batch=2, block=30, seed=1) for _ in range(2))
        take(stream, 7)
        other.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        for left, right in zip(take(stream, 9), take(other, 9)):
            assert torch.equal(left.x, right.x) and torch.equal(left.fresh, right.fresh)


def test_books_refuse_what_they_cannot_read(tmp_path):
    with pytest.raises(ValueError, match=r"is not a folder of books; .* expire-span data books"):
        Books(BooksTask(path=str(tmp_path / "none")))
    (tmp_path / "few").mkdir()
    with pytest.raises(ValueError, match="has no book for train"):
        Books(BooksTask(path=str(tmp_path / "few")))
    folder = write_books(tmp_path / "bad", 5)
    (folder / "03.txt").write_bytes(b"fine so far \xff\xfe")
    with pytest.raises(ValueError, match=r"03.txt is not UTF-8 text: byte 0xff at 12 of 14; convert or remove it"):
        assert not Books(BooksTask(path=str(folder))).codec.size
    (folder / "03.txt").write_bytes(b"")
    with pytest.raises(ValueError, match="holds 0 characters"):
        assert not Books(BooksTask(path=str(folder))).codec.size
