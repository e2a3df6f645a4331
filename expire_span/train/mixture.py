"""The contexts of a retrofit's training, mixed from several kinds of lessons by their shares.

Text alone teaches little about retrieval: hardly anything in a book depends on one number that was told thousands of tokens
before. So other kinds ask at the end for what the context told. An answer of ten tokens among four thousand would count nothing
in a mean over tokens: hence in every context with answers, the tokens of the answers weigh together as much as all others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from expire_span.errors import UserError
from expire_span.hf.retrofitted import Retrofit
from expire_span.hf.texts import Beginning
from expire_span.models.marks import FREE, KEEP
from expire_span.settings.retrofit import CHAT_MIXTURE, DistillConfig, parse_mixture

from .lessons import LEAST_CONTEXT, Lesson, Passages, Repeats, Row, Text, Turns, read_code
from .lookups import Lookups
from .sampled_chats import SampledChats

ANSWERS = 0.5
"""Share of a context's loss that falls on the tokens of its answers, if there are any."""

LEAST_CHAT = 1024
"""Shortest context in which `auto` has chats, whose system prompts are long."""


@dataclass(frozen=True)
class Contexts:
    """A batch of contexts."""

    ids: Tensor
    """Tokens [B, n]."""
    weights: Tensor
    """Weight of the divergence after each token [B, n]; the mean of a row is 1."""
    marks: Tensor | None = None
    """Lifetimes given to single tokens [B, n], as models/marks.py defines them."""

    @classmethod
    def of_rows(cls, rows: Sequence[Row], device: Any = "cpu") -> Contexts:
        ids = torch.stack([row.ids for row in rows])
        weights = torch.stack([weigh(row) for row in rows])
        if not any(row.kept for row in rows):
            return cls(ids.to(device), weights.to(device))
        kept = torch.tensor([row.kept for row in rows]).unsqueeze(1)
        marks = torch.where(torch.arange(ids.shape[1]) < kept, KEEP, FREE)
        return cls(ids.to(device), weights.to(device), marks.to(device))

    @classmethod
    def plain(cls, ids: Tensor) -> Contexts:
        """Contexts in which all tokens weigh the same."""
        return cls(ids, torch.ones(ids.shape, device=ids.device))

    def split(self, size: int) -> Iterator[Contexts]:
        """Parts of at most `size` rows."""
        for n in range(0, len(self.ids), size):
            rows = slice(n, n + size)
            yield Contexts(self.ids[rows], self.weights[rows], None if self.marks is None else self.marks[rows])

    def blocks(self, size: int) -> Iterator[Contexts]:
        """Consecutive parts of at most `size` tokens of each context."""
        for n in range(0, self.ids.shape[1], size):
            part = slice(n, n + size)
            marks = None if self.marks is None else self.marks[:, part]
            yield Contexts(self.ids[:, part], self.weights[:, part], marks)


def weigh(row: Row) -> Tensor:
    """The weight of the divergence after each token of a context [n]: what follows the token is what is predicted there."""
    count = len(row.ids)
    predicts = torch.zeros(count, dtype=torch.bool)
    if row.answers is not None:
        predicts[:-1] = row.answers[1:].cpu()
    answers = int(predicts.sum())
    if not answers:
        return torch.ones(count)
    return torch.where(predicts, ANSWERS * count / answers, (1 - ANSWERS) * count / (count - answers))


