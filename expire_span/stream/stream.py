"""`Stream`: rows that read prompts and generate any number of tokens from them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expire_span.checks import as_whole, show
from expire_span.errors import UserError
from expire_span.models.decoder import Decoder
from expire_span.models.encoder import Encoder
from expire_span.models.stepping import can_step
from expire_span.sampling import Sampling

from .engines import Engine, SteadyEngine
from .events import find_events, remember_living
from .memory_check import bytes_per_row, check_room
from .plain_engine import PlainEngine
from .prompts import Prompt, check_prompt, group_by_length, read_with_reports
from .saved import read_saved, write_saved
from .tokens import Flight, Step

STEPPED = 512
"""On a GPU, prompts of different lengths of at most this many tokens are read step by step, one token of each row per step."""


class Stream:
    """Rows of a decoder that read and generate tokens, each with its own prompt and start.

        stream = Stream(decoder, rows=2)
        stream.read([b"Once upon a time", b"It was"])
        for step in stream.generate(Sampling(temperature=0.8)):
            ...  # step.tokens [rows]; stream.replace(1, b"And then") while the others go on

    Memory is bounded by the living memories. On a GPU a step is one replay of a CUDA graph, and the host reads a step's tokens
    while the next step runs, so that neither waits for the other. The decoder's weights must not change while a stream uses
    them.
    """

    def __init__(self, decoder: Decoder, rows: int = 16, *, recorded: bool = True) -> None:
        """recorded: if False, steps on a GPU are launched kernel by kernel instead of as CUDA graphs, for tests and
        benchmarks."""
        _check_decoder(decoder)
        count = as_whole(rows)
        if count is None or count < 1:
            raise ValueError(f"rows must be a whole number of at least 1, got {show(rows)}")
        self.decoder, rows = decoder.eval(), count
        self.steady = can_step(decoder)
        check_room(decoder, rows, bytes_per_row(decoder))
        with torch.inference_mode():
            self._engine: Engine = (SteadyEngine if self.steady else PlainEngine)(decoder, rows)
        if isinstance(self._engine, SteadyEngine) and not recorded:
            self._engine.launch_plainly()
        self._active = [False] * rows
        self._flights: deque[Flight] = deque()
        self._generator: tuple[int, torch.Generator] | None = None

    @property
    def rows(self) -> int:
        return self._engine.rows

    @property
    def position(self) -> int:
        """Number of steps that the stream has taken."""
        return self._engine.position

    # Reading

    @torch.inference_mode()
    def read(self, prompts: Sequence[Prompt]) -> None:
        """Row n begins with prompts[n], of any length; rows without a prompt are idle."""
        if not isinstance(prompts, (Sequence, Tensor, np.ndarray)) or isinstance(prompts, (str, bytes, bytearray)):
            raise ValueError(f"read takes a list of prompts, one for each row, got {show(prompts)}; give [prompt]")
        if not 1 <= len(prompts) <= self.rows:
            raise ValueError(f"read takes 1 to {self.rows} prompts, one for each row, got {len(prompts)}")
        found = {n: check_prompt(prompt, self.decoder.config.vocab, n) for n, prompt in enumerate(prompts)}
        self._flights.clear()
        self._active = [n in found for n in range(self.rows)]
        self._engine.drop([n for n in range(self.rows) if n not in found])
        if self._reads_in_step(found):
            assert isinstance(self._engine, SteadyEngine)
            self._engine.read_in_step(found)
            return
        for rows, block in group_by_length(found):
            logits, state, reports = read_with_reports(self.decoder, block)
            self._engine.load(rows, state, logits, reports)

    def _reads_in_step(self, prompts: dict[int, Tensor]) -> bool:
        """Whether to read prompts step by step; see `STEPPED`."""
        lengths = {len(prompt) for prompt in prompts.values()}
        if not (isinstance(self._engine, SteadyEngine) and self._engine.device.type == "cuda"):
            return False
        rules: list[Any] = [getattr(block.mixer, "rules", None) for block in self.decoder.layers()]
        # Initial memories are stored by the decoder's initial state only.
        starts = any(getattr(rule, "initial_memories", 0) for rule in rules)
        return len(lengths) > 1 and max(lengths) <= STEPPED and not starts

    @torch.inference_mode()
    def replace(self, row: int, prompt: Prompt) -> None:
        """Empty row `row` and let it read a new prompt; the other rows go on as they are."""
        row = self._check_row(row)
        tokens = check_prompt(prompt, self.decoder.config.vocab, row)
        logits, state, reports = read_with_reports(self.decoder, tokens.unsqueeze(0))
        self._engine.load([row], state, logits, reports)
        self._active[row] = True
        for flight in self._flights:
            flight.stale.add(row)

    def _check_row(self, row: Any) -> int:
        number = as_whole(row)
        if number is None or not 0 <= number < self.rows:
            raise ValueError(f"row must be a whole number in 0..{self.rows - 1}, got {show(row)}")
        return number

    # Writing

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
        if not any(self._active):
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
            step = self._flights[0].collect(self._active)
            self._flights.popleft()
            count += 1
            yield step

    @torch.inference_mode()
    def _launch(self, sampling: Sampling, events: bool) -> None:
        engine = self._engine
        before = remember_living(engine) if events else None
        engine.advance(sampling, self._generator_of(sampling))
        flight = _send_to_host(engine.tokens) if engine.lookahead else Flight(engine.tokens.to("cpu", copy=True))
        flight.events = find_events(engine, before, self._active) if before is not None else None
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
        return self._engine.live.cpu() * torch.tensor(self._active)

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
        check_room(self.decoder, len(rows), max(self.bytes_held // self.rows, bytes_per_row(self.decoder)))
        other = Stream.__new__(Stream)
        other.decoder, other.steady = self.decoder, self.steady
        other._engine = self._engine.selected(torch.tensor(rows))
        other._active = [self._active[row] for row in rows]
        other._flights = deque(
            Flight(step.tokens[rows]) for step in (flight.collect(self._active) for flight in self._flights)
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
        meta: dict[str, Any] = {"rows": self.rows, "active": self._active, "steady": self.steady, "engine": engine}
        meta["flights"] = [flight.collect(self._active).tokens.tolist() for flight in self._flights]
        if self._generator is not None:
            meta["seed"] = self._generator[0]
            tensors = tensors | {"generator": self._generator[1].get_state()}
        write_saved(Path(path), self.decoder, tensors, meta)

    @classmethod
    def load(cls, decoder: Decoder, path: str | Path) -> Stream:
        """The stream that `save` wrote, of the same model."""
        _check_decoder(decoder)
        tensors, meta = read_saved(Path(path), decoder)
        try:
            return cls(decoder, meta["rows"])._restored(tensors, meta)
        except torch.OutOfMemoryError:
            raise  # the file may be right
        except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            raise UserError(f"{path} is not a saved stream that this version can read ({error})") from error

    def _restored(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Stream:
        with torch.inference_mode():
            self._engine.unpacked(tensors, meta["engine"])
        self._active = meta["active"]
        self._flights = deque(Flight(torch.tensor(tokens)) for tokens in meta["flights"])
        if "seed" in meta:
            self._generator = meta["seed"], torch.Generator(self._engine.device)
            with contextlib.suppress(RuntimeError):  # a generator state of another kind of device cannot be restored
                self._generator[1].set_state(tensors["generator"])
        return self


def _check_decoder(decoder: Any) -> None:
    if not isinstance(decoder, Decoder) or isinstance(decoder, Encoder):  # an encoder is not causal
        got = type(decoder).__name__
        raise ValueError(f"a stream runs a Decoder, got {got}; build one by Decoder(config) or load_decoder(folder)")


def _send_to_host(tokens: Tensor) -> Flight:
    """Start to copy tokens from a GPU, without waiting for it."""
    host, event = torch.empty(len(tokens), dtype=tokens.dtype, pin_memory=True), torch.cuda.Event()
    host.copy_(tokens, non_blocking=True)
    event.record()
    return Flight(host, event)
