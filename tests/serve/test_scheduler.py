"""The server's scheduler: responses that are generated together get the tokens that each would get alone."""

from __future__ import annotations

import queue

import pytest
import torch

pytest.importorskip("transformers")

from expire_span.sampling import Sampling, draw, draw_rows
from expire_span.serve.batch import Batch
from expire_span.serve.requests import Request
from expire_span.serve.scheduler import Busy, Scheduler
from expire_span.serve.sessions import Sessions
from expire_span.serve.text import TextModel
from expire_span.store.slots import FRESH
from expire_span.stream import Stream
from tests.hf_models import byte_tokenizer, forgetful, tiny
from tests.stream_cases import build

SAMPLINGS = (
    Sampling(temperature=0),
    Sampling(seed=3),
    Sampling(seed=4),
    Sampling(temperature=0.7, top_k=9, seed=3),
    Sampling(top_p=0.8, seed=1),
)


class Numbers:
    """A tokenizer whose text is the tokens' numbers, so that an answer shows which tokens were drawn."""

    def decode(self, tokens, skip_special_tokens=True):
        return "".join(f"{token}," for token in tokens)


class Client:
    """Requests to one scheduler, and the pieces of their responses."""

    def __init__(self, model, rows, sessions=None):
        self.scheduler = Scheduler(TextModel(model, Numbers()), rows=rows, sessions=sessions)

    def ask(self, prompt, limit, sampling=SAMPLINGS[0]):
        pieces = queue.Queue()
        request = Request(prompt, limit, sampling, (), pieces.put)
        self.scheduler.submit(request)
        return request, pieces


def text_of(pieces):
    text = ""
    while (piece := pieces.get(timeout=60)) is not None:
        if isinstance(piece, Exception):
            raise piece
        text += piece
    return text


def alone(model, prompt, limit, sampling):
    stream = Stream(model, 1, static_shapes=False)
    stream.read([prompt])
    return "".join(f"{int(step.tokens)}," for step in stream.generate(sampling, limit))


def test_rows_with_settings_of_their_own_are_drawn_as_if_alone():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    of = lambda: [torch.Generator().manual_seed(x.seed) for x in SAMPLINGS]  # noqa: E731
    together = draw_rows(logits, SAMPLINGS, of())
    each = [draw(row[None], sampling, own) for row, sampling, own in zip(logits, SAMPLINGS, of())]
    assert together.tolist() == torch.cat(each).tolist()


MODELS = {
    "llama": lambda: forgetful(tiny(), max_span=40, ramp=4),
    "llama that keeps first tokens": lambda: forgetful(tiny(), max_span=40, ramp=4, keep_first=6),
    "gpt2": lambda: forgetful(tiny("gpt2"), max_span=40, ramp=4, keep_first=6),  # no slots
    "a run's": lambda: build("spans per head"),
}


OVERLAPPING = ("llama", "a run's")
"""Models whose rows read a token before the host knows it; on a GPU the scheduler does so by itself."""


@pytest.mark.parametrize(("model", "overlaps"), [(x, False) for x in MODELS] + [(x, True) for x in OVERLAPPING])
def test_answers_do_not_depend_on_their_neighbours(model, overlaps, monkeypatch):
    """Prompts and answers of unequal length, more requests than rows, and one that leaves in the middle."""
    monkeypatch.setattr(Batch, "overlaps", overlaps)
    retrofitted = MODELS[model]()
    client = Client(retrofitted, rows=3)
    draws = torch.Generator().manual_seed(1)
    sizes = [(3, 40), (300, 10), (8, 70), (1, 9), (40, 10)]
    prompts = [torch.randint(1, 90, (n,), generator=draws).tolist() for n, _ in sizes]
    leaving, left = client.ask([7, 8], 10**9)
    answers = [client.ask(p, limit, s)[1] for p, (_, limit), s in zip(prompts, sizes, SAMPLINGS)]
    while not isinstance(left.get(timeout=60), str):
        pass
    leaving.cancelled = True
    for prompt, (_, limit), sampling, pieces in zip(prompts, sizes, SAMPLINGS, answers):
        assert text_of(pieces) == alone(retrofitted, prompt, limit, sampling)
    client.scheduler.close()


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_session_knows_every_token_that_its_row_has_read(overlaps, monkeypatch):
    """With steps that overlap also the last one, which was read before it was known that the answer ends there."""
    monkeypatch.setattr(Batch, "overlaps", overlaps)
    retrofitted = MODELS["llama"]()
    client = Client(retrofitted, 2, Sessions(retrofitted, 10**8))
    prompt, beside = [5, 6, 7] * 9, client.ask([9, 8], 40)[1]
    first = text_of(client.ask(prompt, 30)[1])
    longer = prompt + [int(x) for x in first.split(",")[:-1]] + [11, 12]
    request, pieces = client.ask(longer, 25)
    assert text_of(pieces) == alone(retrofitted, longer, 25, SAMPLINGS[0])
    assert request.cached == len(prompt) + 30 - (not overlaps)
    assert text_of(beside) == alone(retrofitted, [9, 8], 40, SAMPLINGS[0])
    client.scheduler.close()


