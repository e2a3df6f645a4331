"""`Stream`: rows that read prompts and generate any number of tokens from them, of any model that forgets."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expire_span.checks import as_whole, show
from expire_span.errors import UserError
from expire_span.models.marks import check_marks
from expire_span.sampling import Sampling

from .decoders import model_of
from .engines import Engine, SlotEngine
from .events import count_by_head, find_events, remember_living
from .interface import Prefilled, trimmed
from .memory_check import check_room
from .plain_engine import PlainEngine
from .prompts import Prompt, check_prompt, group_by_length, stack_marks
from .saved import read_saved, write_saved
from .tokens import Flight, Step, send_to_host

STEPPED = 512
"""On a GPU, prompts of different lengths of at most this many tokens are read step by step, one token of each row per step."""

Marks = Sequence[int] | Tensor | None


class Stream:
    """Rows of a model that read and generate tokens, each with its own prompt and start.

        stream = Stream(model, rows=2)  # a Decoder, or what expire_span.hf.retrofit returns
        stream.read([b"Once upon a time", b"It was"])
        for step in stream.generate(Sampling(temperature=0.8)):
            ...  # step.tokens [rows]; stream.join(b"And then", row=1) while the others go on

    Memory is bounded by the living memories. On a GPU a step is one replay of a CUDA graph, and the host reads a step's tokens
    while the next step runs, so that neither waits for the other. The model's weights must not change while a stream uses
    them.
    """

    def __init__(self, model: Any, rows: int = 16, *, static_shapes: bool | None = None, recorded: bool = True) -> None:
        """static_shapes: whether to decode in place over buffers of static shapes, where the model can; None does so where it
        is faster. recorded: if False, steps on a GPU are launched kernel by kernel instead of as CUDA graphs, for tests and
        benchmarks."""
        self._model = model_of(model)
        count = as_whole(rows)
        if count is None or count < 1:
            raise ValueError(f"rows must be a whole number of at least 1, got {show(rows)}")
        self.model, rows = model, count
        wanted = self._model.prefers_steps if static_shapes is None else static_shapes
        kind = SlotEngine if wanted and self._model.can_step else PlainEngine
        check_room(self._model.device, rows, self._model.row_bytes)
        with torch.inference_mode():
            self._engine: Engine = kind(self._model, rows)
        if isinstance(self._engine, SlotEngine) and not recorded:
            self._engine.launch_plainly()
        self._flights: deque[Flight] = deque()
        self._generator: tuple[int, torch.Generator] | None = None

    @property
    def static_shapes(self) -> bool:
        """Whether the rows' memories lie in buffers of static shapes, which steps change in place."""
        return isinstance(self._engine, SlotEngine)

    @property
    def device(self) -> torch.device:
        return self._engine.device

    @property
    def active(self) -> tuple[bool, ...]:
        """Which rows are in use."""
        return tuple(self._engine.active)

    @property
    def length(self) -> int | None:
        """Most tokens that a row may read; None where the model has no limit."""
        return self._model.length

    @property
    def rows(self) -> int:
        return self._engine.rows

    @property
    def position(self) -> int:
        """Number of steps that the stream has taken."""
        return self._engine.position

    # Reading

    @torch.inference_mode()
    def read(self, prompts: Sequence[Prompt], marks: Sequence[Marks] | None = None) -> None:
        """Row n begins with prompts[n], of any length; rows without a prompt are idle. marks: as for `prefill`, for each
        prompt."""
        if not isinstance(prompts, (Sequence, Tensor, np.ndarray)) or isinstance(prompts, (str, bytes, bytearray)):
            raise ValueError(f"read takes a list of prompts, one for each row, got {show(prompts)}; give [prompt]")
        if not 1 <= len(prompts) <= self.rows:
            raise ValueError(f"read takes 1 to {self.rows} prompts, one for each row, got {len(prompts)}")
        found = {n: check_prompt(prompt, self._model.vocab, n) for n, prompt in enumerate(prompts)}
        if marks is not None and len(marks) != len(prompts):
            raise ValueError(f"read takes marks for each of {len(prompts)} prompts, or None for some, got {len(marks)}")
        marked = {n: self._check_marks(None if marks is None else marks[n], len(x), n) for n, x in found.items()}
        self._flights.clear()
        self._engine.drop([n for n in range(self.rows) if n not in found])
        if self._reads_in_step(found) and not any(x is not None for x in marked.values()):
            assert isinstance(self._engine, SlotEngine)
            self._engine.read_in_step(found)
            return
        for rows, block in group_by_length(found):
            self._engine.load(rows, self._model.prefill(block, None, stack_marks(marked, rows, block.shape[1])))

    def _reads_in_step(self, prompts: dict[int, Tensor]) -> bool:
        """Whether to read prompts step by step; see `STEPPED`."""
        lengths = {len(prompt) for prompt in prompts.values()}
        fast = self.static_shapes and self._model.reads_in_step and self.device.type == "cuda"
        return fast and len(lengths) > 1 and max(lengths) <= STEPPED

    @torch.inference_mode()
    def prefill(self, prompt: Prompt, before: Prefilled | None = None, marks: Marks = None) -> Prefilled:
        """Read a prompt, or its next part after what was read before, for a row that will join; no row changes meanwhile.

        marks: a lifetime for each token of the prompt: `KEEP` (its memories never expire), an age in tokens at which they are
        deleted at the latest, or `FREE` (as the model predicts).
        """
        tokens = check_prompt(prompt, self._model.vocab)
        marked = self._check_marks(marks, len(tokens))
        state = None if before is None else self._own(before).state
        read = self._model.prefill(tokens.unsqueeze(0), state, None if marked is None else marked.unsqueeze(0))
        return replace(read, reader=self.model)

    @torch.inference_mode()
    def prefill_together(self, prompts: Sequence[Prompt]) -> Prefilled:
        """Read prompts of the same length in one call, for rows that will join; no row changes meanwhile."""
        tokens = torch.stack([check_prompt(prompt, self._model.vocab, n) for n, prompt in enumerate(prompts)])
        return replace(self._model.prefill(tokens), reader=self.model)

    def _check_marks(self, marks: Marks, tokens: int, row: int | None = None) -> Tensor | None:
        found = check_marks(marks, tokens, row)
        if found is not None:
            self._model.check_marks(found)
        return found

    def _own(self, read: Prefilled) -> Prefilled:
        if read.reader not in (None, self.model):
            raise ValueError(
                "this prompt was read by another model, whose memories mean nothing here; read it with this one"
            )
        return read

    @torch.inference_mode()
    def join(self, prompt: Prompt | Prefilled, row: int | None = None) -> int:
        """Let a row begin with a prompt, or with what `prefill` has read; the other rows go on as they are. Returns its number.

        row: which one; what it held is deleted. None takes the first idle row.
        """
        if row is None and all(self._engine.active):
            raise ValueError(f"all {self.rows} rows are in use; let one leave first, or say which row to replace")
        row = self._engine.active.index(False) if row is None else self._check_row(row)
        self._engine.load([row], self._own(prompt) if isinstance(prompt, Prefilled) else self.prefill(prompt))
        self._drop_flights(row)
        return row

    @torch.inference_mode()
    def join_together(self, read: Prefilled) -> list[int]:
        """Let idle rows, the first ones, begin with prompts that were read together. Returns their numbers."""
        rows = [row for row, active in enumerate(self._engine.active) if not active][: len(read.logits)]
        if len(rows) < len(read.logits):
            raise ValueError(f"{len(rows)} of {self.rows} rows are idle, got {len(read.logits)} prompts to join")
        self._engine.load(rows, self._own(read))
        for row in rows:
            self._drop_flights(row)
        return rows

    @torch.inference_mode()
    def snapshot(self, row: int) -> Prefilled:
        """What a row holds and the logits of its next token, as `prefill` gives them: `join(snapshot(row))` goes on from here,
        and so does `prefill(more, snapshot(row))`. Of what the row has read, only what is alive is in it."""
        row = self._check_row(row)
        if not self._engine.active[row]:
            raise ValueError(f"row {row} is idle and holds nothing; name one of the rows in use, {self._in_use()}")
        self._check_nothing_ahead()
        logits, state = self._engine.logits[row : row + 1].clone(), self._engine.row_state(row)
        return trimmed(Prefilled(logits, state, reader=self.model))

    def _in_use(self) -> list[int]:
        return [row for row, active in enumerate(self._engine.active) if active]

    @torch.inference_mode()
    def leave(self, row: int) -> None:
        """Delete what a row holds; it is idle until another prompt joins there."""
        row = self._check_row(row)
        self._engine.drop([row])
        self._drop_flights(row)

    def _drop_flights(self, row: int) -> None:
        for flight in self._flights:
            flight.stale.add(row)

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int] | Tensor) -> None:
        """Let every row read given tokens: one each [rows], or several [rows, T]. Idle rows read nothing of what is given."""
        given = torch.as_tensor(tokens)
        given = given.unsqueeze(1) if given.dim() == 1 else given
        if given.dim() != 2 or len(given) != self.rows or given.is_floating_point() or not given.shape[1]:
            shape = f"shape {tuple(given.shape)} of {given.dtype}"
            raise ValueError(f"feed takes a token for each of {self.rows} rows, [rows] or [rows, T], got {shape}")
        self._check_nothing_ahead()
        self._engine.feed(given.to(torch.int64))

    def _check_nothing_ahead(self) -> None:
        if self._flights:
            raise ValueError(
                "generate has computed a step ahead; take it first, by next(stream.generate()), or give max_tokens"
            )

    def _check_row(self, row: Any) -> int:
        number = as_whole(row)
        if number is None or not 0 <= number < self.rows:
            raise ValueError(f"row must be a whole number in 0..{self.rows - 1}, got {show(row)}")
        return number

    # Generating

    def generate(
        self, sampling: Sampling | None = None, max_tokens: int | None = None, *, events: bool = False
    ) -> Iterator[Step]:
        """Yield steps of one token for each row: `max_tokens` of them, or without end where it is None.

        If the caller stops early, the next call continues where this one stopped. events: report which memories were written
        and which died in every layer; the host then waits for the device at each step.
        """
        if sampling is not None and not isinstance(sampling, Sampling):
            raise ValueError(f"sampling must be a Sampling, got {show(sampling)}; give Sampling(temperature=0.8)")
        most = None if max_tokens is None else as_whole(max_tokens)
        if max_tokens is not None and (most is None or most < 0):
            raise ValueError(f"max_tokens must be a whole number, 0 or more, got {show(max_tokens)}")
        if not any(self._engine.active):
            raise ValueError("the stream has read no prompt yet; call read first")
        return self._steps(sampling or Sampling(), most, events)

    def _steps(self, sampling: Sampling, max_tokens: int | None, events: bool) -> Iterator[Step]:
        count = 0
        while max_tokens is None or count < max_tokens:
            if not self._flights:
                self._launch(sampling, events)
            ahead = self._engine.lookahead and not events and (max_tokens is None or count + 1 < max_tokens)
            if ahead and len(self._flights) < 2:
                self._launch(sampling, events)
            step = self._flights[0].collect(self._engine.active)
            self._flights.popleft()
            count += 1
            yield step

    @torch.inference_mode()
    def _launch(self, sampling: Sampling, events: bool) -> None:
        engine = self._engine
        before = remember_living(engine) if events else None
        engine.advance(sampling, self._generator_of(sampling))
        flight = send_to_host(engine.tokens) if engine.lookahead else Flight(engine.tokens.to("cpu", copy=True))
        flight.events = find_events(engine, before) if before is not None else None
        self._flights.append(flight)

    def _generator_of(self, sampling: Sampling) -> torch.Generator:
        """The random generator of a seed; the same one is used until another seed is given."""
        if self._generator is None or self._generator[0] != sampling.seed:
            device = self._engine.device
            self._generator = sampling.seed, torch.Generator(device).manual_seed(sampling.seed)
        return self._generator[1]

    # Looking

    @property
    @torch.inference_mode()
    def live(self) -> Tensor:
        """Number of living memories per head, the mean over heads, [layers, rows]; 0 for rows that are idle."""
        return self._engine.live.cpu() * torch.tensor(self._engine.active)

    @property
    @torch.inference_mode()
    def live_by_head(self) -> list[Tensor]:
        """Number of living memories, [rows, heads] for each layer; 0 for idle rows, and no heads where a layer has no slots."""
        return count_by_head(self._engine)

    @property
    def evicted(self) -> int:
        """Number of memories of all rows that a cap has deleted while they were alive."""
        return self._engine.evicted

    @property
    def bytes_held(self) -> int:
        """Bytes of all memories, spare slots included."""
        return self._engine.bytes_held

    @property
    @torch.inference_mode()
    def logits(self) -> Tensor:
        """Logits of every row's next token, [rows, V]."""
        return self._engine.logits.clone()

    # Copies

    @torch.inference_mode()
    def fork(self, rows: Sequence[int]) -> Stream:
        """An independent stream with copies of these rows, in this order; a row may occur several times."""
        if not isinstance(rows, (Sequence, Tensor, np.ndarray)) or isinstance(rows, str):
            raise ValueError(f"fork takes a list of rows, got {show(rows)}; give [row]")
        rows = [self._check_row(row) for row in rows]
        if not rows:
            raise ValueError("fork needs at least one row, got none")
        check_room(self.device, len(rows), max(self.bytes_held // self.rows, self._model.row_bytes))
        other = Stream.__new__(Stream)
        other.model, other._model = self.model, self._model
        other._engine = self._engine.selected(rows)
        other._flights = deque(
            Flight(step.tokens[rows]) for step in (flight.collect(self._engine.active) for flight in self._flights)
        )
        other._generator = None
        if self._generator is not None:
            copy = torch.Generator(self._engine.device)
            copy.set_state(self._generator[1].get_state())
            other._generator = self._generator[0], copy
        return other

    @torch.inference_mode()
    def save(self, path: str | Path) -> None:
        """Write everything to one file, atomically; `Stream.load` continues from it."""
        tensors, engine = self._engine.packed()
        meta: dict[str, Any] = {"rows": self.rows, "active": self._engine.active, "engine": engine}
        meta["static_shapes"] = self.static_shapes
        meta["flights"] = [flight.collect(self._engine.active).tokens.tolist() for flight in self._flights]
        if self._generator is not None:
            meta["seed"] = self._generator[0]
            tensors = tensors | {"generator": self._generator[1].get_state()}
        write_saved(Path(path), self._model.fingerprint(), tensors, meta)

    @classmethod
    def load(cls, model: Any, path: str | Path) -> Stream:
        """The stream that `save` wrote, of the same model."""
        tensors, meta = read_saved(Path(path), model_of(model).fingerprint())
        try:
            return cls(model, meta["rows"], static_shapes=meta["static_shapes"])._restored(tensors, meta)
        except torch.OutOfMemoryError:
            raise  # the file may be right
        except (KeyError, TypeError, AttributeError, IndexError, RuntimeError, ValueError) as error:
            raise UserError(f"{path} is not a saved stream that this version can read ({error})") from error

    def _restored(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Stream:
        with torch.inference_mode():
            self._engine.unpacked(tensors, meta["engine"])
        self._engine.active = meta["active"]
        self._flights = deque(Flight(torch.tensor(tokens)) for tokens in meta["flights"])
        if "seed" in meta:
            self._generator = meta["seed"], torch.Generator(self._engine.device)
            with contextlib.suppress(RuntimeError):  # a generator state of another kind of device cannot be restored
                self._generator[1].set_state(tensors["generator"])
        return self
