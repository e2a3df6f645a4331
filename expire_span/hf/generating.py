"""`generate` of a retrofitted model as people call it: it gets an expiring cache by itself, and decodes over slots.

While a retrofit is attached, its model makes a `SteppingCache` wherever `generate`, a pipeline, or a call with `use_cache=True`
gives none. Prompts are read into it as into any `ExpiringCache`. When single tokens follow, its memories move into the slots of
a stream's engine (stream/engines.py); on a GPU a step is then one replay of a CUDA graph. Whatever else is asked of the cache
moves them back first, and where that happens after every step, as for beams, they stay out. The retrofit keeps the last engine
that is no longer used, so that the next answer with as many rows records nothing anew.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from expire_span.stream.engines import SlotEngine
from expire_span.stream.interface import Prefilled

from .cache import ExpiringCache

MORE = ("inputs_embeds", "output_attentions", "output_hidden_states", "labels", "token_type_ids")
"""Arguments of a forward pass with which a step is computed by the model itself."""


MOVES = 2
"""Number of times in a row that memories leave slots after a single step before they stay out, since moving costs more than a
step over slots saves."""


class SteppingCache(ExpiringCache):
    """An `ExpiringCache` that steps of single tokens move into slots."""

    engine: SlotEngine | None = None
    """Holds the memories of all layers while single tokens are decoded; the layers are then empty."""
    _give_back: Any = None
    _layers: list[Any]
    _steps = 0
    """Steps since the memories moved into slots."""
    _single = 0
    """How often in a row they have left after a single one."""

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        """The layers, with their memories: those in slots are moved back."""
        self.leave_slots()
        return self._layers

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        self._layers = layers

    @property
    def is_compileable(self) -> bool:
        """Asked by `generate` before every step: the answer must not move the memories out of their slots."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._layers[layer_idx].seen if self.engine is not None else super().get_seq_length(layer_idx)

    def enter_slots(self, model: Any, positions: Tensor) -> None:
        """Move all memories into slots. positions: of each row's next token in its own text, padding not counted, [B]."""
        layers, rows = self.expiring, len(positions)
        state = [{"memory": x.memory, "position": x.seen} for x in layers]
        spare: SpareEngine = model.retrofitted.spare_engine
        engine, mark = spare.take(model, rows)
        none = torch.zeros(rows, model.vocab, device=model.device)
        engine.load(list(range(rows)), Prefilled(none, state))
        engine.clock.epochs.copy_(positions - engine.clock.column)
        engine.stepper.begin([], [{"position": int(positions.min())}])
        for x in layers:
            x.memory = None
        self.engine, self._give_back = engine, weakref.finalize(self, spare.keep, engine, mark)
        self._steps = 0
        self._give_back.atexit = False

    @property
    def stays_out(self) -> bool:
        """Whether the memories are moved no more, since they have left their slots after every step."""
        return self._single >= MOVES

    def step(self, tokens: Tensor) -> Tensor:
        """Read one token of each row, [B], and return logits [B, V]."""
        assert self.engine is not None
        self._steps += 1
        self.engine.tokens.copy_(tokens)
        self.engine.advance(None)
        for x in self._layers:
            x.seen += 1
        return self.engine.logits.clone()

    def leave_slots(self) -> None:
        """Move memories that are in slots back into the layers."""
        engine, self.engine = self.engine, None
        if engine is None:
            return
        self._single = self._single + 1 if self._steps == 1 else 0
        column, seen = engine.clock.column, self._layers[0].seen
        for x, memory in zip(self._layers, engine.stepper.memories):
            x.memory = memory.to_memory(column, seen - column)
        self._give_back()


class SpareEngine:
    """The engine that the last answer has left, with its slots and its recorded graphs. A copy of the model has its own."""

    def __init__(self) -> None:
        self._kept: tuple[SlotEngine, Any] | None = None

    def __deepcopy__(self, memo: Any) -> SpareEngine:
        return SpareEngine()

    def keep(self, engine: SlotEngine, mark: Any) -> None:
        """Runs whenever a cache is collected as garbage, so nothing here may use the device."""
        self._kept = engine, mark

    def drop(self) -> None:
        self._kept = None

    def take(self, model: Any, rows: int) -> tuple[SlotEngine, Any]:
        """An engine whose rows are all to be loaded, and the mark to keep it with: the spare one if it has as many rows and the
        model's weights are the same tensors with the same values, else a new one."""
        mark, kept = _mark_of(model.retrofitted), self._kept
        self._kept = None
        fits = kept is not None and kept[1] == mark and kept[0].rows == rows
        if kept is None or not fits or (kept[0].tokens.is_inference() and not torch.is_inference_mode_enabled()):
            return SlotEngine(model, rows), mark
        return kept[0], mark


