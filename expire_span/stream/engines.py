"""How a stream's steps run: in place over buffers of fixed size, or by ordinary calls of the decoder.

An engine keeps `logits` [rows, V] of the next token of every row. `advance` draws tokens from them (or takes given ones), and
computes the next logits. `SteadyEngine` decodes in buffers of fixed size, so that on a GPU each step is one replay of a
recorded CUDA graph. `PlainEngine` (plain_engine.py) is for memory systems whose states have no fixed shapes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from expire_span.models.decoder import Decoder
from expire_span.models.mixer import MixerAux
from expire_span.models.slot_step import Memories, SlotStep
from expire_span.models.state import bytes_of
from expire_span.models.stepping import StateStep, Stepper
from expire_span.ops.graphs import record_graph
from expire_span.sampling import Sampling, draw
from expire_span.store.slots import FRESH, FRESH_BEFORE


class Engine(ABC):
    """The state of a stream's rows, and the step that advances them."""

    lookahead = False
    """Whether the host may launch a step before it has read the tokens of the one before."""

    def __init__(self, decoder: Decoder, rows: int) -> None:
        self.decoder, self.rows = decoder, rows
        device, vocab = decoder.embed.weight.device, decoder.config.vocab
        self.device = device
        self.logits = torch.zeros(rows, vocab, device=device)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.position = 0
        """Number of steps taken since the stream began."""

    @abstractmethod
    def load(self, rows: list[int], state: list[Any], logits: Tensor, reports: Sequence[MixerAux] = ()) -> None:
        """Replace the memories of the rows with the numbers `rows` by a decoder's state after their prompts.

        state: one part per layer, with len(rows) batch rows; logits [len(rows), V]: those of the next token; reports: what each
        layer reported about the last block that it read.
        """

    def drop(self, rows: Collection[int]) -> None:  # noqa: B027 (slots are freed with the stream)
        """Free the memories of rows that are idle from now on, where a row has memory of its own."""

    @abstractmethod
    def advance(self, sampling: Sampling | None, generator: torch.Generator | None = None) -> None:
        """Feed one token to every row: drawn from the logits, or, where `sampling` is None, those in `tokens` [rows]."""

    @property
    @abstractmethod
    def live(self) -> Tensor:
        """Number of living memories per head, the mean over heads, [layers, rows]."""

    @property
    @abstractmethod
    def bytes_held(self) -> int: ...

    @abstractmethod
    def selected(self, rows: Tensor) -> Engine:
        """An independent copy with these rows."""

    @abstractmethod
    def packed(self) -> tuple[dict[str, Tensor], Any]:
        """Tensors and plain values from which `unpacked` restores everything."""

    @abstractmethod
    def unpacked(self, tensors: dict[str, Tensor], meta: Any) -> None: ...

    def _draw(self, sampling: Sampling, generator: torch.Generator | None) -> None:
        assert generator is not None
        self.tokens.copy_(draw(self.logits, sampling, generator))


