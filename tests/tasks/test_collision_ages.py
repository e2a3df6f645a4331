"""How far back collision's answers lie in both processes, and what direct lookup leaves; `benchmarks.collision` counts both."""

import numpy as np
import pytest

from benchmarks.collision import Ages, by_age, describe, lookup_error, simulate
from expire_span.settings.tasks import CollisionTask
from expire_span.tasks.collision import FRAME, Collision

MEASURED = {"present": 0.427, "latest": 0.065, 2048: 0.78, 4096: 0.62, 8192: 0.39}
"""Of the released process, over three streams of 60,000 frames (its median age: 6,400 frames)."""


def count(easy: str, rows: int, frames: int) -> tuple[dict, dict]:
    """Frequencies, each as the mean over streams and the standard deviation from stream to stream."""
    each = [describe(simulate(CollisionTask(easy=easy), 1, frames, seed=seed)) for seed in range(rows)]
    values = [{"present": x["present"], "latest": x["latest"], **x["older"]} for x in each]
    mean = {name: float(np.mean([x[name] for x in values])) for name in values[0]}
    return mean, {name: float(np.std([x[name] for x in values], ddof=1)) for name in values[0]}


@pytest.mark.long
def test_the_released_process_asks_as_it_was_measured():
    rows = 8
    mean, deviation = count("now", rows, 60_000)
    for name, measured in MEASURED.items():
        error = deviation[name] * (1 / rows + 1 / 3) ** 0.5  # of the difference between eight streams and three
        assert abs(mean[name] - measured) <= 4 * error + 0.005, (name, mean[name], measured, error)


def test_easy_questions_are_about_the_present_or_about_the_latest_collision():
    """With probability 0.4 a question is easy, and a random one of 4 pairs is the one that is meant: 0.4 + 0.6 / 4."""
    for easy, meant in (("now", "present"), ("latest", "latest")):
        drawn = simulate(CollisionTask(easy=easy, size=4, colours=2), 32, 1500, warm=1500)  # all pairs have met
        deviation = (0.55 * 0.45 / len(drawn["age"])) ** 0.5
        assert abs(drawn[meant].mean() - 0.55) < 5 * deviation + 0.005, (easy, drawn[meant].mean())


def test_lookup_knows_what_is_within_the_span_and_guesses_the_rest():
    age, label = np.array([0, 10, 2048, 2049, 9000]), np.array([0, 1, 2, 3, 3])
    assert lookup_error(age, label, 2048 * FRAME) == 0.0  # both older ones are of the most frequent label
    assert lookup_error(age, np.array([3, 3, 3, 0, 1]), 2048 * FRAME) == 0.4


def test_ages_read_from_tokens_are_those_of_the_simulation():
    config = CollisionTask(easy="now", size=4, colours=2, colour_prob=0.3)
    task = Collision(config)
    batch = next(task.stream("test", batch=3, block=8 * 200, seed=0))
    ages = Ages(task, 3)
    halves = [ages.of(x) for x in np.split(batch.x.numpy(), 2, axis=1)]
    found, whole = np.concatenate(halves, 1), Ages(task, 3).of(batch.x.numpy())
    assert np.array_equal(found, whole) and (found >= -1).all() and (found.max(1) > 0).all()
    frames = batch.x.numpy().reshape(3, -1, FRAME)
    met = (frames[..., 0] == frames[..., 3]) & (frames[..., 1] == frames[..., 4])
    assert not met[found > 0].all() and (found[~met] != 0).all()  # an age of 0 needs a collision in that very frame


def test_errors_by_age_add_up():
    age = np.array([0, 5, 12, 20, 30, 99, -1, -1])
    correct = np.array([1, 1, 0, 1, 0, 0, 1, 0], bool)
    told = by_age(age, np.zeros(8, int), correct, 10 * FRAME)
    parts = told["by age in spans"]
    assert [parts[name]["share"] * 8 for name in parts] == [2, 2, 1, 0, 1, 2]
    assert told["error"] == 0.5 == sum(x["share"] * (x["error"] or 0) for x in parts.values())
