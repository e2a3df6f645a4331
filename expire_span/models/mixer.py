"""The contract of a memory system: `y, state, aux = layer(x, state)`, state in and state out.

x is [B, T, C] with any T: long T is parallel training, T = 1 is decoding. A state is a nested structure of dicts, lists,
tensors with the batch in dimension 0, plain values and stores; `state.py` detaches, moves, saves, forks and reorders it.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from expire_span.checks import show
from expire_span.models import systems
from expire_span.models.systems import LayerShape
from expire_span.ops.context import active_context

from .state import accept_state, bytes_of

Keep = Literal["hidden", "kv", "nothing"]
"""What a state holds of the past. "hidden": hidden states, for training; keys, values and spans are recomputed from them in
every block. "kv": keys and values, for serving; they are computed once. "nothing": every call is a sequence of its own."""


def check_start(batch: int, keep: str) -> None:
    """Raise ValueError unless these are a number of rows and a `Keep` that a state can begin with."""
    if torch.jit.is_tracing():  # type: ignore[reportPrivateImportUsage]
        raise ValueError("torch.jit.trace cannot record a memory; give the model to torch.compile, or to torch.export")
    if not isinstance(batch, int) or batch < 0:
        raise ValueError(f"a state needs a whole number of rows, 0 or more, got {batch!r}")
    if keep not in get_args(Keep):
        raise ValueError(f"keep must be one of {', '.join(get_args(Keep))}, got {keep!r}")


class MixerAux:
    """What a layer reports beside its output; tensors stay on their device.

    `loss` and `live` may be given as functions, which are called when the attribute is read: decoding token by token reads
    neither.
    """

    def __init__(
        self,
        loss: Tensor | Callable[[], Tensor | None] | None = None,
        span: Tensor | None = None,
        live: Tensor | Callable[[], Tensor] | None = None,
        bytes_held: int = 0,
    ) -> None:
        self._loss, self._live = loss, live
        self.span = span
        """Spans given to this block's tokens, [B, T] or [B, Hkv, T], detached."""
        self.bytes_held = bytes_held
        """Bytes that the state occupies after this block."""

    @property
    def loss(self) -> Tensor | None:
        """Span loss of this block for each row, [B]; unweighted, with gradient."""
        self._loss = self._loss() if callable(self._loss) else self._loss
        return self._loss

    @loss.setter
    def loss(self, value: Tensor | None) -> None:
        self._loss = value

    @property
    def live(self) -> Tensor | None:
        """Mean number of memories alive per query of this block (scalar)."""
        self._live = self._live() if callable(self._live) else self._live
        return self._live


class MixerOutput(NamedTuple):
    """What a layer returns; it unpacks as `y, state, aux`."""

    y: Tensor
    state: Any
    aux: MixerAux


@dataclass(frozen=True)
class Recordable:
    """Guarantees about a layer's training passes, read by the code that compiles them or records them as CUDA graphs."""

    shapes: bool = False
    """The state that training carries keeps its shapes for many blocks, so that compiling whole blocks is worthwhile."""
    alone: bool = False
    """Without carried memory, the host never waits for the device in forward and backward, so that they can be recorded."""
    carried: bool = False
    """The same holds when memory is carried from the block before."""


