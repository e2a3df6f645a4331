"""Endless streams in bounded memory, and the server with a real client."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from expire_span import Sampling, Stream  # noqa: E402
from expire_span.generate import generate_tokens  # noqa: E402
from expire_span.hf.loading import end_tokens, turn_tokens  # noqa: E402
from tests.hf_models import byte_tokenizer, forgetful, model_folder, tiny, tokens, word_tokenizer  # noqa: E402

ROUNDING = 1e-5


def write(retrofitted, ids, count, **sampling):
    return [int(x) for x in generate_tokens(retrofitted, ids[0], Sampling(**sampling), max_tokens=count)]


def test_greedy_streams_are_what_generate_writes():
    model, ids = tiny(), tokens(1, 30)
    retrofitted = forgetful(model, max_span=30, ramp=4)
    want = model.generate(ids, use_cache=False, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert write(retrofitted, ids, 12, temperature=0) == want[0, 30:].tolist()


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(seed=5)], ids=["greedy", "drawn"])
def test_slots_write_what_the_cache_writes(sampling, tmp_path):
    """Reading, generating, breaking off, reading on, forking and saving give the same over slots as without."""
    retrofitted, texts = forgetful(tiny(), max_span=90, ramp=8), []
    for static_shapes in (False, True):
        stream = Stream(retrofitted, 2, static_shapes=static_shapes)
        assert stream.static_shapes == static_shapes
        stream.read(list(tokens(2, 40)))
        text = [step.tokens.tolist() for step in stream.generate(sampling, 80)]
        for n, step in enumerate(stream.generate(sampling)):
            text.append(step.tokens.tolist())
            if n == 5:
                break
        stream.feed(tokens(2, 30, seed=9))
        text += [step.tokens.tolist() for step in stream.fork([0, 1]).generate(sampling, 10)]
        stream.save(tmp_path / "saved")
        again = Stream.load(retrofitted, tmp_path / "saved")
        assert again.static_shapes == static_shapes
        text += [step.tokens.tolist() for step in again.generate(sampling, 10)]
        texts.append((text, stream.position, stream.live.tolist()))
    assert texts[0] == texts[1]
    assert texts[0][0][-10:] == texts[0][0][-20:-10] and texts[0][1] == 80 + 6 + 30


def test_saved_streams_name_their_model(tmp_path):
    stream = Stream(forgetful(tiny(), max_span=40, ramp=4), 1)
    stream.read([[5, 6]])
    stream.save(tmp_path / "saved")
    for other in (forgetful(tiny(seed=5), max_span=40, ramp=4), forgetful(tiny(), max_span=40, ramp=4, seed=9)):
        with pytest.raises(ValueError, match="was saved by another model"):
            Stream.load(other, tmp_path / "saved")
        with pytest.raises(ValueError, match="was read by another model"):
            Stream(other, 1).join(stream.prefill([5, 6]))


def test_forks_answer_many_questions_about_one_book():
    retrofitted, (book,) = forgetful(tiny(), max_span=60, ramp=4), tokens(1, 80)
    reader = Stream(retrofitted, 1)
    reader.read([book])
    both, questions = reader.fork([0, 0]), tokens(2, 7, seed=8)
    both.feed(questions)
    for row in range(2):
        alone = reader.fork([0])
        alone.feed(questions[row : row + 1])
        assert (alone.logits[0] - both.logits[row]).abs().max() < ROUNDING
    assert reader.position == 0


def test_draws_follow_the_seed_and_the_options():
    retrofitted, ids = forgetful(tiny()), tokens(1, 20)
    assert (
        write(retrofitted, ids, 8, top_k=1)
        == write(retrofitted, ids, 8, temperature=0)
        == write(retrofitted, ids, 8, top_p=1e-6)
    )
    assert (
        write(retrofitted, ids, 8, seed=3) == write(retrofitted, ids, 8, seed=3) != write(retrofitted, ids, 8, seed=4)
    )
    reader = Stream(retrofitted, 1)
    reader.read([ids[0]])
    take = lambda stream, count: [int(step.tokens) for step in stream.generate(Sampling(seed=3), count)]  # noqa: E731
    assert take(reader.fork([0]), 16) == take(reader, 8) + take(reader, 8)  # the second call goes on with the draws
    for wrong, said in ((dict(temperature=-1), "temperature"), (dict(top_k=0), "top_k"), (dict(top_p=2), "top_p")):
        with pytest.raises(ValueError, match=f"{said} must"):
            write(retrofitted, ids, 8, **wrong)
    with pytest.raises(ValueError, match="has read no prompt yet"):
        Stream(retrofitted, 1).generate()


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gpt_neox", "gpt2"])
def test_deletion_changes_nothing_over_20k_tokens(family):
    """The undeleted computation keeps every memory in one rectangle and reads it again for each chunk."""
    from tests.hf_models import FAMILIES

    length = 20_000
    config = FAMILIES[family]()
    config.max_position_embeddings = length
    if family == "gpt2":
        config.n_positions = length
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    retrofitted = forgetful(model, max_span=400, ramp=32)
    ids, mask = tokens(2, length), torch.ones(2, length, dtype=torch.long)
    mask[1, :700] = 0
    places, cache = (mask.cumsum(-1) - 1).clamp_min(0), retrofitted.new_cache()
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

    from expire_span.serve.http import build_app
    from expire_span.serve.scheduler import Scheduler
    from expire_span.serve.text import TextModel
    from tests.hf_models import FAMILIES

    config = FAMILIES["llama"]()
    config.vocab_size = 259
    torch.manual_seed(0)
    retrofitted = forgetful(AutoModelForCausalLM.from_config(config).eval(), max_span=60, ramp=8)
    scheduler = Scheduler(TextModel.of_retrofit(retrofitted, byte_tokenizer()), rows=2)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build_app(scheduler, "tiny"), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    yield openai.OpenAI(base_url=address, api_key="none", max_retries=5), retrofitted
    server.should_exit = True
    thread.join()
    scheduler.close()


def test_the_openai_client_gets_completions_and_chat(client):
    api, retrofitted = client
    assert [x.id for x in api.models.list()] == ["tiny"]
    options = dict(model="tiny", max_tokens=12, temperature=0)
    whole = api.completions.create(prompt="Once upon", **options)
    assert whole.usage.prompt_tokens == 9 and whole.usage.completion_tokens <= 12
    streamed = "".join(x.choices[0].text for x in api.completions.create(prompt="Once upon", stream=True, **options))
    assert streamed == whole.choices[0].text
    tokenizer = byte_tokenizer()
    ids = write(retrofitted, torch.tensor([tokenizer.encode("Once upon")]), 12, temperature=0)
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
        (dict(prompt=5), "prompt must be text, tokens, or a list of either, got 5"),
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
    with pytest.raises(
        openai.NotFoundError, match=r"has POST /v1/chat/completions, .* GET /health, got POST /v1/embeddings"
    ):
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
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}"
        with socket.create_connection((api.base_url.host, api.base_url.port)) as away:
            away.sendall(head.encode() + b"\r\n\r\n" + body)
            time.sleep(0.2)
    api.with_options(timeout=20, max_retries=0).completions.create(model="tiny", prompt="x", max_tokens=2)


def test_text_comes_in_whole_characters_and_without_stop_strings():
    from expire_span.serve.detokenizer import TextWriter

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
    from expire_span.hf.pieces import Pieces
    from expire_span.serve.detokenizer import TextWriter
    from expire_span.serve.protocol import Chat, Completion

    tokenizer = word_tokenizer()
    prompt, (named, dot) = tokenizer.encode("a fox"), tokenizer.encode("named.")
    pieces = Pieces(forgetful(tiny()), tokenizer)
    assert [pieces.label(x) for x in (*prompt, named, dot)] == [" a", " fox", " named", "."]
    assert pieces.label_first(prompt[0]) == "a" and pieces.decode([*prompt, named, dot]) == b"a fox named."
    assert pieces.encode(b"a fox").tolist() == prompt and not len(pieces.encode(b"")) and pieces.size == 97
    writer = TextWriter(tokenizer, (), prompt)
    assert [writer.add(named), writer.add(dot)] == [" named", "."]
    assert TextWriter(tokenizer).add(named) == "named"
    assert Completion.continues and not Chat.continues
    bytes_of = byte_tokenizer()
    half = bytes_of.encode("é")
    assert (
        TextWriter(bytes_of, (), half[:1]).add(bytes_of.encode("x")[0]) == "x"
    )  # a prompt that ends within a character


def test_counts_that_no_scheduler_can_have():
    """Without rows, it would wait for ever."""
    from expire_span.hf import retrofit
    from expire_span.serve.scheduler import Scheduler
    from expire_span.serve.text import TextModel

    with pytest.raises(ValueError, match="rows must be a whole number of at least 1, got 0"):
        Scheduler(TextModel(forgetful(tiny(), max_span=30, ramp=4), None), rows=0)
    with pytest.raises(ValueError, match="config must be a RetrofitConfig, got 'tight'"):
        retrofit(tiny(), "tight")  # type: ignore[arg-type]


# The chat


def test_a_chat_goes_on_after_an_interrupted_answer(tmp_path, monkeypatch, capsys):
    import io
    import signal

    from expire_span.cli import main
    from expire_span.hf.loading import open_model
    from expire_span.serve.detokenizer import TextWriter

    model, _ = open_model(str(model_folder(tmp_path / "base")), device="cpu")
    forgetful(model).save(tmp_path / "adapter")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
    tokenizer.save_pretrained(tmp_path / "base")
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


def test_generate_continues_a_text_with_an_adapter(tmp_path, capsysbinary):
    from expire_span.cli import main
    from expire_span.hf.loading import open_model

    model, tokenizer = open_model(str(model_folder(tmp_path / "base")), device="cpu")
    retrofitted = forgetful(model)
    retrofitted.save(tmp_path / "adapter")
    options = ["--prompt", "Once", "--max-tokens", "8", "--temperature", "0", "--device", "cpu"]
    assert main(["generate", str(tmp_path / "base"), "--adapter", str(tmp_path / "adapter"), *options]) == 0
    ids = tokenizer.encode("Once") + write(retrofitted, torch.tensor([tokenizer.encode("Once")]), 8, temperature=0)
    wanted, said = tokenizer.decode(ids, skip_special_tokens=True).encode(), capsysbinary.readouterr().out
    assert wanted.startswith(said.rstrip(b"\n")) and len(said) > len("Once")
    other = model_folder(tmp_path / "other", family="qwen2")
    assert main(["generate", str(other), "--adapter", str(tmp_path / "adapter"), *options]) == 2
    assert capsysbinary.readouterr().out == b""  # nothing is written before it is known that the answer can follow
