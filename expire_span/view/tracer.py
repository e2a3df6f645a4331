"""A `Tracer` runs a model, one of this package or a retrofitted one, and records each step; see trace.py for the format.

It uses what every model of a stream tells of tokens that it reads: the logits, the state, and the spans of the tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from expire_span.generate import Sampling, narrow
from expire_span.models.decoder import Decoder
from expire_span.stream.decoders import model_of
from expire_span.tasks.contract import Codec, Symbols

from .memory_log import MemoryFacts, MemoryLog, hidden_of, round_off, spans_by_head
from .trace import VERSION, Line

READ_BLOCK = 256
"""Number of tokens per call where spans determine which memories live at each step."""
COARSE_BLOCK = 32
"""Number of tokens per call where only the mean number of living memories per call is known."""
GUESSES = 4
"""Number of likeliest next tokens that a step lists."""


class Tracer:
    """Call `header()` once, then `read(tokens)` and `generate(sampling)` any number of times; memory is carried between
    calls."""

    def __init__(
        self,
        model: Any,
        *,
        name: str,
        task: str,
        about: str = "",
        codec: Codec | None = None,
        facts: MemoryFacts | None = None,
    ) -> None:
        """model: any that a Stream takes. codec: how tokens are written; without one they are numbered symbols. facts: about
        its memories; None asks a decoder, by `facts_of`."""
        self.model, self.name, self.task, self.about = model_of(model), name, task, about
        self.codec = codec or Symbols(self.model.vocab, str)
        self.log = MemoryLog(facts or facts_of(model))
        self.logits: Tensor | None = None
        self.state: list[Any] | None = None

    @property
    def position(self) -> int:
        """Number of the next step."""
        return self.log.position

    def header(self) -> Line:
        about = {"name": self.name, "task": self.task, "about": self.about}
        return {
            "kind": "header",
            "version": VERSION,
            **about,
            "vocabulary": f"{self.codec.unit}s",
            **self.log.facts.header(),
        }

    def read(
        self, tokens: Tensor, answers: dict[int, int] | None = None, extras: Sequence[Line] | None = None
    ) -> Iterator[Line]:
        """Yield the steps of tokens [T].

        answers: the target tokens by position, where a task scores some. extras: further fields of each step, such as a
        picture.
        """
        steps = (step for block in tokens.split(self._pace()) for step in self._advance(block.tolist(), answers or {}))
        for n, step in enumerate(steps):
            yield step if extras is None else step | extras[n]

    def generate(self, sampling: Sampling, max_tokens: int) -> Iterator[Line]:
        """Yield the steps of tokens that the model generates, each with its time; something must have been read before."""
        if self.logits is None:
            raise ValueError("generating needs a token to go on from, got none; read a prompt first")
        generator = torch.Generator().manual_seed(sampling.seed)
        for _ in range(max_tokens):
            chances = narrow(self.logits.unsqueeze(0), sampling)
            (token,) = torch.multinomial(chances[0], 1, generator=generator).tolist()
            drawn = round(time.time() * 1000, 1)
            for step in self._advance([token], {}):
                yield step | {"at": drawn}

    def _pace(self) -> int:
        if self.log.facts.hidden or self.log.facts.cap is not None:
            return 1  # hidden states and evictions can be read only after a call, so each call reads one token
        return READ_BLOCK if self.log.spans else COARSE_BLOCK

    def _advance(self, tokens: list[int], answers: dict[int, int]) -> Iterator[Line]:
        with torch.inference_mode():
            found = self.model.observe(torch.tensor(tokens, dtype=torch.long), self.state)
            logs = found.logits.float().log_softmax(-1).cpu()  # [T, V]
        heads, self.state = self.log.facts.heads, found.state
        spans = [spans_by_head(layer.span, heads) for layer in found.reports] if self.log.spans else None
        costs, guesses, texts = self._costs(logs, tokens), self._guesses(logs), self._texts(tokens)
        self.logits = found.logits[-1].float().cpu()
        for n, token in enumerate(tokens):
            i = self.position
            step: Line = {"kind": "step", "i": i, "token": token, "text": texts[n], "bits": costs[n], "top": guesses[n]}
            if i in answers:
                step["answer"] = self._answer(logs[n], answers[i])
            step |= self.log.add([layer[n] for layer in spans] if spans else None, self.state, found.reports)
            if self.log.facts.hidden:
                step["hidden"] = hidden_of(self.state)
            yield step

    def _costs(self, logs: Tensor, tokens: list[int]) -> list[float | None]:
        """Bits of each token, as predicted from those before it; None where the task predicts something else."""
        if self.codec.unit == "symbol":
            return [None] * len(tokens)
        first = None if self.logits is None else -float(self.logits.log_softmax(-1)[tokens[0]]) / math.log(2)
        later = -logs[:-1].gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1) / math.log(2)
        return [None if first is None else round_off(first), *(round_off(x) for x in later.tolist())]

    def _texts(self, tokens: list[int]) -> list[str]:
        texts = self.codec.show(torch.tensor(tokens))
        return texts if self.position else [self.codec.label_first(tokens[0]), *texts[1:]]

    def _guesses(self, logs: Tensor) -> list[list[list[Any]]]:
        """Per step the likeliest next tokens, [text, probability] each."""
        best, which = logs.topk(min(GUESSES, logs.shape[1]), -1)
        names = self.codec.show(which.flatten())
        count = best.shape[1]
        return [
            [[names[n * count + k], round_off(math.exp(x))] for k, x in enumerate(row)]
            for n, row in enumerate(best.tolist())
        ]

    def _answer(self, logs: Tensor, wanted: int) -> Line:
        (text,) = self.codec.show(torch.tensor([wanted]))
        return {"text": text, "bits": round_off(-float(logs[wanted]) / math.log(2))}


@torch.inference_mode()
def facts_of(decoder: Decoder) -> MemoryFacts:
    """Facts about the memories of a decoder, which reads one token for them: that takes as long as generating one."""
    found = model_of(decoder).observe(torch.zeros(1, dtype=torch.long))
    element = decoder.embed.weight.element_size()
    return MemoryFacts.of(decoder.config, found.reports[0].span, found.state, element=element)
