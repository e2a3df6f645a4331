"""Contexts to learn from in which numbers are named and asked for later, in other words than the test's questions.

Books alone rarely ask for something said thousands of tokens before, so a model that learns from them only has little reason to
keep it. A fact is stated once and asked for once, anywhere after; the model's own answer is the lesson, not ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from expire_span.train.distill import Learner

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


class LessonLearner(Learner):
    """Learns from books, and in some rows of a batch from books with facts woven in."""

    def __init__(
        self, handle: Any, documents: list[Tensor], config: Any, tokenizer: Any, rows: int, facts: int
    ) -> None:
        super().__init__(handle, documents, config)
        self.tokenizer, self.rows, self.facts = tokenizer, rows, facts

    def _contexts(self) -> Tensor:
        ids = super()._contexts()
        for row in range(self.rows):
            ids[row] = self.weave(ids[row].cpu()).to(ids.device)
        return ids

    def weave(self, text: Tensor) -> Tensor:
        """The text with facts and later questions about them, cut to the length it had."""
        places = []
        for who, what in self._pairs():
            kind, code = int(self.rng.integers(len(STATED))), self._code()
            words = dict(who=who, what=what, code=code)
            said, asked = sorted(self.rng.integers(len(text), size=2).tolist())
            places += [(said, 0, STATED[kind].format(**words)), (asked, 1, ASKED[kind].format(**words))]
        parts, start = [], 0
        for place, _, words in sorted(places):
            parts += [text[start:place], self._encode(f"\n{words}\n")]
            start = place
        return torch.cat([*parts, text[start:]])[: len(text)]

    def _pairs(self) -> list[tuple[str, str]]:
        every = [(who, what) for who in PEOPLE.split() for what in THINGS.split()]
        chosen = self.rng.choice(len(every), self.facts, replace=False)
        return [every[int(n)] for n in chosen]

    def _code(self) -> str:
        digits = int(self.rng.integers(4, 7))
        return "".join(str(x) for x in self.rng.integers(10, size=digits))

    def _encode(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer.encode(text, add_special_tokens=False), dtype=torch.long)