class Mixer(nn.Module, ABC):
    """Base of every memory system. Subclasses define the abstract methods and call their output projection `out`.

    `Layer(dim, heads, kv_heads=None, **options)`: options are the fields of the system's settings and of `LayerShape`
    (positions, qk_norm, ...). Settings that are already built are given as `settings=`.
    """

    settings_class: ClassVar[type]
    __signature__: ClassVar[inspect.Signature]
    fixed_state: ClassVar[bool] = False
    """Whether the state for decoding is a dict of tensors of fixed shapes, so that a step can overwrite it in place."""
    reads_parts: ClassVar[bool] = False
    """Whether the layer can read one part of a sequence whose other parts are elsewhere (`expire_span.ops.context`)."""
    out: nn.Linear

    def __init_subclass__(cls, **options: Any) -> None:
        """Give the class the signature that `help()` and editors show at run time: its options by name."""
        super().__init_subclass__(**options)
        if is_dataclass(getattr(cls, "settings_class", None)):
            cls.__signature__ = _name_options(cls.settings_class)

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        kv_heads: int | None = None,
        *,
        settings: Any = None,
        relative_keys: nn.Parameter | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        names = {f.name for f in fields(LayerShape)}
        shape = {name: options.pop(name) for name in list(options) if name in names}
        self.shape = LayerShape(dim, heads, kv_heads, **shape)
        if settings is not None and options:
            raise ValueError(f"give settings or single fields, got both: settings and {', '.join(options)}")
        if settings is not None and not isinstance(settings, self.settings_class):
            wanted = self.settings_class.__name__
            raise ValueError(f"settings of {type(self).__name__} must be a {wanted}, got {show(settings)}")
        self.settings: Any = self.settings_class(**options) if settings is None else settings
        self._shared_keys = (relative_keys,)  # owned by the model; a tuple keeps it out of this layer's parameters

    @abstractmethod
    def initial_state(self, batch: int, keep: Keep = "kv", *, empty: Tensor | None = None) -> Any:
        """A fresh state for `batch` rows. empty [C]: what this layer reads for a zero hidden state (the norm before it may add
        a bias); systems that start with stored zero vectors need it. None means zeros."""

    @abstractmethod
    def reset_rows(self, state: Any, fresh: Tensor, *, empty: Tensor | None = None) -> Any:
        """The state with the rows marked in `fresh` [B] (bool) emptied; the other rows keep their memory."""

    @abstractmethod
    def mix(self, x: Tensor, state: Any) -> MixerOutput:
        """The output y to be added to the residual stream x [B, T, C], the state after the block, and the report."""

    def begin_steps(self, state: Any, count: int) -> Any:
        """The state in a form for at most `count` calls with one token each, without gradients, while weights stay the same."""
        return state

    def end_steps(self, state: Any) -> Any:
        """The state after those calls in its usual form."""
        return state

    if TYPE_CHECKING:  # torch's modules return Any when called; editors should see the real type

        def __call__(self, x: Tensor, state: Any = None) -> MixerOutput: ...

    def forward(self, x: Tensor, state: Any = None) -> MixerOutput:
        """A state of None starts fresh and keeps keys and values; `initial_state` gives other starts."""
        self._check_input(x)
        if not self.reads_parts and active_context() is not None:
            name = type(self).__name__
            raise ValueError(
                f"in a context, layers must be built on expiring attention, got {name}; give expire_span layers"
            )
        state = self.initial_state(x.shape[0]) if state is None else accept_state(state, x.shape[0])
        return self.mix(x, state) if x.numel() else _mix_nothing(x, state)

    def _check_input(self, x: Tensor) -> None:
        """Refuse what is not [B, T, C] in the dtype of the weights, in one sentence."""
        if not isinstance(x, Tensor):
            raise ValueError(f"x must be a tensor [B, T, {self.shape.dim}], got {type(x).__name__}")
        if x.dim() != 3 or x.shape[-1] != self.shape.dim:
            raise ValueError(f"x must have shape [B, T, {self.shape.dim}], got {tuple(x.shape)}")
        weight = self.out.weight
        if x.device != weight.device:
            raise ValueError(f"x is on {x.device} but the layer is on {weight.device}; move one of them")
        if x.is_meta:
            raise ValueError(f"x is on the device {x.device}, which holds no numbers; give it on a CPU or a GPU")
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"x is {x.dtype} but the layer's weights are {weight.dtype}; convert one of them")

    @property
    def reads_episodes(self) -> bool:
        """Whether a state of hidden states may be given "episodes" [B, T], so that a block of several episodes is read at
        once. The layer then reports no loss and gives its state back as it was."""
        return False

    def recordable(self) -> Recordable:
        return Recordable()


def _name_options(settings: type) -> inspect.Signature:
    """The signature of a layer: dim, heads and kv_heads, then by keyword the fields of its settings and of `LayerShape`."""
    dim, *others = inspect.signature(LayerShape).parameters.values()
    heads, kv_heads, *more = others
    shape = [dim.replace(default=inspect.Parameter.empty), heads.replace(default=1), kv_heads]
    own = [p for p in inspect.signature(settings).parameters.values() if p.name != "kind"]
    defaults = {f.name: f.default_factory() for f in fields(settings) if f.default_factory is not MISSING}
    named = [p.replace(kind=p.KEYWORD_ONLY, default=defaults.get(p.name, p.default)) for p in (*own, *more)]
    built = inspect.signature(Mixer.__init__).parameters
    return inspect.Signature([*shape, *named, built["settings"], built["relative_keys"]])


def _mix_nothing(x: Tensor, state: Any) -> MixerOutput:
    """No rows or no tokens: nothing is read, so the state stays as it is, and no memory is alive to anybody."""
    span, live = x.new_zeros(x.shape[:2]), torch.zeros((), device=x.device)
    aux = MixerAux(loss=x.new_zeros(x.shape[0]), span=span, live=live, bytes_held=bytes_of(state))
    return MixerOutput(torch.zeros_like(x), state, aux)


def build_mixer(shape: LayerShape, settings: Any, relative_keys: nn.Parameter | None = None) -> Mixer:
    """The layer of the memory system to which these settings belong."""
    module, name = systems.find(settings.kind).layer.split(":")
    layer = getattr(importlib.import_module(module), name)
    return layer(**asdict(shape), settings=settings, relative_keys=relative_keys)
