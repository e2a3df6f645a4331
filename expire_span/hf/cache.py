"""ExpiringCache: the key/value cache of a retrofitted model (`past_key_values`), which deletes memories as they expire.

How it fits transformers: `get_seq_length` counts tokens seen, not memories kept, so that positions continue. Keys keep the
rotation of the position at which they were written, since only differences of positions matter. `update` gets keys and values
but no spans: the hook before the layer has passed them to the cache by `stage`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from expire_span.disk.files import write_atomic
from expire_span.errors import StorageError, UserError, describe
from expire_span.models.marks import override
from expire_span.models.state import bytes_of, pack, unpack
from expire_span.store import ExpiringMemory
from expire_span.store.tensor_files import check_tensors, to_bytes

from .attention import LayerReading, is_kept
from .recurrent import RecurrentLayer, copy_states, load_states, map_states, states_of


class ForgettingLayer(CacheLayerMixin):
    """The part of transformers' interface that all cache layers which delete memories share."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False
    seen: int
    """Number of tokens read so far, deleted ones included."""
    has_buffers: bool
    """Whether buffers for memories exist already."""

    @property
    def is_initialized(self) -> bool:
        return self.has_buffers

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        """Ignored: the base class sets this, but here it follows from the buffers."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                f"an expiring cache cannot take back {abs(tokens_to_remove)} tokens, because what expired is gone; fork it "
                "before, and decode without prompt lookup or an assistant model"
            )


class ExpiringLayer(ForgettingLayer):
    """One layer's memories: an `ExpiringMemory` with a row for each batch row and key/value head."""

    def __init__(self, ramp: float, cap: int | None = None) -> None:
        super().__init__()
        self.ramp, self.cap = ramp, cap
        self.memory: ExpiringMemory | None = None
        self.seen = 0
        self.staged: LayerReading | None = None
        self.spans: Tensor | None = None
        """Spans of the tokens that were read last, [B, Hkv, T], as they are used."""
        self.marks: Tensor | None = None
        """Lifetimes that the caller gives to the next tokens, [B, T]; see models/marks.py."""
        self.padded = False
        """Whether a mask came with tokens read so far, so that some of them may be padding."""

    @property
    def has_buffers(self) -> bool:
        return self.memory is not None

    def stage(self, reading: LayerReading, *, padded: bool = False) -> None:
        """Store the spans of the next tokens, which `update` needs and transformers does not pass to it. padded: whether they
        come with a mask."""
        self._check_fits(reading.span)
        reading.span = override(reading.span, self.marks, reading.ramp)
        self.staged, self.padded = reading, self.padded or padded
        self.spans = reading.span.detach()

    def count_kept(self) -> Tensor | int:
        """Number of memories of each row that are kept for ever, [B, 1]. Until it reaches `keep_first`, it is the number of
        tokens that the row has read, padding not counted."""
        if self.memory is None:
            return 0
        return is_kept(self.memory.span).sum(-1).flatten(1).amin(1, keepdim=True)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows = tuple(key_states.shape[:2])
        self.memory = ExpiringMemory.empty(rows, ramp=self.ramp, cap=self.cap, device=key_states.device)

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new memories and return the keys and values that the new queries may read; delete what later queries cannot."""
        reading, self.staged = self.staged, None
        if reading is None:
            raise ValueError(
                "an ExpiringCache works with the retrofitted model that made it, but this model has no span predictors "
                "(was it detached?); pass past_key_values=None, or retrofit the model"
            )
        if self.memory is None:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._remember(reading, key_states, value_states)
        self.seen += key_states.shape[2]
        self.memory = self._kept().expire(self.seen)
        return keys, values

    def _kept(self) -> ExpiringMemory:
        assert self.memory is not None
        return self.memory

    def _remember(self, reading: LayerReading, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        old = self._kept()
        pos = torch.arange(self.seen, self.seen + keys.shape[2], device=keys.device)
        self.memory = old.append(pos, reading.span, k=keys, v=values, check_values=False)
        if torch.is_grad_enabled() and (keys.requires_grad or reading.span.requires_grad) and len(old):
            # The store detaches what it holds, so the new keys and values are concatenated here, with their gradients.
            reading.k_pos = self.memory.pos
            reading.span = torch.cat([old.span, reading.span], -1)
            return torch.cat([old["k"], keys], 2), torch.cat([old["v"], values], 2)
        if not len(old):
            return keys, values
        reading.k_pos, reading.span = self.memory.pos, self.memory.span
        return self.memory["k"], self.memory["v"]

    def _check_fits(self, span: Tensor) -> None:
        if self.memory is None:
            return
        if self.memory.rows[0] != span.shape[0]:
            rows = f"{self.memory.rows[0]} rows, got {span.shape[0]}"
            raise ValueError(f"this cache holds a batch of {rows}; use a new cache, or batch_repeat_interleave")
        device = self.memory.slots["pos"].device
        if device != span.device:
            raise ValueError(
                f"the cache is on {device} but the model is on {span.device}; move it with cache.to(device)"
            )

    # The interface of transformers

    def reset(self) -> None:
        self.memory, self.seen, self.staged, self.spans, self.padded = None, 0, None, None, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda memory: memory.select(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda memory: memory.select(torch.arange(memory.rows[0]).repeat_interleave(repeats)))

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
        self._change(lambda memory: memory.select(rows))

    def offload(self) -> None:
        self._change(lambda memory: memory.map_tensors(lambda x: x.cpu()))

    def prefetch(self) -> None:
        raise ValueError(
            "an expiring cache is small and is not offloaded by transformers; move it with cache.to(device)"
        )

    def _change(self, change: Callable[[ExpiringMemory], ExpiringMemory]) -> None:
        if self.memory is not None:
            self.memory = change(self.memory)


class StatesBeside(RecurrentLayer):
    """The part of a layer of hybrids that has recurrent states beside its memories; the other base class has the memories."""

    is_compileable = False
    memories: type[ExpiringLayer]

    def __init__(self, ramp: float, cap: int | None, states: int) -> None:
        RecurrentLayer.__init__(self, number_of_states=states)  # type: ignore[call-arg]  # its base is transformers' own
        self.memories.__init__(self, ramp, cap)  # type: ignore[arg-type]

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Transformers gives keys and values by place, and states by name."""
        (self.memories if len(args) == 2 else RecurrentLayer).lazy_initialization(self, *args, **kwargs)  # type: ignore[arg-type]

    def reset(self) -> None:
        self._both("reset")

    def offload(self) -> None:
        self._both("offload")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._both("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._both("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._both("batch_select_indices", indices)

    def _both(self, name: str, *args: Any) -> None:
        for kind in (RecurrentLayer, self.memories):
            getattr(kind, name)(self, *args)


class HybridLayer(StatesBeside, ExpiringLayer):
    """A layer with memories and recurrent states."""

    memories = ExpiringLayer


class ExpiringCache(Cache):
    """Build one with `retrofitted.new_cache()`."""

    layers: list[Any]
    """One for each layer of the model: of hybrids, some hold recurrent states alone."""

    def __init__(self, layers: list[Any], identify: Callable[[], str] | None = None, maker: Any = None) -> None:
        """identify: gives the hash of the model's weights, which a saved cache names; None leaves it out.
        maker: a weak reference to the `Retrofit` that may use the cache; None allows all with the same settings."""
        super().__init__(layers=layers)
        self.identify, self.maker = identify, maker

    @property
    def expiring(self) -> list[ExpiringLayer]:
        """The layers that hold memories."""
        return [x for x in self.layers if isinstance(x, ExpiringLayer)]

    @property
    def recurrent(self) -> dict[str, Any]:
        """Recurrent states of hybrids, by the number of their layer; empty for other models."""
        return {str(n): states_of(x) for n, x in enumerate(self.layers) if isinstance(x, RecurrentLayer)}

    @recurrent.setter
    def recurrent(self, states: dict[str, Any]) -> None:
        for n, x in states.items():
            load_states(self.layers[int(n)], x)

    @property
    def seen(self) -> int:
        """Tokens read so far."""
        return self.expiring[0].seen

    @property
    def bytes_held(self) -> int:
        """Bytes of all buffers, spare slots included."""
        memories = sum(layer.memory.bytes_held for layer in self.expiring if layer.memory is not None)
        return memories + bytes_of(self.recurrent)

    def live(self) -> list[Tensor]:
        """Living memories of each layer, per batch row and head: [B, Hkv] each."""
        return [layer.memory.live(layer.seen) for layer in self.expiring if layer.memory is not None]

    def compact(self) -> ExpiringCache:
        """Remove all dead memories now; spare slots stay."""
        for layer in self.expiring:
            layer._change(lambda memory: memory.compact())
        return self

    def check_whole(self) -> None:
        """Refuse a cache in which some layers have read more tokens than others, because a forward pass failed half way."""
        seen = {layer.seen for layer in self.expiring}
        if len(seen) > 1:
            raise ValueError(
                f"an earlier forward pass through this cache stopped half way (layers have seen {min(seen)} and {max(seen)} "
                "tokens); take a new cache or a fork made before it"
            )

    def fork(self, copies: int = 1) -> ExpiringCache:
        """An independent copy in which each row occurs `copies` times, so that it can be continued in several ways."""
        twin = ExpiringCache([], self.identify, self.maker)
        for layer in self.layers:
            other = object.__new__(type(layer))
            vars(other).update(vars(layer))
            if isinstance(other, ExpiringLayer):
                other.staged = None
                other._change(lambda memory: memory.fork())
            if isinstance(other, RecurrentLayer):
                copy_states(other)
            twin.layers.append(other)
        if copies > 1:
            twin.batch_repeat_interleave(copies)
        return twin

    def __copy__(self) -> ExpiringCache:
        return self.fork()

    def to(self, device: torch.device | str) -> ExpiringCache:
        """Move this cache itself, as a module moves; a fork stays where it is."""
        for layer in self.expiring:
            layer._change(lambda memory: memory.map_tensors(lambda x: x.to(device)))
        for layer in self.layers:
            if isinstance(layer, RecurrentLayer):
                map_states(layer, lambda x: x.to(device))
        return self

    def state_dict(self) -> list[dict[str, Any]]:
        memories = [(x.seen, x.memory) for x in self.expiring]
        parts = [{"seen": seen, "memory": None if memory is None else memory.state_dict()} for seen, memory in memories]
        return parts + ([{"recurrent": self.recurrent}] if self.recurrent else [])

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        recurrent = [x["recurrent"] for x in state if "recurrent" in x]
        state = [x for x in state if "recurrent" not in x]
        if len(state) != len(self.expiring):
            raise ValueError(f"the saved cache has {len(state)} layers, this model has {len(self.expiring)}")
        found = []
        for layer, saved in zip(self.expiring, state):
            memory = saved["memory"]
            if memory is not None and memory["ramp"] != layer.ramp:
                raise ValueError(f"the saved cache has ramp {memory['ramp']}, this retrofit has {layer.ramp}")
            found.append((saved["seen"], None if memory is None else ExpiringMemory.from_state_dict(memory)))
        for layer, (seen, memory) in zip(self.expiring, found):
            layer.seen, layer.memory, layer.padded = seen, memory, True
        for states in recurrent:
            self.recurrent = states

    def save(self, path: str | Path) -> None:
        """Write the cache to one safetensors file, whole or not at all; it names the model by the hash of its weights."""
        tensors, skeleton = pack(self.state_dict())
        tensors = {name: x.contiguous().cpu() for name, x in tensors.items()}
        head = {"skeleton": json.dumps(skeleton)} | ({} if self.identify is None else {"model": self.identify()})
        try:
            write_atomic(Path(path), to_bytes(tensors, head))
        except OSError as error:
            raise StorageError(
                f"the cache could not be saved to {path}: {describe(error)}; save it elsewhere"
            ) from error

    def load(self, path: str | Path, device: torch.device | str = "cpu") -> ExpiringCache:
        """Go on from a cache that `save` wrote for the same model. If this raises, the cache is as it was."""
        try:
            with safetensors.safe_open(path, framework="pt", device=str(device)) as file:
                head = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            state = unpack(tensors, json.loads(head["skeleton"]))
        except OSError as error:
            raise UserError(f"{path} is not a saved cache that can be read: {describe(error)}") from error
        except (*_DAMAGE, ValueError) as error:
            raise UserError(f"{path} is not a saved cache that can be read ({error})") from error
        self._check_model(path, head.get("model"))
        check_tensors(path, tensors, head)
        try:
            self.load_state_dict(state)
        except _DAMAGE as error:
            raise UserError(f"{path} is not a saved cache that can be read ({error})") from error
        return self

    def _check_model(self, path: str | Path, wrote: str | None) -> None:
        """Refuse a cache of another model, where this one can tell its own."""
        mine = wrote if self.identify is None else self.identify()
        if wrote != mine:
            raise UserError(
                f"{path} was saved by another model (weights {wrote!s:.12}, these are {mine!s:.12}); load it with the model "
                "that wrote it"
            )


_DAMAGE = (KeyError, TypeError, AttributeError, RecursionError, safetensors.SafetensorError)
