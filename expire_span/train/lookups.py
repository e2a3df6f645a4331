"""Lookups: contexts with facts in many formats, some of which are asked for at the end.

The formats are those of notes, tables, logs, settings, code, glossaries and lists. None is a generator of lab/suites, by which
caches are judged: what is learned here is to keep what may be asked for, not to recognise one kind of sentence.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from .lessons import Asked, Passages, Row, Turns


def listed(words: str) -> list[str]:
    """What stands between commas."""
    return [" ".join(word.split()) for word in words.split(",")]


PEOPLE = listed(
    """Alice, Bruno, Chiara, Dmitri, Elif, Farid, Greta, Hiro, Irene, Jonas, Kemal, Leila, Maren, Nadia, Olga, Pablo, Ravi,
    Selma, Tomas, Uma, Viktor, Wanda, Ximena, Yusuf, Zora"""
)
THINGS = listed(
    """bicycle, lantern, violin, umbrella, kettle, ladder, passport, camera, suitcase, telescope, hammer, carpet, teapot"""
)
PLACES = listed(
    """behind the mill, in the cellar, under the stairs, at the harbour, on the third shelf, beside the old oak, in a blue box,
    next to the oven, at her sister's, in the boat house, above the stable, inside the clock"""
)
NUMBERED = listed(
    """locker, account, ticket, cabin, parcel, licence, order, room, badge, invoice, engine, seat, contract, crate"""
)
GOODS = listed(
    """apples, nails, candles, flour, ink, rope, honey, salt, buttons, wool, paper, vinegar, plums, soap, tar, lemons, chalk"""
)
COLUMNS = listed("price, weight, stock, year, floor, depth, speed, area, width, rank")
AREAS = listed("cache, net, auth, queue, disk, mail, sensor, pump, valve, motor, index, batch")
FIELDS = listed("limit, ttl, port, retries, offset, level, window, depth, quota, delay, size, rate")
SYLLABLES = listed(
    """bra, den, fol, gim, hur, jas, kel, lom, mir, nop, quil, ras, sten, tov, ulm, vex, wim, yar, zeb, cro, plin, dru"""
)
PHRASES = listed(
    """the lake is frozen, no ship sails today, bring two lamps, the bell rang twice, we meet at dawn, the road is closed,
    trust the gardener, seven geese flew north, the key fits nowhere, the tea is cold"""
)
MEANINGS = listed(
    """a lamp for miners, a knot in a wet rope, the last day of harvest, a bridge without rails, bread that was baked twice,
    a wind from the north, a coin with a hole, the smell of rain, a door that sticks, a song for rowing, a very small debt"""
)


@dataclass(frozen=True)
class Facts:
    """Some facts, and questions about them."""

    parts: Sequence[str]
    """Texts, each of which is put somewhere into the context, in this order."""
    questions: Sequence[Asked]


def make_value(rng: random.Random) -> str:
    """Something that cannot be guessed."""
    kind = rng.randrange(7)
    if kind <= 1:
        return str(rng.randrange(10 ** rng.randrange(2, 7), 10**7))
    if kind == 2:
        return f"{make_word(rng, 1).upper()}-{rng.randrange(100, 10000)}"
    if kind == 3:
        return f"{rng.getrandbits(4 * rng.choice([8, 12, 24])):x}"
    if kind == 4:
        return f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    return make_word(rng) if kind == 5 else f"{rng.randrange(1, 900)}.{rng.randrange(10, 100)}"


def make_word(rng: random.Random, syllables: int = 3) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(syllables))


def make_names(rng: random.Random, count: int) -> list[str]:
    """Different names such as cache.limit_3."""
    pairs = [(area, field) for area in AREAS for field in FIELDS]
    return [f"{area}.{field}_{rng.randrange(1, 100)}" for area, field in rng.sample(pairs, count)]


