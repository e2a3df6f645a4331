"""The server's engine: answers that are written together get the tokens that each would get alone."""

from __future__ import annotations

import queue

import pytest
import torch

pytest.importorskip("transformers")

from expire_span.hf.answers import Request
from expire_span.hf.decoding import RetrofitEngine
from expire_span.hf.engine import AnswerEngine
from expire_span.hf.streams import Stream
from expire_span.sampling import Sampling, draw, draw_rows
from expire_span.store.slots import FRESH

from .hf_models import byte_tokenizer, forgetful, tiny

SAMPLINGS = (
    Sampling(temperature=0),
    Sampling(seed=3),
    Sampling(seed=4),
    Sampling(temperature=0.7, top_k=9, seed=3),
    Sampling(top_p=0.8, seed=1),
)


class Tokens:
    """A tokenizer whose text is the tokens' numbers, so that an answer shows which tokens were drawn."""

    eos_token_id = None

    def decode(self, tokens, skip_special_tokens=True):
        return "".join(f"{token}," for token in tokens)


class Asked:
    """Requests to one engine, and the pieces of their answers."""

    def __init__(self, handle, rows):
        self.engine = AnswerEngine(handle, Tokens(), rows=rows)
        self.engine.ends = set()

    def ask(self, prompt, limit, sampling=SAMPLINGS[0]):
        pieces = queue.Queue()
        request = self.engine.submit(Request(prompt, limit, sampling, (), pieces.put))
        return request, pieces


def text_of(pieces):
    text = ""
    while (piece := pieces.get(timeout=60)) is not None:
        if isinstance(piece, Exception):
            raise piece
        text += piece
    return text


def alone(handle, prompt, limit, sampling):
    stream = Stream(handle, slots=False)
    stream.read(torch.tensor([prompt]))
    return "".join(f"{int(token)}," for token in stream.write(limit, sampling))


def test_rows_with_settings_of_their_own_are_drawn_as_if_alone():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    of = lambda: [torch.Generator().manual_seed(x.seed) for x in SAMPLINGS]  # noqa: E731
    together = draw_rows(logits, SAMPLINGS, of())
    each = [draw(row[None], sampling, own) for row, sampling, own in zip(logits, SAMPLINGS, of())]
    assert together.tolist() == torch.cat(each).tolist()


@pytest.mark.parametrize(("family", "keep_first"), [("llama", 0), ("llama", 6), ("gpt2", 6)])  # gpt2: no slots
def test_answers_do_not_depend_on_their_neighbours(family, keep_first):
    """Prompts and answers of unequal length, more requests than rows, and one that leaves in the middle."""
    handle = forgetful(tiny(family), max_span=40, ramp=4, keep_first=keep_first)
    asked = Asked(handle, rows=3)
    draws = torch.Generator().manual_seed(1)
    sizes = [(3, 40), (300, 10), (8, 70), (1, 9), (40, 10)]
    prompts = [torch.randint(1, 90, (n,), generator=draws).tolist() for n, _ in sizes]
    leaving, left = asked.ask([7, 8], 10**9)
    answers = [asked.ask(p, limit, s)[1] for p, (_, limit), s in zip(prompts, sizes, SAMPLINGS)]
    while not isinstance(left.get(timeout=60), str):
        pass
    leaving.cancelled = True
    for prompt, (_, limit), sampling, pieces in zip(prompts, sizes, SAMPLINGS, answers):
        assert text_of(pieces) == alone(handle, prompt, limit, sampling)
    asked.engine.close()


def test_answers_share_the_steps_of_the_model():
    handle = forgetful(tiny(), max_span=30, ramp=4)
    calls = []
    handle.model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(args[0].shape), with_kwargs=True)
    asked = Asked(handle, rows=4)
    answers = [asked.ask([n + 1, n + 2], 40)[1] for n in range(4)]
    for pieces in answers:
        text_of(pieces)
    asked.engine.close()
    assert max(rows for rows, _ in calls) == 4
    assert len(calls) <= 4 + 39 + 6, "four prompts, and 39 steps for all but those that joined later"


def test_a_step_that_fails_ends_its_answers_and_the_engine_goes_on(monkeypatch):
    handle = forgetful(tiny(), max_span=30, ramp=4)
    advance, failed = RetrofitEngine.advance, []

    def fail_once(self, *args):
        assert self not in failed, "an engine that failed in the middle of a step has no known state"
        if self.rows == 2 and not failed:
            failed.append(self)
            raise RuntimeError("out of memory")
        return advance(self, *args)

    monkeypatch.setattr(RetrofitEngine, "advance", fail_once)
    asked = Asked(handle, rows=2)
    answers = [asked.ask([n + 1], 10**9)[1] for n in range(2)]
    for pieces in answers:
        with pytest.raises(RuntimeError, match="out of memory"):
            text_of(pieces)
    assert text_of(asked.ask([5], 20)[1]) == alone(handle, [5], 20, SAMPLINGS[0])
    asked.engine.close()


def test_a_request_that_cannot_begin_does_not_stop_the_engine():
    handle = forgetful(tiny(), max_span=30, ramp=4)
    asked = Asked(handle, rows=1)
    with pytest.raises(ValueError, match="str"):
        text_of(asked.ask(["no token"], 4)[1])
    assert text_of(asked.ask([5], 8)[1]) == alone(handle, [5], 8, SAMPLINGS[0])
    asked.engine.close()


def test_free_rows_hold_nothing_after_a_compaction():
    """On a GPU the number of rows is fixed, and free ones read something in every step."""
    engine, stream = RetrofitEngine(forgetful(tiny()), 3), Stream(forgetful(tiny()), slots=False)
    logits = stream.read(torch.tensor([[4, 5]]))
    engine.begin(stream.cache, logits, [1])
    for _ in range(FRESH + 1):
        engine.advance(None)
    counts = engine.stepper.slot_layers[0].slots.counts
    assert counts[1].min() > 0 and not counts[[0, 2]].any()


def test_closing_the_engine_ends_its_requests():
    engine = AnswerEngine(forgetful(tiny(), max_span=30, ramp=4), byte_tokenizer(), rows=1)
    ends = [queue.Queue(), queue.Queue()]  # one request that runs, and one that waits
    for end in ends:
        engine.submit(Request([5, 6], 10**9, Sampling(), (), end.put))
    while not isinstance(ends[0].get(timeout=20), str):
        pass
    engine.close()
    for end in ends:
        *_, last = end.queue
        assert "the server was stopped" in str(last)
