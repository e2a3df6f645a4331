"""What the plugin needs of an adapter folder. vLLM pins a transformers of its own, so nothing here imports transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expire_span.errors import UserError
from expire_span.hf.adapter import check_base, read_head, read_weights
from expire_span.hf.predictors import build_predictor
from expire_span.models.lifetimes import LifetimeRule
from expire_span.ops.slots import SpanForm
from expire_span.settings.retrofit import RetrofitConfig

from .options import Options
from .peaks import NAME, read_peaks, with_room

NO_WEIGHTS = ("rotary_emb.inv_freq", ".masked_bias")
"""Ends of names in checkpoint files that are no weights of the model."""


@dataclass(frozen=True)
class Adapter:
    """An adapter folder that was read."""

    folder: Path
    head: dict[str, Any]
    config: RetrofitConfig
    weights: dict[str, Tensor]
    peaks: list[list[int]] | None
    """Measured peaks by layer and head; see peaks.py."""

    @property
    def longest_life(self) -> int:
        """Number of tokens after which every memory is dead, except the first ones, which are kept."""
        return self.config.max_span + self.config.ramp

    def span_form(self, layer: int, dim: int, kv_heads: int) -> SpanForm:
        """How the spans of a layer follow from its hidden states, for all its key/value heads."""
        own = {name.partition(".")[2]: x for name, x in self.weights.items() if name.partition(".")[0] == str(layer)}
        predictor = build_predictor(dim, kv_heads, self.config)
        assert isinstance(predictor, LifetimeRule)
        for name, x in predictor.state_dict().items():
            wanted, found = tuple(x.shape), tuple(own[name].shape) if name in own else "none"
            if found != wanted:
                raise UserError(
                    f"adapter {self.folder} does not fit its model: {layer}.{name} must have shape {wanted}, got {found}"
                )
        predictor.load_state_dict(own)
        form = predictor.span_form(dim)
        assert form is not None
        return form

    def capacities(self, layer: int, kv_heads: int, options: Options, most_tokens: int) -> list[int]:
        """Slots of each key/value head of a layer that learns. A memory that the next query sees is at least one token old, so
        a life of n tokens fills n - 1 slots; no request has more than `most_tokens` memories."""
        most = min(self.longest_life - 1 + self.config.keep_first, most_tokens)
        wanted = [most] * kv_heads
        if options.slots is not None:
            wanted = [options.slots] * kv_heads
        elif self.peaks is not None:
            if not (layer < len(self.peaks) and len(self.peaks[layer]) == kv_heads):
                raise UserError(f"{self.folder / NAME} does not fit the model; measure again, or remove it")
            wanted = [with_room(peak) for peak in self.peaks[layer]]
        return [max(1, min(n, most, self.config.cap or n)) for n in wanted]


def read_adapter(folder: str | Path) -> Adapter:
    """Read and check an adapter folder, as far as that is possible without its model."""
    folder = Path(folder)
    head = read_head(folder)
    if head["lora_rank"]:
        raise UserError(
            f"adapter {folder} has low-rank additions of rank {head['lora_rank']}, which vLLM would not apply; serve it with "
            "expire-span serve, or train one without them"
        )
    return Adapter(folder, head, RetrofitConfig(**head["config"]), read_weights(folder, head), read_peaks(folder, head))


def check_weights(weights: Iterable[tuple[str, Tensor]], adapter: Adapter, tied: bool) -> Iterator[tuple[str, Tensor]]:
    """The same weights, by their names in the checkpoint, after it was checked that the adapter was made for them. tied:
    whether the output layer shares the weights of the embedding, and so may be missing in the files."""
    found = {name: x for name, x in weights if not name.endswith(NO_WEIGHTS)}
    told = dict(found)
    if tied and "lm_head.weight" not in told:
        told["lm_head.weight"] = next(x for name, x in found.items() if name.endswith("embed_tokens.weight"))
    check_base(_Checkpoint(told), adapter.head, adapter.folder)
    yield from found.items()


class _Checkpoint(nn.Module):
    """A model of which only the weights are known, for `check_base`."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.weights = weights

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return self.weights


def slice_heads(form: SpanForm, first: int, count: int) -> SpanForm:
    """The form for `count` of the key/value heads, from `first` on."""
    return SpanForm(*(x[first : first + count].contiguous() for x in form))


def predict_spans(hidden: Tensor, form: SpanForm) -> Tensor:
    """Spans [tokens, heads] of hidden states [tokens, C], in float32."""
    logits = torch.nn.functional.linear(hidden.float(), form.weight) + form.bias
    return torch.addcmul(form.low, torch.sigmoid(logits), form.room)
