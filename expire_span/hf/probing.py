"""What one short forward pass of the base model shows of its attention: which modules attend, what they read, under which mask.

The families of transformers name the same things differently, and some fields of their modules mislead. What a layer gives to
the attention interface, to its cache, and to the function that makes masks is the same for all, and is what is computed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention_function import attention_function

NAME = "expire_span_probe"
FAR = 2**29
"""A query's position at which masks are read: further back than any window."""
KNOWN_TENSORS = {"s_aux", "position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k"}
"""Keyword arguments that hold tensors and may be given to an attention function; sinks count, the others change nothing."""


@dataclass
class AttentionCall:
    """One call of the attention interface."""

    module: nn.Module
    index: int | None
    """Index of the cache layer whose keys the call reads; None if its keys come from no cache."""
    writes: bool
    """Whether the module has written these keys itself; else it reads those of an earlier layer."""
    kv_heads: int
    head_dim: int
    window: int | None
    softcap: float
    sinks: bool
    dim: int
    """Width of the module's input."""
    obstacle: str | None
    """What expiring attention cannot compute, as the end of a sentence; None if nothing."""


@dataclass
class Probe:
    """What was seen, in the order of the calls."""

    calls: list[AttentionCall] = field(default_factory=list)
    logits: Tensor | None = None
    cache: Any = None
    rotary: list[nn.Module] = field(default_factory=list)
    """Modules that have computed rotary angles."""
    embeddings: list[nn.Module] = field(default_factory=list)
    """Embeddings that were read: the language part's, not those of pictures."""
    _windows: dict[int, int | str | None] = field(default_factory=dict)
    """The window under each mask, or what is wrong with it, by the address of the mask's numbers."""
    _masks: list[Tensor] = field(default_factory=list)
    _written: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    _dims: dict[nn.Module, int] = field(default_factory=dict)
    _seen: set[nn.Module] = field(default_factory=set)

    def note_mask(self, mask: Any, function: Callable[..., Any]) -> None:
        if isinstance(mask, Tensor):
            self._masks.append(mask)  # kept, so that no later tensor gets its address
            self._windows[_address(mask)] = _describe_mask(function)

    def note_call(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, kwargs: dict[str, Any]) -> None:
        window = self._windows.get(_address(mask), None) if isinstance(mask, Tensor) else None
        last = self._written[-1] if self._written else None
        found = next((n for n, key, value in reversed(self._written) if _same(key, k) and _same(value, v)), None)
        writes = last is not None and found == last[0] and found not in {c.index for c in self.calls if c.writes}
        obstacle = window if isinstance(window, str) else _obstacle(module, q, k, v, found, kwargs)
        if module in self._seen:
            obstacle = (
                f"calls {type(module).__name__} more than once in a pass, so that its memories are not one layer's"
            )
        elif self._dims.get(module) is None:
            obstacle = f"has a {type(module).__name__} that takes no hidden states or passes no keyword arguments on"
        self._seen.add(module)
        self.calls.append(
            AttentionCall(
                module,
                found,
                writes,
                k.shape[1],
                k.shape[-1],
                window if isinstance(window, int) else None,
                float(kwargs.get("softcap") or 0.0),
                kwargs.get("s_aux") is not None,
                self._dims.get(module, 0),
                obstacle,
            )
        )


class RecordingCache(DynamicCache):
    """An ordinary cache that tells a probe what is written."""

    probe: Probe

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        out = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.probe._written.append((layer_idx, out[0], out[1]))
        return out


def probe(model: Any, configs: list[Any], tokens: Tensor, config: Any) -> Probe:
    """Run the base model over `tokens` [1, n] and tell what its attention did, with its logits."""
    seen = Probe()
    cache = RecordingCache(config=config)
    cache.probe = seen
    seen.cache = cache
    with _observed(model, configs, seen), torch.no_grad():
        seen.logits = model(tokens, past_key_values=cache, use_cache=True).logits
    return seen


