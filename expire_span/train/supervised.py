"""Supervised training: batches of a task, a decoder, a run folder.

`train` makes a new run and `resume` goes on with one; both return the finished run. Blocks with carried memory and
parallel training over long sequences are the same loop: `TrainConfig.carry` says whether a row's state lives on.

With several processes (`accelerate launch -m expire_span train ...`) each one draws the same global batch and takes its
rows; the loss is divided by the global number of scored positions, so that the gradient is the single process's.
"""

from __future__ import annotations

import itertools
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from expire_span.config import RunConfig
from expire_span.models.decoder import Decoder
from expire_span.models.state import move
from expire_span.runs import RunError, RunFolder, UserError, check_new
from expire_span.tasks.task import Task, build_task

from . import checkpoint, randomness
from .budget import BudgetController
from .checkpoint import Snapshot
from .devices import build_accelerator, describe_environment
from .evaluate import Result, evaluate_stream, memory_bytes
from .optimizers import build_optimizers, rate_factor, set_rates
from .progress import Board, Clock, Display
from .scorer import Scorer, rows_of, start_of
from .signals import Interrupted, StopRequest
from .step import Pass, TrainStep
from .window import Window

_PREFIX = "decoder."
"""Where the decoder's weights lie inside the trained module; checkpoints hold them without it."""


class NonFinite(RunError):
    """The loss or the gradient is NaN or infinite."""


def train(
    config: RunConfig, path: Path, *, recipe: str = "", task: Task | None = None, shown: bool = True
) -> RunFolder:
    """Start a new run in folder `path` and train it to the end. Nothing is written before everything is checked."""
    trainer = Trainer(config, task, shown=shown)
    if trainer.accelerator.is_main_process:
        check_new(path)
        environment = describe_environment(trainer.config, trainer.accelerator)
        RunFolder.create(path, trainer.config, recipe=recipe, environment=environment)
    trainer.accelerator.wait_for_everyone()
    run = RunFolder.open(path)
    with _hold(run, trainer):
        return trainer.run(run)


def resume(run: RunFolder, *, task: Task | None = None, shown: bool = True) -> RunFolder:
    """Go on with an interrupted run from its newest sound checkpoint."""
    if run.finished:
        raise UserError(f"run {run.path} is finished ({run.config.train.steps} steps); nothing to resume")
    trainer = Trainer(run.config, task, shown=shown)
    with _hold(run, trainer):
        snapshot = checkpoint.load(run, rank=trainer.accelerator.process_index, warn=trainer.display.say)
        trainer.accelerator.wait_for_everyone()
        if trainer.accelerator.is_main_process:
            checkpoint.remove_unfinished(run)
            checkpoint.remove_damaged(run)
            run.truncate(snapshot.step if snapshot else 0)
        if snapshot is not None:
            trainer.load(snapshot)
        trainer.accelerator.wait_for_everyone()
        return trainer.run(run)


def _hold(run: RunFolder, trainer: Trainer) -> AbstractContextManager[None]:
    """One of the processes that train a run holds its folder for all of them."""
    return run.hold() if trainer.accelerator.is_main_process else nullcontext()


