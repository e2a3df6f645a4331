"""Chats with a system prompt, long material and a request, whose answers the base model itself has written.

The system prompt is kept for ever in half of them, as a server keeps it that is told so, and in the others it expires like any
other text: so spans are learned beside kept tokens, and without them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import DynamicCache

from expire_span.errors import UserError
from expire_span.hf.loading import chat_text
from expire_span.hf.retrofitted import Retrofit

from .lessons import Passages, Row, Turns
from .lookups import listed, make_value, make_word

SAMPLED, TOKENS, ROWS = 24, 48, 8
"""Number of chats, most tokens of an answer, and number of chats that are answered side by side."""
ROLES = listed(
    """You are a patient clerk of a town hall., You are a sailor who tells stories., You check texts for a publisher.,
    You teach a class of children., You help engineers with their tools."""
)
RULES = listed(
    """Sign every answer with the name {}., Answer as one question., Always write numbers as words.,
    Put your answer in square brackets., Answer in one short sentence., Start with the current mood: {}., Call the user {}.,
    Write everything in lower case."""
)
REQUESTS = listed(
    """Say in a sentence what the text is about., Who appears in the text?, What would you ask its author?, Introduce yourself.,
    Give the text a title., What should I do next?, Write a greeting., Which rules do you follow?,
    What is your name and your task?"""
)
TOOL = '{"name": "%s", "description": "Looks up the %s.", "parameters": {"%s": "string"}}'
MARK = "the-material-stands-here"


class SampledChats:
    """Some chats of one length; `prepare` lets the base model answer them, `draw` takes one."""

    def __init__(self, passages: Sequence[Passages], turns: Turns, length: int, seed: int) -> None:
        self.passages, self.turns, self.length, self.seed = passages, turns, length, seed
        self.room = min(TOKENS, length // 8)
        rng = numpy.random.default_rng([seed, 3])
        self.chats = [self._build(rng, random.Random(f"{seed}/{n}")) for n in range(SAMPLED)]
        self.answers: list[list[int]] | None = None
        """What the base model wrote in each chat, its end and what it wrote behind the end included."""

    @torch.no_grad()
    def prepare(self, retrofitted: Retrofit, tell: Callable[[str], None]) -> None:
        """Let the base model write the answers, by its own probabilities; those that are there stay."""
        if self.answers is not None:
            return
        tell(f"the base model answers {len(self.chats)} chats, from which it will learn")
        generator, found = torch.Generator().manual_seed(self.seed), []
        with retrofitted.paused() as model:
            for first in range(0, len(self.chats), ROWS):
                ids = torch.tensor([context for context, _ in self.chats[first : first + ROWS]])
                found += _write(model, ids, self.room, generator).tolist()
        self.answers = found

    def draw(self, rng: numpy.random.Generator) -> Row:
        assert self.answers is not None, "prepare comes first"
        n = int(rng.integers(len(self.chats)))
        (context, front), answer = self.chats[n], self.answers[n]
        end = self.turns.tokenizer.eos_token_id
        written = answer.index(end) + 1 if end in answer else len(answer)
        place = torch.arange(self.length)
        ids = torch.tensor([*context, *answer], dtype=torch.long)
        return Row(ids, (place >= len(context)) & (place < len(context) + written), front if n % 2 else 0)

    def _build(self, rng: numpy.random.Generator, plain: random.Random) -> tuple[list[int], int]:
        """The tokens of a chat up to its answer, and how many of them stand before the material."""
        before, after = self._frame(_invent_system(plain))
        front, back = self.turns.encode(before), self.turns.encode(f"\n\n{plain.choice(REQUESTS)}{after}")
        passages = plain.choice(list(self.passages))
        count = self.length - self.room - len(front) - len(back)
        if count < 1:
            raise UserError(
                f"a chat with its system prompt has {len(front) + len(back)} tokens without its material, and a context has "
                f"{self.length}, of which {self.room} are the answer's; give a longer --context, or leave chat out of --mixture"
            )
        material = passages.take(rng, count)
        return [*front, *material.tolist(), *back], len(front)

    def _frame(self, system: str) -> tuple[str, str]:
        """What the chat template writes before and behind a user's words."""
        user = {"role": "user", "content": MARK}
        try:
            text = chat_text(self.turns.tokenizer, [{"role": "system", "content": system}, user])
        except UserError:  # a template that knows no system prompt
            text = chat_text(self.turns.tokenizer, [{"role": "user", "content": f"{system}\n\n{MARK}"}])
        before, _, after = text.partition(MARK)
        return before, after


def _invent_system(rng: random.Random) -> str:
    """A system prompt: a role, some rules, and in half of them tools."""
    rules = [rule.format(make_word(rng).capitalize()) for rule in rng.sample(RULES, rng.randrange(1, 4))]
    told = " ".join([rng.choice(ROLES), *rules])
    if rng.random() < 0.5:
        tools = [TOOL % tuple(make_word(rng, 2) for _ in range(3)) for _ in range(rng.randrange(1, 4))]
        told = "\n".join([told, "Your tools:", *tools, f"Their pass phrase is {make_value(rng)}."])
    return told


def _write(model: Any, ids: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` tokens that a model writes after each row of ids [B, n], by its own probabilities, [B, count]."""
    cache, given, found = DynamicCache(config=model.config), ids, []
    for _ in range(count):
        logits = model(given.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        given = torch.multinomial(logits.float().softmax(-1).cpu(), 1, generator=generator)
        found.append(given)
    return torch.cat(found, 1)
