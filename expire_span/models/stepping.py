"""Decoding steps of a whole decoder: one token of every row per step, in fixed shapes and in place.

A `Stepper` holds a decoder's blocks in a form made for decoding: the weights of several projections are concatenated into one
product, and the memory of each layer lies in buffers that are replaced only when their capacity must grow. On a GPU, the host
waits for nothing during a step, and all numbers that change from step to step lie on the device, so that the whole step can be
recorded as one CUDA graph.

Layers of expiring attention and of a sliding window keep `Slots`; systems with a `fixed_state` keep that state. A decoder with
any other layer cannot be stepped (`can_step`), and streams then call the decoder itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expire_span.models.backbone import Block
from expire_span.models.decoder import Decoder
from expire_span.models.kit.attention import AttentionMixer
from expire_span.models.kit.plain import are_plain
from expire_span.models.mixer import Mixer
from expire_span.models.slot_step import SlotStep, StreamPosition, slot_rules
from expire_span.models.step_products import StepStates, add_linear, fold_gain, folds, norm_linear


class StateStep:
    """The step of one layer whose state is a dict of tensors of fixed shapes (`Mixer.fixed_state`), overwritten in place."""

    memory = None  # no slots

    def __init__(self, mixer: Mixer, norm: nn.Module, rows: int) -> None:
        self.mixer, self.norm = mixer, norm
        self.state: dict[str, Tensor] = dict(mixer.initial_state(rows))

    def load(self, rows: Tensor, state: dict[str, Tensor]) -> None:
        for name, x in self.state.items():
            x[rows] = state[name].to(x.dtype)

    def row_state(self, row: int) -> dict[str, Tensor]:
        return {name: x[row : row + 1].clone() for name, x in self.state.items()}

    def add(self, states: StepStates) -> StepStates:
        y, after, _ = self.mixer.mix(self.norm(states.x).unsqueeze(1), self.state)
        for name, old in self.state.items():
            old.copy_(after[name])
        return StepStates(states.x + y.squeeze(1))


class BlockStep:
    """The step of one block: memory system and feed-forward part."""

    def __init__(self, block: Block, clock: StreamPosition, rows: int) -> None:
        rules = slot_rules(block.mixer)
        assert rules is not None or block.mixer.fixed_state
        self.block, self.pre_norm = block, block.pre_norm
        norm = block.norm1 if self.pre_norm else nn.Identity()
        self.layer: SlotStep | StateStep
        if rules is None:
            self.layer = StateStep(block.mixer, norm, rows)
        else:
            assert isinstance(block.mixer, AttentionMixer)
            self.layer = SlotStep(block.mixer, rules, clock, norm)
            self.layer.memory.allocate(rows)
        ff = block.ff
        self.squares = self.pre_norm and ff.activation == "relu2" and are_plain(ff.up, ff.down)
        self.down = ff.down.weight.detach()
        fused = isinstance(self.layer, SlotStep) and self.layer.fused
        self.folded = self.squares and fused and folds(block.norm2, self.down)
        up: Any = ff.up
        self.up = fold_gain(up.weight, block.norm2) if self.folded else None
        self.square = _square_relu_on_gpu if fused else _square_relu

    def __call__(self, states: StepStates) -> StepStates:
        block, states = self.block, self.layer.add(states)
        x = states.x
        if not self.pre_norm:
            x = block.norm1(x)
            return StepStates(block.norm2(x + block.ff(x)))
        if not self.squares:
            return StepStates(x + block.ff(block.norm2(x)))
        if self.up is not None:
            h = norm_linear(states, block.norm2, self.up, square_relu=True)
        else:
            up: Any = block.ff.up
            h = self.square(F.linear(block.norm2(x), up.weight))
        return add_linear(x, h, self.down, self.folded)


def _square_relu(x: Tensor) -> Tensor:
    return F.relu(x, inplace=True).square_()


def _square_relu_on_gpu(x: Tensor) -> Tensor:
    from expire_span.ops.triton.slots import square_relu_

    return square_relu_(x)


def can_step(decoder: Decoder) -> bool:
    """Whether every layer's memory has fixed shapes, so that a `Stepper` can decode in place."""
    return all(block.mixer.fixed_state or slot_rules(block.mixer) is not None for block in decoder.layers())


class Stepper:
    """All blocks of a decoder as steps over `rows` rows, with their clock."""

    def __init__(self, decoder: Decoder, rows: int) -> None:
        self.decoder, self.rows = decoder, rows
        config, weight = decoder.config, decoder.embed.weight
        rotary = (config.head_dim, config.rotary_base) if config.positions == "rotary" else None
        self.clock = StreamPosition(weight.device, rotary, weight.dtype, rows)
        self.blocks = [BlockStep(block, self.clock, rows) for block in decoder.layers()]
        self.layers = [step.layer for step in self.blocks]
        self.memories = [layer.memory for layer in self.layers if layer.memory is not None]

    def logits(self, tokens: Tensor) -> Tensor:
        """Read one token per row, tokens [B], and return logits [B, V]. The caller advances the clock."""
        states = StepStates(self.decoder.embed(tokens))
        for step in self.blocks:
            states = step(states)
        return self.decoder.head(self.decoder.backbone.norm(states.x))

    def compact(self) -> None:
        """Delete dead memories in all layers and begin the clock's next epoch. Only work on the device is done here."""
        for memory in self.memories:
            memory.compact()
        self.clock.begin_epoch()

    def begin(self, rows: list[int], state: list[Any]) -> None:
        """Nothing to do: these layers keep no first tokens."""

    def prepare(self) -> str:
        return "step"

    def clear(self, rows: list[int]) -> None:
        """Empty the memories of these rows."""
        where = torch.tensor(rows, device=self.clock.on_device.device)
        self.clock.start_rows(where, 0)
        for layer in self.layers:
            if isinstance(layer, StateStep):
                layer.load(where, layer.mixer.initial_state(len(rows)))
            else:
                layer.memory.slots.clear(where)

    def to_state(self) -> None:
        """None: rows of a batch may have read unequally many tokens, which the decoder does not take."""

    def row_state(self, row: int) -> list[Any]:
        return [layer.row_state(row) for layer in self.layers]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that steps change, by name."""
        found = {"epochs": self.clock.epochs}
        for n, layer in enumerate(self.layers):
            part = layer.state if isinstance(layer, StateStep) else layer.memory.slots.tensors()
            found |= {f"layer{n}.{name}": x for name, x in part.items()}
        return found
