"""A retrofitted model as a stream's model: it reads prompts into expiring memories, and decodes over slots where it can, one
token of every row per step; on a GPU a step is one replay of a CUDA graph."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from expire_span.models.marks import KEEP
from expire_span.models.mixer import MixerAux
from expire_span.models.slot_step import SlotRules, StreamPosition
from expire_span.ops.rule import full_until, until_dead
from expire_span.store.slots import smallest_bytes
from expire_span.store.tensor_files import digest_tensors
from expire_span.stream.interface import Observed, Prefilled
from expire_span.stream.prompts import part_size

from .adapter import base_hash
from .cache import ExpiringCache, ExpiringLayer
from .layouts import AttentionLayer, text_config
from .slots import SlotAttention, SlotCache, span_form

CHUNK = 640
"""Most tokens of a row per forward pass while reading on a CPU: half as many take a sixth more time, twice as many no less."""
SMALL_CHUNK = 256
"""The same where a cap evicts at the end of each pass, on any device; on a GPU also the fewest for many rows."""
TRIED = 512
"""Tokens that `verify` reads where nobody says how many: each is a forward pass of the base model."""
GPU_CHUNK = 32_768
"""Tokens of all rows together per forward pass on a GPU, where a pass of few tokens takes as long as one of thousands."""


class RetrofitModel:
    """What a stream asks of a retrofitted model. The state of a layer is {"memory": ExpiringMemory, "position": int}."""

    reads_in_step = False  # a forward pass of many tokens costs little more than a step
    rounding = 1e-4  # weights that were trained for long amplify it

    def __init__(self, retrofitted: Any) -> None:
        self.retrofitted, self.length = retrofitted, retrofitted.length
        places = [x.device for x in retrofitted.model.parameters()]
        self.device = next((x for x in places if x.type != "meta"), torch.device("cpu"))  # accelerate offloads to meta
        self.vocab, self.layers = text_config(retrofitted.model).vocab_size, len(retrofitted.layers)
        plain = not retrofitted.layout.recurrent and not retrofitted.layout.readers and set(places) == {self.device}
        self.can_step = plain and retrofitted.endless and retrofitted.layout.takes_positions
        """Whether slots can hold all that the model remembers: keys whose rotation does not depend on the context's length,
        each read by one layer, no recurrent states, and all weights on one device."""
        self.prefers_steps = self.device.type in ("cpu", "cuda")  # elsewhere slots are not tried

    @property
    def capped(self) -> bool:
        return self.retrofitted.config.cap is not None

    @property
    def beginning(self) -> tuple[int, ...]:
        known = self.retrofitted.beginning
        return () if known is None else known.context

    @property
    def trial(self) -> int:
        return min(TRIED, self.length or TRIED)

    def check_marks(self, marks: Tensor) -> None:
        """In a layer with a window of the base model's own, a kept token is read as far as the base model reads it."""
        if all(x.window is not None for x in self.retrofitted.layers) and bool((marks == KEEP).any()):
            windows = ", ".join(sorted({str(x.window) for x in self.retrofitted.layers}))
            raise ValueError(
                f"this model reads the last {windows} tokens in every layer, so no token can be kept for longer; leave the "
                "mark out"
            )

    @property
    def row_bytes(self) -> int:
        element = self.retrofitted.model.dtype.itemsize
        slots = (smallest_bytes(x.kv_heads, x.head_dim, element) for x in self.retrofitted.layers)
        return 8 * self.vocab + (sum(slots) if self.can_step else 0)

    @property
    def token_bytes(self) -> int:
        """Its logits."""
        return 4 * self.vocab

    def fingerprint(self) -> str:
        """The hashes of the base model and of what was learned."""
        return f"{base_hash(self.retrofitted.model)} {digest_tensors(self.retrofitted.learned())}"

    def prefill(self, tokens: Tensor, state: list[Any] | None = None, marks: Tensor | None = None) -> Prefilled:
        cache, logits = self._cache_of(state), torch.empty(0)
        size = CHUNK if self.device.type != "cuda" else max(SMALL_CHUNK, GPU_CHUNK // len(tokens))
        size = SMALL_CHUNK if self.capped else size
        size = part_size(tokens.shape[1], size)
        chunks = tokens.to(self.device).split(size, dim=1)
        for chunk, marked in zip(chunks, repeat(None) if marks is None else marks.split(size, dim=1)):
            for layer in cache.expiring:
                layer.marks = marked
            out = self.retrofitted.model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits = out.logits[:, -1]
        return Prefilled(logits.float(), _state_of(cache))

    def observe(self, tokens: Tensor, state: list[Any] | None = None) -> Observed:
        cache = self._cache_of(state)
        out = self.retrofitted.model(tokens.unsqueeze(0).to(self.device), past_key_values=cache, use_cache=True)
        ramp = float(self.retrofitted.config.ramp)
        return Observed(out.logits[0], _state_of(cache), [MixerAux(span=_spans_by(ramp, x)) for x in cache.expiring])

    def _cache_of(self, state: list[Any] | None) -> ExpiringCache:
        """A cache that goes on from a state."""
        cache = self.retrofitted.new_cache()
        for layer, part in zip(cache.expiring, state or ()):
            layer.memory, layer.seen = part["memory"], part["position"]
            cache.recurrent = part.get("recurrent", {})
        return cache

    def undeleted(self, tokens: Tensor) -> Tensor:
        return self.retrofitted.model(tokens.to(self.device), use_cache=False).logits

    def stepper(self, rows: int) -> RetrofitStepper:
        return RetrofitStepper(self.retrofitted, rows)


def _state_of(cache: ExpiringCache) -> list[Any]:
    found: list[dict[str, Any]] = [{"memory": x.memory, "position": x.seen} for x in cache.expiring]
    if cache.recurrent:
        found[0]["recurrent"] = cache.recurrent
    return found


def _spans_by(ramp: float, layer: ExpiringLayer) -> Tensor:
    """The spans of the tokens that a layer read last, with which memories live as long by this ramp as by the layer's own."""
    assert layer.spans is not None
    return layer.spans if layer.ramp == ramp else full_until(until_dead(layer.spans, layer.ramp), ramp)


class RetrofitStepper:
    """The decoding step of a retrofitted model over `rows` rows."""

    def __init__(self, retrofitted: Any, rows: int) -> None:
        self.retrofitted = retrofitted
        like = next(retrofitted.model.parameters())
        self.clock = StreamPosition(like.device, None, like.dtype, rows)
        self.layers = [SlotAttention(x, slot_rules(retrofitted, x), self.clock, like) for x in retrofitted.layers]
        self.memories = [layer.memory for layer in self.layers]
        for memory in self.memories:
            memory.allocate(rows)
        self.cache = SlotCache(self.layers)
        self._until_kept: int = retrofitted.config.keep_first
        """Most steps until every row has read its first tokens, which are kept; these rows may be copies of any others."""
        self._keeps = False

    def prepare(self) -> str:
        self._keeps, self._until_kept = self._until_kept > 0, max(0, self._until_kept - 1)
        return "step of first tokens" if self._keeps else "step"

    def logits(self, tokens: Tensor) -> Tensor:
        """Read one token per row, tokens [B], and return logits [B, V]. The caller advances the clock."""
        places = (self.clock.epochs + self.clock.on_device).unsqueeze(1)
        first = places < self.retrofitted.config.keep_first if self._keeps else None
        for attention, layer in zip(self.layers, self.retrofitted.layers):
            attention.first = first if layer.window is None else None
        out = self.retrofitted.model(
            tokens.unsqueeze(1), position_ids=places, past_key_values=self.cache, use_cache=True
        )
        return out.logits[:, -1]

    def compact(self) -> None:
        for memory in self.memories:
            memory.compact()
        self.clock.begin_epoch()

    def begin(self, rows: list[int], state: list[Any]) -> None:
        self._until_kept = max(self._until_kept, self.retrofitted.config.keep_first - state[0]["position"])

    def clear(self, rows: list[int]) -> None:
        where = torch.tensor(rows, dtype=torch.int64, device=self.clock.epochs.device)
        for memory in self.memories:
            memory.slots.clear(where)

    def to_state(self) -> list[Any] | None:
        """The host waits for the device."""
        epochs = set(self.clock.epochs.tolist())
        if len(epochs) > 1:
            return None
        column, (epoch,) = self.clock.column, epochs
        return [{"memory": x.to_memory(column, epoch), "position": epoch + column} for x in self.memories]

    def row_state(self, row: int) -> list[Any]:
        """What a row holds, as `prefill` takes it. The host waits for the device."""
        column, epoch = self.clock.column, int(self.clock.epochs[row])
        return [{"memory": x.to_memory(column, epoch, row), "position": epoch + column} for x in self.memories]

    def tensors(self) -> dict[str, Tensor]:
        layers = enumerate(self.memories)
        fields = {f"layer{n}.{name}": x for n, memory in layers for name, x in memory.slots.tensors().items()}
        return fields | {"epochs": self.clock.epochs}


def slot_rules(retrofitted: Any, layer: AttentionLayer) -> SlotRules:
    """How a layer of a retrofitted model fills and reads its slots."""
    form = span_form(retrofitted.predictor_of(layer), layer, retrofitted.dial)
    assert form is not None
    limit = layer.window if layer.window is not None else retrofitted.longest_life + 1 + retrofitted.config.keep_first
    cap = retrofitted.config.cap if layer.window is None else None
    return SlotRules(
        retrofitted.ramp_of(layer), cap, True, 0.0, min(limit, cap or limit), retrofitted.config.impl, form
    )
