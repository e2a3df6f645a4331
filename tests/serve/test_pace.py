"""How many tokens of prompts are read between two decode steps."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("transformers")

from expire_span.serve import pace
from expire_span.serve.pace import CAPPED_CHUNK, CHUNK, STEP, Pace
from tests.hf_models import forgetful, tiny


def timed(cost, pause):
    """A pace that has learned what a token costs."""
    found = Pace(512, 512, pause)
    for _ in range(20):
        found.note(128, 128 * cost)
    return found


@pytest.mark.parametrize(
    ("cost", "pause", "tokens"),
    [(0.002, 1.0, 448), (0.002, 0.3, 128), (0.0001, 1.0, 512), (0.1, 1.0, 64), (0.1, math.inf, 512)],
)
def test_a_chunk_takes_no_longer_than_the_pause(cost, pause, tokens):
    """In multiples of 64 tokens, at least one, at most 512."""
    assert timed(cost, pause).chunk(shared=True) == tokens


def test_nobody_waits_for_a_prompt_that_is_read_alone():
    assert timed(0.1, 1.0).chunk(shared=False) == 512


def test_the_first_chunk_is_the_smallest_and_a_slower_machine_makes_chunks_shorter():
    found = Pace(512, 512, 1.0)
    assert found.chunk(shared=True) == STEP
    found.note(STEP - 1, 100.0)  # says little
    assert found.chunk(shared=True) == STEP
    sizes = []
    for cost in (0.002, 0.02, 0.02, 0.02):
        found.note(STEP, STEP * cost)
        sizes.append(found.chunk(shared=True))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 448 and sizes[-1] == 64


def test_a_capped_model_reads_the_same_chunks_however_long_they_take():
    """What a cap evicts depends on where reading pauses, so an answer must not depend on what else runs."""
    free, capped = Pace.of(forgetful(tiny())), Pace.of(forgetful(tiny(), cap=12))
    for each in (free, capped):
        each.note(128, 128.0)
    assert (free.chunk(shared=False), free.chunk(shared=True)) == (CHUNK, STEP)
    assert capped.chunk(shared=False) == capped.chunk(shared=True) == CAPPED_CHUNK


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan")])
def test_a_pause_takes_some_time(wrong):
    with pytest.raises(ValueError, match="pause must be a number of seconds above 0, got"):
        Pace.of(forgetful(tiny()), wrong)


def test_a_gpu_reads_thousands_of_tokens_at_once(monkeypatch):
    class OnGpu:
        device, capped = torch.device("cuda"), False

    monkeypatch.setattr(pace, "model_of", lambda model: OnGpu)
    assert (Pace.of(None).chunk(False), Pace.of(None).chunk(True)) == (pace.GPU_CHUNK, pace.GPU_SHARED_CHUNK)