class Trainer:
    """Everything that changes while a run is trained, and the loop over it."""

    def __init__(self, config: RunConfig, task: Task | None = None, *, shown: bool = True) -> None:
        task = task or build_task(config.task)
        self.config = config = replace(config, model=replace(config.model, vocab=task.vocab))
        self.task, self.train_config, self.step = task, config.train, 0
        self.tokens = 0  # since the last line of metrics
        self.stream = self._stream("train")
        self._stream("valid")  # a split that is too short must be found before anything is written
        self._stream("test")
        self.accelerator = build_accelerator(config)
        randomness.seed_everything(config.seed)
        decoder = Decoder(config.model).to(self.accelerator.device)
        if config.train.compile:
            decoder.compile_blocks(carry=config.train.carry)
        scorer = Scorer(decoder, config.train.precision).train()
        self.model, *wrapped = self.accelerator.prepare(scorer, *build_optimizers(scorer, config.train))
        self.wrapped_optimizers = wrapped
        self.optimizers = [w.optimizer for w in wrapped]
        self.parameters = list(self.model.parameters())
        self.run_pass = TrainStep(self.model, self.accelerator.backward, graphs=self._can_replay(decoder))
        self.states: list[Any] = [None] * config.train.accumulate
        self.bytes_held = [0] * config.train.accumulate
        self.window = Window(config.model.layers)
        self.budget = self._build_budget()
        self.fixed_weight = torch.tensor(config.train.span_weight, device=self.accelerator.device)
        self.display = Display(config.train.steps, task.score.name, shown=shown and self.accelerator.is_main_process)

    def run(self, run: RunFolder) -> RunFolder:
        """Train from the current step to the last, evaluate, and write result.json."""
        board = Board(run, self.step) if self.accelerator.is_main_process else None
        try:
            with self.display:
                self._loop(run, board)
                result = self._final_result()
        finally:
            if board is not None:
                board.close()
        if self.accelerator.is_main_process:
            run.write_result({"step": self.step, **result.to_dict()})
        self.accelerator.wait_for_everyone()
        return run

    def _loop(self, run: RunFolder, board: Board | None) -> None:
        config, clock = self.train_config, Clock(self.step)
        with StopRequest() as stop:
            while self.step < config.steps:
                self._train_step()
                self.step += 1
                last = self.step == config.steps
                logs = last or self.step % config.log_every == 0
                if logs:
                    self._log(run, board, clock)
                paused = time.perf_counter()
                if last or self.step % config.eval_every == 0:
                    self._evaluate(run, board)
                asked = self._agree_to_stop(stop, logs)
                if last or asked or self.step % config.checkpoint_every == 0:
                    self.save(run)
                clock.pause(time.perf_counter() - paused)
                if asked and not last:
                    advice = f"go on with: expire-span resume {run.path}"
                    raise Interrupted(f"stopped at step {self.step} of {config.steps} and saved; {advice}", asked)

    def _agree_to_stop(self, stop: StopRequest, logs: bool) -> int:
        """The signal to obey now, or 0. Processes agree at log steps, since all must stop after the same step."""
        if self.accelerator.num_processes == 1:
            return stop.signum
        if not logs:
            return 0
        asked = torch.tensor([stop.signum], device=self.accelerator.device)
        return int(self.accelerator.gather(asked).max())  # type: ignore[union-attr]

    # One step

    def _train_step(self) -> None:
        batch = next(self.stream)
        self.tokens += batch.x.numel()
        count = max(int(batch.mask.sum()), 1)
        weight = self.budget.weight if self.budget is not None else self.fixed_weight
        set_rates(self.optimizers, rate_factor(self.step, self.train_config))
        micro, processes = self.train_config.accumulate, self.accelerator.num_processes
        size = self.train_config.batch // (micro * processes)
        first = self.accelerator.process_index * micro * size
        pieces = []
        for n in range(micro):
            rows = rows_of(batch, first + n * size, first + (n + 1) * size)
            with nullcontext() if n == micro - 1 else self.accelerator.no_sync(self.model):
                pieces.append(self._run_pass(n, rows, processes / count, weight / micro))
        grad_norm = self._update_weights()
        self.window.add(pieces, weight, grad_norm, count)
        self._update_budget(count)

    def _run_pass(self, n: int, rows: Any, scale: float, weight: Tensor) -> dict[str, Tensor]:
        """Forward and backward of one micro-batch, with its own carried memory."""
        carry, device = self.train_config.carry, self.accelerator.device
        state, fresh = start_of(rows, self.states[n], device)
        x, y, mask = (part.to(device, non_blocking=True) for part in (rows.x, rows.y, rows.mask))
        given = Pass(x, y, mask, state, fresh, torch.full((), scale, device=device), weight, carry)
        sums, self.states[n], self.bytes_held[n] = self.run_pass(given)
        return sums

    def _can_replay(self, decoder: Decoder) -> bool:
        """Whether steps can be recorded as CUDA graphs: one process on a GPU, with no memory or one whose shapes are steady."""
        config, one = self.train_config, self.accelerator.num_processes == 1
        promises = [block.mixer.steadiness() for block in decoder.layers()]
        steady = all(promise.carried if config.carry else promise.alone for promise in promises)
        return config.graphs and one and config.accumulate == 1 and self.accelerator.device.type == "cuda" and steady

    def _update_weights(self) -> Tensor:
        limit = self.train_config.clip or float("inf")
        norm = self.accelerator.clip_grad_norm_(self.parameters, limit)
        for optimizer in self.wrapped_optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[union-attr, return-value]

    def _update_budget(self, count: int) -> None:
        if self.budget is None:
            return
        row, start = self.window.rows[-1], 5
        seen = torch.stack([row[start : start + self.config.model.layers].mean(), row[0]])
        seen = self.accelerator.reduce(seen, "sum")
        self.budget.update(seen[0] / self.accelerator.num_processes, seen[1] / count)  # type: ignore[index]

    # What is written

    def _log(self, run: RunFolder, board: Board | None, clock: Clock) -> None:
        table = self._check_finite(run)
        held = torch.tensor([sum(self.bytes_held)], device=self.accelerator.device)
        held = int(self.accelerator.gather(held).sum())  # type: ignore[union-attr]
        means = self.window.summary(table)
        nll, correct, count = means.pop("nll"), means.pop("correct"), means.pop("count")
        line = {"step": self.step, "split": "train", "loss": nll / count}
        line |= {"score": self.task.score_of(nll, correct, count), **means}
        line |= {"lr": self.train_config.lr * rate_factor(self.step - 1, self.train_config), "bytes_held": held}
        self.window.clear()
        seconds, speed, left, pace = clock.read(self.step, self.tokens, self.train_config.steps)
        self.tokens = 0
        if self.accelerator.is_main_process:
            run.append_metrics(line)
            measured = {"seconds": seconds, "tokens_per_second": speed, "ms_per_step": pace, "peak_bytes": peak_bytes()}
            run.append_speed({"step": self.step, **measured})
            self.display.train(line, speed, left)
        if board is not None:
            board.add(line)

    def _evaluate(self, run: RunFolder, board: Board | None) -> None:
        result = self._score("valid", self.train_config.eval_batches)
        forget_peak()
        line = {"step": self.step, "split": "valid", "loss": result.loss, "score": result.score}
        line |= {"live": result.live, "span": result.span, "live_share": result.live_share}
        line |= {"bytes_held": result.peak_bytes}
        if board is not None:
            run.append_metrics(line)
            board.add(line)
            self.display.valid(line)

    def _final_result(self) -> Result:
        return self._score("test", self.train_config.test_batches)

    def _score(self, split: Any, batches: int | None) -> Result:
        """Every process scores all batches: simple, equal everywhere, and FSDP needs all of them anyway."""
        sharded = self.accelerator.distributed_type == DistributedType.FSDP
        scorer = self.model if sharded else self.accelerator.unwrap_model(self.model)
        stream = itertools.islice(self._stream(split), batches)
        return evaluate_stream(scorer, self.config.model, self.task, split, stream)

    def _check_finite(self, run: RunFolder) -> Tensor:
        table = self.window.read(self.accelerator)
        fault = self.window.find_fault(table)
        if fault is None:
            return table
        back, process, micro, value = fault
        size = self.train_config.batch // (self.train_config.accumulate * self.accelerator.num_processes)
        first = (process * self.train_config.accumulate + micro) * size
        place = f"rows {first}-{first + size - 1} of that step's batch" if micro >= 0 else "in the gradient only"
        raise NonFinite(
            f"the {'loss' if micro >= 0 else 'gradient norm'} became {value} at step {self.step - back} ({place}); "
            f"{checkpoint.last_good(run)}; try a lower --train.lr (now {self.train_config.lr:g}), "
            f"a smaller --train.clip (now {self.train_config.clip:g}) or --train.precision fp32"
        )

    # Saving and loading

    def save(self, run: RunFolder) -> None:
        """Write a checkpoint of this very moment; a run whose numbers are no longer finite is refused."""
        if self.window.rows:
            self._check_finite(run)
        accelerator = self.accelerator
        checkpoint.save(
            run,
            self.snapshot(),
            keep=self.train_config.keep_checkpoints,
            rank=accelerator.process_index,
            barrier=accelerator.wait_for_everyone,
        )
        accelerator.wait_for_everyone()

    def snapshot(self) -> Snapshot:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizers, options=options)
        state = {
            "processes": self.accelerator.num_processes,
            "stream": self.stream.state_dict(),
            "budget": self.budget.state_dict() if self.budget is not None else None,
            "random": randomness.host_state(),
        }
        worker = {"states": self.states, "window": self.window.state_dict(), "random": randomness.torch_state()}
        weights = {name.removeprefix(_PREFIX): x for name, x in model.items()}
        return Snapshot(self.step, state, worker, weights, optimizer)  # type: ignore[arg-type]

    def load(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot: weights, optimizers, memories, place in the data, generators."""
        saved, here = snapshot.state["processes"], self.accelerator.num_processes
        if saved != here:
            raise UserError(f"this run was trained by {saved} processes, got {here}; launch it with {saved}")
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict={_PREFIX + name: x for name, x in snapshot.model.items()},
            optim_state_dict=snapshot.optimizer,  # type: ignore[arg-type]
            options=StateDictOptions(full_state_dict=True),
        )
        self.step = snapshot.step
        self.stream.load_state_dict(snapshot.state["stream"])
        if self.budget is not None:
            self.budget.load_state_dict(snapshot.state["budget"])
        device = self.accelerator.device
        self.states = [move(state, device) for state in snapshot.worker["states"]]
        self.window.load_state_dict(move(snapshot.worker["window"], device))
        randomness.load_host_state(snapshot.state["random"])
        randomness.load_torch_state(snapshot.worker["random"])

    def _stream(self, split: Any) -> Any:
        config, batch, block = self.train_config, self.train_config.batch, self.train_config.block
        if split != "train":
            batch, block = config.eval_batch or batch, config.eval_block or block
        return self.task.stream(split, batch=batch, block=block, seed=self.config.seed)

    def _build_budget(self) -> BudgetController | None:
        if not self.train_config.budget.active:
            return None
        element = 2 if self.train_config.precision == "bf16" else 4
        return BudgetController(
            self.train_config.budget,
            layers=self.config.model.layers,
            bytes_per_memory=memory_bytes(self.config.model, element),
            device=self.accelerator.device,
        )


def forget_peak() -> None:
    """Measure a GPU's peak anew, so that it is that of training alone; the host's cannot be reset."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """The most memory this process has held: the GPU's where one is in use, else the host's."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
