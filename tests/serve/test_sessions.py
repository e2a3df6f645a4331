"""Sessions: a request goes on from what earlier ones have read, and answers as if it had read all of it again."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from expire_span.sampling import Sampling
from expire_span.serve.batch import Batch
from expire_span.serve.pace import CAPPED_CHUNK
from expire_span.serve.requests import Request, Response
from expire_span.serve.scheduler import Scheduler
from expire_span.serve.sessions import Sessions, name_beginnings
from expire_span.serve.text import TextModel
from expire_span.stream import Stream
from expire_span.web.guard import Keys
from tests.serve.chats import cached, chats, model, said, text_model
from tests.serve.test_scheduler import MODELS, Client, Numbers, alone, text_of
from tests.stream_cases import build

SYSTEM = {"role": "system", "content": "The fox lives in the wood, and the hen in the yard. " * 3}
QUESTIONS = ("Who are you?", "Where is the hen?", "and the fox", "again: where?", "\u00fcber den Fluss? " * 4)


def converse(server, turns, **fields):
    """The answers of a chat with so many turns, and how many tokens of each prompt were cached."""
    messages, answers = [SYSTEM], []
    for n in range(turns):
        messages.append({"role": "user", "content": QUESTIONS[n % len(QUESTIONS)]})
        answers.append(server.say(messages, **fields))
        messages.append({"role": "assistant", "content": said(answers[-1])})
    return answers


@pytest.mark.parametrize(
    ("family", "overlaps"), [("llama", False), ("llama", True), ("gemma3", False), ("gpt2", False)]
)
@pytest.mark.parametrize("fields", [{}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}], ids=["greedy", "seeded"])
def test_answers_with_sessions_are_those_without(family, overlaps, fields, monkeypatch):
    """Also where rows read the last token of an answer before the host knows it, as on a GPU: that token is in the session."""
    monkeypatch.setattr(Batch, "overlaps", overlaps)
    text = text_model(model(family))
    with chats(text) as with_sessions, chats(text, 0) as without:
        got, wanted = converse(with_sessions, 4, **fields), converse(without, 4, **fields)
        read = with_sessions.read
    assert [said(x) for x in got] == [said(x) for x in wanted]
    assert [cached(x) for x in wanted] == [0] * 4
    assert cached(got[0]) == 0 and all(cached(x) > 0 for x in got[1:])
    assert read == sum(x["usage"]["prompt_tokens"] - cached(x) for x in got)
    assert without.read == sum(x["usage"]["prompt_tokens"] for x in got)


@pytest.mark.parametrize("name", [*MODELS, "learned reach", "paper preset", "layer spans"])
def test_prompts_go_on_from_prompts_and_answers(name):
    """Turn by turn, each prompt being the one before, its answer, and something new; runs and retrofits."""
    retrofitted = MODELS[name]() if name in MODELS else build(name)
    scheduler = Scheduler(TextModel(retrofitted, Numbers()), rows=2, sessions=Sessions(retrofitted, 10**8))
    client = Client.__new__(Client)
    client.scheduler = scheduler
    prompt, draws, known = [5, 6, 7], torch.Generator().manual_seed(0), 0
    for turn in range(5):
        sampling = Sampling(temperature=turn % 2, seed=turn)
        request, pieces = client.ask(prompt, 12, sampling)
        answer = text_of(pieces)
        assert answer == alone(retrofitted, prompt, 12, sampling), turn
        assert request.cached == known
        written = [int(x) for x in answer.split(",")[:-1]]
        known = len(prompt) + 11  # the last token of an answer that was cut off has not been read
        prompt = prompt + written + torch.randint(3, 90, (17 * turn,), generator=draws).tolist() + [4]
    again, pieces = client.ask(prompt[:3], 12, sampling)
    assert text_of(pieces) == alone(retrofitted, prompt[:3], 12, sampling) and again.cached == 3, (
        "an answer is taken again"
    )
    scheduler.close()


@pytest.mark.parametrize("turns", [25, pytest.param(200, marks=pytest.mark.long)])
def test_a_long_chat_reads_each_token_once(turns):
    """The time to the first token is that of the new tokens: their number does not grow, and all tokens are read once. Every
    answer is that of a server without sessions, which reads the whole chat at each turn."""
    text = text_model(model())
    with chats(text, 10**6) as server, chats(text, 0) as without:
        answers = converse(server, turns, max_tokens=3)
        assert [said(x) for x in answers] == [said(x) for x in converse(without, turns, max_tokens=3)]
        new = [x["usage"]["prompt_tokens"] - cached(x) for x in answers]
        length = answers[-1]["usage"]["total_tokens"]
        assert server.scheduler.sessions.bytes_held()[0] <= 10**6
        assert server.read <= length, "no token is read twice"
        assert max(new[-5:]) <= max(new[5:10]), "the last turn reads no more than the tenth"


def test_a_template_that_writes_earlier_turns_again_in_another_way():
    """Answers lose a part in later turns, so that the memory at their end is of no use; the point before them is."""
    template = (
        "{% for m in messages %}<s>{{ m.role }}: {{ m.content[:2] if m.role == 'assistant' else m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: think {% endif %}"
    )
    text = text_model(model(), template)
    with chats(text) as server, chats(text, 0) as without:
        got, wanted = converse(server, 4), converse(without, 4)
    assert [said(x) for x in got] == [said(x) for x in wanted]
    for before, answer in pairwise(got):
        assert cached(answer) == before["usage"]["prompt_tokens"] - len(" think "), "up to the end of the role's header"


def test_chats_share_the_system_prompt_and_changed_messages_are_read_again():
    with chats(text_model(model())) as server:
        first = server.say([SYSTEM, {"role": "user", "content": "one"}])
        other = server.say([SYSTEM, {"role": "user", "content": "two"}])
        same = server.say([SYSTEM, {"role": "user", "content": "one"}], n=3)
        assert cached(first) == 0
        assert len(SYSTEM["content"]) < cached(other) < other["usage"]["prompt_tokens"]
        assert cached(same) == same["usage"]["prompt_tokens"] and len(same["choices"]) == 3
        before = server.read
        parts = server.say([SYSTEM, {"role": "user", "content": "three"}], n=4)
        assert server.read - before == parts["usage"]["prompt_tokens"] - cached(parts), (
            "four answers read the prompt once"
        )


def test_keys_share_nothing():
    keys = Keys(("blue", "green"), open_paths=("/health",))
    with chats(text_model(model()), keys=keys) as server:
        messages = [SYSTEM, {"role": "user", "content": "one"}]
        mine = server.say(messages, "blue")
        assert cached(server.say(messages, "green")) == 0
        assert cached(server.say(messages, "blue")) == mine["usage"]["prompt_tokens"]
        session = mine["choices"][0]["session"]
        ask = lambda key: server.client.get(f"/v1/memory/{session}", headers={"Authorization": f"Bearer {key}"})  # noqa: E731
        assert ask("blue").status_code == 200 and ask("green").status_code == 404
        for headers in (
            {},
            {"Authorization": "Bearer red"},
            {"Authorization": "blue"},
            {"Authorization": "Basic blue"},
        ):
            for path in ("/v1/models", "/metrics", f"/v1/memory/{session}"):
                answer = server.client.get(path, headers=headers)
                assert answer.status_code == 401 and "needs a key" in answer.json()["error"]["message"]
                assert answer.headers["www-authenticate"] == "Bearer"
            assert server.client.get("/health", headers=headers).json() == {"status": "ok"}


def test_a_chat_outlives_the_server(tmp_path):
    text = text_model(model())
    messages = [SYSTEM, {"role": "user", "content": "one"}]
    with chats(text, folder=tmp_path) as server:
        first = server.say(messages)
    messages += [{"role": "assistant", "content": said(first)}, {"role": "user", "content": "two"}]
    with chats(text, folder=tmp_path) as server, chats(text, 0) as without:
        assert (
            server.client.get(f"/v1/memory/{first['choices'][0]['session']}").json()["messages"][0]["role"] == "system"
        )
        second = server.say(messages)
        assert cached(second) == first["usage"]["total_tokens"] - 1 and said(second) == said(without.say(messages))
    with chats(text_model(model(seed=1)), folder=tmp_path) as other:
        assert cached(other.say(messages)) == 0, "another model has sessions of its own"
    with chats(text_model(model(ramp=9)), folder=tmp_path) as other:
        assert cached(other.say(messages)) == 0, "and so have other settings"


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "cut":
        data = data[: len(data) // 2]
    elif how == "changed":
        data[-5] ^= 1
    else:
        data = bytearray(b"\0" * 100)
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("how", ["cut", "changed", "zeros", "gone"])
def test_damaged_files_are_read_as_nothing(how, tmp_path, capsys):
    text, messages = text_model(model()), [SYSTEM, {"role": "user", "content": "one"}]
    with chats(text, folder=tmp_path) as server:
        first = server.say(messages)
    files = list(tmp_path.glob("*/*.safetensors"))
    assert files and not list(tmp_path.glob("*/.*")), "whole files only"
    assert all(x.stat().st_mode & 0o077 == 0 for x in files), "nobody else may read them"
    messages += [{"role": "assistant", "content": said(first)}, {"role": "user", "content": "two"}]
    with chats(text, folder=tmp_path) as server, chats(text, 0) as without:
        for path in files:
            path.unlink() if how == "gone" else damage(path, how)
        second = server.say(messages)
        assert cached(second) == 0 and said(second) == said(without.say(messages))
        assert server.scheduler.sessions.counts["failed"] > 0
    assert "its text is read again" in capsys.readouterr().err


def test_a_full_disk_leaves_the_server_alive(tmp_path, monkeypatch, capsys):
    def full(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("expire_span.stream.saved.write_atomic", full)
    with chats(text_model(model()), folder=tmp_path) as server:
        answers = converse(server, 3)
        assert all(cached(x) > 0 for x in answers[1:])
        server.scheduler.sessions.flush()
        assert "expire_span_session_failed_total 6" in server.client.get("/metrics").text
    told = capsys.readouterr().err
    assert told.count("sessions cannot be written") == 1 and "Traceback" not in told


def test_the_pool_is_bounded_and_the_oldest_leave_first(tmp_path):
    retrofitted = model()
    stream = Stream(retrofitted, 1)
    read = stream.prefill(list(range(3, 103)))
    probe = Sessions(retrofitted, 10**9)
    probe.put("", [1], None, lambda: read, [])
    size, _ = probe.bytes_held()
    for folder in (None, tmp_path):
        pool = Sessions(retrofitted, 3 * size, folder, most_disk=4 * size)
        for n in range(5):
            pool.put("", [n, n], None, lambda: read, [])
            pool.find("", [0, 0], None, load=False)  # used again and again
            pool.flush()
        found = [pool.find("", [n, n, 7], None, load=False) is not None for n in range(5)]
        assert found == [True, False, False, True, True]
        assert pool.bytes_held()[0] <= 3 * size
        back = pool.find("", [1, 1, 7], None, load=True)
        assert (back is not None) == (folder is not None)
        for n in range(10, 20):
            pool.put("", [n, n], None, lambda: read, [])
            pool.flush()
        in_memory, on_disk = pool.bytes_held()
        assert in_memory <= 3 * size and on_disk <= 4 * size
        assert sum(x.stat().st_size for x in tmp_path.glob("*/*")) == on_disk
    too_small = Sessions(retrofitted, size - 1)
    too_small.put("", [1], None, lambda: read, [])
    assert len(too_small) == 0


def test_names_tell_owner_tokens_and_marks_apart():
    names = {
        next(name_beginnings(owner, tokens, marks, [2]))
        for owner in ("", "a")
        for tokens in ([1, 2], [2, 1], [1, 3])
        for marks in (None, [5, -1])
    }
    assert len(names) == 12
    whole = list(name_beginnings("a", range(2000), None, [1, 7, 1999, 2000]))
    assert whole == [next(name_beginnings("a", range(n), None, [n])) for n in (1, 7, 1999, 2000)]
    assert next(name_beginnings("a", [1], [-1], [1])) == next(name_beginnings("a", [1], None, [1]))


def test_a_model_with_a_cap_is_served_without_sessions():
    """What a cap evicts depends on where the reading was interrupted."""
    retrofitted = model(cap=12)
    scheduler = Scheduler(TextModel(retrofitted, Numbers()), sessions=Sessions(retrofitted, 10**8))
    assert scheduler.sessions is None
    scheduler.close()


def test_long_prompts_are_read_in_chunks_that_end_where_others_may_begin():
    request = Request(list(range(10)) * 70, 1, Sampling(), (), print)
    request.chat = type(request.chat)([], None, (30, 650, 700))
    response = Response(TextModel(model(), Numbers()), request, torch.device("cpu"))
    response.begin(None, torch.device("cpu"))
    sizes = []
    while (chunk := response.next_chunk(CAPPED_CHUNK)) is not None:
        sizes.append(len(chunk.tokens))
        response.read += sizes[-1]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    assert max(sizes) <= CAPPED_CHUNK and ends[-1] == 700 and {30, 650} <= set(ends)
    assert sizes == [30, 207, 207, 206, 50], "equal parts up to each of these points, none of them short"
