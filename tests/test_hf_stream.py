"""Endless streams in flat memory, positions re-based, and the server that real clients talk to."""

import time

import pytest
import torch

transformers = pytest.importorskip("transformers")

from expire_span.hf import Drawing, Stream, stream  # noqa: E402

from .hf_models import byte_tokenizer, forgetful, tiny, tokens  # noqa: E402

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


def test_drawing():
    logits, generator = torch.tensor([[0.0, 5.0, 4.0, -9.0]]), torch.Generator().manual_seed(0)
    assert {int(Drawing(top_k=1).draw(logits, generator)) for _ in range(9)} == {1}
    assert {int(Drawing(top_p=0.99).draw(logits, generator)) for _ in range(60)} == {1, 2}
    for wrong, said in ((dict(temperature=-1), "temperature"), (dict(top_k=0), "top_k"), (dict(top_p=2), "top_p")):
        with pytest.raises(ValueError, match=f"{said} must"):
            Drawing(**wrong)
    with pytest.raises(ValueError, match="must read at least one token"):
        next(Stream(forgetful(tiny())).write(1))


def measure(reader, seed):
    """Bytes held after a chunk, and seconds of single steps."""
    reader.read(tokens(1, 256, seed=seed))
    held, steps = reader.cache.bytes_held, tokens(1, 20, seed=seed)
    began = time.perf_counter()
    for token in steps.split(1, 1):
        reader.read(token)
    return held, time.perf_counter() - began


def run_bounded(count, early):
    handle = forgetful(tiny(), max_span=120, ramp=16)
    reader, first = Stream(handle), None
    for chunk in range(count // 256):
        reader.read(tokens(1, 256, seed=chunk))
        if reader.read_tokens >= early and first is None:
            first = max(measure(reader, seed)[0] for seed in range(4))
    last = max(measure(reader, seed)[0] for seed in range(4))
    assert last <= 1.1 * first, (first, last)
    assert reader.cache.seen < 2 * 2**15


def test_memory_is_flat():
    run_bounded(6000, 2000)


@pytest.mark.long
def test_memory_is_flat_over_a_million_tokens():
    run_bounded(1_000_000, 20_000)


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

    from expire_span.hf.engine import Engine
    from expire_span.hf.serve import build_app

    from .hf_models import FAMILIES

    config = FAMILIES["llama"]()
    config.vocab_size = 259
    torch.manual_seed(0)
    handle = forgetful(AutoModelForCausalLM.from_config(config).eval(), max_span=60, ramp=8)
    engine = Engine(handle, byte_tokenizer(), rows=2)
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
        (dict(temperature=-1), "temperature must be 0 or more, got -1.0"),
        (dict(n=2), "n must be 1"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            api.completions.create(model="tiny", prompt="x", max_tokens=2, **options)
