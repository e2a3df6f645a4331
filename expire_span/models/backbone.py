"""The backbone: blocks of a memory system and a feed-forward part, hidden states [B, T, C] in and out, state in and out.

It knows no tokens: the decoder puts an embedding and a vocabulary head around it, the policy an encoder of observations and
heads for actions and values. Its layers may hold different memory systems, by a pattern.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expire_span.checks import show
from expire_span.models import systems
from expire_span.settings.models import BackboneConfig
from expire_span.store import HiddenMemory, trim_states

from .mixer import Keep, Mixer, MixerAux, build_mixer, check_start


@dataclass
class BackboneAux:
    """What the blocks report beside their output; `layers` holds one report per block."""

    hidden: Tensor
    """The last block's output [B, T, C]. Only its shape and device are used, to build a zero loss where no layer has one."""
    layers: list[MixerAux]

    @property
    def row_loss(self) -> Tensor:
        """Span loss of each row summed over layers, unweighted, [B]."""
        losses = [aux.loss for aux in self.layers if aux.loss is not None]
        return torch.stack(losses).sum(0) if losses else self.hidden.new_zeros(len(self.hidden))

    @property
    def loss(self) -> Tensor:
        """Span loss averaged over the batch."""
        return self.row_loss.mean()

    @property
    def live(self) -> Tensor:
        """Mean number of living memories per query, one number for each layer that reports it, [layers]."""
        return torch.stack([aux.live for aux in self.layers if aux.live is not None])

    @property
    def bytes_held(self) -> int:
        return sum(aux.bytes_held for aux in self.layers)


class BackboneOutput(NamedTuple):
    """What a backbone returns; it unpacks as `h, state, aux`: h [B, T, C], one state per block, and the report."""

    h: Tensor
    state: list[Any]
    aux: BackboneAux


class SwiGLU(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, inner, bias=False)
        self.up = nn.Linear(dim, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)