@pytest.mark.parametrize("with_sessions", [False, True])
def test_prompts_of_equal_length_are_read_together(with_sessions):
    """Here 32 tokens each and 256 in a call; of two that begin with the same tokens, the session of one serves the other."""
    retrofitted = forgetful(tiny(), max_span=40, ramp=4)
    calls = []
    retrofitted.model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(tuple(args[0].shape)), with_kwargs=True
    )
    client = Client(retrofitted, 6, Sessions(retrofitted, 10**8) if with_sessions else None)
    draws = torch.Generator().manual_seed(2)
    prompts = [torch.randint(1, 90, (n,), generator=draws).tolist() for n in (32, 32, 32, 20, 32)]
    prompts.append(prompts[1])
    pieces, limits = [queue.Queue() for _ in prompts], (8, 9, 1, 12, 30, 9)
    requests = [
        Request(p, limit, s, (), own.put)
        for p, limit, s, own in zip(prompts, limits, (*SAMPLINGS, SAMPLINGS[1]), pieces)
    ]
    client.scheduler.submit(*requests)
    answers = [text_of(x) for x in pieces]
    assert [rows for rows, tokens in calls if tokens == 32] == ([4] if with_sessions else [5])
    assert client.scheduler.counts["read"] == 20 + 32 * (4 if with_sessions else 5)
    assert [x.cached for x in requests] == [0] * 5 + [32 * with_sessions]
    for prompt, limit, request, answer in zip(prompts, limits, requests, answers):
        assert answer == alone(retrofitted, prompt, limit, request.sampling)
    client.scheduler.close()


def test_a_prompt_that_cannot_be_read_fails_alone():
    """A token beyond the vocabulary, in the middle of prompts that would be read in one call."""
    retrofitted = forgetful(tiny(), max_span=40, ramp=4)
    client = Client(retrofitted, rows=3)
    pieces = [queue.Queue() for _ in range(3)]
    prompts = [[5] * 20, [10**6] * 20, [6] * 20]
    client.scheduler.submit(*(Request(p, 9, SAMPLINGS[0], (), own.put) for p, own in zip(prompts, pieces)))
    with pytest.raises(ValueError, match="tokens must lie in 0"):
        text_of(pieces[1])
    for n in (0, 2):
        assert text_of(pieces[n]) == alone(retrofitted, prompts[n], 9, SAMPLINGS[0])
    client.scheduler.close()


def test_answers_share_the_steps_of_the_model():
    retrofitted = forgetful(tiny(), max_span=30, ramp=4)
    calls = []
    retrofitted.model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(args[0].shape), with_kwargs=True)
    client = Client(retrofitted, rows=4)
    answers = [client.ask([n + 1, n + 2], 40)[1] for n in range(4)]
    for pieces in answers:
        text_of(pieces)
    client.scheduler.close()
    assert max(rows for rows, _ in calls) == 4
    assert len(calls) <= 4 + 39 + 6, "four prompts, and 39 steps for all but those that joined later"


def test_steps_on_a_cpu_have_only_the_rows_of_answers_that_run():
    """Answers end in the middle of others: the first and the third row leave, and those behind them move to the front."""
    retrofitted = forgetful(tiny(), max_span=30, ramp=4)
    steps = []
    retrofitted.model.register_forward_pre_hook(
        lambda _, args, kwargs: steps.append(tuple(args[0].shape)), with_kwargs=True
    )
    client = Client(retrofitted, rows=4)
    limits, samplings = (20, 90, 40, 70), SAMPLINGS[:4]
    requests, pieces = [], [queue.Queue() for _ in limits]
    for n, (limit, sampling) in enumerate(zip(limits, samplings)):
        requests.append(Request([n + 3] * 9, limit, sampling, (), pieces[n].put))
    client.scheduler.submit(*requests)
    answers = [text_of(x) for x in pieces]
    client.scheduler.close()
    rows = [rows for rows, tokens in steps if tokens == 1]
    assert rows == sorted(rows, reverse=True), "a row stayed after its answer had ended"
    assert rows.count(4) == 19 and rows.count(3) == 20 and rows.count(2) == 30 and rows.count(1) == 20
    for n, (limit, sampling, answer) in enumerate(zip(limits, samplings, answers)):
        assert answer == alone(retrofitted, [n + 3] * 9, limit, sampling)


