"""Tasks about a whole text: variables that take each other's value, the most common words, the most frequent made-up words.

RULER's tasks by their published definitions; the wording is our own. The first two show a short example first, as there.
"""

from __future__ import annotations

import random
import string
from itertools import pairwise

from .haystack import Haystack, fit, no_books
from .needles import hide
from .prompts import Frame, Prompt
from .words import make_list

HOPS = 4
"""Number of times that a value is handed on to another variable."""
COMMON = 10
"""Number of common words."""
SHORT = 4096
"""Contexts shorter than this get fewer copies of each word, since the common ones alone would fill them."""
ALPHA = 2.0
"""Exponent of the frequencies of made-up words: the word of rank k is written about k ** -ALPHA times as often as the first."""


def make_tracking(frame: Frame, haystack: Haystack, context: int, index: int, rng: random.Random) -> Prompt:
    """Variable tracking: one chain of assignments in repeated sentences; all variables with the first one's value are asked."""
    begin = "The text below hides assignments to variables. Keep track of which variable has which value.\n\n"
    lines, value, names = make_chain(rng, HOPS)
    shown, shown_value, shown_names = make_chain(rng, HOPS)
    filler = no_books().take(rng, 2 * len(shown))
    told = " ".join(x for n, line in enumerate(shown) for x in (*filler[2 * n : 2 * n + 2], line))
    example = f"{begin}{told}{_ask_chain(shown_value)} {', '.join(shown_names)}\n\n"
    text = hide(frame, example + begin, lines, no_books().take, context, rng)
    question, prefix = _ask_chain(value).split("\nAnswer:")
    return Prompt("tracking", index, text, question, tuple(names), 30, f"\nAnswer:{prefix}", fills=True)


def _ask_chain(value: str) -> str:
    return (
        f"\n\nQuestion: Which variables have the value {value} in the text above?"
        f"\nAnswer: The {HOPS + 1} variables that have the value {value} are:"
    )


def make_chain(rng: random.Random, hops: int) -> tuple[list[str], str, list[str]]:
    """Assignments, the value, and the names of the variables that have it."""
    names: list[str] = []
    while len(names) < hops + 1:
        name = "".join(rng.choices(string.ascii_uppercase, k=5))
        if name not in names:
            names.append(name)
    value = str(rng.randrange(10000, 100000))
    lines = [f"VAR {names[0]} = {value}."]
    lines += [f"VAR {new} = VAR {old}." for old, new in pairwise(names)]
    return lines, value, names


def make_common(frame: Frame, haystack: Haystack, context: int, index: int, rng: random.Random) -> Prompt:
    """Common words: a numbered list in which ten words are written ten times as often as all others."""
    often, seldom = (30, 3) if context >= SHORT else (10, 1)
    example, shown = _word_list(rng.random(), 20, 3, 1)
    seed = rng.random()
    asked = f"\n\nQuestion: Which {COMMON} words appear most often in the list above?"
    prefix = f"\nAnswer: The {COMMON} words that appear most often are:"
    begin = "Below is a numbered list of words, of which some appear more often than others. Keep those in mind.\n\n"
    told = " ".join(f"{n + 1}. {word}" for n, word in enumerate(shown))
    start = f"{begin}{example}{asked}{prefix} {told}\n\n{begin}"

    def build(count: int) -> str:
        return start + _word_list(seed, count, often, seldom)[0]

    count, _ = fit(frame.tokenizer, build, frame.room(context))
    answers = tuple(_word_list(seed, count, often, seldom)[1])
    return Prompt("common_words", index, build(count), asked, answers, 120, prefix)


def _word_list(seed: float, others: int, often: int, seldom: int) -> tuple[str, list[str]]:
    """A numbered list in random order with the common words `often` times and `others` more words `seldom` times."""
    rng = random.Random(seed)
    words = make_list(rng, COMMON + others)
    common, rest = words[:COMMON], words[COMMON:]
    listed = common * often + rest * seldom
    rng.shuffle(listed)
    return " ".join(f"{n + 1}. {word}" for n, word in enumerate(listed)), common


def make_frequent(frame: Frame, haystack: Haystack, context: int, index: int, rng: random.Random) -> Prompt:
    """Frequent words: made-up words with the frequencies of a power law; the three most frequent ones are asked for. The most
    frequent of all is a row of dots, which is to be ignored."""
    seed = rng.random()
    begin = "The words of the text below are in code. Find out which three of them appear most often.\n\n"
    asked = "\n\nQuestion: Which three words, apart from the dots, appear most often in the text above? Only name them."
    prefix = "\nAnswer: The three words that appear most often are:"

    def build(count: int) -> str:
        return begin + " ".join(_coded_text(seed, count)[0])

    count, _ = fit(frame.tokenizer, build, frame.room(context))
    return Prompt("frequent_words", index, build(count), asked, tuple(_coded_text(seed, count)[1]), 50, prefix)


def _coded_text(seed: float, count: int) -> tuple[list[str], list[str]]:
    """`count` words in random order and the three most frequent ones but the dots."""
    rng, total = random.Random(seed), sum(k**-ALPHA for k in range(1, 2000))
    text, top, rank = [], [], 0
    while len(text) < count:
        rank += 1
        word = "...." if rank == 1 else "".join(rng.choices(string.ascii_lowercase, k=6))
        copies = min(max(round(count * rank**-ALPHA / total), 1), count - len(text))
        text += [word] * copies
        top += [word] if 1 < rank <= 4 else []
    rng.shuffle(text)
    return text, top
