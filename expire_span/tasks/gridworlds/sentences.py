"""The small grammar of the instruction world: words with ids, and templates with slots that are filled by numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence

PLACES = (
    "kitchen",
    "garden",
    "cellar",
    "attic",
    "library",
    "stable",
    "tower",
    "chapel",
    "bakery",
    "harbour",
    "mill",
    "forge",
)
PLACES = (*PLACES, "orchard", "bridge", "fountain", "market")
VERBS = ("open", "clean", "paint", "carry")
OBJECTS = ("box", "lamp", "chair", "clock", "basket", "mirror")
NAMES = ("Ada", "Bruno", "Carla", "Dario", "Elif", "Farid")
ADJECTIVES = ("cold", "bright", "quiet", "dusty", "warm", "empty")
FUNCTION_WORDS = (
    "you",
    "are",
    "at",
    "the",
    "when",
    "reach",
    "never",
    "mind",
    "instead",
    "well",
    "done",
    "that",
    "was",
    "wrong",
)
FUNCTION_WORDS = (*FUNCTION_WORDS, "saw", "likes", "to", "is", "very", "yesterday", "go", "now")

WORDS = ("", *FUNCTION_WORDS, *PLACES, *VERBS, *OBJECTS, *NAMES, *ADJECTIVES)
"""Words by id; 0 is the filling behind a sentence."""
SLOTS = {
    "PLACE": (-1, PLACES),
    "VERB": (-2, VERBS),
    "OBJECT": (-3, OBJECTS),
    "NAME": (-4, NAMES),
    "ADJECTIVE": (-5, ADJECTIVES),
}
"""Number that stands for each slot in a template, and the words that can fill it."""
LENGTH = 8
"""Word ids of a sentence, filling included (S)."""

TEMPLATES = (
    "you are at the PLACE",
    "when you reach the PLACE VERB the OBJECT",
    "never mind the PLACE",
    "at the PLACE VERB the OBJECT instead",
    "well done",
    "that was wrong",
    "go now",
    "NAME saw the OBJECT at the PLACE",
    "NAME likes to VERB the OBJECT",
    "the PLACE is very ADJECTIVE",
    "yesterday NAME was at the PLACE",
)
WHERE, INSTRUCT, CANCEL, REPLACE, PRAISE, BLAME, GO, FIRST_TALK = range(8)
"""Numbers of the templates; from FIRST_TALK on they are distracting talk."""

_KINDS = ("where it is", "instruction", "change of one", "change of one", "verdict", "verdict", "go now")
"""What the sentences of each template are, for pictures; those after these are talk."""

PAIRS = tuple((verb, thing) for verb in range(len(VERBS)) for thing in range(len(OBJECTS)))
HELD_OUT = tuple(pair for pair in PAIRS if (pair[0] + pair[1]) % 4 == 0)
"""Combinations of verb and object that training never sees; each verb and each object occurs in others."""


def first_id(words: Sequence[str]) -> int:
    """Id of the first of a group of words."""
    return WORDS.index(words[0])


def encode_template(template: str) -> list[int]:
    """Word ids and slot numbers of a template, filled up to the length of a sentence."""
    parts = [SLOTS[word][0] if word in SLOTS else WORDS.index(word) for word in template.split()]
    return parts + [0] * (LENGTH - len(parts))


def read_sentence(ids: Sequence[int]) -> str:
    """Word ids as text."""
    return " ".join(WORDS[n] for n in ids if n)


def kind_of(sentence: str) -> str | None:
    """What a sentence is (an instruction, talk, ...), or None if it is none of this world's."""
    for number, template in enumerate(TEMPLATES):
        if re.fullmatch(re.sub("[A-Z]{2,}", r"\\w+", template), sentence):
            return _KINDS[number] if number < FIRST_TALK else "talk"
    return None
