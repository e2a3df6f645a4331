"""Supervised training: batches of a task, a decoder, a run folder.

`train` starts a new run and `resume` continues one; both return the finished run. Training in blocks with carried memory and
parallel training over long sequences use the same step: `TrainConfig.carry` says whether a row's state is carried to the next.

With several processes (`accelerate launch -m expire_span train ...`) each one draws the same global batch and takes its own
rows. The loss is divided by the global number of scored positions, so that the gradient equals that of a single process.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from expire_span.checkpoint import Snapshot
from expire_span.disk.sizes import show_bytes
from expire_span.models.decoder import Decoder
from expire_span.models.state import move
from expire_span.ops.context import context_parallel
from expire_span.runs import UserError
from expire_span.settings.run import SupervisedRunConfig, TrainConfig
from expire_span.tasks.contract import Task
from expire_span.tasks.registry import build_task

from . import randomness
from .budget import BudgetController
from .context import build_context, seed_shards
from .data_fingerprint import find_fingerprint
from .devices import build_accelerator, check_device, check_processes, impl_of
from .estimate import check_arithmetic, check_size
from .evaluate import Result, evaluate_stream, memory_bytes
from .loop import Fault, NonFinite
from .optimizers import build_optimizers, dip_decay, rate_factor, set_rates
from .regroup import Layout, regroup
from .scorer import Scorer, rows_of, start_of
from .session import resume, train
from .step import Pass, TrainStep
from .step_metrics import StepMetrics
from .trackers import check_tracker
from .weight_average import WeightAverage

__all__ = ["NonFinite", "SupervisedLearner", "resume", "train"]

_PREFIX = "decoder."
"""Prefix of the decoder's weights in the trained module; checkpoints name them without it."""


