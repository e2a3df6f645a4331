"""Lifetimes of messages, what `/v1/memory` says of them, and what those who run the server can ask."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from expire_span.sampling import Sampling
from expire_span.serve.http import Limits
from expire_span.serve.requests import Request
from expire_span.serve.turns import Prompt, read_chat
from expire_span.stream import FREE, KEEP, Stream
from tests.serve.chats import TEMPLATE, cached, chats, model, said, text_model

GREEDY = Sampling(temperature=0)
RULES = {"role": "system", "content": "Answer in the words of the fox."}
LONG = {"role": "user", "content": "the river, the road, " * 8}
ASK = {"role": "user", "content": "so?"}


def texts_of(text, prompt: Prompt):
    return [text.tokenizer.decode(prompt.tokens[x.begin : x.end]) for x in prompt.places]


@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["template", "lines"])
def test_messages_are_found_among_the_tokens(template):
    text = text_model(model(), template)
    messages = [RULES, {**LONG, "expires": 30}, {"role": "assistant", "content": "\u00fcber den Flu\u00df"}]
    messages += [{**ASK, "keep": True}]
    messages += [{"role": "user", "content": "so?"}, {"role": "user", "content": ""}]
    prompt = read_chat(text, messages)
    strip = str.strip if template else str
    assert texts_of(text, prompt) == [strip(x["content"]) for x in messages]
    plain = [{"role": x["role"], "content": x["content"]} for x in messages]
    assert prompt.tokens == text.chat_tokens(plain), "marks change no token"
    _, long, _, ask, *_ = prompt.places
    ages = list(range(long.end - long.begin - 1 + 30, 29, -1))
    for at, mark in enumerate(prompt.marks):
        inside = next((n for n, x in enumerate(prompt.places) if x.begin <= at < x.end), None)
        wanted = ages[at - long.begin] if inside == 1 else KEEP if inside == 3 else FREE
        assert mark == wanted, at
    assert prompt.kept == ask.end - ask.begin == 3


def test_a_template_that_hides_its_messages_takes_no_marks():
    for template in (
        "{{ messages | length }}",
        "{% for m in messages %}{{ m.content | upper }}{{ m.content }}{% endfor %}",
    ):
        text = text_model(model(), template)
        assert read_chat(text, [ASK]).marks is None
        with pytest.raises(ValueError, match="does not show where a message stands; leave out keep and expires"):
            read_chat(text, [{**ASK, "keep": True}])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_marked_chats_answer_as_a_stream_with_the_same_marks(family):
    """Also where the chat goes on from a session; and other marks on the same words are another session."""
    text = text_model(model(family))
    messages = [{**RULES, "keep": True}, {**LONG, "expires": 20}, ASK]
    prompt = read_chat(text, messages)
    answers = {}
    with chats(text) as server:
        for age in (20, 21, None):
            asked = [messages[0], {**LONG, "expires": age}, ASK]
            first = server.say(asked, max_tokens=30)
            assert cached(first) <= prompt.places[1].begin, "what was read under other marks is of no use"
            again = server.say(asked, max_tokens=30)
            assert said(again) == said(first) and cached(again) == first["usage"]["prompt_tokens"]
            answers[age] = said(first)
    for age, got in answers.items():
        stream = Stream(text.model, 1)
        own = read_chat(text, [messages[0], {**LONG, "expires": age}, ASK])
        stream.read([own.tokens], [own.marks])
        drawn = [int(step.tokens) for step in stream.generate(max_tokens=30, sampling=GREEDY)]
        assert got == text.tokenizer.decode(drawn)


def test_the_memory_of_a_chat_is_listed():
    text = text_model(model())
    with chats(text) as server:
        asked = [{**RULES, "keep": True}, {**LONG, "expires": 50}, ASK]
        answer = server.say(asked, max_tokens=70)
        session = answer["choices"][0]["session"]
        told = server.client.get(f"/v1/memory/{session}").json()
        rules, long, _, own = told["messages"]
        assert told["object"] == "memory" and told["model"] == "tiny"
        assert told["tokens"] == answer["usage"]["total_tokens"] - 1
        assert (rules["role"], rules["keep"], rules["for"], rules["since"]) == ("system", True, "ever", rules["begin"])
        assert rules["tokens_alive"] == len(RULES["content"]) and rules["alive"] == 4 * len(RULES["content"]), (
            "2 layers, 2 heads"
        )
        assert (long["alive"], long["since"], long["for"], long["expires"]) == (0, None, 0, 50)
        assert own["role"] == "assistant" and own["end"] == told["tokens"] and 0 < own["for"] <= 68
        assert own["since"] >= own["begin"] and 0 < own["alive"] <= told["alive"]
        soon = server.say(asked, max_tokens=2)["choices"][0]["session"]
        long = server.client.get(f"/v1/memory/{soon}").json()["messages"][1]
        assert long["alive"] > 0 and 0 < long["for"] <= 50, "shortly after it was read, something of it is left"
        missing = server.client.get(f"/v1/memory/{'0' * 64}")
        assert missing.status_code == 404 and "no session is known by this name" in missing.json()["error"]["message"]
        for bad in ("../../etc/passwd", "x" * 2000, "%00"):
            assert server.client.get(f"/v1/memory/{bad}").status_code == 404


def test_bad_marks_are_refused_in_a_sentence():
    limits = Limits(max_kept=40)
    with chats(text_model(model()), limits=limits) as server:
        for mark, words in (
            ({"keep": True, "expires": 5}, "message 1 is marked to be kept and to expire after 5 tokens; choose one"),
            ({"expires": -1}, "expires of message 1 must be 1 to 8,388,608 tokens, got -1"),
            ({"expires": 0}, "got 0"),
            ({"expires": 2.5}, "got 2.5"),
            ({"expires": True}, "got True"),
            ({"expires": "soon"}, "got 'soon'"),
            ({"expires": 10**30}, "expires of message 1 must be 1 to 8,388,608 tokens"),
            ({"keep": "yes"}, "keep of message 1 must be true or false, got 'yes'"),
            ({"keep": 1}, "keep of message 1 must be true or false, got 1"),
        ):
            message = server.say([RULES, {**ASK, **mark}], status=400)["error"]["message"]
            assert words in message and "\n" not in message
        over = server.say([RULES, {**LONG, "keep": True}], status=400)["error"]["message"]
        assert "a chat may keep 40 tokens, which fill slots for good, got 167; keep fewer" in over
        assert server.say([{**RULES, "keep": True}, {**ASK, "expires": 1, "keep": False}])
    with chats(text_model(model("mistral"))) as server:
        refused = server.say([{**RULES, "keep": True}], status=400)["error"]["message"]
        assert "reads the last 24 tokens in every layer, so no token can be kept for longer" in refused
        assert server.say([{**RULES, "expires": 5}])


SAMPLE = re.compile(r'^[a-z_]+(\{[a-z]+="[a-z]+"\})? \d+$')


def test_metrics_are_in_prometheus_format_and_count_what_happened():
    with chats(text_model(model())) as server:
        first = server.say([RULES, ASK])
        server.say([RULES, ASK])
        answer = server.client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.text.splitlines()
        samples = [line for line in lines if not line.startswith("#")]
        assert all(SAMPLE.match(line) for line in samples) and answer.text.endswith("\n")
        for name in {re.split("[ {]", line)[0] for line in samples}:
            assert sum(line.startswith(f"# TYPE {name} ") for line in lines) == 1
            assert sum(line.startswith(f"# HELP {name} ") for line in lines) == 1
        values = dict(line.rsplit(" ", 1) for line in samples)
        tokens = first["usage"]["prompt_tokens"]
        wanted = {
            'requests_total{reason="length"}': 2,
            'tokens_total{kind="read"}': tokens,
            'tokens_total{kind="known"}': tokens,
            'tokens_total{kind="written"}': 18,
            'session_lookups_total{found="yes"}': 1,
            'session_lookups_total{found="no"}': 1,
            "requests_running": 0,
            "requests_waiting": 0,
            "memories_alive": 0,
        }
        for name, value in wanted.items():
            assert values[f"expire_span_{name}"] == str(value), name
        assert int(values['expire_span_session_bytes{place="memory"}']) > 0


def test_metrics_of_a_server_that_works():
    with chats(text_model(model()), rows=1) as server:
        requests = [Request([5] * 40, 10**9, GREEDY, (), lambda piece: None) for _ in range(3)]
        server.scheduler.submit(*requests)
        while server.scheduler.counts["read"] < 40:
            server.scheduler.ask(lambda batch: None).result(60)
        server.scheduler.ask(lambda batch: None).result(60)
        text = server.client.get("/metrics").text
        assert "expire_span_requests_running 1\n" in text and "expire_span_requests_waiting 2\n" in text
        assert int(re.search(r"memories_alive (\d+)", text)[1]) > 0
        assert int(re.search(r"memory_bytes (\d+)", text)[1]) > 0
        for request in requests:
            request.cancelled = True
        assert server.client.get("/health").json() == {"status": "ok"}
        server.scheduler.close()
        stopping = server.client.get("/health")
        assert stopping.status_code == 503 and stopping.json() == {"status": "stopping"}
        assert server.client.get("/metrics").status_code == 503
