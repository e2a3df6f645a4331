"""A `Tracer` runs a decoder and records each step; see trace.py for the format.

It uses public results of the decoder only: the spans of new tokens, the logits, the state.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from expire_span.generate import Sampling, narrow
from expire_span.models.decoder import Decoder
from expire_span.tasks.contract import Codec, Symbols

from .memory_log import MemoryFacts, MemoryLog, hidden_of, round_off, spans_by_head
from .trace import VERSION, Line

READ_BLOCK = 256
"""Number of tokens per call where spans determine which memories live at each step."""
COARSE_BLOCK = 32
"""Number of tokens per call where only the mean number of living memories per call is known."""
GUESSES = 4
"""Number of likeliest next tokens that a step lists."""


class TokenTracer(ABC):
    """Call `header()` once, then `read(tokens)` and `generate(sampling)` any number of times; memory is carried between
    calls."""

    def __init__(self, facts: MemoryFacts, *, name: str, task: str, about: str, vocabulary: str, show: Any) -> None:
        self.name, self.task, self.about = name, task, about
        self.vocabulary, self.show = vocabulary, show
        self.log = MemoryLog(facts)
        self.logits: Tensor | None = None
        self.state: Any = None
        self.recurrent = False

    @abstractmethod
    def forward(self, tokens: Sequence[int]) -> tuple[Tensor, list[list[list[float]]] | None, Any]:
        """Logits [T, V] after each token, the tokens' spans [layers][T][heads] (None without spans), and the layers' report."""

    @property
    def position(self) -> int:
        """Number of the next step."""
        return self.log.position

    def header(self) -> Line:
        about = {"name": self.name, "task": self.task, "about": self.about}
        return {"kind": "header", "version": VERSION, **about, "vocabulary": self.vocabulary, **self.log.facts.header()}

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
        if self.recurrent or self.log.facts.cap is not None:
            return 1  # hidden states and evictions can be read only after a call, so each call reads one token
        return READ_BLOCK if self.log.spans else COARSE_BLOCK

    def _advance(self, tokens: list[int], answers: dict[int, int]) -> Iterator[Line]:
        with torch.inference_mode():
            logits, spans, aux = self.forward(tokens)
            logs = logits.float().log_softmax(-1).cpu()  # [T, V]
        costs = self._costs(logs, tokens)
        guesses, texts = self._guesses(logs), self.show(torch.tensor(tokens))
        self.logits = logits[-1].float().cpu()
        for n, token in enumerate(tokens):
            i = self.position
            step: Line = {"kind": "step", "i": i, "token": token, "text": texts[n], "bits": costs[n], "top": guesses[n]}
            if i in answers:
                step["answer"] = self._answer(logs[n], answers[i])
            step |= self.log.add([layer[n] for layer in spans] if spans else None, self.state, aux)
            if self.recurrent:
                step["hidden"] = hidden_of(self.state)
            yield step

    def _costs(self, logs: Tensor, tokens: list[int]) -> list[float | None]:
        """Bits of each token, as predicted from those before it; None where the task predicts something else."""
        if self.vocabulary == "symbols":
            return [None] * len(tokens)
        first = None if self.logits is None else -float(self.logits.log_softmax(-1)[tokens[0]]) / math.log(2)
        later = -logs[:-1].gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1) / math.log(2)
        return [None if first is None else round_off(first), *(round_off(x) for x in later.tolist())]

    def _guesses(self, logs: Tensor) -> list[list[list[Any]]]:
        """Per step the likeliest next tokens, [text, probability] each."""
        best, which = logs.topk(min(GUESSES, logs.shape[1]), -1)
        names = self.show(which.flatten())
        count = best.shape[1]
        return [
            [[names[n * count + k], round_off(math.exp(x))] for k, x in enumerate(row)]
            for n, row in enumerate(best.tolist())
        ]

    def _answer(self, logs: Tensor, wanted: int) -> Line:
        (text,) = self.show(torch.tensor([wanted]))
        return {"text": text, "bits": round_off(-float(logs[wanted]) / math.log(2))}


class Tracer(TokenTracer):
    """The tracer of a decoder of this package."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        name: str,
        task: str,
        about: str = "",
        codec: Codec | None = None,
        probed: tuple[int, bool] | None = None,
    ) -> None:
        """codec: how tokens are written; without one they are numbered symbols.

        probed: what `probe_spans` returns for this decoder, if the caller has asked before."""
        self.decoder = decoder.eval()
        heads, spans = probed or probe_spans(decoder)
        element = decoder.embed.weight.element_size()
        facts = MemoryFacts.of(decoder.config, heads=heads, spans=spans, element=element)
        codec = codec or Symbols(decoder.config.vocab, str)
        super().__init__(facts, name=name, task=task, about=about, vocabulary=f"{codec.unit}s", show=codec.show)
        self.recurrent = hidden_of(decoder.initial_state(1)) is not None

    def forward(self, tokens: Sequence[int]) -> tuple[Tensor, list[list[list[float]]] | None, Any]:
        logits, self.state, aux = self.decoder(_row(tokens, self.decoder), self.state)
        spans = [spans_by_head(cast(Tensor, layer.span)) for layer in aux.layers] if self.log.spans else None
        return logits[0], spans, aux


@torch.inference_mode()
def probe_spans(decoder: Decoder) -> tuple[int, bool]:
    """Number of spans that a layer gives to a token (1, or one for each key/value head), and whether it gives any.

    The decoder reads one token for it, which takes as long as generating one.
    """
    span = decoder.eval()(_row([0], decoder), None)[2].layers[0].span
    return (span.shape[1] if span is not None and span.dim() == 3 else 1), span is not None


def _row(tokens: Sequence[int], decoder: Decoder) -> Tensor:
    return torch.tensor([list(tokens)], dtype=torch.long, device=decoder.embed.weight.device)
