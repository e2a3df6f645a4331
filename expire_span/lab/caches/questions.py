"""Retrieval questions: long contexts made from any text, with facts hidden in them, one of which is asked for at the end."""

from __future__ import annotations

from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from expire_span.hf.texts import Beginning, template_of_turn

from .evaluate import Question

NAMES = ("apple", "river", "candle", "marble", "falcon", "garden", "silver", "window", "pepper", "island")


def make_questions(
    tokenizer: Any,
    documents: list[Tensor],
    count: int,
    kind: Literal["passkey", "pairs"],
    seed: int = 0,
    *,
    begins: Beginning | None = None,
) -> list[Question]:
    """Questions about one hidden number (passkey), or about one of several named numbers (pairs), in contexts of equal length.

    A document [n] is shortened so that context, question and answer together have at most n tokens.
    begins: what the documents begin with. Where that is the beginning of a user's turn, the question ends the turn as the chat
    template does, and the answer follows in the model's own.
    """
    rng = numpy.random.default_rng(seed)
    begins = Beginning() if begins is None else begins
    turn = template_of_turn(tokenizer) if begins.context != begins.text else None
    texts = [_invent(tokenizer, kind, rng, [] if turn is None else turn[1]) for _ in range(count)]
    longest = max((len(question) + len(answer) for _, question, answer in texts), default=0)
    made = []
    for n, (facts, question, answer) in enumerate(texts):
        text = documents[n % len(documents)]
        context = _hide(facts, text[: max(0, len(text) - longest)], rng, len(begins.context))
        made.append(Question(context, question.to(text.device), answer.to(text.device), kind))
    return made


def _invent(
    tokenizer: Any, kind: str, rng: numpy.random.Generator, closing: list[int]
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Facts, the question about one of them, and its answer. closing: tokens between the question and what answers it."""
    names = ["pass"] if kind == "passkey" else list(rng.choice(NAMES, 5, replace=False))
    codes = [str(rng.integers(10000, 99999)) for _ in names]
    asked = int(rng.integers(len(names)))
    facts = [_encode(tokenizer, f"\nThe {name} key is {code}. Remember it.\n") for name, code in zip(names, codes)]
    parts = f"\nWhat is the {names[asked]} key?", f"The {names[asked]} key is"
    question = _encode(tokenizer, f"{parts[0]} {parts[1]}")
    if closing:
        question = torch.cat([_encode(tokenizer, parts[0]), torch.tensor(closing), _encode(tokenizer, parts[1])])
    return facts, question, _encode(tokenizer, f" {codes[asked]}")


def _hide(facts: list[Tensor], text: Tensor, rng: numpy.random.Generator, first: int = 0) -> Tensor:
    """The text with facts inserted at random places behind its `first` tokens; its end is cut off so that its length stays the
    same."""
    head, text = text[:first], text[first:]
    room = len(text) - sum(map(len, facts))
    if room < len(facts):
        raise ValueError(
            f"a document has {len(text)} tokens beside its question, too few for facts of {sum(map(len, facts))} tokens; give "
            "a longer --context, or --questions 0"
        )
    places = numpy.sort(rng.integers(room, size=len(facts)))
    parts, start = [head], 0
    for place, fact in zip(places, facts):
        parts += [text[start:place], fact.to(text.device)]
        start = int(place)
    return torch.cat([*parts, text[start:room]])


def _encode(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.long)
