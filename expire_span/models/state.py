"""Operations on any layer's or model's state: a nested structure of dicts, lists, tensors, plain values and stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from expire_span.store import ExpiringMemory, HiddenMemory, Store, restore


def map_tensors(state: Any, fn: Callable[[Tensor], Tensor], of_store: Callable[[Store], Store] | None = None) -> Any:
    """A copy of the structure with `fn` applied to every tensor; `of_store`, where given, is applied to whole stores."""
    if isinstance(state, Tensor):
        return fn(state)
    if isinstance(state, Store):
        return state.map_tensors(fn) if of_store is None else of_store(state)
    if isinstance(state, dict):
        return {key: map_tensors(value, fn, of_store) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map_tensors(value, fn, of_store) for value in state)
    return state


def count_rows(state: Any) -> int | None:
    """The batch rows of a state, as its first store or tensor has them; None where it holds neither."""
    if isinstance(state, ExpiringMemory):
        return state.rows[0]
    if isinstance(state, HiddenMemory):
        return len(state.hidden)
    if isinstance(state, Tensor):
        return state.shape[0] if state.dim() else None
    if isinstance(state, (dict, list, tuple)):
        parts = state.values() if isinstance(state, dict) else state
        return next((rows for rows in map(count_rows, parts) if rows is not None), None)
    return None


def accept_state(state: Any, rows: int) -> Any:
    """The state for an input of so many rows, or a ValueError where it has others.

    Tensors that torch.inference_mode made cannot be changed outside of it, so such a state is copied. Compiled code is given
    states that uncompiled code has made, and leaves this out.
    """
    if torch.compiler.is_compiling():
        return state
    held = count_rows(state)
    if held is not None and held != rows:
        raise ValueError(
            f"the state holds {held} rows and x has {rows}; begin with None, or choose rows by models.state.select_rows"
        )
    return fork(state) if not torch.is_inference_mode_enabled() and _from_inference(state) else state


def _from_inference(state: Any) -> bool:
    """Whether inference mode made any tensor of a state. Decoding asks this for every token, so no copy is built."""
    if isinstance(state, Tensor):
        return state.is_inference()
    if isinstance(state, ExpiringMemory):
        return any(x.is_inference() for x in state.layout.buffers.values())
    if isinstance(state, HiddenMemory):
        return state.hidden.is_inference()
    if isinstance(state, (dict, list, tuple)):
        return any(map(_from_inference, state.values() if isinstance(state, dict) else state))
    return False


def bytes_of(state: Any) -> int:
    """Bytes that the tensors of a state occupy."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(bytes_of(x) for x in state.values())
    if isinstance(state, (list, tuple)):
        return sum(bytes_of(x) for x in state)
    return getattr(state, "bytes_held", 0)


def detach(state: Any) -> Any:
    return map_tensors(state, torch.Tensor.detach)


def move(state: Any, device: torch.device | str) -> Any:
    return map_tensors(state, lambda x: x.to(device))


def fork(state: Any) -> Any:
    """An independent copy: later changes of one do not affect the other."""
    return map_tensors(state, torch.Tensor.clone)


def select_rows(state: Any, rows: Tensor) -> Any:
    """Keep, repeat or reorder batch rows: `rows` are indices into dimension 0."""
    return map_tensors(state, lambda x: x.index_select(0, rows.to(x.device)), lambda store: store.select(rows))


def pack(state: Any, prefix: str = "state") -> tuple[dict[str, Tensor], Any]:
    """Split a state into named tensors and a JSON skeleton that says where each belongs."""
    if isinstance(state, Tensor):
        return {prefix: state.detach().contiguous()}, {"tensor": prefix}
    if isinstance(state, Store):
        tensors, skeleton = pack(state.state_dict(), prefix)
        return tensors, {"memory": skeleton, "layout": state.layout_name}
    if isinstance(state, (dict, list, tuple)):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        packed = {str(key): pack(value, f"{prefix}.{key}") for key, value in items}
        tensors = {name: x for part, _ in packed.values() for name, x in part.items()}
        skeletons = {key: skeleton for key, (_, skeleton) in packed.items()}
        return tensors, {"dict": skeletons} if isinstance(state, dict) else {"list": list(skeletons.values())}
    return {}, {"value": state}


def unpack(tensors: dict[str, Tensor], skeleton: Any) -> Any:
    """The inverse of `pack`."""
    (kind, value), *_ = skeleton.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "memory":
        return restore(skeleton["layout"], unpack(tensors, value))
    if kind == "dict":
        return {key: unpack(tensors, part) for key, part in value.items()}
    if kind == "list":
        return [unpack(tensors, part) for part in value]
    return value