class Mixture:
    """Lessons with their shares; a context is drawn from one of them by chance."""

    def __init__(self, lessons: dict[str, tuple[float, Lesson]], code: Sequence[Tensor] = ()) -> None:
        self.lessons, self.code = lessons, code
        total = sum(share for share, _ in lessons.values())
        self.shares = numpy.array([share / total for share, _ in lessons.values()])

    def draw(self, rows: int, rng: numpy.random.Generator, device: Any = "cpu") -> Contexts:
        kinds = list(self.lessons.values())
        if len(kinds) == 1:
            return Contexts.of_rows([kinds[0][1].draw(rng) for _ in range(rows)], device)
        chosen = rng.choice(len(kinds), size=rows, p=self.shares)
        return Contexts.of_rows([kinds[n][1].draw(rng) for n in chosen], device)

    def prepare(self, retrofitted: Retrofit, tell: Callable[[str], None]) -> None:
        """Let the base model write what is learned from it, once."""
        if (chats := self.chats) is not None:
            chats.prepare(retrofitted, tell)

    @property
    def chats(self) -> SampledChats | None:
        return next((lesson for _, lesson in self.lessons.values() if isinstance(lesson, SampledChats)), None)

    @property
    def plain(self) -> bool:
        """Whether there is nothing but text."""
        return list(self.lessons) == ["text"]

    @property
    def fingerprint(self) -> bytes:
        """What contexts follow from, apart from the text and the seed."""
        digest = hashlib.sha256(repr([list(self.lessons), self.shares.tolist()]).encode())
        for ids in self.code:
            digest.update(ids.numpy().tobytes())
        return digest.digest()

    def describe(self) -> str:
        parts = (f"{share:.0%} {name}" for name, share in zip(self.lessons, self.shares))
        return f"training contexts: {', '.join(parts)}"

    def to_state(self) -> list[list[int]] | None:
        """The answers that the base model has written."""
        return None if self.chats is None else self.chats.answers

    def load_state(self, state: list[list[int]] | None) -> None:
        if self.chats is not None:
            self.chats.answers = state


def build_mixture(
    documents: Sequence[Tensor],
    config: DistillConfig,
    beginning: Beginning | None,
    tokenizer: Any,
    device: Any,
    seed: int,
) -> Mixture:
    """The mixture that `config` asks for, of documents that hold whole contexts."""
    begins = () if beginning is None else beginning.context
    passages, length = Passages(documents), config.context
    shares = choose_shares(config, tokenizer, torch.device(device))
    made: dict[str, Lesson] = {"text": Text(passages, length, begins)}
    if set(shares) == {"text"}:
        return Mixture({"text": (1.0, made["text"])})
    turns = Turns(tokenizer, beginning or Beginning())
    code = Passages(_join(read_code(tokenizer, seed), tokenizer))
    if "code" in shares and code.longest < length:
        raise UserError(
            f"the sources of installed packages have {code.longest} tokens, a context has {length}; leave code out"
        )
    made["code"] = Text(code, length, begins)
    fill = [passages, code] if code.longest >= length else [passages]
    made |= {"lookups": Lookups(fill, turns, length), "repeats": Repeats(fill, turns, length)}
    if "chat" in shares:
        made["chat"] = SampledChats(fill, turns, length, seed)
    return Mixture({name: (share, made[name]) for name, share in shares.items()}, code.documents)


def choose_shares(config: DistillConfig, tokenizer: Any, device: torch.device) -> dict[str, float]:
    """The shares of the mixture; `auto` takes what this model and device allow, anything else is refused where it cannot be."""
    asked, chats = parse_mixture(config.mixture), bool(getattr(tokenizer, "chat_template", None))
    if asked is None:
        if not chats or config.context < LEAST_CONTEXT:
            return {"text": 1.0}
        answers = device.type != "cpu" and config.context >= LEAST_CHAT  # on a CPU they would take minutes
        return {name: share for name, share in CHAT_MIXTURE.items() if name != "chat" or answers}
    if set(asked) == {"text"}:
        return asked
    if tokenizer is None:
        raise ValueError(f"the mixture {config.mixture} needs the model's tokenizer, got none; give tokenizer=...")
    if config.context < LEAST_CONTEXT:
        raise UserError(
            f"the mixture {config.mixture} needs contexts of at least {LEAST_CONTEXT} tokens, got {config.context}; give a "
            "longer --context or --mixture text"
        )
    if "chat" in asked and not chats:
        raise UserError(f"the mixture {config.mixture} needs a model with a chat template, got none; leave chat out")
    return asked


def _join(documents: Sequence[Tensor], tokenizer: Any) -> list[Tensor]:
    """All sources as one document, with the token that ends a text between them."""
    end = getattr(tokenizer, "eos_token_id", None)
    between = torch.tensor([] if end is None else [end], dtype=torch.long)
    return [torch.cat([part for ids in documents for part in (ids, between)])] if documents else []