class FeedForward(nn.Module):
    """Two linear maps with a non-linearity between them; they have biases only with `activation="relu"`, as in the paper."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        bias = config.activation == "relu"
        self.activation = config.activation
        if config.activation == "swiglu":
            self.up: nn.Module = SwiGLU(config.dim, config.ff_dim)
        else:
            self.up = nn.Linear(config.dim, config.ff_dim, bias=bias)
        self.down = nn.Linear(config.ff_dim, config.dim, bias=bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.activation != "swiglu":
            x = F.relu(x)
            x = x * x if self.activation == "relu2" else x
        return self.down(self.dropout(x))


def build_norm(config: BackboneConfig) -> nn.Module:
    return nn.RMSNorm(config.dim, eps=1e-6) if config.norm_kind == "rms" else nn.LayerNorm(config.dim)


class Block(nn.Module):
    """One layer: memory system and feed-forward, each with its residual and norm."""

    def __init__(self, config: BackboneConfig, layer: int, relative_keys: nn.Parameter | None) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.norm1, self.norm2 = build_norm(config), build_norm(config)
        self.mixer: Mixer = build_mixer(config.shape(layer), config.mixer_of(layer), relative_keys)
        self.ff = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)
        self.compiled: Callable[..., Any] | None = None  # set by Backbone.compile_blocks

    def initial_state(self, batch: int, keep: Keep = "kv") -> Any:
        return self.mixer.initial_state(batch, keep, empty=self._empty())

    def reset_rows(self, state: Any, fresh: Tensor) -> Any:
        return self.mixer.reset_rows(state, fresh, empty=self._empty())

    @torch.no_grad()
    def _empty(self) -> Tensor:
        """What the mixer reads for a hidden state of zeros, [C]. It is not zero where the norm before it adds a bias."""
        zero = self.ff.down.weight.new_zeros(len(self.ff.down.weight))
        return self.norm1(zero) if self.pre_norm else zero

    def forward(
        self, x: Tensor, state: Any, used: Tensor | None = None, fresh: Tensor | None = None, keep: Keep = "kv"
    ) -> tuple[Tensor, Any, MixerAux]:
        """x [B, T, C] -> (output [B, T, C], state after the block, report).

        used: None, or a scalar 0 or 1 with which LayerDrop skips or keeps this block. fresh [B] (bool): rows whose memory is
        emptied first. keep: what a state of None begins to keep. States start and are reset in here, not by the caller, since
        both may use weights, and wrappers such as FSDP gather weights only during forward.
        """
        if state is None:
            state = self.initial_state(x.shape[0], keep)
        elif fresh is not None:
            state = self.reset_rows(state, fresh)
        y, state, aux = self.mixer(self.norm1(x) if self.pre_norm else x, state)
        mixed = self.dropout(y)
        if self.pre_norm:
            h = x + mixed
            h = h + self.ff(self.norm2(h))
        else:
            h = self.norm1(x + mixed)
            h = self.norm2(h + self.ff(h))
        if used is not None:
            h = torch.where(used > 0, h, x)
        return h, state, aux


class Backbone(nn.Module):
    """`h, state, aux = backbone(x, state)` with x and h [B, T, C]; a state of None starts fresh."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        check_config(config, BackboneConfig, "Backbone")
        self.config = config
        self.relative_keys = None
        if config.positions == "relative" and any(systems.find(m.kind).scores_pairs for m in config.mixers):
            self.relative_keys = nn.Parameter(torch.randn(config.relative_window, config.head_dim))
        self.blocks = nn.ModuleList(Block(config, n, self.relative_keys) for n in range(config.layers))
        self.norm = build_norm(config) if config.norm == "pre" else nn.Identity()
        self._scale_outputs()

    def _scale_outputs(self) -> None:
        """With pre-norm, divide output projections by sqrt(2 layers), so that depth does not change the residual's scale."""
        if self.config.norm != "pre":
            return
        with torch.no_grad():
            for block in self.layers():
                block.mixer.out.weight.div_(math.sqrt(2 * self.config.layers))
                block.ff.down.weight.div_(math.sqrt(2 * self.config.layers))

    def layers(self) -> list[Block]:
        """The blocks as a list of `Block`, for type checkers; `blocks` is an `nn.ModuleList`."""
        return cast(list[Block], list(self.blocks))

    def compile_blocks(self, *, carry: bool, attention: bool = True) -> None:
        """Compile each block on its own: blocks of the same shape share one graph, so only one layer has to be compiled.

        carry: whether training carries memory from block to block. Without it, or where the carried state keeps its shapes,
        whole blocks are compiled. Other systems' states change their shapes: there only the feed-forward parts are compiled, as
        they are without `attention`, for layers that read one part of a sequence.
        """
        for block in self.layers():
            if not attention or (carry and not block.mixer.recordable().shapes):
                block.ff.compile()
            else:
                block.compiled = torch.compile(block.forward)

    def initial_state(self, batch: int, keep: Keep = "kv") -> list[Any]:
        check_start(batch, keep)
        return [block.initial_state(batch, keep) for block in self.layers()]

    def reset_rows(self, state: list[Any], fresh: Tensor) -> list[Any]:
        """Empty the memory of the rows marked in `fresh` [B] (bool)."""
        return [block.reset_rows(part, fresh) for block, part in zip(self.layers(), state)]

    if TYPE_CHECKING:  # torch's modules return Any when called; editors should see the real type

        def __call__(
            self, x: Tensor, state: list[Any] | None = None, *, fresh: Tensor | None = None, keep: Keep = "kv"
        ) -> BackboneOutput: ...

    def forward(
        self, x: Tensor, state: list[Any] | None = None, *, fresh: Tensor | None = None, keep: Keep = "kv"
    ) -> BackboneOutput:
        """x [B, T, C]. fresh [B] (bool): rows whose memory is emptied first. keep: what a state of None begins to keep."""
        _check_fresh(fresh, x.shape[0])
        if state is None:
            check_start(x.shape[0], keep)
            state = [None] * len(self.blocks)
        elif len(state) != len(self.blocks):
            raise ValueError(f"the state has {len(state)} layers and the model {len(self.blocks)}; begin with None")
        else:
            state = trim_states(state)
        h, states, auxes = x, [], []
        for block, part, used in zip(self.layers(), state, self._draw_layers(x)):
            run = block.compiled if block.compiled is not None and _has_static_shapes(part, fresh, keep) else block
            h, part, aux = run(h, part, used, fresh, keep)
            states.append(part)
            auxes.append(aux)
        return BackboneOutput(self.norm(h), states, BackboneAux(h.detach(), auxes))

    def _draw_layers(self, h: Tensor) -> list[Tensor | None]:
        """LayerDrop: for each block a scalar 0 or 1 that says whether it runs in this training step, else None."""
        if not self.training or self.config.layer_drop == 0:
            return [None] * len(self.blocks)
        used = (torch.rand(len(self.blocks), device=h.device) >= self.config.layer_drop).to(h.dtype)
        return list(used.unbind())


def check_config(config: Any, wanted: type, model: str) -> None:
    """Refuse to build a model from anything but its own settings."""
    if not isinstance(config, wanted):
        name = wanted.__name__
        raise ValueError(f"a {model} is built from a {name}, got {show(config)}; give {model}({name}(...))")


def _check_fresh(fresh: Tensor | None, rows: int) -> None:
    if fresh is None:
        return
    if not isinstance(fresh, Tensor) or fresh.dtype != torch.bool:
        got = fresh.dtype if isinstance(fresh, Tensor) else type(fresh).__name__
        raise ValueError(f"fresh must be a tensor of bool, one mark for each of the {rows} rows, got {got}")
    if tuple(fresh.shape) != (rows,):
        raise ValueError(f"fresh must have shape ({rows},), one mark a row, got {tuple(fresh.shape)}")


def _has_static_shapes(state: Any, fresh: Tensor | None, keep: Keep) -> bool:
    """Whether a compiled block can run with this state: there is no memory, or its shapes stay the same."""
    if state is None:
        return keep == "nothing"
    return fresh is None and isinstance(state, dict) and isinstance(state.get("memory"), HiddenMemory)
