"""Needles in a haystack: sentences that give keys values, hidden in a long text, some of which are asked for.

The eight variants of RULER by their published definitions, and this package's own passkey and pairs. The wording is our own.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .haystack import Haystack, fit, no_books
from .prompts import Frame, Prompt
from .words import make_keys, make_list

MOST_TOKENS = 128


@dataclass(frozen=True)
class Needles:
    """What a variant hides, and in what."""

    hay: str = "books"
    """books, nothing (repeated sentences), or needles (the text is made of others of the same kind)."""
    keys: str = "words"
    """words, or codes: random identifiers of 32 digits."""
    values: str = "numbers"
    """numbers, or codes."""
    hidden: int = 1
    """Number of keys with a value."""
    values_each: int = 1
    """Number of values of each key."""
    asked: int = 1
    """Number of keys that are asked for."""


VARIANTS = {
    "single_1": Needles(hay="nothing"),
    "single_2": Needles(),
    "single_3": Needles(values="codes"),
    "multikey_1": Needles(hidden=4),
    "multikey_2": Needles(hay="needles"),
    "multikey_3": Needles(hay="needles", keys="codes", values="codes"),
    "multivalue": Needles(values_each=4),
    "multiquery": Needles(hidden=4, asked=4),
}


def make_needles(name: str, frame: Frame, haystack: Haystack, context: int, index: int, rng: random.Random) -> Prompt:
    """A prompt of one of the variants."""
    kind = VARIANTS[name]
    keys = [make_code(rng) for _ in range(kind.hidden)] if kind.keys == "codes" else make_keys(rng, kind.hidden)
    facts = {key: [make_value(rng, kind.values) for _ in range(kind.values_each)] for key in keys}
    asked = rng.sample(keys, kind.asked)
    told = [tell(key, value, kind.values) for key, values in facts.items() for value in values]
    many = kind.asked * kind.values_each > 1
    what = kind.values if many else kind.values.removesuffix("s")
    begin = (
        f"The text below hides {'several' if many or kind.hidden > 1 else 'a'} secret "
        f"{kind.values if many or kind.hidden > 1 else what}. Keep what it says about them in mind: you will be asked "
        f"for the {what} at its end.\n\n"
    )
    listed = ", ".join(asked[:-1]) + (f", and {asked[-1]}" if len(asked) > 1 else asked[-1])
    verb = "are all the" if many else "is the"
    question = f"\n\nWhat {verb} secret {what} of {listed} that the text above gives?"
    prefix = f" The secret {what} of {listed} that the text gives {'are' if many else 'is'}"
    if kind.hay == "needles":
        body = NeedleText(kind, set(keys), rng)
    else:
        body = (haystack if kind.hay == "books" else no_books()).take
    text = hide(frame, begin, told, body, context, rng)
    answers = tuple(value for key in asked for value in facts[key])
    return Prompt(name, index, text, question, answers, MOST_TOKENS, prefix, fills=True)


def tell(key: str, value: str, kind: str) -> str:
    return f"One of the secret {kind} of {key} is {value}."


def make_value(rng: random.Random, kind: str) -> str:
    return make_code(rng) if kind == "codes" else str(rng.randrange(10**6, 10**7))


def make_code(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


class NeedleText:
    """A haystack of needles whose keys are none of those that are hidden."""

    def __init__(self, kind: Needles, taken: set[str], rng: random.Random) -> None:
        self.kind, self.taken, self.seed = kind, taken, rng.random()

    def __call__(self, rng: random.Random, count: int) -> list[str]:
        mine, lines = random.Random(self.seed), []
        while len(lines) < count:
            key = make_code(mine) if self.kind.keys == "codes" else make_keys(mine, 1)[0]
            if key not in self.taken:
                lines.append(tell(key, make_value(mine, self.kind.values), self.kind.values))
        return lines


def hide(
    frame: Frame, begin: str, facts: Sequence[str], take: Any, context: int, rng: random.Random, system: str = ""
) -> str:
    """`begin` and sentences that fill a context, with the facts in their order at random places among them; the end of the last
    sentence is to be cut off where the context ends.

    take: a function of a random generator and a number that gives so many sentences; system: the system prompt.
    """
    places, seed = sorted(rng.random() for _ in facts), rng.random()

    def build(count: int) -> str:
        sentences = take(random.Random(seed), count)
        parts, done = [], 0
        for place, fact in zip(places, facts):
            here = int(place * max(count - 1, 1))
            parts += [*sentences[done:here], fact]
            done = here
        return begin + " ".join([*parts, *sentences[done:]])

    count, _ = fit(frame.tokenizer, build, frame.room(context, system))
    return build(count + 2)  # all facts stand before the last two sentences, and so in what is left


def make_passkey(frame: Frame, haystack: Haystack, context: int, index: int, rng: random.Random) -> Prompt:
    return _make_named("passkey", ["pass"], frame, haystack, context, index, rng)


def make_pairs(frame: Frame, haystack: Haystack, context: int, index: int, rng: random.Random) -> Prompt:
    return _make_named("pairs", make_list(rng, 5), frame, haystack, context, index, rng)


def _make_named(
    task: str, names: list[str], frame: Frame, haystack: Haystack, context: int, index: int, rng: random.Random
) -> Prompt:
    """One of a few named numbers, told as in the questions of `evaluate-cache` without a suite."""
    codes = [str(rng.randrange(10000, 100000)) for _ in names]
    asked = rng.randrange(len(names))
    facts = [f"The {name} key is {code}. Remember it." for name, code in zip(names, codes)]
    begin = "The text below tells the number of a key in between. Remember it.\n\n"
    text = hide(frame, begin, facts, haystack.take, context, rng)
    question = f"\n\nWhat is the {names[asked]} key that the text above tells?"
    return Prompt(task, index, text, question, (codes[asked],), 16, f" The {names[asked]} key is", fills=True)