def test_answers_of_a_capped_model_do_not_depend_on_their_neighbours():
    """What a cap evicts depends on where reading pauses: a prompt beside running answers is read as if it were alone."""
    retrofitted = forgetful(tiny(), max_span=400, ramp=4, cap=24)
    client = Client(retrofitted, rows=3)
    prompt = torch.randint(1, 90, (600,), generator=torch.Generator().manual_seed(1)).tolist()
    running, begun = client.ask([7], 10**9)
    begun.get(timeout=60)
    beside = text_of(client.ask(prompt, 60, Sampling(seed=3))[1])
    running.cancelled = True
    assert beside == alone(retrofitted, prompt, 60, Sampling(seed=3))
    client.scheduler.close()


def test_a_step_that_fails_ends_its_responses_and_the_scheduler_goes_on(monkeypatch):
    retrofitted = forgetful(tiny(), max_span=30, ramp=4)
    feed, failed = Stream.feed, []

    def fail_once(self, *args):
        assert self not in failed, "a stream that failed in the middle of a step has no known state"
        if self.rows == 2 and not failed:
            failed.append(self)
            raise RuntimeError("out of memory")
        return feed(self, *args)

    monkeypatch.setattr(Stream, "feed", fail_once)
    client = Client(retrofitted, rows=2)
    answers = [client.ask([n + 1], 10**9)[1] for n in range(2)]
    for pieces in answers:
        with pytest.raises(RuntimeError, match="out of memory"):
            text_of(pieces)
    assert text_of(client.ask([5], 20)[1]) == alone(retrofitted, [5], 20, SAMPLINGS[0])
    client.scheduler.close()


def test_a_request_that_cannot_begin_does_not_stop_the_scheduler():
    retrofitted = forgetful(tiny(), max_span=30, ramp=4)
    client = Client(retrofitted, rows=1)
    with pytest.raises(ValueError, match="str"):
        text_of(client.ask(["no token"], 4)[1])
    assert text_of(client.ask([5], 8)[1]) == alone(retrofitted, [5], 8, SAMPLINGS[0])
    client.scheduler.close()


@pytest.mark.parametrize("model", ["llama", "a run's"])
def test_idle_rows_hold_nothing_after_a_compaction(model):
    """On a GPU the number of rows is fixed, and idle ones read something in every step."""
    stream = Stream(MODELS[model](), 3, static_shapes=True)
    stream.join([4, 5], row=1)
    for _ in range(FRESH + 1):
        stream.feed([7, 8, 9])
    counts = stream._engine.stepper.memories[0].slots.counts
    assert counts[1].min() > 0 and not counts[[0, 2]].any()


def test_a_table_of_positions_ends_one_response_alone():
    retrofitted = forgetful(tiny("gpt2"), max_span=40, ramp=4)
    client = Client(retrofitted, rows=2)
    long, short = client.ask([1] * 2040, 50)[1], client.ask([5], 40)[1]
    with pytest.raises(ValueError, match="reads at most 2,048 tokens, prompt and answer together; ask for fewer"):
        text_of(long)
    assert text_of(short) == alone(retrofitted, [5], 40, SAMPLINGS[0])
    client.scheduler.close()


def test_closing_the_scheduler_ends_its_requests():
    scheduler = Scheduler(TextModel.of_retrofit(MODELS["llama"](), byte_tokenizer()), rows=1)
    ends = [queue.Queue(), queue.Queue()]  # one request that runs, and one that waits
    for end in ends:
        scheduler.submit(Request([5, 6], 10**9, Sampling(), (), end.put))
    while not isinstance(ends[0].get(timeout=20), str):
        pass
    scheduler.close()
    for end in ends:
        *_, last = end.queue
        assert "the server was stopped" in str(last)
    with pytest.raises(RuntimeError, match="the server was stopped"):  # nobody would ever answer it
        scheduler.submit(Request([5, 6], 1, Sampling(), (), ends[0].put))


def test_a_scheduler_that_refuses_goes_on_with_what_it_has():
    client = Client(forgetful(tiny(), max_span=30, ramp=4), rows=1)
    answers = [client.ask([n + 1], 30)[1] for n in range(2)]
    client.scheduler.refuse()
    with pytest.raises(RuntimeError, match="the server was stopped"):
        client.ask([5], 1)
    assert all(text_of(pieces).count(",") == 30 for pieces in answers)
    client.scheduler.close()


def test_requests_that_nobody_waits_for_leave_the_queue_while_all_rows_are_busy():
    client = Client(forgetful(tiny(), max_span=30, ramp=4), rows=1)
    client.scheduler.most_waiting = 20
    running, begun = client.ask([7], 10**9)
    begun.get(timeout=60)
    waiting = [client.ask([5], 10**9) for _ in range(20)]
    with pytest.raises(Busy, match="20 texts wait, of at most 20, got 1 more; ask later"):
        client.ask([6], 1)
    for request, _ in waiting:
        request.cancelled = True
    _, pieces = client.ask([6], 1)  # there is room at once
    for _, gone in waiting:
        assert gone.get(timeout=60) is None and gone.empty()
    assert not running.cancelled and pieces.empty()
    running.cancelled = True
    assert text_of(pieces)
    client.scheduler.close()
