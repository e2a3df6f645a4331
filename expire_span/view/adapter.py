"""Traces of a retrofitted Hugging Face model: the spans that each of its key/value heads gives to a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from expire_span.hf import Retrofit, load_adapter
from expire_span.hf.loading import open_base
from expire_span.hf.pieces import Pieces
from expire_span.runs import RunFolder
from expire_span.shipped import SAMPLE, SHIPPED

from .memory_log import MemoryFacts
from .reader import TextReader
from .trace import Line
from .tracer import Tracer

ABOUT = "Predict the next token of a text with a pretrained model that was taught what to forget."


def _facts_of(retrofitted: Retrofit) -> MemoryFacts:
    layer = retrofitted.layers[0]
    heads, element = max(x.kv_heads for x in retrofitted.layers), next(layer.module.parameters()).element_size()
    pair, settings = 2 * layer.head_dim * element, retrofitted.config
    return MemoryFacts(
        **{"system": "expire_span", "layers": len(retrofitted.layers), "heads": heads, "ramp": float(settings.ramp)},
        **{"full_bytes": heads * pair + 12, "memory_bytes": pair + 12},
        **{"max_span": settings.max_span, "cap": settings.cap},
    )


class AdapterReader(TextReader):
    """A pretrained model with the spans of an adapter folder."""

    def __init__(self, retrofitted: Retrofit, tokenizer: Any, name: str) -> None:
        super().__init__()
        self.retrofitted, self.name, self.codec = retrofitted, name, Pieces(retrofitted, tokenizer)
        self.model: nn.Module = retrofitted.predictors

    @classmethod
    def open(cls, run: RunFolder) -> AdapterReader:
        """The adapter that a run of `expire-span retrofit` saved."""
        return cls.of_folder(run.adapter)

    @classmethod
    def of_folder(cls, folder: Path, model: str | None = None) -> AdapterReader:
        """model: the base model, if it is not where the adapter says; None takes the adapter's."""
        name, opened, tokenizer = open_base(folder, model, "cpu")
        title = folder.parent.name if folder.name == "adapter" else folder.name
        return cls(load_adapter(opened, folder), tokenizer, f"{Path(name).name} with {title}")

    def tracer(self) -> Tracer:
        kept = self.retrofitted.config.keep_first
        about = f"{ABOUT} Its first {kept} tokens are kept for good, whatever they are." if kept else ABOUT
        facts = _facts_of(self.retrofitted)
        return Tracer(self.retrofitted, name=self.name, task="text", about=about, codec=self.codec, facts=facts)

    def sample(self) -> tuple[Tensor, dict[int, int], list[Line] | None]:
        """The sample text of the model that ships with this package, which any model can read."""
        return self.encode((SHIPPED / SAMPLE).read_bytes()), {}, None