@contextlib.contextmanager
def _observed(model: nn.Module, configs: list[Any], seen: Probe) -> Iterator[None]:
    before = [c._attn_implementation for c in configs]
    name = next((x for x in before if isinstance(x, str) and x != "eager"), "eager")
    if name not in ("eager", "sdpa"):
        name = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("expire_probe", None)
        seen.note_call(module, q, k, v, attention_mask, kwargs)
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        function = eager if name == "eager" and eager is not None else ALL_ATTENTION_FUNCTIONS["sdpa"]
        return function(module, q, k, v, attention_mask, **kwargs)

    def make_mask(*args: Any, **kwargs: Any) -> Any:
        mask = ALL_MASK_ATTENTION_FUNCTIONS[name](*args, **{**kwargs, "allow_is_causal_skip": False})
        seen.note_mask(mask, kwargs["mask_function"])
        return mask

    def before_module(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        if isinstance(hidden, Tensor) and hidden.dim() == 3:
            seen._dims[module] = hidden.shape[-1]

    def note(found: list[nn.Module], module: nn.Module, *_: Any) -> None:
        if module not in found:
            found.append(module)

    with attention_function(NAME, attend, make_mask, configs), contextlib.ExitStack() as hooks:
        for m in model.modules():
            if _takes_more(m):
                hooks.callback(m.register_forward_pre_hook(before_module, with_kwargs=True).remove)
            if is_rotary(m):
                hooks.callback(m.register_forward_hook(partial(note, seen.rotary)).remove)
            if isinstance(m, nn.Embedding):
                hooks.callback(m.register_forward_hook(partial(note, seen.embeddings)).remove)
        yield


def is_rotary(module: nn.Module) -> bool:
    return "Rotary" in type(module).__name__ and hasattr(module, "rope_type")


def _takes_more(module: nn.Module) -> bool:
    """Whether a module's forward pass takes keyword arguments that it does not name."""
    code = getattr(type(module).forward, "__code__", None)
    inner = getattr(type(module).forward, "__wrapped__", None)
    code = getattr(inner, "__code__", code)
    return code is not None and bool(code.co_flags & 0x08)


def _obstacle(module: Any, q: Tensor, k: Tensor, v: Tensor, index: int | None, kwargs: dict[str, Any]) -> str | None:
    if v.shape[-1] != q.shape[-1]:
        return (
            f"has keys of {k.shape[-1]} numbers and values of {v.shape[-1]}; expiring attention takes equal sizes only"
        )
    if index is None:
        return (
            "attends to keys that are not those its cache holds (they are stored compressed, or come from elsewhere), so that "
            "deleting entries would not delete what is read"
        )
    strange = [n for n, x in kwargs.items() if isinstance(x, Tensor) and n not in KNOWN_TENSORS]
    if strange:
        return f"gives its attention {', '.join(strange)}, which expiring attention does not compute"
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        return "attends in both directions"
    return None


def _describe_mask(function: Callable[..., Any]) -> int | str | None:
    """The sliding window of a mask function in tokens, None if it is causal, or what else it is."""
    zero = torch.zeros((), dtype=torch.int64)

    def sees(query: int, distances: Tensor) -> Tensor:
        at = torch.tensor(query)
        return torch.as_tensor(function(zero, zero, at, at - distances)).expand(len(distances))

    try:
        if bool(sees(FAR, torch.arange(-8, 0)).any()):
            return "attends in both directions"
        windows = [_window_at(sees, query) for query in (FAR, FAR + 1, FAR + 7, FAR + 1023)]
    except (IndexError, RuntimeError):
        return "has a mask that is read from its tokens, which expiring attention does not compute"
    if len(set(windows)) > 1:
        return "attends in chunks, so that what a token sees depends on its position, not on ages"
    return windows[0]


def _window_at(sees: Callable[[int, Tensor], Tensor], query: int) -> int | None:
    """The number of tokens that a query sees, its own included; None if it sees all."""
    powers = 2 ** torch.arange(28)
    blind = (~sees(query, powers)).nonzero()
    if not len(blind):
        return None
    high = int(powers[int(blind[0, 0])])
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bool(sees(query, torch.tensor([middle]))) else (low, middle)
    return high if bool(sees(query, torch.tensor([1]))) else 1


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.data_ptr() == b.data_ptr() and a.stride() == b.stride())