def whereabouts(rng: random.Random) -> Facts:
    who, what, where = rng.choice(PEOPLE), rng.choice(THINGS), rng.choice(PLACES)
    told = rng.choice(("{} keeps the {} {}.", "The {1} of {0} is {2}.", "It was {0} who put the {1} {2}."))
    questions = [
        Asked(f"Where is the {what} of {who}?", where, f"The {what} of {who} is" if rng.random() < 0.5 else "")
    ]
    return Facts([told.format(who, what, where)], questions)


def numbers(rng: random.Random) -> Facts:
    who, what, value = rng.choice(PEOPLE), rng.choice(NUMBERED), make_value(rng)
    forms = ("Note that {0}'s {1} number is {2}.", "{0} has {1} number {2}.", "The {1} of {0}: {2}.", "{1} | {0} | {2}")
    prefix = f"{who}'s {what} number is" if rng.random() < 0.6 else ""
    return Facts(
        [rng.choice(forms).format(who, what, value)],
        [Asked(f"Which {what} number does {who} have? Give the number alone.", value, prefix)],
    )


def table(rng: random.Random) -> Facts:
    rows, columns = rng.sample(PEOPLE, rng.randrange(4, 11)), rng.sample(COLUMNS, rng.randrange(2, 5))
    title, sign = make_word(rng, 2).capitalize(), rng.choice((" | ", ",", "\t", "; "))
    cells = {row: [str(rng.randrange(10, 10**5)) for _ in columns] for row in rows}
    lines = [f"Table {title}", sign.join(["name", *columns]), *(sign.join([row, *cells[row]]) for row in rows)]
    asked = [(row, n) for row in rng.sample(rows, 3) for n in rng.sample(range(len(columns)), 1)]
    questions = [
        Asked(f"In the table {title}, what is the {columns[n]} of {row}? Give the number alone.", cells[row][n])
        for row, n in asked
    ]
    return Facts(["\n".join(lines)], questions)


def log(rng: random.Random) -> Facts:
    names, second = make_names(rng, rng.randrange(3, 9)), rng.randrange(50_000)
    values = {name: make_value(rng) for name in names}
    lines = []
    for name in names:
        second += rng.randrange(1, 4000)
        clock = f"{second // 3600 % 24:02}:{second // 60 % 60:02}:{second % 60:02}"
        level = rng.choice(("INFO", "DEBUG", "WARN"))
        lines.append(f"{clock} {level} worker-{rng.randrange(1, 20)} set {name}={values[name]}")
    parts = ["\n".join(lines)] if rng.random() < 0.5 else lines
    return Facts(parts, [Asked(f"What was {n} set to in the log?", values[n], f"{n}=") for n in rng.sample(names, 2)])


def settings(rng: random.Random) -> Facts:
    title, values = make_word(rng, 2), {name: make_value(rng) for name in make_names(rng, rng.randrange(4, 10))}
    form = rng.randrange(3)
    if form == 0:
        text = json.dumps({title: values}, indent=rng.choice((None, 2)))
    else:
        sign = " = " if form == 1 else ": "
        text = "\n".join([f"[{title}]" if form == 1 else f"{title}:", *(f"  {n}{sign}{v}" for n, v in values.items())])
    asked = rng.sample(sorted(values), 2)
    return Facts([text], [Asked(f"What is the setting {n} of {title}?", values[n], f"{n} is") for n in asked])


def functions(rng: random.Random) -> Facts:
    names = [f"{make_word(rng, 2)}_{rng.choice(FIELDS)}" for _ in range(rng.randrange(1, 5))]
    values = {name: repr(v) if not (v := make_value(rng)).isdecimal() else v for name in names}
    forms = ("def {0}():\n    return {1}", "{0} = {1}", 'def {0}(x=None):\n    """Used by others."""\n    return {1}')
    parts = [rng.choice(forms).format(name, value) for name, value in values.items()]
    told = [Asked(f"What does the code above give {name}? Write the value alone.", v) for name, v in values.items()]
    return Facts(parts, told)