class SteadyEngine(Engine):
    """Decodes in place over slots. After each compaction the counts of older slots are copied to the host in the background;
    the host reads them before the next compaction, `FRESH` steps later, to see whether the slots must grow."""

    def __init__(self, decoder: Decoder, rows: int, stepper: Stepper | None = None) -> None:
        super().__init__(decoder, rows)
        self.stepper = stepper or Stepper(decoder, rows)
        self.clock = self.stepper.clock
        self.lookahead = self._on_gpu = self.device.type == "cuda"
        # Steps in plain PyTorch take the index of the fresh slot from the host: a recorded graph would repeat the same index.
        self._replays = self._on_gpu and all(layer.fused for layer in self.stepper.slot_layers)
        self._graphs: dict[Any, Any] = {}
        self._warm: set[Any] = set()
        self._pool: Any = None
        self._counts: tuple[Tensor, torch.cuda.Event] | None = None

    def launch_plainly(self) -> None:
        """Launch kernel by kernel instead of replaying graphs."""
        self._replays = False

    # Rows

    def load(self, rows: list[int], state: list[Any], logits: Tensor, reports: Sequence[MixerAux] = ()) -> None:
        self._note_counts()
        where = torch.tensor(rows, device=self.device)
        for step, part in zip(self.stepper.blocks, state):
            memory = step.memory
            if isinstance(memory, StateStep):
                memory.load(where, part)
                continue
            self._load_slots(where, [(memory, memory.memories(part))])
        self.logits[where] = logits.float()

    def _load_slots(self, rows: Tensor, found: list[tuple[SlotStep, Memories]]) -> None:
        """Put memories into the rows of some layers. The host waits once for the counts of all of them."""
        counts = torch.cat([layer.count(memories) for layer, memories in found]).tolist()
        for layer, memories in found:
            own, counts = counts[: layer.kv_heads], counts[layer.kv_heads :]
            if layer.make_room([max(a, b) for a, b in zip(own, layer.most)]):
                self._forget_graphs()
            layer.load(rows, memories, own)

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
        for n in range(longest):
            if n in begins:
                self._clear(begins[n])
            self.tokens.copy_(table[n])
            self.advance(None)

    def _clear(self, rows: list[int]) -> None:
        """Empty the memories of these rows."""
        where = torch.tensor(rows, device=self.device)
        for step in self.stepper.blocks:
            if isinstance(step.memory, SlotStep):
                step.memory.slots.clear(where)
            else:
                step.memory.load(where, step.block.mixer.initial_state(len(rows)))

    # Steps

    def advance(self, sampling: Sampling | None, generator: torch.Generator | None = None) -> None:
        if self.clock.column == FRESH:
            self._compact()

        def step() -> None:
            if sampling is not None:
                self._draw(sampling, generator)
            self.logits.copy_(self.stepper.logits(self.tokens))
            self.clock.on_device += 1

        self._run(("step", sampling, id(generator)), step, generator)
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
        self._graphs[key].replay()

    def _record(self, work: Callable[[], None], generator: torch.Generator | None) -> Any:
        graph = torch.cuda.CUDAGraph()
        if generator is not None:
            graph.register_generator_state(generator)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with record_graph(graph, self._pool):
            work()
        return graph

    def _forget_graphs(self) -> None:
        """Drop all recorded graphs, since buffers were replaced and the graphs use the old ones."""
        if self._graphs:
            torch.cuda.synchronize()
        # The next run is direct again: other sizes may need other kernels, which cannot be loaded while recording.
        self._graphs, self._pool, self._warm = {}, None, set()

    def _compact(self) -> None:
        self._note_counts()
        layers = self.stepper.slot_layers
        grown = [layer.make_room(layer.most) for layer in layers]
        if any(grown):
            self._forget_graphs()
        self._run("compact", self.stepper.compact)
        self.clock.epoch, self.clock.column = self.clock.epoch + FRESH, 0
        if layers:
            self._ask_counts(torch.stack([layer.slots.counts for layer in layers]))

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
        for layer, of_layer in zip(self.stepper.slot_layers, counts):
            layer.note_counts(of_layer)

    # Reports and copies

    @property
    def live(self) -> Tensor:
        counts = []
        for step in self.stepper.blocks:
            if isinstance(step.memory, SlotStep):
                counts.append(step.memory.slots.live(self.clock.column).float().mean(1))
            else:
                counts.append(torch.ones(self.rows, device=self.device))
        return torch.stack(counts)

    @property
    def bytes_held(self) -> int:
        return bytes_of(self.stepper.tensors())

    def selected(self, rows: Tensor) -> SteadyEngine:
        self._note_counts()
        other = SteadyEngine(self.decoder, len(rows))
        other.unpacked(*self.packed(rows))
        return other

    def packed(self, rows: Tensor | None = None) -> tuple[dict[str, Tensor], Any]:
        self._note_counts()
        tensors = {"logits": self.logits, **self.stepper.tensors()}
        if rows is not None:
            tensors = {name: x.index_select(0, rows.to(x.device)) for name, x in tensors.items()}
        layers = self.stepper.slot_layers
        meta = {"epoch": self.clock.epoch, "column": self.clock.column, "position": self.position, "fresh": FRESH}
        meta["capacity"] = [list(layer.slots.capacity) for layer in layers]
        return tensors, meta | {"most": [layer.most for layer in layers]}

    def unpacked(self, tensors: dict[str, Tensor], meta: Any) -> None:
        self.position = meta["position"]
        self.logits.copy_(tensors["logits"])
        if meta.get("fresh", FRESH_BEFORE) != FRESH:
            self._load_other_slots(tensors, meta)
            return
        for layer, capacity, most in zip(self.stepper.slot_layers, meta["capacity"], meta["most"]):
            layer.allocate(self.rows, capacity=capacity)
            layer.most = list(most)
            layer.refresh()
        self.clock.set(meta["epoch"], meta["column"])
        for name, x in self.stepper.tensors().items():
            x.copy_(tensors[name])

    def _load_other_slots(self, tensors: dict[str, Tensor], meta: Any) -> None:
        """Load a stream that was saved with another number of fresh slots: its living memories go into older slots."""
        self.clock.set(meta["epoch"] + meta["column"], 0)
        rows, capacities = torch.arange(self.rows, device=self.device), iter(meta["capacity"])
        for n, step in enumerate(self.stepper.blocks):
            begin, memory = f"layer{n}.", step.memory
            own = {name.removeprefix(begin): x.to(self.device) for name, x in tensors.items() if name.startswith(begin)}
            if isinstance(memory, StateStep):
                memory.load(rows, own)
                continue
            found = memory.read_saved(
                own, next(capacities), meta.get("fresh", FRESH_BEFORE), meta["epoch"], meta["column"]
            )
            self._load_slots(rows, [(memory, found)])
            memory.slots.evicted.copy_(own["evicted"])
