"""Generation: the same as running the decoder over the whole text, seeded, bounded, shared between samples."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch

from expire_span.generate import Sampling, generate_text, generate_tokens, narrow
from expire_span.models.decoder import Decoder
from expire_span.settings.run import DecoderConfig, ExpireSpanConfig
from expire_span.stream import Stream
from expire_span.stream.prompts import PROMPT_BLOCK
from expire_span.tasks.text import BYTES
from tests.error_budget import DOUBLE, reordered
from tests.tiny import MIXER, MODEL

CONFIG = DecoderConfig.modern(**MODEL, mixer=ExpireSpanConfig(**MIXER))


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    return Decoder(CONFIG).eval()


def text_of(decoder, sampling, **options) -> list[bytes]:
    return [b"".join(parts) for parts in zip(*generate_text(decoder, BYTES, b"memory", sampling, **options))]


def test_greedy_equals_running_the_whole_text_each_time(decoder):
    (text,) = text_of(decoder, Sampling(temperature=0), max_tokens=60)
    tokens = list(b"memory")
    with torch.no_grad():
        for _ in range(60):
            tokens.append(int(decoder(torch.tensor([tokens]))[0][0, -1].argmax()))
    assert bytes(tokens) == b"memory" + text


def test_seed_decides(decoder):
    a, b, c = (text_of(decoder, Sampling(seed=s), max_tokens=20) for s in (1, 1, 2))
    assert a == b != c


def test_samples_differ_and_rows_stay_apart(decoder):
    texts = text_of(decoder, Sampling(seed=3), max_tokens=20, samples=4)
    assert len(set(texts)) == 4 and all(len(text) == 20 for text in texts)
    greedy = text_of(decoder, Sampling(temperature=0), max_tokens=20, samples=3)
    assert greedy == text_of(decoder, Sampling(temperature=0), max_tokens=20) * 3


def test_prompt_is_read_in_blocks(decoder):
    prompt = torch.randint(256, (1, PROMPT_BLOCK + 37))
    with torch.no_grad():
        whole = decoder(prompt)[0][:, -1]
    budget = reordered(PROMPT_BLOCK + 37, depth=13)  # logits of about 1, two layers and a head
    torch.testing.assert_close(Stream(decoder, 1).prefill(prompt[0]).logits, whole, rtol=budget, atol=budget)


def test_endless_generation_goes_on(decoder):
    tokens = generate_tokens(decoder, torch.tensor(list(b"x")), Sampling())
    assert sum(1 for _ in itertools.islice(tokens, 400)) == 400


def test_empty_prompt_begins_somewhere(decoder):
    assert len(list(generate_text(decoder, BYTES, b"", max_tokens=3))) == 3


def test_top_k_and_top_p():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    torch.testing.assert_close(narrow(logits, Sampling(top_k=2)), torch.tensor([[0.625, 0.375, 0, 0]]))
    torch.testing.assert_close(narrow(logits, Sampling(top_p=0.7)), torch.tensor([[0.625, 0.375, 0, 0]]))
    torch.testing.assert_close(narrow(logits, Sampling(top_p=0.5)), torch.tensor([[1.0, 0, 0, 0]]))
    torch.testing.assert_close(narrow(logits, Sampling(temperature=0)), torch.tensor([[1.0, 0, 0, 0]]))
    torch.testing.assert_close(narrow(logits, Sampling()), logits.exp())
    for cold in (1e-20, 1e-45, 1e-300):  # divided by these, logits would be infinite
        torch.testing.assert_close(narrow(10 + logits, Sampling(temperature=cold)), torch.tensor([[1.0, 0, 0, 0]]))


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_bad_sampling_is_named(bad):
    (value,) = bad.values()
    with pytest.raises(ValueError, match=f"got {value}"):
        Sampling(**bad)


def test_the_codec_must_be_the_models():
    with pytest.raises(ValueError, match="vocab 12, got one of 256 tokens"):
        next(generate_text(Decoder(replace(CONFIG, vocab=12)), BYTES, b"x"))


@pytest.mark.parametrize("position", [2**20, 2**31 - 60, 2**40, -(2**33)])
def test_streams_do_not_end_at_large_positions(decoder, position):
    """Only distances matter, and angles are exact: nothing has to be renumbered."""
    tokens, decoder = torch.randint(256, (2, 120)), copy.deepcopy(decoder).double()

    def stream(start):
        state, parts = [part | {"position": start} for part in decoder.initial_state(2, "kv")], []
        with torch.no_grad():
            for block in tokens.split(7, dim=1):
                logits, state, _ = decoder(block, state)
                parts.append(logits)
        return torch.cat(parts, 1), state

    expected, _ = stream(0)
    actual, state = stream(position)
    assert state[0]["position"] == position + 120
    torch.testing.assert_close(actual, expected, rtol=0, atol=DOUBLE)
