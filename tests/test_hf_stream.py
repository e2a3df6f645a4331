"""Endless streams in bounded memory with renumbered positions, and the server with a real client."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from expire_span.hf import Sampling, Stream, retrofit, stream  # noqa: E402
from expire_span.hf.loading import end_tokens, turn_tokens  # noqa: E402

from .hf_models import byte_tokenizer, forgetful, model_folder, tiny, tokens, word_tokenizer  # noqa: E402

ROUNDING = 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_neox"])
def test_rebased_positions_change_nothing(family):
    model, ids = tiny(family), tokens(2, 400)
    handle = forgetful(model, max_span=40, ramp=8)
    plain, often = Stream(handle, rebase_after=10**9), Stream(handle, rebase_after=60)
    for part in ids.split(23, 1):
        assert (plain.read(part) - often.read(part)).abs().max() < 10 * ROUNDING  # each turn rounds keys once more
    assert plain.cache.seen == 400 and often.cache.seen < 160


def test_greedy_streams_are_what_generate_writes():
    model, ids = tiny(), tokens(1, 30)
    handle = forgetful(model, max_span=30, ramp=4)
    want = model.generate(ids, use_cache=False, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert [int(x) for x in stream(handle, ids, 12, temperature=0)] == want[0, 30:].tolist()


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(seed=5)], ids=["greedy", "drawn"])
def test_slots_write_what_the_cache_writes(sampling):
    """Reading, writing, breaking off, reading again and forking give the same with fixed slots as without."""
    handle, texts = forgetful(tiny(), max_span=90, ramp=8), []
    for slots in (False, True):
        reader = Stream(handle, slots=slots, rebase_after=50)
        reader.read(tokens(2, 40))
        text = [token.tolist() for token in reader.write(80, sampling)]
        for n, token in enumerate(reader.write(None, sampling)):
            text.append(token.tolist())
            if n == 5:
                break
        reader.read(tokens(2, 30, seed=9))
        text += [token.tolist() for token in reader.fork().write(10, sampling)]
        texts.append((text, reader.read_tokens, [x.tolist() for x in reader.cache.live()]))
    assert texts[0] == texts[1]
    assert texts[0][1] == 40 + 80 + 5 + 30  # the token that was broken off at has not been read


def test_forks_answer_many_questions_about_one_book():
    model, book = tiny(), tokens(1, 80)
    handle = forgetful(model, max_span=60, ramp=4)
    reader = Stream(handle)
    reader.read(book)
    both = reader.fork(copies=2)
    questions = tokens(2, 7, seed=8)
    got = both.read(questions)
    for row in range(2):
        assert (reader.fork().read(questions[row : row + 1]) - got[row]).abs().max() < ROUNDING
    assert reader.cache.seen == 80


def test_draws_follow_the_seed_and_the_options():
    handle, ids = forgetful(tiny()), tokens(1, 20)
    write = lambda **options: [int(x) for x in stream(handle, ids, 8, **options)]  # noqa: E731
    assert write(top_k=1) == write(temperature=0) == write(top_p=1e-6)
    assert write(seed=3) == write(seed=3) != write(seed=4)
    reader = Stream(handle)
    reader.read(ids)
    once = [int(x) for x in reader.fork().write(16, Sampling(seed=3))]
    twice = [
        int(x) for _ in range(2) for x in reader.write(8, Sampling(seed=3))
    ]  # the second call goes on with the draws
    assert once == twice
    for wrong, said in ((dict(temperature=-1), "temperature"), (dict(top_k=0), "top_k"), (dict(top_p=2), "top_p")):
        with pytest.raises(ValueError, match=f"{said} must"):
            write(**wrong)
    with pytest.raises(ValueError, match="must read at least one token"):
        next(Stream(forgetful(tiny())).write(1))


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gpt_neox", "gpt2"])
def test_deletion_changes_nothing_over_20k_tokens(family):
    """The undeleted computation keeps every memory in one rectangle and reads it again for each chunk."""
    from .hf_models import FAMILIES

    length = 20_000
    config = FAMILIES[family]()
    config.max_position_embeddings = length
    if family == "gpt2":
        config.n_positions = length
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    handle = forgetful(model, max_span=400, ramp=32)
    ids, mask = tokens(2, length), torch.ones(2, length, dtype=torch.long)
    mask[1, :700] = 0
    places, cache = (mask.cumsum(-1) - 1).clamp_min(0), handle.new_cache()
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits
        for start in range(0, length, 250):
            end = start + 250
            options = dict(attention_mask=mask[:, :end], position_ids=places[:, start:end])
            part = model(ids[:, start:end], past_key_values=cache, **options).logits
            valid = mask[:, start:end].bool()
            assert (part - whole[:, start:end])[valid].abs().max() < ROUNDING


# The server


@pytest.fixture(scope="module")
def client():
    """The real client of OpenAI against the server, in this process."""
    openai, uvicorn = pytest.importorskip("openai"), pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    import socket
    import threading

    from transformers import AutoModelForCausalLM

    from expire_span.hf.engine import AnswerEngine
    from expire_span.hf.serve import build_app

    from .hf_models import FAMILIES

    config = FAMILIES["llama"]()
    config.vocab_size = 259
    torch.manual_seed(0)
    handle = forgetful(AutoModelForCausalLM.from_config(config).eval(), max_span=60, ramp=8)
    engine = AnswerEngine(handle, byte_tokenizer(), rows=2)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build_app(engine, "tiny"), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    yield openai.OpenAI(base_url=address, api_key="none", max_retries=5), handle
    server.should_exit = True
    thread.join()
    engine.close()


def test_the_openai_client_gets_completions_and_chat(client):
    api, handle = client
    assert [x.id for x in api.models.list()] == ["tiny"]
    options = dict(model="tiny", max_tokens=12, temperature=0)
    whole = api.completions.create(prompt="Once upon", **options)
    assert whole.usage.prompt_tokens == 9 and whole.usage.completion_tokens <= 12
    streamed = "".join(x.choices[0].text for x in api.completions.create(prompt="Once upon", stream=True, **options))
    assert streamed == whole.choices[0].text
    tokenizer = byte_tokenizer()
    ids = [int(x) for x in stream(handle, torch.tensor([tokenizer.encode("Once upon")]), 12, temperature=0)]
    assert tokenizer.decode(ids, skip_special_tokens=True).startswith(streamed)
    said = [{"role": "user", "content": "hello"}]
    answer = api.chat.completions.create(messages=said, **options)
    parts = list(api.chat.completions.create(messages=said, stream=True, **options))
    assert "".join(x.choices[0].delta.content or "" for x in parts) == answer.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == answer.choices[0].finish_reason


def test_requests_share_the_model_and_keep_apart(client):
    from concurrent.futures import ThreadPoolExecutor

    api, _ = client
    prompts = [f"story {n}" for n in range(5)]  # more than the engine runs at a time

    def ask(prompt):
        out = api.completions.create(model="tiny", prompt=prompt, max_tokens=10, temperature=0)
        return out.choices[0].text

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(ask, prompts)) == alone


def test_the_server_says_what_is_wrong(client):
    import openai

    api, _ = client
    for options, said in (
        (dict(temperature=-1), "temperature must be 0 or more and finite, got -1.0"),
        (dict(n=0), "n must be a whole number of at least 1, got 0"),
        (dict(n=200), "prompts times n must be at most 128, got 200"),
        (dict(prompt=[3, 259]), r"tokens must lie in 0..258, the model's vocabulary, got 259"),
        (dict(prompt=5), "prompt: Input should be a valid string, got 5"),
        (dict(stop=""), "stop must be text of at least one character, got ''"),
        (dict(logprobs=2), "this server does not have logprobs, got 2; leave it out"),
        (dict(logprobs=0), "this server does not have logprobs, got 0; leave it out"),  # those of the drawn tokens
        (dict(extra_body={"top_k": 5}), "this server does not have top_k, got 5; leave it out"),
        (dict(echo=True), "this server does not have echo, got True"),
        (dict(max_tokens=-1), "max_tokens must be a whole number of at least 1, got -1"),
        (dict(max_tokens=0), "max_tokens must be a whole number of at least 1, got 0"),
        (dict(seed=-1), "seed must lie between 0 and"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            api.completions.create(**{"model": "tiny", "prompt": "x", "max_tokens": 2, **options})
    with pytest.raises(openai.BadRequestError, match=r"a message needs a role and a content, got \{'role': 'user'\}"):
        api.chat.completions.create(model="tiny", messages=[{"role": "user"}], max_tokens=2)
    picture = [{"type": "image_url", "image_url": {"url": "x"}}]
    for messages, said in (
        ([], "at least one message, got none"),
        ([{"role": "user", "content": picture}], "text only"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            api.chat.completions.create(model="tiny", messages=messages, max_tokens=2)
    with pytest.raises(openai.NotFoundError, match="this server has the model tiny, got other"):
        api.models.retrieve("other")
    assert api.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match=r"has GET /v1/models, .* got POST /v1/embeddings"):
        api.embeddings.create(model="tiny", input="x")
    form = api._client.post("completions", content=b"{}", headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert "not sent as JSON; give the header Content-Type: application/json" in form.json()["error"]["message"]
    half = api._client.post(
        "completions", content=b'{"prompt": "a\\ud800"}', headers={"Content-Type": "application/json"}
    )
    assert (
        half.status_code == 400 and "whole characters, got '\\ud800' at character 1" in half.json()["error"]["message"]
    )


def test_several_texts_stop_strings_and_usage(client):
    api, _ = client
    ask = lambda **options: api.completions.create(model="tiny", max_tokens=14, **{"prompt": "Once", **options})  # noqa: E731
    texts = [ask(seed=seed).choices[0].text for seed in (7, 8)]
    assert [x.text for x in ask(seed=7, n=2).choices] == texts != texts[::-1]
    both = ask(prompt=["Twice", "Once"], seed=7, temperature=None)
    assert both.choices[1].text == texts[0] and both.usage.prompt_tokens == 9
    assert ask(prompt=byte_tokenizer().encode("Once"), seed=7).choices[0].text == texts[0]
    events = list(ask(seed=7, n=2, stream=True, stream_options={"include_usage": True}))
    pieces = [x.choices[0] for x in events if x.choices]
    assert ["".join(x.text for x in pieces if x.index == n) for n in (0, 1)] == texts
    assert [x.usage.prompt_tokens for x in events if x.usage] == [4]
    word = texts[0][5:8]  # a stop string of several tokens
    whole = ask(seed=7, stop=["never", word]).choices[0]
    assert whole.text == texts[0][: texts[0].find(word)] and whole.finish_reason == "stop"
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    options = dict(model="tiny", max_tokens=4, temperature=0)
    chat = lambda content, **more: api.chat.completions.create(  # noqa: E731
        messages=[{"role": "user", "content": content}], **options, **more
    )
    assert chat(parts).choices[0].message.content == chat("hello").choices[0].message.content
    roles = [x.choices[0].delta.role for x in chat("hello", stream=True)]
    assert roles[0] == "assistant" and not any(roles[1:])


def test_a_client_that_goes_away_makes_room(client):
    """Two clients ask for the largest answers, on as many rows as there are, and leave without waiting for them."""
    import json
    import socket
    import time

    api, _ = client
    for streamed in (False, True):
        body = json.dumps({"prompt": "x", "max_tokens": 10**9, "temperature": 0, "stream": streamed}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        with socket.create_connection((api.base_url.host, api.base_url.port)) as away:
            away.sendall(head.encode() + b"\r\n\r\n" + body)
            time.sleep(0.2)
    api.with_options(timeout=20, max_retries=0).completions.create(model="tiny", prompt="x", max_tokens=2)


def test_text_comes_in_whole_characters_and_without_stop_strings():
    from expire_span.hf.writing import TextWriter

    tokenizer = byte_tokenizer()
    writer = TextWriter(tokenizer, ("end.", "never"))
    pieces = [writer.add(token) for token in tokenizer.encode("é 🦊 in the en end.")]
    assert not any("\ufffd" in piece for piece in pieces) and pieces[:2] == ["", "é"]
    assert "".join(pieces) == "é 🦊 in the en " and writer.stopped
    writer = TextWriter(tokenizer, ("end.",))
    broken = [tokenizer.encode("é")[0]] * 16  # never a whole character
    assert "".join(map(writer.add, broken)) and not writer.add(tokenizer.encode("e")[0]) and writer.finish() == "e"


def test_text_goes_on_after_its_prompt_with_a_space():
    """Tokenizers of Llama and Gemma mark where words begin, and drop the mark of the first word that they decode."""
    from expire_span.hf.asked import Chat, Completion
    from expire_span.hf.writing import TextWriter, text_of

    tokenizer = word_tokenizer()
    prompt, (named, dot) = tokenizer.encode("a fox"), tokenizer.encode("named.")
    assert [text_of(tokenizer, x) for x in (*prompt, named, dot)] == [" a", " fox", " named", "."]
    writer = TextWriter(tokenizer, (), prompt)
    assert [writer.add(named), writer.add(dot)] == [" named", "."]
    assert TextWriter(tokenizer).add(named) == "named"
    assert Completion.continues and not Chat.continues
    bytes_of = byte_tokenizer()
    half = bytes_of.encode("é")
    assert (
        TextWriter(bytes_of, (), half[:1]).add(bytes_of.encode("x")[0]) == "x"
    )  # a prompt that ends within a character


def test_counts_that_no_stream_can_have():
    """Without rows, the engine would wait for ever."""
    from expire_span.hf.engine import AnswerEngine

    handle = forgetful(tiny(), max_span=30, ramp=4)
    with pytest.raises(ValueError, match="rows must be a whole number of at least 1, got 0"):
        AnswerEngine(handle, None, rows=0)
    with pytest.raises(ValueError, match="rebase_after must be a whole number of at least 1, got 0"):
        Stream(handle, rebase_after=0)
    stream = Stream(handle)
    with pytest.raises(ValueError, match="count must be a whole number of at least 0, got -1"):
        next(stream.write(-1))
    with pytest.raises(ValueError, match="copies must be a whole number of at least 1, got 0"):
        stream.fork(0)
    with pytest.raises(ValueError, match="config must be a RetrofitConfig, got 'tight'"):
        retrofit(tiny(), "tight")  # type: ignore[arg-type]


# The chat


def test_a_chat_goes_on_after_an_interrupted_answer(tmp_path, monkeypatch, capsys):
    import io
    import signal

    from expire_span.cli import main
    from expire_span.hf.loading import open_model
    from expire_span.hf.writing import TextWriter

    model, _ = open_model(str(model_folder(tmp_path / "base")), device="cpu")
    forgetful(model).save(tmp_path / "adapter")
    added, add = [], TextWriter.add

    def interrupted(writer, token):
        added.append(token)
        if len(added) == 3:
            signal.raise_signal(signal.SIGINT)
        return add(writer, token)

    monkeypatch.setattr(TextWriter, "add", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("no \udcff UTF-8\nagain\n"))
    options = ["--adapter", str(tmp_path / "adapter"), "--max-tokens", "5", "--temperature", "0", "--device", "cpu"]
    assert main(["chat", str(tmp_path / "base"), *options]) == 0
    assert len(added) == 3 + 5 and capsys.readouterr().err.count("tokens read") == 2


def test_a_later_turn_repeats_no_system_prompt():
    tokenizer = byte_tokenizer()
    turn = lambda said: tokenizer.decode(turn_tokens(tokenizer, said))  # noqa: E731
    assert turn("why?") == "\nuser: why?\nassistant:"
    tokenizer.chat_template = (
        "{{ '<s>be kind ' }}{% for m in messages %}{{ '[' + m['role'] + '] ' + m['content'] + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
    )
    assert turn("why?") == "</s>[user] why?</s>[assistant] "
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ValueError, match="the model's chat template refuses these messages: no"):
        turn("why?")


def test_all_tokens_that_end_an_answer():
    model = tiny()
    model.generation_config.eos_token_id = [9, 11]  # as for models whose chat turns end with a token of their own
    assert end_tokens(model, byte_tokenizer()) == {2, 9, 11}
