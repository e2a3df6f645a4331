"""Contexts that a retrofit learns from: passages of text, passages to be repeated, and how questions stand behind them.

A lesson draws one context of a given length at a time. Its questions come after everything that they ask about, so that a span
predictor cannot know them; the tokens of the answers are marked, since they are what the lesson is about.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from expire_span.hf.loading import turn_tokens
from expire_span.hf.texts import Beginning, template_of_turn

LEAST_CONTEXT = 256
"""Shortest context that holds a passage, questions about it, and their answers."""
CODE_FILES, CODE_CHARACTERS = 64, 30_000
"""Number of source files that are read, and of characters of each."""
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "__pycache__", "site-packages", "_vendor"}
"""Folders whose sources are not read."""


@dataclass(frozen=True)
class Row:
    """One context."""

    ids: Tensor
    """Its tokens [n]."""
    answers: Tensor | None = None
    """Which tokens belong to answers [n]; None where none does."""
    kept: int = 0
    """Number of first tokens that never expire, such as a system prompt."""


class Lesson(Protocol):
    """One kind of contexts."""

    def draw(self, rng: numpy.random.Generator) -> Row: ...


class Passages:
    """Consecutive tokens from anywhere in some documents, every place equally likely."""

    def __init__(self, documents: Sequence[Tensor]) -> None:
        self.documents = list(documents)
        self.longest = max((len(x) for x in self.documents), default=0)

    def take(self, rng: numpy.random.Generator, count: int) -> Tensor:
        places = numpy.array([max(0, len(x) - count + 1) for x in self.documents], dtype=float)
        document = self.documents[rng.choice(len(places), p=places / places.sum())]
        start = int(rng.integers(len(document) - count + 1))
        return document[start : start + count]


class Text:
    """Passages behind the tokens with which a context of the model begins."""

    def __init__(self, passages: Passages, length: int, begins: Sequence[int]) -> None:
        self.passages, self.count = passages, length - len(begins)
        self.front = torch.tensor(list(begins), dtype=torch.long)

    def draw(self, rng: numpy.random.Generator) -> Row:
        passage = self.passages.take(rng, self.count)
        return Row(torch.cat([self.front.to(passage.device), passage]) if len(self.front) else passage)


@dataclass(frozen=True)
class Asked:
    """A question and its answer; what is given as tokens is taken as it is."""

    question: str
    answer: str | Sequence[int]
    prefix: str | Sequence[int] = ""
    """What the answer begins with and the model is given."""


class Turns:
    """Questions and answers as tokens: through the chat template where there is one, else as lines of text."""

    def __init__(self, tokenizer: Any, beginning: Beginning) -> None:
        self.tokenizer = tokenizer
        turn = template_of_turn(tokenizer) if beginning.context != beginning.text else None
        self.chats = turn is not None
        self.begins = torch.tensor(list(beginning.context), dtype=torch.long)
        self.closing: list[int] = turn[1] if turn is not None else self.encode("\nAnswer:")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def write(self, asked: Asked, first: bool) -> tuple[list[int], list[int]]:
        """The tokens up to the answer, and those of the answer. first: the question stands in the turn of the context."""
        if not self.chats:
            before = [*self.encode(f"\n\nQuestion: {asked.question}"), *self.closing]
        elif first:
            before = [*self.encode(f"\n\n{asked.question}"), *self.closing]
        else:
            before = turn_tokens(self.tokenizer, asked.question)
        return [*before, *self._follow(asked.prefix, first=self.chats)], self._follow(
            asked.answer, first=self.chats and not asked.prefix
        )

    def _follow(self, written: str | Sequence[int], first: bool) -> list[int]:
        """Tokens of what stands behind a word, or first in a turn of the model."""
        if not isinstance(written, str):
            return list(written)
        return self.encode(written if first or not written else f" {written}")

    def write_all(self, questions: Sequence[Asked], room: int) -> tuple[list[int], list[bool]]:
        """As many questions with their answers as `room` tokens hold, and which of these tokens belong to answers."""
        ids: list[int] = []
        answers: list[bool] = []
        for asked in questions:
            before, answer = self.write(asked, not ids)
            if len(ids) + len(before) + len(answer) > room:
                continue
            ids += [*before, *answer]
            answers += [False] * len(before) + [True] * len(answer)
        return ids, answers

    def finish(self, context: Sequence[Tensor], ids: list[int], answers: list[bool]) -> Row:
        """The context with its questions behind it."""
        front = torch.cat([self.begins, *context])
        marks = torch.cat([torch.zeros(len(front), dtype=torch.bool), torch.tensor(answers, dtype=torch.bool)])
        return Row(torch.cat([front, torch.tensor(ids, dtype=torch.long)]), marks)


class Repeats:
    """Passages of which parts are to be repeated at the end: what a memory of everything would allow."""

    QUOTED, SHORTEST, LONGEST = 8, 24, 96
    """Number of tokens by which a part is named, and least and most tokens of a part."""

    def __init__(self, passages: Sequence[Passages], turns: Turns, length: int) -> None:
        self.passages, self.turns, self.length = passages, turns, length

    def draw(self, rng: numpy.random.Generator) -> Row:
        room = max(self.length // 8, 128)
        passages = self.passages[int(rng.integers(len(self.passages)))]
        passage = passages.take(rng, self.length - len(self.turns.begins))
        kept = passage[: len(passage) - room].tolist()
        ids, answers = self.turns.write_all([self._ask(kept, rng, room) for _ in range(room // self.SHORTEST)], room)
        return self.turns.finish([passage[: len(passage) - len(ids)]], ids, answers)

    def _ask(self, passage: list[int], rng: numpy.random.Generator, room: int) -> Asked:
        count = int(rng.integers(self.SHORTEST, max(self.SHORTEST + 1, min(self.LONGEST, room // 3))))
        start = int(rng.integers(len(passage) - self.QUOTED - count))
        quoted, wanted = passage[start : start + self.QUOTED], passage[start + self.QUOTED :][:count]
        named = self.turns.tokenizer.decode(quoted).strip()
        return Asked(f'Repeat the part of the text above that begins with "{named}", word for word.', wanted, quoted)


def read_code(tokenizer: Any, seed: int = 0) -> list[Tensor]:
    """Sources of the standard library and of installed packages as tokens, without licences and imports at their beginning."""
    files = find_sources()
    chosen = random.Random(seed).sample(files, min(CODE_FILES, len(files)))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(chosen)]
    texts = [text[min(len(text) // 10, 2000) :][:CODE_CHARACTERS] for text in texts]
    found = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return [torch.tensor(ids, dtype=torch.long) for ids in found if ids]


def find_sources() -> list[Path]:
    """Source files of some size, of the standard library and of installed packages without their tests."""
    found = set()
    for name in ("stdlib", "purelib"):
        root = Path(sysconfig.get_paths()[name])
        for path in (*root.glob("*.py"), *root.glob("*/*.py"), *root.glob("*/*/*.py")):
            if not LEFT_OUT & set(path.relative_to(root).parts) and path.stat().st_size > 8000:
                found.add(path)
    return sorted(found)
