"""The one skeleton: embed, blocks of (mixer, feed-forward), head. Every memory system is compared inside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expire_span.config import DecoderConfig
from expire_span.mixer_configs import POSITION_FREE

from .carried import settle
from .mixer import MixerAux, build_mixer


@dataclass
class DecoderAux:
    """What the blocks report, layer by layer."""

    hidden: Tensor
    """The last block's output [B, T, C]: where there is no span loss, its rows and device say what zero looks like."""
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
        """Mean live memories per query, one number per layer, [layers]."""
        return torch.stack([aux.live for aux in self.layers if aux.live is not None])

    @property
    def bytes_held(self) -> int:
        return sum(aux.bytes_held for aux in self.layers)


class SwiGLU(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, inner, bias=False)
        self.up = nn.Linear(dim, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)


class FeedForward(nn.Module):
    """Two linear maps around the non-linearity; biases only in the paper's ReLU form."""

    def __init__(self, config: DecoderConfig) -> None:
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


def build_norm(config: DecoderConfig) -> nn.Module:
    return nn.RMSNorm(config.dim, eps=1e-6) if config.norm_kind == "rms" else nn.LayerNorm(config.dim)


class Block(nn.Module):
    """One layer: mixer and feed-forward, each with its residual and norm."""

    def __init__(self, config: DecoderConfig, layer: int, relative_keys: nn.Parameter | None) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.norm1, self.norm2 = build_norm(config), build_norm(config)
        self.mixer = build_mixer(config, layer, relative_keys)
        self.ff = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)
        self.compiled: Callable[..., Any] | None = None  # set by Decoder.compile_blocks

    def initial_state(self, batch: int, remember: bool = True) -> Any:
        return self.mixer.initial_state(batch, self._empty(), None if remember else "none")

    def reset_rows(self, state: Any, fresh: Tensor) -> Any:
        return self.mixer.reset_rows(state, fresh, self._empty())

    @torch.no_grad()
    def _empty(self) -> Tensor:
        """What a zero hidden state looks like at the mixer's input, [C]."""
        zero = self.ff.down.weight.new_zeros(self.ff.down.out_features)
        return self.norm1(zero) if self.pre_norm else zero

    def forward(
        self, x: Tensor, state: Any, keep: Tensor | None = None, fresh: Tensor | None = None, remember: bool = True
    ) -> tuple[Tensor, Any, MixerAux]:
        """`keep` is None, or a 0/1 scalar by which LayerDrop scales what this block adds.

        A state of None starts here, and `fresh` rows are emptied here, so that all use of weights lies within forward.
        """
        if state is None:
            state = self.initial_state(x.shape[0], remember)
        elif fresh is not None:
            state = self.reset_rows(state, fresh)
        out = self.mixer(self.norm1(x) if self.pre_norm else x, state)
        mixed = self.dropout(out.y)
        if self.pre_norm:
            h = x + mixed
            h = h + self.ff(self.norm2(h))
        else:
            h = self.norm1(x + mixed)
            h = self.norm2(h + self.ff(h))
        if keep is not None:
            h = torch.where(keep > 0, h, x)
        return h, out.state, out.aux


class Decoder(nn.Module):
    """`decoder(tokens, state) -> (logits [B, T, V], state, aux)`; a state of None starts fresh."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.relative_keys = None
        if config.positions == "relative" and config.mixer.kind not in POSITION_FREE:
            self.relative_keys = nn.Parameter(torch.randn(config.relative_window, config.head_dim))
        self.blocks = nn.ModuleList(Block(config, n, self.relative_keys) for n in range(config.layers))
        self.norm = build_norm(config) if config.norm == "pre" else nn.Identity()
        self.head = nn.Linear(config.dim, config.vocab, bias=config.norm_kind == "layer")
        self._initialise()

    def layers(self) -> list[Block]:
        """The blocks, typed."""
        return cast(list[Block], list(self.blocks))

    def compile_blocks(self, *, carry: bool) -> None:
        """Compile block by block: all blocks share one graph, so it costs the compile time of a single layer.

        Sequences that stand alone run whole compiled blocks, and so do carried memories whose shapes are steady. Other
        systems' states change shape from block to block: there only the feed-forward parts are compiled.
        """
        for block in self.layers():
            if carry and not block.mixer.steady_shapes:
                block.ff.compile()
            else:
                block.compiled = torch.compile(block.forward)

    def _initialise(self) -> None:
        """Depth-scaled output projections with pre-norm, so that the residual stream starts at the same size."""
        nn.init.normal_(self.embed.weight, std=1.0 if self.config.norm_kind == "layer" else 0.5)
        if self.config.norm == "pre":
            with torch.no_grad():
                for block in self.layers():
                    block.mixer.out.weight.div_(math.sqrt(2 * self.config.layers))
                    block.ff.down.weight.div_(math.sqrt(2 * self.config.layers))

    def initial_state(self, batch: int) -> list[Any]:
        return [block.initial_state(batch) for block in self.layers()]

    def reset_rows(self, state: list[Any], fresh: Tensor) -> list[Any]:
        """Empty the memory of the rows marked in `fresh` [B] (bool)."""
        return [block.reset_rows(part, fresh) for block, part in zip(self.layers(), state)]

    def forward(
        self, tokens: Tensor, state: list[Any] | None = None, fresh: Tensor | None = None, remember: bool = True
    ) -> tuple[Tensor, list[Any], DecoderAux]:
        """`fresh` [B] (bool) marks rows whose memory is emptied first.

        With no state, `remember=False` skips storing what nobody will read: training on sequences that stand alone.
        """
        state = [None] * len(self.blocks) if state is None else settle(state)
        h = self.embed(tokens)  # [B, T, C]
        states, auxes = [], []
        for block, part, keep in zip(self.layers(), state, self._layer_keep(h)):
            steady = not remember or (
                block.mixer.steady_shapes and self.training and part is not None and fresh is None
            )
            run = block.compiled if steady and block.compiled is not None else block
            h, part, aux = run(h, part, keep, fresh, remember)
            states.append(part)
            auxes.append(aux)
        return self.head(self.norm(h)), states, DecoderAux(h.detach(), auxes)

    def _layer_keep(self, h: Tensor) -> list[Tensor | None]:
        """LayerDrop: which blocks take part in this training forward."""
        if not self.training or self.config.layer_drop == 0:
            return [None] * len(self.blocks)
        keep = (torch.rand(len(self.blocks), device=h.device) >= self.config.layer_drop).to(h.dtype)
        return list(keep.unbind())
