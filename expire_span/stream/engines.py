"""How a stream's steps run: in place over buffers of static shapes, or by ordinary calls of the model.

An engine keeps `logits` [rows, V] of the next token of every row. `advance` draws tokens from them (or takes given ones), and
computes the next logits. `SlotEngine` decodes in buffers of static shapes, so that on a GPU each step is one replay of a
recorded CUDA graph. `PlainEngine` (plain_engine.py) is for models whose memories have no static shapes.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from expire_span.models.state import bytes_of
from expire_span.ops.graphs import record_graph
from expire_span.sampling import Sampling, draw
from expire_span.store.slots import FRESH

from .interface import Prefilled, StreamModel

LONG = 16
"""Number of given tokens from which it is faster to take memories out of slots and read the tokens in one call."""


class Engine(ABC):
    """The state of a stream's rows, and the step that advances them."""

    lookahead = False
    """Whether the host may launch a step before it has read the tokens of the one before."""

    def __init__(self, model: StreamModel, rows: int) -> None:
        self.model, self.rows, self.device = model, rows, model.device
        self.active = [False] * rows
        """Which rows are in use; the others are idle."""
        self.logits = torch.zeros(rows, model.vocab, device=self.device)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.position = 0
        """Number of steps taken since the stream began."""

    def load(self, rows: list[int], prompts: Prefilled) -> None:
        """Replace the memories of the rows with the numbers `rows` by those of prompts that were read."""
        self._load(rows, prompts)
        self.logits[torch.tensor(rows, device=self.device)] = prompts.logits.float()
        for row in rows:
            self.active[row] = True

    @abstractmethod
    def _load(self, rows: list[int], prompts: Prefilled) -> None: ...

    def drop(self, rows: Sequence[int]) -> None:
        """Forget what these rows hold; they are idle from now on."""
        if rows:
            self._drop(rows)
        for row in rows:
            self.active[row] = False

    @abstractmethod
    def _drop(self, rows: Sequence[int]) -> None: ...

    @abstractmethod
    def advance(self, sampling: Sampling | None, generator: torch.Generator | None = None) -> None:
        """Feed one token to every row: drawn from the logits, or, where `sampling` is None, those in `tokens` [rows]."""

    def feed(self, tokens: Tensor) -> None:
        """Feed given tokens [rows, T] to the rows."""
        for column in tokens.to(self.device).unbind(1):
            self.tokens.copy_(column)
            self.advance(None)

    @abstractmethod
    def row_state(self, row: int) -> list[Any]:
        """What a row holds, as `prefill` takes it, in tensors of its own. The host waits for the device."""

    @property
    @abstractmethod
    def live(self) -> Tensor:
        """Number of living memories per head, the mean over heads, [layers, rows]."""

    @property
    @abstractmethod
    def evicted(self) -> int:
        """Number of memories of all rows that a cap has deleted while they were alive."""

    @property
    @abstractmethod
    def bytes_held(self) -> int: ...

    @abstractmethod
    def selected(self, rows: list[int]) -> Engine:
        """An independent copy with these rows."""

    @abstractmethod
    def packed(self) -> tuple[dict[str, Tensor], Any]:
        """Tensors and plain values from which `unpacked` restores everything but `active`."""

    @abstractmethod
    def unpacked(self, tensors: dict[str, Tensor], meta: Any) -> None: ...

    def _draw(self, sampling: Sampling, generator: torch.Generator | None) -> None:
        assert generator is not None
        self.tokens.copy_(draw(self.logits, sampling, generator))


