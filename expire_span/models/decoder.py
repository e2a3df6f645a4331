"""The decoder: embedding, backbone, vocabulary head. Every memory system is compared inside it."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from expire_span.settings.models import DecoderConfig

from .backbone import Backbone, BackboneAux, Block, check_config
from .mixer import Keep

MANY_SINGLE_TOKENS = 64
"""Number of tokens read one by one on a GPU after which a program is told, once, of a faster way."""
_single_tokens = itertools.count(1)


class DecoderOutput(NamedTuple):
    """What a decoder returns; it unpacks as `logits, state, aux`."""

    logits: Tensor
    state: list[Any]
    aux: BackboneAux


class Decoder(nn.Module):
    """`logits, state, aux = decoder(tokens, state)`: tokens [B, T], logits [B, T, V]; a state of None starts fresh.

    This call is for training and for reading whole blocks. To write token by token use `expire_span.Stream(decoder)`, whose
    steps are recorded: on a GPU a token here costs over a hundred times as much, since every operation is launched by the host.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        check_config(config, DecoderConfig, type(self).__name__)
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.backbone = Backbone(config)
        self.head = nn.Linear(config.dim, config.vocab, bias=config.norm_kind == "layer")
        nn.init.normal_(self.embed.weight, std=1.0 if config.norm_kind == "layer" else 0.5)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.backbone.blocks

    def layers(self) -> list[Block]:
        """The blocks as a list of `Block`, for type checkers; `blocks` is an `nn.ModuleList`."""
        return self.backbone.layers()

    def compile_blocks(self, *, carry: bool, attention: bool = True) -> None:
        self.backbone.compile_blocks(carry=carry, attention=attention)

    def initial_state(self, batch: int, keep: Keep = "kv") -> list[Any]:
        return self.backbone.initial_state(batch, keep)

    def reset_rows(self, state: list[Any], fresh: Tensor) -> list[Any]:
        """Empty the memory of the rows marked in `fresh` [B] (bool)."""
        return self.backbone.reset_rows(state, fresh)

    if TYPE_CHECKING:  # torch's modules return Any when called; editors should see the real type

        def __call__(
            self, tokens: Tensor, state: list[Any] | None = None, fresh: Tensor | None = None, keep: Keep = "kv"
        ) -> DecoderOutput: ...

    def forward(
        self, tokens: Tensor, state: list[Any] | None = None, fresh: Tensor | None = None, keep: Keep = "kv"
    ) -> DecoderOutput:
        """tokens [B, T]. fresh [B] (bool): rows whose memory is emptied first. keep: what a state of None begins to keep."""
        x = self._embed(tokens)
        if state is not None and x.shape[1] == 1 and x.is_cuda and not torch.is_grad_enabled():
            _recommend_stream()
        h, after, aux = self.backbone(x, state, fresh=fresh, keep=keep)
        return DecoderOutput(self.head(h), after, aux)

    def _embed(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, C]. Tokens outside the vocabulary are refused on a CPU; on a GPU, CUDA reports them later."""
        tokens = check_tokens(tokens)
        if tokens.device != self.embed.weight.device:
            here = self.embed.weight.device
            raise ValueError(f"tokens are on {tokens.device} but the model is on {here}; move one of them")
        try:
            return self.embed(tokens)
        except IndexError:
            low, high, last = int(tokens.min()), int(tokens.max()), self.config.vocab - 1
            raise ValueError(f"tokens must lie between 0 and {last}, got {low} to {high}") from None


def _recommend_stream() -> None:
    if not torch.compiler.is_compiling() and next(_single_tokens) == MANY_SINGLE_TOKENS:
        warnings.warn(
            f"{MANY_SINGLE_TOKENS} tokens were read one by one by decoder(token, state), which takes tens of milliseconds a "
            "token on a GPU; expire_span.Stream(decoder) takes a fraction of one (docs/serving.md)",
            stacklevel=5,
        )


def check_tokens(tokens: Tensor) -> Tensor:
    """Tokens [B, T] of any integer dtype, as an embedding reads them."""
    if not isinstance(tokens, Tensor):
        raise ValueError(f"tokens must be a tensor [B, T], got {type(tokens).__name__}; convert it by torch.as_tensor")
    if tokens.dim() != 2:
        raise ValueError(f"tokens must have shape [B, T], got {tuple(tokens.shape)}; one row is tokens[None]")
    if tokens.dtype in (torch.int64, torch.int32):
        return tokens
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ValueError(f"tokens must be integers, got {tokens.dtype}; convert them by tokens.long()")
    return tokens.long()  # bytes are often held as uint8, which an embedding does not take
