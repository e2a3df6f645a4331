"""Traces of a retrofitted Hugging Face model: the spans that each of its key/value heads gives to a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expire_span.hf import Retrofit, load_adapter
from expire_span.hf.loading import open_base
from expire_span.hf.texts import encode_text
from expire_span.ops.rule import full_until
from expire_span.runs import RunFolder
from expire_span.serve.detokenizer import text_of
from expire_span.shipped import SAMPLE, SHIPPED

from .memory_log import MemoryFacts, spans_by_head
from .reader import TextReader, refuse_empty
from .trace import Line
from .tracer import TokenTracer

KEPT = float(2**28)
"""Span that a trace gives to the first tokens, which are kept for ever: longer than any trace."""
ABOUT = "Predict the next token of a text with a pretrained model that was taught what to forget."


class AdapterTracer(TokenTracer):
    """Drives a retrofitted model through its expiring cache."""

    def __init__(self, retrofitted: Retrofit, tokenizer: Any, *, name: str) -> None:
        self.retrofitted, self.tokenizer = retrofitted, tokenizer
        facts = _facts_of(retrofitted)
        kept = retrofitted.config.keep_first
        about = f"{ABOUT} Its first {kept} tokens are kept for good, whatever they are." if kept else ABOUT
        super().__init__(facts, name=name, task="text", about=about, vocabulary="pieces", show=self._show)
        self.cache = retrofitted.new_cache()
        self.state = [{"memory": None} for _ in retrofitted.layers]

    def _show(self, tokens: Tensor) -> list[str]:
        return [text_of(self.tokenizer, token) for token in tokens.tolist()]

    def _advance(self, tokens: list[int], answers: dict[int, int]) -> Iterator[Line]:
        for step in super()._advance(tokens, answers):
            if step["i"] == 0:  # no space before the first word, so that the texts of all steps together are the text
                step["text"] = self.tokenizer.decode([step["token"]])
            yield step

    def forward(self, tokens: Sequence[int]) -> tuple[Tensor, list[list[list[float]]], Any]:
        retrofitted, found, start = self.retrofitted, {}, self.cache.seen
        device = next(retrofitted.model.parameters()).device

        def keep(index: int) -> Any:
            return lambda module, args, span: found.__setitem__(
                index, span if retrofitted.dial == 1 else span * retrofitted.dial
            )

        hooks = [
            retrofitted.predictors[str(x.index)].register_forward_hook(keep(x.index)) for x in _learned(retrofitted)
        ]
        try:
            row = torch.tensor([list(tokens)], device=device)
            out = retrofitted.model(row, past_key_values=self.cache, use_cache=True)
        finally:
            for hook in hooks:
                hook.remove()
        self.state = [{"memory": layer.memory} for layer in self.cache.expiring]
        kept = max(retrofitted.config.keep_first - start, 0)
        spans = [self._spans(layer, found.get(layer.index), len(tokens), kept) for layer in retrofitted.layers]
        return out.logits[0], spans, None

    def _spans(self, layer: Any, span: Tensor | None, count: int, kept: int) -> list[list[float]]:
        """Spans [T][heads] of a layer. In a layer with a window of its own, all spans are the window; the first `kept` tokens
        never expire."""
        heads, ramp = self.log.facts.heads, self.log.facts.ramp
        if span is None:
            return [[full_until(layer.window - 0.5, ramp)] * heads] * count
        rows = spans_by_head(span)
        rows = [[KEPT] * len(row) for row in rows[:kept]] + rows[kept:]
        return [row if len(row) == heads else (row * heads)[:heads] for row in rows]


def _learned(retrofitted: Retrofit) -> list[Any]:
    return [layer for layer in retrofitted.layers if layer.window is None]


def _facts_of(retrofitted: Retrofit) -> MemoryFacts:
    layer = retrofitted.layers[0]
    heads, element = max(x.kv_heads for x in retrofitted.layers), next(layer.module.parameters()).element_size()
    pair, settings = 2 * layer.head_dim * element, retrofitted.config
    return MemoryFacts(
        **{"system": "expire_span", "layers": len(retrofitted.layers), "heads": heads, "ramp": float(settings.ramp)},
        **{"full_bytes": heads * pair + 12, "memory_bytes": pair + 12},
        **{"max_span": settings.max_span, "cap": settings.cap},
    )


class AdapterReader(TextReader):
    """A pretrained model with the spans of an adapter folder."""

    def __init__(self, retrofitted: Retrofit, tokenizer: Any, name: str) -> None:
        super().__init__()
        self.retrofitted, self.tokenizer, self.name = retrofitted, tokenizer, name
        self.model: nn.Module = retrofitted.predictors

    @classmethod
    def open(cls, run: RunFolder) -> AdapterReader:
        """The adapter that a run of `expire-span retrofit` saved."""
        return cls.of_folder(run.adapter)

    @classmethod
    def of_folder(cls, folder: Path, model: str | None = None) -> AdapterReader:
        """model: the base model, if it is not where the adapter says; None takes the adapter's."""
        name, opened, tokenizer = open_base(folder, model, "cpu")
        title = folder.parent.name if folder.name == "adapter" else folder.name
        return cls(load_adapter(opened, folder), tokenizer, f"{Path(name).name} with {title}")

    def encode(self, raw: bytes) -> Tensor:
        known = self.retrofitted.beginning
        words = raw.decode("utf-8", errors="replace")
        tokens = encode_text(self.tokenizer, words, None if known is None else known.text) if words else []
        refuse_empty(tokens)
        return torch.tensor(tokens, dtype=torch.long)

    def tracer(self) -> AdapterTracer:
        return AdapterTracer(self.retrofitted, self.tokenizer, name=self.name)

    def sample(self) -> tuple[Tensor, dict[int, int], list[Line] | None]:
        """The sample text of the model that ships with this package, which any model can read."""
        return self.encode((SHIPPED / SAMPLE).read_bytes()), {}, None
