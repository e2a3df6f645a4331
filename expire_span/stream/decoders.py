"""A decoder as a stream's model, and the way from any model to what a stream asks of it."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from expire_span.models import systems
from expire_span.models.decoder import Decoder
from expire_span.models.encoder import Encoder
from expire_span.models.kit.expiring import ExpiringAttention
from expire_span.models.marks import KEEP
from expire_span.models.slot_step import slot_rules
from expire_span.models.state import bytes_of
from expire_span.models.stepping import Stepper, can_step
from expire_span.store.slots import smallest_bytes
from expire_span.store.tensor_files import digest_tensors

from .interface import Observed, Prefilled, StreamModel
from .prompts import read_blocks

MOST_TRIED = 4096
"""Most tokens that `verify` reads where nobody says how many."""


def model_of(model: Any) -> StreamModel:
    """What a stream asks of a model: of a decoder, or of any model that says so itself by `for_stream`."""
    if isinstance(model, Decoder) and not isinstance(model, Encoder):  # an encoder is not causal
        return DecoderModel(model)
    for_stream: Any = getattr(model, "for_stream", None)
    if for_stream is not None:
        return for_stream()
    got = type(model).__name__
    raise ValueError(
        f"a stream runs a Decoder or a Retrofit, got {got}; give Decoder(config), load_decoder(folder) or retrofit(model)"
    )


class DecoderModel:
    """A decoder that was trained here."""

    prefers_steps = True
    length: int | None = None
    rounding = 1e-5
    beginning: tuple[int, ...] = ()

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder.eval()
        self.device, self.vocab = decoder.embed.weight.device, decoder.config.vocab
        self.layers = len(decoder.blocks)
        self.can_step = can_step(decoder)
        # Initial memories are stored by the decoder's initial state only.
        self._rules: list[Any] = [getattr(block.mixer, "rules", None) for block in decoder.layers()]
        self.reads_in_step = not any(getattr(rule, "initial_memories", 0) for rule in self._rules)

    @property
    def row_bytes(self) -> int:
        """Its logits and probabilities, and in every layer the smallest slots, or, where the layer keeps no slots, the state
        that it begins with."""
        c, element = self.decoder.config, self.decoder.embed.weight.element_size()
        slots = smallest_bytes(c.num_kv_heads, c.head_dim, element)
        mixers = [block.mixer for block in self.decoder.layers()]
        return 8 * self.vocab + sum(bytes_of(m.initial_state(1)) if slot_rules(m) is None else slots for m in mixers)

    @property
    def token_bytes(self) -> int:
        """Its logits and the hidden states of all layers."""
        return 4 * (self.vocab + self.layers * self.decoder.config.dim)

    @property
    def trial(self) -> int:
        """Three times the longest life of a memory, where there is one, up to `MOST_TRIED`."""
        c = self.decoder.config
        sizes = [systems.StateSize(c.shape(n), settings) for n, settings in enumerate(c.mixers)]
        fields = [systems.find(size.settings.kind).receptive_field(size) for size in sizes]
        return min(MOST_TRIED, 3 * max([field + 1 for field in fields if field is not None], default=256))

    def fingerprint(self) -> str:
        """sha256 of the decoder's weights and their names."""
        return digest_tensors(self.decoder.state_dict())

    @property
    def capped(self) -> bool:
        return any(getattr(rule, "cap", None) is not None for rule in self._rules)

    def check_marks(self, marks: Tensor) -> None:
        mixers = [block.mixer for block in self.decoder.layers()]
        others = sorted({m.settings.kind for m in mixers if not isinstance(m, ExpiringAttention)})
        expiring = any(isinstance(m, ExpiringAttention) for m in mixers)
        if bool((marks == KEEP).any()) and not expiring:
            raise ValueError(
                f"layers of {', '.join(others)} have no lifetimes, so no token can be kept for longer; leave the mark out"
            )
        if bool(((marks >= 0) & (marks != KEEP)).any()) and others:
            raise ValueError(
                f"layers of {', '.join(others)} do not forget single tokens, so none can expire at a given age; leave the "
                "mark out"
            )

    def prefill(self, tokens: Tensor, state: list[Any] | None = None, marks: Tensor | None = None) -> Prefilled:
        *_, (_, logits, after, aux) = deque(read_blocks(self.decoder, tokens, state, marks), maxlen=1)
        return Prefilled(logits[:, -1].float(), after, aux.layers)

    def observe(self, tokens: Tensor, state: list[Any] | None = None) -> Observed:
        logits, after, aux = self.decoder(tokens.unsqueeze(0).to(self.device), state)
        return Observed(logits[0], after, aux.layers)

    def undeleted(self, tokens: Tensor) -> Tensor:
        return self.decoder(tokens.to(self.device), self.decoder.initial_state(len(tokens), "nothing")).logits

    def stepper(self, rows: int) -> Stepper:
        return Stepper(self.decoder, rows)