def glossary(rng: random.Random) -> Facts:
    words = [make_word(rng) for _ in range(rng.randrange(1, 6))]
    meanings = dict(zip(words, rng.sample(MEANINGS, len(words))))
    parts = [rng.choice(("{} (noun): {}.", "A {} is {}.", "{}, that is, {}.")).format(*x) for x in meanings.items()]
    word = rng.choice(words)
    return Facts(parts, [Asked(f"What is a {word}?", meanings[word], f"A {word} is" if rng.random() < 0.5 else "")])


def signals(rng: random.Random) -> Facts:
    word, phrase = make_word(rng, 2).upper(), rng.choice(PHRASES)
    told = rng.choice(
        ("When I say {}, answer only: {}.", "Remember: to {} the reply is: {}.", "If you are asked {}, say: {}.")
    )
    return Facts([told.format(word, phrase)], [Asked(f"I say {word}.", phrase)])


def lists(rng: random.Random) -> Facts:
    title, goods = make_word(rng, 2).capitalize(), rng.sample(GOODS, rng.randrange(4, 9))
    text = rng.choice((", ", "\n- ")).join([f"List {title}: {goods[0]}", *goods[1:]])
    return Facts([text], [Asked(f"Repeat the list {title}, in its order, with commas.", ", ".join(goods))])


def purchases(rng: random.Random) -> Facts:
    who, goods = rng.choice(PEOPLE), rng.sample(GOODS, rng.randrange(2, 6))
    told = rng.choice(("{} bought {}.", "In the shop {} asked for {}.", "{} came home with {}."))
    question = f"Name everything that {who} bought, in the order of the text."
    return Facts([told.format(who, x) for x in goods], [Asked(question, ", ".join(goods), f"{who} bought")])


MAKERS: tuple[Callable[[random.Random], Facts], ...] = (
    *(whereabouts, numbers, table, log, settings, functions, glossary, signals, lists, purchases),
)


class Lookups:
    """Facts at random places of a passage, or among nothing but other facts; questions about some of them at the end."""

    def __init__(self, passages: Sequence[Passages], turns: Turns, length: int) -> None:
        self.passages, self.turns, self.length = passages, turns, length

    def draw(self, rng: numpy.random.Generator) -> Row:
        plain = random.Random(int(rng.integers(2**62)))
        asks = max(self.length // 8, 128)
        room = self.length - len(self.turns.begins) - asks
        facts = self._invent(plain, int(room * plain.choice((0.05, 0.15, 0.4, 0.9))))
        questions = [x for group, _ in facts for x in group.questions]
        asked = Counter(x.question for x in questions)
        questions = [x for x in questions if asked[x.question] == 1]  # two facts of one name may contradict each other
        plain.shuffle(questions)
        ids, answers = self.turns.write_all(questions, asks)
        parts = [part for _, group in facts for part in group]
        passages = self.passages[int(rng.integers(len(self.passages)))]
        fill = passages.take(rng, self.length - len(self.turns.begins) - len(ids) - sum(map(len, parts)))
        return self.turns.finish(scatter([group for _, group in facts], fill, plain), ids, answers)

    def _invent(self, rng: random.Random, room: int) -> list[tuple[Facts, list[Tensor]]]:
        """Facts, at least one, of at most `room` tokens where there are more; each with the tokens of its parts."""
        found: list[tuple[Facts, list[Tensor]]] = []
        used = 0
        for _ in range(1000):
            made = rng.choice(MAKERS)(rng)
            parts = [torch.tensor(self.turns.encode(f"\n{part}\n"), dtype=torch.long) for part in made.parts]
            size = sum(map(len, parts))
            if used + size > room and (found or size > self.length // 3):
                if found:
                    break
                continue
            used += size
            found.append((made, parts))
        return found


def scatter(groups: Sequence[Sequence[Tensor]], fill: Tensor, rng: random.Random) -> list[Tensor]:
    """The parts of each group, in their order, at random places of a passage."""
    placed = []
    for group in groups:
        placed += zip(sorted(rng.randrange(len(fill) + 1) for _ in group), group)
    found, start = [], 0
    for place, part in sorted(placed, key=lambda x: x[0]):
        found += [fill[start:place], part]
        start = place
    return [*found, fill[start:]]
