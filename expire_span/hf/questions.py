"""Long contexts made from any text, with something hidden in them that is asked for at the end."""

from __future__ import annotations

from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from .evaluate import Question

NAMES = ("apple", "river", "candle", "marble", "falcon", "garden", "silver", "window", "pepper", "island")


def make_questions(
    tokenizer: Any, documents: list[Tensor], count: int, kind: Literal["passkey", "pairs"], seed: int = 0
) -> list[Question]:
    """Contexts as long as the documents [n] that hide one number, or several named ones of which one is asked for."""
    rng = numpy.random.default_rng(seed)
    return [_question(tokenizer, documents[i % len(documents)], kind, rng) for i in range(count)]


def _question(tokenizer: Any, text: Tensor, kind: str, rng: numpy.random.Generator) -> Question:
    names = ["pass"] if kind == "passkey" else list(rng.choice(NAMES, 5, replace=False))
    codes = [str(rng.integers(10000, 99999)) for _ in names]
    asked = int(rng.integers(len(names)))
    facts = [_encode(tokenizer, f"\nThe {name} key is {code}. Remember it.\n") for name, code in zip(names, codes)]
    question = _encode(tokenizer, f"\nWhat is the {names[asked]} key? The {names[asked]} key is")
    answer = _encode(tokenizer, f" {codes[asked]}")
    room = len(text) - sum(map(len, facts)) - len(question) - len(answer)
    if room < len(facts):
        raise ValueError(f"the documents have {len(text)} tokens, too few for {len(facts)} facts and a question")
    places = numpy.sort(rng.integers(room, size=len(facts)))
    parts, start = [], 0
    for place, fact in zip(places, facts):
        parts += [text[start:place], fact.to(text.device)]
        start = int(place)
    context = torch.cat([*parts, text[start:room]])
    return Question(context, question.to(text.device), answer.to(text.device))


def _encode(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.long)