class SlotEngine(Engine):
    """Decodes in place over slots. After each compaction the counts of older slots are copied to the host in the background;
    the host reads them before the next compaction, `FRESH` steps later, to see whether the slots must grow."""

    def __init__(self, model: StreamModel, rows: int) -> None:
        super().__init__(model, rows)
        self.stepper = model.stepper(rows)
        self.clock = self.stepper.clock
        self.lookahead = self._on_gpu = self.device.type == "cuda"
        # Steps in plain PyTorch take the index of the fresh slot from the host: a recorded graph would repeat the same index.
        self._replays = self._on_gpu and all(memory.fused for memory in self.stepper.memories)
        self._graphs: dict[Any, Any] = {}
        self._warm: set[Any] = set()
        self._pool: Any = None
        self._counts: tuple[Tensor, torch.cuda.Event] | None = None

    def launch_plainly(self) -> None:
        """Launch kernel by kernel instead of replaying graphs."""
        self._replays = False

    # Rows

    def _load(self, rows: list[int], prompts: Prefilled) -> None:
        """The host waits once, for the counts of all layers."""
        self._note_counts()
        where, parts = torch.tensor(rows, device=self.device), list(zip(self.stepper.layers, prompts.state))
        slots = [(layer, layer.memories(part)) for layer, part in parts if layer.memory is not None]
        counts = torch.cat([layer.memory.count(found) for layer, found in slots]).tolist() if slots else []
        for layer, found in slots:
            memory = layer.memory
            own, kept, counts = counts[: memory.heads], counts[memory.heads], counts[memory.heads + 1 :]
            memory.allow(kept)
            if memory.make_room([max(a, b) for a, b in zip(own, memory.most)]):
                self._forget_graphs()
            layer.load(where, found, own)
        for layer, part in parts:
            if layer.memory is None:
                layer.load(where, part)
        if slots:
            self.clock.start_rows(where, slots[0][1].now)  # every layer has read as many tokens
        self.stepper.begin(rows, prompts.state)

    def _drop(self, rows: Sequence[int]) -> None:
        self.stepper.clear(list(rows))

    def feed(self, tokens: Tensor) -> None:
        state = self.stepper.to_state() if tokens.shape[1] >= LONG else None
        if state is None:
            super().feed(tokens)
            return
        self.load(list(range(self.rows)), self.model.prefill(tokens, state))
        self.position += tokens.shape[1]

    def read_in_step(self, prompts: dict[int, Tensor]) -> None:
        """Read prompts of different lengths, {row: tokens [T]}, one token per row and step; shorter ones begin later, so that
        all end with the same step."""
        longest = max(map(len, prompts.values()))
        table = torch.zeros(longest, self.rows, dtype=torch.int64)
        begins: dict[int, list[int]] = {}
        for row, prompt in prompts.items():
            table[longest - len(prompt) :, row] = prompt
            begins.setdefault(longest - len(prompt), []).append(row)
        table = table.to(self.device)
        for row in prompts:
            self.active[row] = True
        for n in range(longest):
            if n in begins:
                self.stepper.clear(begins[n])
            self.tokens.copy_(table[n])
            self.advance(None)

    def row_state(self, row: int) -> list[Any]:
        return self.stepper.row_state(row)

    # Steps

    def advance(self, sampling: Sampling | None, generator: torch.Generator | None = None) -> None:
        if self.clock.column == FRESH:
            self._compact()

        def step() -> None:
            if sampling is not None:
                self._draw(sampling, generator)
            self.logits.copy_(self.stepper.logits(self.tokens))
            self.clock.on_device += 1

        self._run((self.stepper.prepare(), sampling, id(generator)), step, generator)
        self.clock.column += 1
        self.position += 1

    def _run(self, key: Any, work: Callable[[], None], generator: torch.Generator | None = None) -> None:
        """Run work that only changes the contents of buffers. The first call runs it directly, which loads its kernels; the
        second records it as a CUDA graph; that and later ones replay the graph."""
        if not self._replays or key not in self._warm:
            work()
            self._warm.add(key)
            return
        if key not in self._graphs:
            self._graphs[key] = self._record(work, generator)
        if self._graphs[key] is None:
            work()
        else:
            self._graphs[key].replay()

    def _record(self, work: Callable[[], None], generator: torch.Generator | None) -> Any:
        """The recorded graph, or None for a model whose work cannot be recorded, such as one that sorts tokens by their
        experts on the host."""
        graph = torch.cuda.CUDAGraph()
        if generator is not None:
            graph.register_generator_state(generator)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            with record_graph(graph, self._pool):
                work()
        except RuntimeError as error:
            if "capture" not in str(error):
                raise
            reason = str(error).split(". ")[0]
            warnings.warn(
                f"this model's step cannot be recorded as a CUDA graph and is launched each time: {reason}",
                stacklevel=2,
            )
            return None
        return graph

    def _forget_graphs(self) -> None:
        """Drop all recorded graphs, since buffers were replaced and the graphs use the old ones."""
        if self._graphs:
            torch.cuda.synchronize()
        # The next run is direct again: other sizes may need other kernels, which cannot be loaded while recording.
        self._graphs, self._pool, self._warm = {}, None, set()

    def _compact(self) -> None:
        self._note_counts()
        if idle := [row for row, active in enumerate(self.active) if not active]:
            self.stepper.clear(idle)  # what they have read meanwhile must not make the slots grow
        memories = self.stepper.memories
        grown = [memory.make_room(memory.most) for memory in memories]
        if any(grown):
            self._forget_graphs()
        self._run("compact", self.stepper.compact)
        self.clock.epoch, self.clock.column = self.clock.epoch + FRESH, 0
        if memories:
            self._ask_counts(torch.stack([memory.slots.counts for memory in memories]))

    def _ask_counts(self, counts: Tensor) -> None:
        """Start copying counts [layers, rows, heads] to the host; the host waits for them at the next compaction only."""
        if not self._on_gpu:
            self._share_counts(counts)
            return
        host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        host.copy_(counts, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._counts = host, event

    def _note_counts(self) -> None:
        if self._counts is not None:
            host, event = self._counts
            event.synchronize()
            self._share_counts(host)
            self._counts = None

    def _share_counts(self, counts: Tensor) -> None:
        for memory, of_layer in zip(self.stepper.memories, counts):
            memory.note_counts(of_layer)

    # Reports and copies

    @property
    def live(self) -> Tensor:
        one = torch.ones(self.rows, device=self.device)  # a state of fixed size counts as one memory
        memories, column = [layer.memory for layer in self.stepper.layers], self.clock.column
        return torch.stack([one if m is None else m.slots.live(column).float().mean(1) for m in memories])

    @property
    def evicted(self) -> int:
        return sum(int(memory.slots.evicted.sum()) for memory in self.stepper.memories)

    @property
    def bytes_held(self) -> int:
        return bytes_of(self.stepper.tensors())

    def selected(self, rows: list[int]) -> SlotEngine:
        other = SlotEngine(self.model, len(rows))
        other.unpacked(*self.packed(rows))
        other.active = [self.active[row] for row in rows]
        return other

    def packed(self, rows: list[int] | None = None) -> tuple[dict[str, Tensor], Any]:
        self._note_counts()
        tensors = {"logits": self.logits, **self.stepper.tensors()}
        if rows is not None:
            picked = torch.tensor(rows, device=self.device)
            tensors = {name: x.index_select(0, picked) for name, x in tensors.items()}
        memories = self.stepper.memories
        meta = {"epoch": self.clock.epoch, "column": self.clock.column, "position": self.position, "fresh": FRESH}
        meta["capacity"] = [list(memory.slots.capacity) for memory in memories]
        return tensors, meta | {"most": [memory.most for memory in memories], "limits": [x.limit for x in memories]}

    def unpacked(self, tensors: dict[str, Tensor], meta: Any) -> None:
        if meta["fresh"] != FRESH:
            saved = f"it was saved with {meta['fresh']} fresh slots, and this version has {FRESH}"
            raise ValueError(f"{saved}; read the prompts again")
        self.position = meta["position"]
        self.logits.copy_(tensors["logits"])
        memories = self.stepper.memories
        for memory, capacity, most, limit in zip(memories, meta["capacity"], meta["most"], meta["limits"]):
            memory.limit = limit
            memory.allocate(self.rows, capacity=capacity)
            memory.most = list(most)
            memory.refresh()
        self.clock.set(meta["epoch"], meta["column"])
        for name, x in self.stepper.tensors().items():
            x.copy_(tensors[name])
        self.clock.turn_to_epoch()
