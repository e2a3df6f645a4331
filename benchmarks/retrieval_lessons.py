"""Training documents in which numbers are stated and asked for later, in other words than in the test's questions.

Books rarely ask for something that was said thousands of tokens before, so a model trained on them alone has little reason to
keep it. Each fact is stated once and asked for once, some time later. The target is the base model's own prediction.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor

PEOPLE = "Alice Bruno Clara David Emma Felix Greta Hugo Irene Jonas Karla Louis Maria Nils Olga Peter Rosa Simon Tilda Victor"
THINGS = "locker account ticket cabin parcel license order room badge invoice shelf engine"
STATED = (
    "Note that {who}'s {what} number is {code}.",
    "{who} has {what} number {code}.",
    "The {what} of {who}: {code}.",
)
ASKED = (
    "Which {what} number does {who} have? It is {code}.",
    "{who}'s {what} number was {code}.",
    "{what}, {who}: {code}.",
)


def weave_facts(tokenizer: Any, text: Tensor, *, every: int, within: int, seed: int) -> Tensor:
    """A document [n] with one fact per `every` tokens, each asked for at most `within` tokens after it was stated."""
    rng = numpy.random.default_rng(seed)
    places = []
    for _ in range(len(text) // every):
        said = int(rng.integers(len(text)))
        asked = said + int(rng.integers(1, within))
        statement, question = _invent(rng)
        places += [(said, 0, statement), (min(asked, len(text)), 1, question)]
    parts, start = [], 0
    for place, _, words in sorted(places):
        ids = tokenizer.encode(f"\n{words}\n", add_special_tokens=False)
        parts += [text[start:place], torch.tensor(ids, dtype=torch.long)]
        start = place
    return torch.cat([*parts, text[start:]])


def _invent(rng: numpy.random.Generator) -> tuple[str, str]:
    """A fact, and the question about it with its answer."""
    kind, digits = int(rng.integers(len(STATED))), int(rng.integers(4, 7))
    people, things = PEOPLE.split(), THINGS.split()
    words = dict(who=people[rng.integers(len(people))], what=things[rng.integers(len(things))])
    words["code"] = "".join(str(x) for x in rng.integers(10, size=digits))
    return STATED[kind].format(**words), ASKED[kind].format(**words)
