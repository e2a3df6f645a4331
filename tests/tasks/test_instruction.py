"""The instruction world: what is said is what is wanted, wrong and early acts cost, held-out pairs stay out."""

from __future__ import annotations

import numpy as np

from expire_span.settings.tasks import InstructionTask
from expire_span.tasks.gridworlds.levels import build_engine
from expire_span.tasks.gridworlds.sentences import HELD_OUT, OBJECTS, PAIRS, VERBS, read_sentence


def test_sentences_tell_what_the_engine_wants():
    engine = build_engine(InstructionTask(instructions=3, talk=40, cancel_prob=0.3, replace_prob=0.3), 50)
    engine.reset(seed=1)
    orders: list[dict[str, str]] = [{} for _ in range(50)]
    for _ in range(40):
        for row, ids in enumerate(engine.observe()["text"]):
            words = read_sentence(ids).split()
            if words[0] == "when":
                orders[row][words[4]] = f"{words[5]} the {words[7]}"
            elif words[:2] == ["never", "mind"]:
                del orders[row][words[3]]
            elif words[-1] == "instead":
                orders[row][words[2]] = f"{words[3]} the {words[5]}"
        engine.step(np.zeros(50, int))
    for row in range(50):
        wanted = "; ".join(f"{act} at the {place}" for place, act in orders[row].items())
        assert sorted(engine.describe_hidden(row)[7:].split("; ")) == sorted(wanted.split("; "))
    assert read_sentence(engine.observe()["text"][0]) == "go now"


def test_acts_before_the_end_of_the_talk_and_wrong_ones_cost():
    engine = build_engine(InstructionTask(instructions=1, talk=4), 1)
    engine.reset(seed=0)
    place = engine.place.copy()
    assert np.allclose(engine.step([5]).reward, -0.2)
    for _ in range(3):
        assert engine.step([1]).reward[0] == 0 and np.array_equal(engine.place, place)
    while engine.optimal_action()[0] < 4:
        engine.step(engine.optimal_action())
    right = int(engine.optimal_action()[0])
    assert np.allclose(engine.step([4 + (right - 3) % 24]).reward, -0.2)
    assert read_sentence(engine.observe()["text"][0]) == "that was wrong"
    out = engine.step([right])
    assert out.reward[0] == 1 and out.terminated[0] and engine.success[0]


def test_held_out_pairs_never_occur_in_training():
    seen = build_engine(InstructionTask(instructions=6, talk=20), 300)
    new = build_engine(InstructionTask(instructions=6, talk=20, pairs="held_out"), 300)
    held = {verb * len(OBJECTS) + thing for verb, thing in HELD_OUT}
    assert not held & set(np.unique(seen.said[..., 2]).tolist())
    assert set(np.unique(new.said[:, :6, 2]).tolist()) == held
    rest = [p for p in PAIRS if p not in HELD_OUT]
    assert {p[0] for p in rest} == set(range(len(VERBS))) and {p[1] for p in rest} == set(range(len(OBJECTS)))
