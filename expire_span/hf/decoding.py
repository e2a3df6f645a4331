"""Decoding of retrofitted models over slots: one token of every row per step; on a GPU a step is one replay of a CUDA graph.

engine = RetrofitEngine(handle, rows=2)
engine.begin(cache, logits)      # an ExpiringCache that has read the prompts, and the logits after them
engine.advance(Sampling(), generator); engine.tokens, engine.logits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from expire_span.models.slot_step import SlotRules, StreamPosition
from expire_span.sampling import Sampling
from expire_span.stream.engines import SteadyEngine

from .attention import is_kept
from .cache import ExpiringCache
from .handle import Retrofit
from .layouts import ROTARY, text_config
from .slots import LayerSlots, SlotCache, span_form

REBASE_AFTER = 2**15
"""Number of tokens between two renumberings of positions. Transformers computes rotary angles in float32, which at position 1e6
changes a score by 0.03."""


def can_decode(handle: Retrofit) -> bool:
    """Whether this model can decode over slots: it needs rotary positions that do not depend on the length of the context."""
    if text_config(handle.model).model_type not in ROTARY:
        return False
    return all(handle.frequencies_of(x) is not None for x in handle.layers)


class RetrofitStepper:
    """The decoding step of a retrofitted model over `rows` rows, with the interface that `SteadyEngine` expects of a
    `Stepper`."""

    def __init__(self, handle: Retrofit, rows: int) -> None:
        if not can_decode(handle):
            kind = text_config(handle.model).model_type
            raise ValueError(f"decoding over slots needs a model with rotary positions of any length, got {kind}")
        self.handle, self.model = handle, handle.model
        like = next(handle.model.parameters())
        self.clock = StreamPosition(like.device, None, like.dtype)
        self.slot_layers: list[LayerSlots] = []
        for x in handle.layers:
            rules = self._rules(x)
            layer = LayerSlots(x, rules, self.clock, handle.frequencies_of(x), like)
            layer.allocate(rows)
            self.slot_layers.append(layer)
        self.cache = SlotCache(self.slot_layers)

    def _rules(self, layer: Any) -> SlotRules:
        handle = self.handle
        form = span_form(handle.predictor_of(layer), layer, handle.dial)
        assert form is not None
        limit = layer.window if layer.window is not None else handle.longest_life + 1 + handle.config.keep_first
        cap = handle.config.cap if layer.window is None else None
        return SlotRules(handle.ramp_of(layer), cap, True, 0.0, min(limit, cap or limit), handle.config.impl, form)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Read one token per row, tokens [B], and return logits [B, V]. The caller advances the clock."""
        place = (self.clock.epoch_on_device + self.clock.on_device).view(1, 1)
        out = self.model(tokens.unsqueeze(1), position_ids=place, past_key_values=self.cache, use_cache=True)
        return out.logits[:, -1]

    @torch.no_grad()
    def compact(self) -> None:
        for layer in self.slot_layers:
            layer.compact()
        self.clock.begin_epoch()

    def tensors(self) -> dict[str, Tensor]:
        layers = enumerate(self.slot_layers)
        return {f"layer{n}.{name}": x for n, layer in layers for name, x in layer.slots.tensors().items()}


@dataclass(frozen=True)
class _DecoderInterface:
    """The attributes of a decoder that an engine uses, for a retrofitted model."""

    embed: Any
    config: Any


@dataclass(frozen=True)
class _Vocabulary:
    vocab: int


class RetrofitEngine(SteadyEngine):
    """Decodes rows of a retrofitted model, starting from the memories of an `ExpiringCache`."""

    stepper: RetrofitStepper  # type: ignore[assignment]

    def __init__(self, handle: Retrofit, rows: int, *, rebase_after: int = REBASE_AFTER) -> None:
        embed: nn.Module = handle.model.get_input_embeddings()
        face = _DecoderInterface(embed, _Vocabulary(text_config(handle.model).vocab_size))
        super().__init__(face, rows, RetrofitStepper(handle, rows))  # type: ignore[arg-type]
        self.handle, self.rebase_after = handle, rebase_after
        self.active = [False] * rows

    def begin(self, cache: ExpiringCache, logits: Tensor, rows: list[int] | None = None) -> None:
        """Load a cache's rows and the logits [B, V] of their next tokens into these rows of the engine; None: all rows."""
        rows = list(range(self.rows)) if rows is None else rows
        held = len(logits)
        if held != len(rows):
            raise ValueError(f"{len(rows)} rows need a cache with as many, got {held}")
        self._check_kept(cache)
        if not any(self.active):
            self.clock.set(cache.seen, 0)
        self.load(rows, cache.layers, logits)  # type: ignore[arg-type]
        for row in rows:
            self.active[row] = True

    def release(self, rows: list[int]) -> None:
        """Forget what these rows hold; others may begin there."""
        where = torch.tensor(rows, dtype=torch.int64, device=self.device)
        for layer in self.stepper.slot_layers:
            layer.slots.clear(where)
        for row in rows:
            self.active[row] = False

    def _check_kept(self, cache: ExpiringCache) -> None:
        """Refuse a cache that has not read all first tokens of a row that must be kept: a step over slots cannot mark them."""
        keep = self.handle.config.keep_first
        memory = next((x.memory for x, y in zip(cache.layers, self.handle.layers) if y.window is None), None)
        if not keep or memory is None:
            return
        kept = int(is_kept(memory.span).sum(-1).min())
        if kept < keep:
            raise ValueError(
                f"the first {keep} tokens of a row are kept, but one of these rows has read {kept}; let the cache read more"
            )

    @torch.no_grad()
    def load(self, rows: list[int], state: list[Any], logits: Tensor, reports: Any = ()) -> None:
        self._note_counts()
        where = torch.tensor(rows, device=self.device)
        layers = zip(self.stepper.slot_layers, state)
        self._load_slots(where, [(layer, layer.memories(part)) for layer, part in layers])
        self.logits[where] = logits.float()

    @torch.no_grad()
    def advance(self, sampling: Sampling | None, generator: torch.Generator | None = None) -> None:
        super().advance(sampling, generator)

    def _compact(self) -> None:
        if free := [row for row, active in enumerate(self.active) if not active]:
            self.release(free)  # what they have read meanwhile must not make the slots grow
        super()._compact()
        offset = self.clock.epoch - self.handle.longest_life
        if offset >= self.rebase_after:
            for layer in self.stepper.slot_layers:
                layer.rebase(offset)
            self.clock.set(self.clock.epoch - offset, self.clock.column)

    @property
    @torch.no_grad()
    def live(self) -> Tensor:
        return torch.stack([x.slots.live(self.clock.column).float().mean(1) for x in self.stepper.slot_layers])

    def selected(self, rows: Tensor) -> RetrofitEngine:
        self._note_counts()
        other = RetrofitEngine(self.handle, len(rows), rebase_after=self.rebase_after)
        other.unpacked(*self.packed(rows))
        other.active = [self.active[row] for row in rows.tolist()]
        return other

    @torch.no_grad()
    def to_cache(self) -> ExpiringCache:
        """The memories of all rows as an `ExpiringCache`, which can read many tokens at a time. The host waits for the
        device."""
        cache = self.handle.new_cache()
        for layer, step in zip(cache.layers, self.stepper.slot_layers):
            layer.seen = self.clock.now
            layer.memory = step.to_memory()
        return cache
