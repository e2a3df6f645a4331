"""One forward and backward pass; on a GPU, recorded as a CUDA graph for each shape of the memory and then replayed.

A training step with short blocks consists of thousands of small kernels, and the host cannot launch them as fast as a GPU
finishes them. A CUDA graph launches them all at once. The first pass with a shape runs normally, which also compiles what it
needs; the second is recorded.
"""

# pyright: reportPrivateImportUsage=false
# The foreach functions copy many tensors in one launch.

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from expire_span.models.state import detach, map_tensors
from expire_span.ops.context import backward_in_pieces
from expire_span.ops.graphs import record_graph
from expire_span.store import trim_states

Outcome = tuple[dict[str, Tensor], Any, int]
"""What a `Scorer` returns: sums, state, bytes held; all detached."""

MOST_GRAPHS = 4
"""Number of shapes whose recorded graphs are kept at a time."""


@dataclass(frozen=True)
class Pass:
    """The inputs of a forward and backward pass. The loss is nll x scale + span loss x weight."""

    x: Tensor
    y: Tensor
    mask: Tensor
    state: Any
    fresh: Tensor | None
    scale: Tensor
    weight: Tensor
    remember: bool

    def tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        map_tensors([self.x, self.y, self.mask, self.state, self.scale, self.weight], lambda x: found.append(x) or x)
        return found

    def clone(self) -> Pass:
        """A copy with contiguous tensors of its own, in which no row is fresh."""
        parts = map_tensors([self.x, self.y, self.mask, self.state, self.scale, self.weight], _copy)
        x, y, mask, state, scale, weight = parts
        return Pass(x, y, mask, state, None, scale, weight, self.remember)


@dataclass(frozen=True)
class Recording:
    graph: Any
    inputs: Pass
    """The tensors that the recorded graph reads; inputs are copied into them before a replay."""
    outcome: Outcome
    grads: list[Tensor | None]


class TrainStep:
    """`step(pass) -> (sums, state, bytes held)`; gradients go to the parameters' `.grad`, which must be None before."""

    def __init__(self, model: nn.Module, backward: Callable[[Tensor], None], *, graphs: bool, pieces: int = 1) -> None:
        self.model, self.backward, self.graphs, self.pieces = model, backward, graphs, pieces
        self.parameters = list(model.parameters())
        self.recordings: OrderedDict[Any, Recording | None] = OrderedDict()
        self.pool: Any = None

    def __call__(self, given: Pass) -> Outcome:
        if given.state is not None:
            given = _replace_state(given, trim_states(given.state, copy=not self.graphs))
        if not self.graphs or given.fresh is not None or (given.remember and given.state is None):
            return self.run(given)
        key = tuple((x.shape, x.dtype) for x in given.tensors())
        if key not in self.recordings:
            self.recordings[key] = None
            # With the same strides as the recording, since compiled code depends on them.
            return self.run(given.clone())
        self.recordings.move_to_end(key)
        recording = self.recordings[key] or self._record(key, given)
        return self._replay(recording, given)

    def run(self, given: Pass) -> Outcome:
        """Run the pass without a graph, kernel by kernel."""
        if self.pieces > 1:
            return self._run_in_pieces(given)
        sums, state, held = self.model(given.x, given.y, given.mask, given.state, given.fresh, given.remember)
        self.backward(sums["nll"] * given.scale + given.weight * sums["span_loss"])
        sums = {name: x.detach() for name, x in sums.items()}
        return sums, detach(state) if given.remember else None, held

    def _run_in_pieces(self, given: Pass) -> Outcome:
        """The same gradients, with the activations of one piece at a time."""
        sums: dict[int, dict[str, Tensor]] = {}

        def loss_of(n: int) -> Tensor:
            x, y, mask = (part.chunk(self.pieces, 1)[n] for part in (given.x, given.y, given.mask))
            found, _, _ = self.model(x, y, mask, None, None, False)
            sums[n] = {name: part.detach() for name, part in found.items()}
            return found["nll"] * given.scale + given.weight / self.pieces * found["span_loss"]

        backward_in_pieces(loss_of, self.pieces)
        totals = {name: torch.stack([part[name] for part in sums.values()]) for name in sums[0]}
        return {n: x.sum(0) if n in ("nll", "correct") else x.mean(0) for n, x in totals.items()}, None, 0

    def _record(self, key: Any, given: Pass) -> Recording:
        while len(self.recordings) > MOST_GRAPHS:
            self.recordings.popitem(last=False)
        if not any(self.recordings.values()):  # PyTorch refuses a memory pool once no graph uses it any longer
            self.pool = torch.cuda.graph_pool_handle()
        inputs, graph = given.clone(), torch.cuda.CUDAGraph()
        for p in self.parameters:
            p.grad = None
        with record_graph(graph, self.pool):
            outcome = self.run(inputs)
        torch.cuda.empty_cache()  # free what the unrecorded pass cached; the graph has a memory pool of its own
        self.recordings[key] = recording = Recording(graph, inputs, outcome, [p.grad for p in self.parameters])
        return recording

    def _replay(self, recording: Recording, given: Pass) -> Outcome:
        torch._foreach_copy_(recording.inputs.tensors(), given.tensors())
        recording.graph.replay()
        for p, grad in zip(self.parameters, recording.grads):
            p.grad = grad
        return recording.outcome


def _replace_state(given: Pass, state: Any) -> Pass:
    return Pass(given.x, given.y, given.mask, state, given.fresh, given.scale, given.weight, given.remember)


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