def _mark_of(retrofitted: Any) -> tuple[Any, ...]:
    """Changes whenever a weight, a buffer or the factor of spans does."""
    tensors = itertools.chain(retrofitted.model.parameters(), retrofitted.model.buffers(), retrofitted.parameters())
    return retrofitted.dial, *((x.data_ptr(), x.dtype, 0 if x.is_inference() else x._version) for x in tensors)


def in_slots(cache: Any, retrofitted: Any) -> bool:
    """Whether a cache of this retrofit has its memories in slots."""
    own = isinstance(cache, SteppingCache) and cache.maker is not None and cache.maker() is retrofitted
    return own and cache.engine is not None


def supply_caches(retrofitted: Any) -> None:
    """Let the model make its own caches, and decode over slots; `withdraw_caches` undoes it."""
    model = retrofitted.model
    for name, call in (("forward", _forward), ("_prepare_cache_for_generation", _prepare_cache)):
        own = vars(model).get(name)
        # A partial of a function, no closure, so that a deep copy of the model runs through a copy of the retrofit.
        wrapped = functools.update_wrapper(
            functools.partial(call, retrofitted, getattr(model, name)), getattr(model, name)
        )
        retrofitted._replaced[name] = own
        object.__setattr__(model, name, wrapped)


def withdraw_caches(retrofitted: Any) -> None:
    retrofitted.spare_engine.drop()
    for name, own in retrofitted._replaced.items():
        vars(retrofitted.model).pop(name, None)
        if own is not None:  # accelerate had replaced it before
            object.__setattr__(retrofitted.model, name, own)
    retrofitted._replaced = {}


def _prepare_cache(
    retrofitted: Any, prepare: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any
) -> Any:
    """In place of the model's own: nothing changes where the caller gives a cache, or asks for none or for another kind."""
    wanted = generation_config.use_cache and generation_config.cache_implementation is None
    if wanted and not retrofitted._paused and model_kwargs.get("past_key_values") is None:
        model_kwargs["past_key_values"] = retrofitted.new_cache(stepping=True)
    return prepare(generation_config, model_kwargs, *args)


def _forward(retrofitted: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of the model's own: a step over slots where that is possible, else the model's."""
    past = kwargs.get("past_key_values")
    if past is None and kwargs.get("use_cache") is True and not (retrofitted._paused or retrofitted.model.training):
        kwargs["past_key_values"] = retrofitted.new_cache(stepping=True)
    if isinstance(past, SteppingCache) and not retrofitted._paused:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is not None and _may_step(retrofitted, past, tokens, kwargs):
            logits = past.step(tokens[:, 0].to(retrofitted.model.device)).unsqueeze(1)
            return CausalLMOutputWithPast(logits=logits, past_key_values=past)  # type: ignore[arg-type]
        past.leave_slots()
    return forward(*args, **kwargs)


def _may_step(retrofitted: Any, cache: SteppingCache, tokens: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this call reads one token of each row and nothing else; the memories are then in slots."""
    if not isinstance(tokens, Tensor) or tokens.shape[1] != 1 or torch.is_grad_enabled():
        return False
    if any(kwargs.get(name) is not None and kwargs.get(name) is not False for name in MORE):
        return False
    if (engine := cache.engine) is not None:
        writable = torch.is_inference_mode_enabled() or not engine.tokens.is_inference()
        if writable or not in_slots(cache, retrofitted):
            return engine.rows == len(tokens) and in_slots(cache, retrofitted)
    model = retrofitted.for_stream()
    wanted = model.prefers_steps if retrofitted.steps_in_slots is None else retrofitted.steps_in_slots
    if (
        not (wanted and model.can_step)
        or cache.stays_out
        or retrofitted._nothing_expires
        or cache.get_seq_length() == 0
    ):
        return False
    layers = cache.expiring
    if any(x.memory is None or x.memory.rows[0] != len(tokens) for x in layers):
        return False
    positions = _own_positions(kwargs, layers[0].seen, len(tokens), model.device)
    if positions is None:
        return False
    cache.enter_slots(model, positions)
    return True


def _own_positions(kwargs: dict[str, Any], seen: int, rows: int, device: torch.device) -> Tensor | None:
    """The position of each row's new token in its own text, [B]; None where what is given does not tell."""
    places, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if mask is not None and (mask.dim() != 2 or mask.shape[1] != seen + 1 or not bool(mask[:, -1].all())):
        return None
    if places is not None:
        return places.reshape(-1).expand(rows).to(device, torch.int64) if places.numel() in (1, rows) else None
    if mask is None:
        return torch.full((rows,), seen, device=device)
    return mask.to(device).long().sum(-1) - 1
