"""Chats that go on are encoded from where they go on, into the tokens that the whole text has."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("transformers")

from expire_span.serve.encoding import ChatEncoder, count_shared
from tests.hf_models import byte_tokenizer, word_tokenizer
from tests.serve.chats import chats, model, text_model

WORDS = ("so", " the fox", "\u00fcber", "\u2603 ", "<s>", "</s>", "\n", "  ", "<s", "a.", " named", "")


def merging_tokenizer(lstrip: bool = False):
    """Byte pairs that merge, so that neighbours change tokens, and a mark around turns; lstrip: which takes the white space
    before it with it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["so the fox named a fox, so the fox sat. " * 9], trainer)
    tokenizer.add_special_tokens([AddedToken(x, special=True, lstrip=lstrip) for x in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {
    "bytes": byte_tokenizer,
    "merges": merging_tokenizer,
    "marks that strip": lambda: merging_tokenizer(lstrip=True),
    "words": word_tokenizer,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_have_the_tokens_that_they_have_alone(name):
    """Texts that go on from others, from anywhere within them, and from none."""
    tokenizer, rng = TOKENIZERS[name](), random.Random(0)
    encoder, texts = ChatEncoder(tokenizer), ["so"]
    for _ in range(150):
        begins = rng.choice(texts)
        begins = begins[: rng.choice([len(begins), rng.randint(0, len(begins))])]
        text = begins + "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12)))
        texts.append(text)
        found = encoder.encode("me", text)
        alone = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        assert found.text == text and list(found.tokens) == alone["input_ids"]
        assert list(zip(found.begins, found.ends)) == [tuple(x) for x in alone["offset_mapping"]]
    encoded, whole = encoder.encoded, sum(map(len, texts))
    assert (encoded < 0.7 * whole) == (name in ("bytes", "merges")), (encoded, whole)


def test_a_turn_of_a_long_chat_encodes_what_is_new():
    """The number of characters that are encoded for a turn does not grow with the turns."""
    text, messages, encoded = text_model(model()), [{"role": "system", "content": "Be brief. " * 9}], []
    with chats(text, 10**8) as server:
        for turn in range(24):
            messages.append({"role": "user", "content": f"Question {turn:2d}?"})
            before = text.chats.encoded
            answer = server.say(messages, max_tokens=3)["choices"][0]["message"]["content"]
            encoded.append(text.chats.encoded - before)
            messages.append({"role": "assistant", "content": answer})
    assert max(encoded[1:]) < 90, encoded


def test_texts_of_one_owner_serve_no_other_and_leave_when_there_are_too_many():
    encoder = ChatEncoder(byte_tokenizer(), most_characters=1000)
    text = "a" * 300 + "<s>"
    encoder.encode("me", text)
    for owner, known in (("you", False), ("me", True), ("me", True)):
        before = encoder.encoded
        encoder.encode(owner, text + "b")
        assert (encoder.encoded - before < 10) == known
    for n in range(5):
        encoder.encode("you", f"<s>{n}" * 100)
    before = encoder.encoded
    encoder.encode("me", text)
    assert encoder.encoded - before == len(text), "it had left"


@pytest.mark.parametrize(
    ("one", "other", "count"), [("", "a", 0), ("abc", "abd", 2), ("abc", "abc", 3), ("b", "ab", 0)]
)
def test_shared_characters_are_counted(one, other, count):
    assert count_shared(one, other) == count_shared(other, one) == count
