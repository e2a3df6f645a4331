"""Give a causal language model lifetimes: `retrofitted = retrofit(model)`, without changing one of its weights or classes.

A hook before each attention layer predicts spans from the layer's input and passes them to the cache and to the attention
function; nothing else changes. A layer that has a sliding window in the base model keeps it: all its memories get the window as
their span, with a hard edge, and memories beyond it are deleted. `retrofitted.detach()` removes everything again.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expire_span.checks import check_count, show
from expire_span.settings.retrofit import RetrofitConfig

from .adapter import base_hash, check_base, find_budget, load_into, read_head, read_weights, save_adapter
from .attention import KEPT, NAME, LayerReading, register
from .cache import ExpiringCache, ExpiringLayer, HybridLayer
from .calls import check_cache, check_inputs, check_new_tokens, collects_attentions, expiring_cache, find_documents
from .comparing import check_unchanged
from .decoding import RetrofitModel
from .generating import SpareEngine, SteppingCache, in_slots, supply_caches, withdraw_caches
from .layouts import AttentionLayer, Layout, configs_of, find_layout
from .learning import HybridLearningLayer, LearningLayer
from .lora import add_lora, lora_state, remove_lora, without_lora
from .predictors import build_predictor
from .recurrent import EmptyLayer, RecurrentLayer
from .rotary import has_exact_angles, restore_angles, use_exact_angles
from .slots import SlotCache
from .texts import Beginning

HARD_EDGE = 0.5
"""A ramp shorter than one step: a memory has full weight up to its span and none beyond it."""


def retrofit(model: nn.Module, config: RetrofitConfig | None = None, *, own_cache: bool = True) -> Retrofit:
    """Add span predictors to a causal language model. If this raises, the model is unchanged.

    own_cache: whether `generate`, pipelines and calls with use_cache=True that give no cache get an expiring one; if False,
    `past_key_values=retrofitted.new_cache()` must be given.
    The model reads a few tokens before and after, and is refused if anything but the spans would change its logits.
    """
    config = RetrofitConfig() if config is None else config
    if not isinstance(config, RetrofitConfig):
        raise ValueError(f"config must be a RetrofitConfig, got {show(config)}; give RetrofitConfig(...)")
    if getattr(model, "_expire_span_retrofit", None) is not None:
        raise ValueError(f"this {type(model).__name__} is retrofitted already; call detach() on its retrofit first")
    layout = find_layout(model)
    retrofitted = Retrofit(model, layout, config)
    try:
        check_unchanged(retrofitted, layout)
    except BaseException:
        retrofitted.detach()
        raise
    layout.tokens = layout.logits = None
    if own_cache:
        supply_caches(retrofitted)
    return retrofitted


def load_adapter(
    model: nn.Module, folder: str | Path, *, own_cache: bool = True, budget: float | None = None
) -> Retrofit:
    """Retrofit a model with the predictors and settings of an adapter folder. If this raises, the model is unchanged.

    budget: one of the adapter's further budgets; None takes its first.
    """
    folder = Path(folder) if budget is None else find_budget(Path(folder), budget)
    head = read_head(folder)
    check_base(model, head, folder)
    read_weights(folder, head)  # before memory is taken for LoRA weights of the rank that the head gives
    retrofitted = retrofit(model, RetrofitConfig(**head["config"]), own_cache=own_cache)
    try:
        if head["lora_rank"]:
            retrofitted.add_lora(head["lora_rank"])
        retrofitted.load(folder)
    except BaseException:
        retrofitted.detach()
        raise
    return retrofitted


class Retrofit:
    """A retrofitted model: it makes caches, holds the predictors, and can be removed from the model again."""

    def __init__(self, model: nn.Module, layout: Layout, config: RetrofitConfig) -> None:
        self.model: Any = model
        self.layout, self.layers, self.config = layout, layout.layers, config
        # Weights that accelerate has offloaded are on the meta device; a predictor moves to its layer's device when it is used.
        device = next((x.device for x in model.parameters() if x.device.type != "meta"), torch.device("cpu"))
        self.predictors = nn.ModuleDict(
            {str(x.index): build_predictor(x.dim, x.kv_heads, config) for x in self.layers if x.window is None}
        ).to(device)
        self.dial = 1.0
        """Factor of all predicted spans at run time; with a value other than 1 the model is not what was trained."""
        self.lora: list[nn.Parameter] = []
        """The LoRA weights, where there are any; see `add_lora`."""
        self.beginning: Beginning | None = None
        """What stood before a text in training, where that is known; see texts.py."""
        self.length = layout.table
        """Most tokens of a context, where the model has a learned table of positions; else None."""
        self.configs = configs_of(model)
        self.endless = layout.table is None and has_exact_angles(layout.rotary)
        """Whether positions have no table and angles that do not change with the context's length: a stream then has no end."""
        self._shared: dict[int, LayerReading] = {}
        """What layers whose keys other layers read have read in this forward pass."""
        self._nothing_expires = False
        self._angles: list[Any] = []
        self.steps_in_slots: bool | None = None
        """Whether `generate` decodes over slots where the model can; None does so on CPUs and GPUs, where that is faster."""
        self.spare_engine = SpareEngine()
        self._replaced: dict[str, Any] = {}
        self._hooks: list[Any] = []
        self._paused = False
        self._attach()

    # The retrofit

    def new_cache(self, *, learning: bool = False, stepping: bool = False) -> ExpiringCache:
        """An empty cache for `past_key_values`. learning: also store hidden states, so that spans of old memories get
        gradients. stepping: decode over slots where that is faster; see generating.py."""
        states, layers = self.layout.recurrent, []
        cap = None if self._nothing_expires else self.config.cap
        by_index = {x.index: x for x in self.layers}
        for n in range(self.layout.cache_layers):
            x = by_index.get(n)
            if x is None:
                layers.append(RecurrentLayer(number_of_states=states[n]) if n in states else EmptyLayer())
                continue
            learns = learning and x.window is None
            if n in states:
                layers.append((HybridLearningLayer if learns else HybridLayer)(self.ramp_of(x), cap, states[n]))
            else:
                layers.append((LearningLayer if learns else ExpiringLayer)(self.ramp_of(x), cap))
        kind = SteppingCache if stepping else ExpiringCache
        return kind(layers, lambda: base_hash(self.model), weakref.ref(self))

    def for_stream(self) -> RetrofitModel:
        """What `expire_span.Stream` asks of a model."""
        return RetrofitModel(self)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Everything that a retrofit trains: the predictors' weights, and the LoRA weights where there are any."""
        yield from self.predictors.parameters()
        yield from self.lora

    def add_lora(self, rank: int) -> None:
        """Add trainable LoRA weights to the model's linear layers (needs peft); `detach` removes them again."""
        if self.lora:
            raise ValueError("this model has low-rank additions already; detach it first")
        check_count("rank", rank)
        self.lora = add_lora(self.model, rank)
        self.lora_rank = rank

    def learned(self) -> dict[str, Tensor]:
        """Everything that training changes, by name."""
        weights: dict[str, Tensor] = dict(self.predictors.state_dict())
        return weights | ({f"lora.{name}": x for name, x in lora_state(self.model).items()} if self.lora else {})

    def load_learned(self, weights: dict[str, Tensor]) -> None:
        own = {n: x for n, x in weights.items() if not n.startswith("lora.")}
        self.predictors.load_state_dict(own)
        with torch.no_grad():
            for name, x in lora_state(self.model).items() if self.lora else ():
                x.copy_(weights[f"lora.{name}"])

    def save(self, folder: str | Path) -> None:
        """Write the predictors as an adapter folder: safetensors and JSON, the base model named by its hash."""
        save_adapter(self, Path(folder))

    def load(self, folder: str | Path) -> Retrofit:
        """Read the predictors of an adapter folder that was made for this model and these settings."""
        load_into(self, Path(folder))
        return self

    @property
    def attached(self) -> bool:
        return bool(self._hooks)

    def detach(self) -> nn.Module:
        """Remove all hooks and settings; the model is then bit for bit what it was before the retrofit."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        withdraw_caches(self)
        self._restore()
        if self.lora:
            remove_lora(self.model)
            self.lora = []
        if getattr(self.model, "_expire_span_retrofit", None) is self:
            del self.model._expire_span_retrofit
        return self.model

    @contextlib.contextmanager
    def paused(self) -> Iterator[Any]:
        """A context in which the model runs as before the retrofit, with its own kind of cache."""
        self._restore()
        self._paused = True
        try:
            with without_lora(self.model) if self.lora else contextlib.nullcontext():
                yield self.model
        finally:
            self._paused = False
            if self.attached:
                self._take_over()

    @contextlib.contextmanager
    def expiring_nothing(self) -> Iterator[None]:
        """A context in which all memories of layers that learn are kept, whatever is predicted for them."""
        self._nothing_expires = True
        try:
            yield
        finally:
            self._nothing_expires = False

    def __enter__(self) -> Retrofit:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    # Inside

    def _attach(self) -> None:
        register()
        self.implementations = [c._attn_implementation for c in self.configs]
        try:
            self._hooks.append(self.model.register_forward_pre_hook(self._check_call, with_kwargs=True))
            for layer in self.layers:
                # A partial of a method, no closure, so that a deep copy of the model runs through a copy of the retrofit.
                hook = functools.partial(self._before_layer, layer)
                self._hooks.append(layer.module.register_forward_pre_hook(hook, with_kwargs=True))
            for module, index in self.layout.readers.items():
                hook = functools.partial(self._before_reader, index)
                self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            self._take_over()
            # Set around nn.Module, so that the retrofit is no submodule and state_dict and parameters stay as they are.
            object.__setattr__(self.model, "_expire_span_retrofit", self)
        except BaseException:
            self.detach()
            raise

    def _take_over(self) -> None:
        for config in self.configs:
            config._attn_implementation_internal = NAME
        self._angles = use_exact_angles(self.layout.rotary)

    def _restore(self) -> None:
        for config, name in zip(self.configs, self.implementations):
            config._attn_implementation_internal = name
        restore_angles(self._angles)
        self._angles = []

    def _before_layer(
        self, layer: AttentionLayer, module: Any, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        if self._paused:
            return None
        name = module.config._attn_implementation
        if name != NAME:
            raise ValueError(
                f"this model is retrofitted, but its attention implementation was set to {name!r}, which forgets nothing; "
                f"set it back to {NAME!r}, or call detach() on the retrofit before changing it"
            )
        reading = self._prepare(layer, args, kwargs)
        if self.layout.readers:
            self._shared[layer.index] = reading
        return args, {**kwargs, "expire_reading": reading}

    def _before_reader(
        self, index: int, module: Any, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        """A layer that reads an earlier layer's keys sees them under that layer's spans."""
        return None if self._paused else (args, {**kwargs, "expire_reading": self._shared[index]})

    def _prepare(self, layer: AttentionLayer, args: tuple, kwargs: dict[str, Any]) -> LayerReading:
        """Predict the new tokens' spans and stage them with the cache."""
        hidden: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        past = kwargs.get("past_key_values", kwargs.get("layer_past"))
        if isinstance(past, SlotCache):
            step = past.layers[layer.index].attention
            return LayerReading(hidden, step.clock.now, self.ramp_of(layer), hidden=hidden, slots=step)
        cache, mask = expiring_cache(past, layer.index), kwargs.get("attention_mask")
        start = 0 if cache is None else cache.layers[layer.index].seen
        reading = LayerReading(self.spans(layer, hidden), start, self.ramp_of(layer), self.config.impl, hidden=hidden)
        if cache is None and mask is None:
            reading.documents = find_documents(kwargs.get("position_ids"), hidden)
        real = self._real_tokens(mask, start, hidden.shape[1])
        if layer.window is None and self.config.keep_first:
            reading.span = self._keep_first(reading, real, None if cache is None else cache.layers[layer.index])
        if real is not None:  # padding gets a span of -ramp: no query sees it, and it is deleted at once
            new = real[:, -hidden.shape[1] :].to(hidden.device)
            reading.span = torch.where(new.unsqueeze(1), reading.span, -reading.ramp)
        reading.wants_weights = bool(kwargs.get("output_attentions")) or collects_attentions()
        if cache is not None:
            reading.predictor = self.predictor_of(layer)
            cache.layers[layer.index].stage(reading, padded=real is not None)
        return reading

    def spans(self, layer: AttentionLayer, hidden: Tensor) -> Tensor:
        """Spans [B, Hkv, T] of hidden states [B, T, C]: predicted, or the layer's own window."""
        if layer.window is not None:
            shape = hidden.shape[0], layer.kv_heads, hidden.shape[1]
            return torch.full(shape, float(layer.window - 1), device=hidden.device)
        predictor = self.predictor_of(layer)
        if self._nothing_expires:
            return hidden.new_full((hidden.shape[0], layer.kv_heads, hidden.shape[1]), KEPT, dtype=torch.float32)
        if next(predictor.parameters()).device != hidden.device:
            predictor.to(hidden.device)  # the model was moved after the retrofit
        span = predictor(hidden)
        return span if self.dial == 1.0 else span * self.dial

    def predictor_of(self, layer: AttentionLayer) -> nn.Module:
        """The predictor of a layer; an identity for a layer with a window of its own, which has none."""
        return self.predictors[str(layer.index)] if layer.window is None else nn.Identity()

    def ramp_of(self, layer: AttentionLayer) -> float:
        """Length of the soft edge of the layer's memories; a window's edge is hard."""
        return float(self.config.ramp) if layer.window is None else HARD_EDGE

    def _check_call(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Refuse, before anything is computed, a cache that does not fit or that a failed forward pass left, a call without new
        tokens, and tokens beyond a learned position table."""
        if self._paused:
            return
        names = ("input_ids",) if len(args) < 2 else inspect.signature(model.forward).parameters
        kwargs = {**kwargs, **dict(zip(names, args))}
        past = kwargs.get("past_key_values")
        given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        new = next((x.shape[1] for x in given if x is not None), None)
        if new == 1 and in_slots(past, self):
            return
        check_inputs(kwargs)
        if isinstance(past, ExpiringCache):
            past.check_whole()
            check_cache(self, past)
            check_new_tokens(past, new, kwargs)
        if self.length is None:
            return  # rotary positions have no limit, and asking a cache on a GPU for its length may wait for the device
        tokens = (0 if past is None else int(past.get_seq_length())) + (new or 0)
        if tokens > self.length:
            kind = type(self.model).__name__
            raise ValueError(
                f"{kind} has a learned table of {self.length} positions, got a context of {tokens} tokens; "
                "models with rotary positions can go on for ever"
            )

    def _real_tokens(self, mask: Any, start: int, count: int) -> Tensor | None:
        """The checked attention mask as booleans, of all tokens seen or of the new ones only, [B, tokens]; None if there is
        none."""
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"a retrofitted model takes 2-D attention masks [B, tokens seen], got {shape}")
        if mask.shape[1] not in (count, start + count):
            raise ValueError(f"attention_mask must cover {start + count} tokens, got {mask.shape[1]}")
        return mask.to(torch.bool)

    def _keep_first(self, reading: LayerReading, real: Tensor | None, cache: ExpiringLayer | None) -> Tensor:
        """The spans of `reading` with KEPT for the first tokens of each row, padding not counted, and of each packed
        document."""
        span, start, keep = reading.span, reading.start, self.config.keep_first
        padded = cache is not None and cache.padded
        if start >= keep and real is None and not padded:
            return span
        count = span.shape[-1]
        place = torch.arange(start, start + count, device=span.device)
        if reading.documents is not None:
            begins = torch.nn.functional.pad(reading.documents.diff(dim=-1) != 0, (1, 0), value=True)
            place = place - torch.where(begins, place, 0).cummax(-1).values
        elif real is not None or padded:
            new = place.new_ones(len(span), count) if real is None else real[:, -count:].to(span.device)
            place = new.cumsum(-1) - 1 if cache is None else new.cumsum(-1) - 1 + cache.count_kept()
        return torch.where((place < keep).expand(len(span), count).unsqueeze(1), KEPT, span)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's memory over all layers that learn: keys, values, span and position in every head."""
        size = self.model.dtype.itemsize
        return sum(x.kv_heads * (2 * x.head_dim * size + 12) for x in self.layers if x.window is None)

    @property
    def longest_life(self) -> int:
        """Number of tokens after which every memory is dead, except those that `keep_first` keeps for ever."""
        longest = self.config.max_span * max(self.dial, 1.0) + self.config.ramp
        lives = [longest if x.window is None else x.window for x in self.layers]
        return math.ceil(max(lives))