def check_rows(train: TrainConfig, processes: int) -> None:
    """Refuse a batch whose rows cannot be split evenly among processes and accumulation steps."""
    if processes % train.context_parallel:
        raise ValueError(
            f"context_parallel must divide the number of processes, got context_parallel {train.context_parallel} and "
            f"{processes} processes; start them by accelerate launch --num-processes {train.context_parallel}"
        )
    if train.batch % (processes // train.context_parallel * train.accumulate):
        raise ValueError(
            f"batch must be a multiple of processes x accumulate, got batch {train.batch}, "
            f"{processes // train.context_parallel} processes and accumulate {train.accumulate}"
        )


def check_averaging(train: TrainConfig, sharded: bool) -> None:
    """Refuse averages of weights that no process holds whole."""
    if train.averaging and sharded:
        raise ValueError(f"averaging keeps whole weights, but FSDP shards them, got {train.averaging}; use DDP")


class SupervisedLearner:
    """A decoder that learns a task's batches: everything that changes while a run is trained. See `loop.Learner`."""

    def __init__(self, config: SupervisedRunConfig, task: Task | None = None) -> None:
        check_tracker(config.train.tracker)
        check_arithmetic(config, check_device(config.train.device))
        task = task or build_task(config.task)
        self.config = config = replace(config, model=replace(config.model, vocab=task.codec.size))
        self.task, self.train_config = task, config.train
        self.stream = self._stream("train")
        self._stream("valid")  # a split that is too short must be found before anything is written
        self._stream("test")
        self.accelerator = build_accelerator(config.train.device, config.train.precision)
        self.impl, self.warmup = impl_of(config.model, self.accelerator.device), config.train.warmup
        check_rows(config.train, self.accelerator.num_processes)
        check_processes(config, self.accelerator)
        check_averaging(config.train, self._sharded)
        self.context = build_context(config, self.accelerator)
        processes = self.accelerator.num_processes
        check_size(config, self.accelerator.device, processes, processes if self._sharded else 1)
        randomness.seed_everything(config.seed)
        self._build_model()
        seed_shards(config.seed, self.context)
        self.states: list[Any] = [None] * config.train.accumulate
        self.bytes_held = [0] * config.train.accumulate
        self.step_metrics = StepMetrics(config.model.layers)
        self.budget = self._build_budget()
        self.average = WeightAverage(config.train.averaging)
        self.fixed_weight = torch.tensor(config.train.span_weight, device=self.accelerator.device)
        self.rate = 0.0  # share of the peak learning rate in the newest step

    def _build_model(self) -> None:
        decoder = Decoder(self.config.model).to(self.accelerator.device)
        if self.train_config.compile:
            in_parts = self.context is not None or self.train_config.pieces > 1
            decoder.compile_blocks(carry=self.train_config.carry, attention=not in_parts)
        scorer = Scorer(decoder, self.train_config.precision).train()
        self.model, *wrapped = self.accelerator.prepare(scorer, *build_optimizers(scorer, self.train_config))
        self.wrapped_optimizers = wrapped
        self.optimizers = [w.optimizer for w in wrapped]
        self.parameters = list(self.model.parameters())
        graphs, pieces = self._can_replay(decoder), self.train_config.pieces
        self.run_pass = TrainStep(self.model, self.accelerator.backward, graphs=graphs, pieces=pieces)

    def _can_replay(self, decoder: Decoder) -> bool:
        """Whether steps can be recorded as CUDA graphs: one process on a GPU, and layers that allow it (`Mixer.recordable`)."""
        config, one = self.train_config, self.accelerator.num_processes == 1
        promises = [block.mixer.recordable() for block in decoder.layers()]
        steady = all(promise.carried if config.carry else promise.alone for promise in promises)
        one = one and config.pieces == 1
        return config.graphs and one and config.accumulate == 1 and self.accelerator.device.type == "cuda" and steady

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

    def _stream(self, split: Any) -> Any:
        batch, block = self.train_config.batch, self.train_config.block
        if split != "train":
            batch, block = self._eval_rows, self.train_config.eval_block or block
        return self.task.stream(split, batch=batch, block=block, seed=self.config.seed)

    @property
    def _sharded(self) -> bool:
        return self.accelerator.distributed_type == DistributedType.FSDP

    @property
    def _eval_rows(self) -> int:
        return self.train_config.eval_batch or self.train_config.batch

    @property
    def trained(self) -> Decoder:
        """The decoder itself, without the wrapper for several processes."""
        return self.accelerator.unwrap_model(self.model).decoder

    def fingerprint(self) -> dict[str, Any]:
        return find_fingerprint(self.task, self.config.task)

    # One step

    def step(self, index: int) -> int:
        batch = next(self.stream)
        count = max(int(batch.mask.sum()), 1)
        weight = self.budget.weight if self.budget is not None else self.fixed_weight
        self.rate = rate_factor(index, self.train_config)
        set_rates(self.optimizers, self.rate)
        train = self.train_config
        dip_decay(self.optimizers, train.weight_decay, train.decay_dip, index / max(train.steps - 1, 1))
        micro, processes = self.train_config.accumulate, self.accelerator.num_processes
        size = self._rows_of_a_pass
        first = self.accelerator.process_index // self.train_config.context_parallel * micro * size
        pieces = []
        for n in range(micro):
            rows = rows_of(batch, first + n * size, first + (n + 1) * size)
            with nullcontext() if n == micro - 1 else self.accelerator.no_sync(self.model):
                pieces.append(self._run_pass(n, rows, processes / count, weight / micro))
        grad_norm = self._update_weights()
        self.step_metrics.add(pieces, weight, grad_norm, count, batch.units)
        self._update_budget(count)
        return batch.x.numel()

    def _run_pass(self, n: int, rows: Any, scale: float, weight: Tensor) -> dict[str, Tensor]:
        """Forward and backward of one micro-batch, with its own carried memory."""
        carry, device = self.train_config.carry, self.accelerator.device
        state, fresh = start_of(rows, self.states[n], device)
        own = [part if self.context is None else self.context.shard(part) for part in (rows.x, rows.y, rows.mask)]
        x, y, mask = (part.to(device, non_blocking=True) for part in own)
        given = Pass(x, y, mask, state, fresh, torch.full((), scale, device=device), weight, carry)
        with nullcontext() if self.context is None else context_parallel(self.context):
            sums, self.states[n], self.bytes_held[n] = self.run_pass(given)
        return sums

    @property
    def _rows_of_a_pass(self) -> int:
        """Number of rows that a process reads in one forward and backward pass."""
        sharing = self.accelerator.num_processes // self.train_config.context_parallel
        return self.train_config.batch // (self.train_config.accumulate * sharing)

    def _update_weights(self) -> Tensor:
        limit = self.train_config.clip or float("inf")
        norm = self.accelerator.clip_grad_norm_(self.parameters, limit)
        for optimizer in self.wrapped_optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.average.update(self.trained)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[union-attr, return-value]

    def _update_budget(self, count: int) -> None:
        if self.budget is None:
            return
        seen = torch.stack([self.step_metrics.newest_live, self.step_metrics.newest_nll])
        seen = self.accelerator.reduce(seen, "sum")
        self.budget.update(seen[0] / self.accelerator.num_processes, seen[1] / count)  # type: ignore[index]

    # What is measured

    def metrics(self) -> dict[str, Any]:
        held = torch.tensor([sum(self.bytes_held)], device=self.accelerator.device)
        held = int(self.accelerator.gather(held).sum())  # type: ignore[union-attr]
        means = self.step_metrics.summary(self.accelerator)
        nll, correct, count, units = (means.pop(name) for name in ("nll", "correct", "count", "units"))
        self.step_metrics.clear()
        line = {"loss": nll / count, "score": self.task.score_of(nll, correct, units), **means}
        return line | {"lr": self.train_config.lr * self.rate, "bytes_held": held}

    def find_fault(self) -> Fault | None:
        found = self.step_metrics.find_fault(self.accelerator)
        if found is None:
            return None
        back, process, micro, value = found
        size, rows_of = self._rows_of_a_pass, process // self.train_config.context_parallel
        first = (rows_of * self.train_config.accumulate + micro) * size
        place = f"rows {first}-{first + size - 1} of that step's batch" if micro >= 0 else "in the gradient only"
        advice = (
            f"try a lower --train.lr (now {self.train_config.lr:g}), "
            f"a smaller --train.clip (now {self.train_config.clip:g}) or --train.precision fp32"
        )
        return Fault(back, f"the {'loss' if micro >= 0 else 'gradient norm'} became {value}", place, advice)

    def evaluate(self) -> dict[str, Any]:
        result = self._score("valid", self.train_config.eval_batches)
        line: dict[str, Any] = {"loss": result.loss, "score": result.score}
        line |= {"live": result.live, "span": result.span, "live_share": result.live_share}
        return line | {"bytes_held": result.peak_bytes}

    def final_result(self) -> dict[str, Any]:
        return self._score("test", self.train_config.test_batches).to_dict()

    def _score(self, split: Any, batches: int | None) -> Result:
        """Every process scores all batches: all then have the same result, and FSDP needs every process in each pass anyway."""
        scorer = self.model if self._sharded else self.accelerator.unwrap_model(self.model)
        stream = itertools.islice(self._stream(split), batches)
        with self.average.in_place_of(self.trained):
            return evaluate_stream(scorer, self.config.model, self.task, split, stream)

    def describe(self, line: dict[str, Any]) -> list[str]:
        live = " ".join(f"{x:.1f}" for x in line["live"])
        parts = [f"loss {line['loss']:.4f}", f"{self.task.score.name} {line['score']:.4f}", f"live {live}"]
        rows = self._eval_rows if line["split"] == "valid" else self.train_config.batch
        # Training without carried memory keeps nothing between steps, so there is no size to show.
        return [*parts, f"memory {show_bytes(line['bytes_held'] / rows)} per row"] if line["bytes_held"] else parts

    # Saving and loading

    def snapshot(self, step: int) -> Snapshot:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizers, options=options)
        state = {
            "processes": self._layout.processes,
            "context_parallel": self._layout.sharing,
            "stream": self.stream.state_dict(),
            "budget": self.budget.state_dict() if self.budget is not None else None,
            "random": randomness.host_state(),
        }
        worker = {"states": self.states, "window": self.step_metrics.state_dict(), "random": randomness.torch_state()}
        weights = {name.removeprefix(_PREFIX): x for name, x in model.items()}
        if self.average.weights:  # these are for use; the newest are what training goes on from
            worker["newest"] = {name: x.cpu().clone() for name, x in self.trained.state_dict().items()}
            weights = {name: x.cpu() for name, x in self.average.weights.items()}
        return Snapshot(step, state, worker, weights, optimizer)  # type: ignore[arg-type]

    def load(self, snapshot: Snapshot) -> None:
        """Restore weights, optimizers, memories, place in the data and random generators, or only weights, where a run starts
        from given weights."""
        options = StateDictOptions(full_state_dict=True)
        newest = self._newest_of(snapshot)
        weights: dict[str, Any] = {_PREFIX + name: x for name, x in newest.items()}
        if snapshot.weights_only:
            set_model_state_dict(self.model, weights, options=options)
            return
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=weights,
            optim_state_dict=snapshot.optimizer,  # type: ignore[arg-type]
            options=options,
        )
        self.stream.load_state_dict(snapshot.state["stream"])
        if self.budget is not None:
            self.budget.load_state_dict(snapshot.state["budget"])
        device = self.accelerator.device
        if newest is not snapshot.model:
            self.average.weights = move(snapshot.model, device)
        randomness.load_host_state(snapshot.state["random"])
        worker = self._worker_of(snapshot)
        self.states = [move(state, device) for state in worker["states"]]
        self.step_metrics.load_state_dict(move(worker["window"], device))

    def _newest_of(self, snapshot: Snapshot) -> dict[str, Tensor]:
        """The weights from which training goes on; where evaluations use averages, each process has saved the newest."""
        worker = snapshot.worker
        if worker is None and not snapshot.weights_only:  # there are more processes than were
            worker = snapshot.read_workers()[0]
        return (worker or {}).get("newest", snapshot.model)

    @property
    def _layout(self) -> Layout:
        return Layout(self.accelerator.num_processes, self.train_config.context_parallel)

    def _worker_of(self, snapshot: Snapshot) -> dict[str, Any]:
        """What this process held when the checkpoint was written, its random numbers set to go on as then; or, where there were
        other processes, its part of what all of them held, and random numbers that go on from theirs."""
        saved, here = snapshot.state["processes"], self._layout
        if "context_parallel" not in snapshot.state:
            raise UserError(
                "this checkpoint, of an unreleased version, does not say how processes shared rows; train again"
            )
        old = Layout(saved, snapshot.state["context_parallel"])
        if old == here:
            randomness.load_torch_state(snapshot.worker["random"])
            return snapshot.worker
        layers, place = self.config.model.layers, self.accelerator.process_index
        worker = regroup(snapshot.read_workers(), old, here, place, layers)
        randomness.load_torch_state(worker["random"])
        seed_shards(int(torch.randint(2**31, ())), self.context)
        return worker
