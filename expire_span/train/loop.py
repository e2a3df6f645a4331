"""The training loop: steps, lines of metrics, evaluations, checkpoints, requests to stop. It knows no task and no model.

What is learned, and how, is a `Learner`: one step of learning, the numbers it measured, a snapshot of everything that changes.
Supervised training is one kind (supervised.py); another kind of trainer brings a learner of its own and uses this loop, the
run folder and its checkpoints (session.py) as they are.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate import Accelerator

from expire_span import checkpoint
from expire_span.checkpoint import Snapshot
from expire_span.runs import RunError, RunFolder, UserError

from .memory_peak import forget_peak, peak_bytes
from .progress import Clock, Display
from .signals import Interrupted, StopRequest
from .trackers import Tracker


class NonFinite(RunError):
    """The loss or the gradient is NaN or infinite."""


@dataclass(frozen=True)
class Fault:
    """A step whose numbers are not finite."""

    back: int
    """How many steps before the newest it was."""
    what: str
    """What happened, like "the loss became nan"."""
    place: str
    """Where in the step it was seen."""
    advice: str
    """What to try."""


class LoopSettings(Protocol):
    """The settings that the loop reads; `TrainConfig` has them and documents each."""

    @property
    def steps(self) -> int: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def warmup(self) -> int: ...
    @property
    def log_every(self) -> int: ...
    @property
    def eval_every(self) -> int: ...
    @property
    def checkpoint_every(self) -> int: ...
    @property
    def keep_checkpoints(self) -> int: ...


class Learner(Protocol):
    """One step of learning, and all that changes with it. With several processes, every process calls every method."""

    accelerator: Accelerator

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data, so that a run does not go on with other data; empty for generated data."""
        ...

    def step(self, index: int) -> int:
        """Learn once; `index` is the place in the schedule, from 0. Returns the tokens that were read, over all processes."""
        ...

    def metrics(self) -> dict[str, Any]:
        """The means over all steps since the last call, as plain JSON values; starts a new window of steps."""
        ...

    def find_fault(self) -> Fault | None:
        """The first step since the last `metrics` that is not finite, or None."""
        ...

    def evaluate(self) -> dict[str, Any]:
        """Score the valid split."""
        ...

    def final_result(self) -> dict[str, Any]:
        """Score the test split; what result.json holds."""
        ...

    def describe(self, line: dict[str, Any]) -> list[str]:
        """A line of metrics in words for the terminal, the most important part first."""
        ...

    def snapshot(self, step: int) -> Snapshot:
        """Everything that is needed to go on from here after `step` steps."""
        ...

    def load(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot."""
        ...


class TrainingLoop:
    """Trains a learner in a run folder, from step `first` on. Only the first process writes and shows anything."""

    def __init__(
        self,
        learner: Learner,
        run: RunFolder,
        settings: LoopSettings,
        *,
        display: Display,
        tracker: Tracker,
        first: int = 0,
    ) -> None:
        self.learner, self.run_folder, self.settings, self.step = learner, run, settings, first
        self.display, self.tracker = display, tracker
        self.accelerator = learner.accelerator
        self.writes = self.accelerator.is_main_process
        self.clock, self.tokens = Clock(first), 0  # tokens since the last line of metrics
        self.unread = False  # steps were made that `find_fault` has not looked at
        if settings.seconds is not None and self.accelerator.num_processes > 1:
            given = f"got seconds {settings.seconds:g} and {self.accelerator.num_processes} processes"
            raise UserError(
                f"a time limit holds for one process, since clocks differ, {given}; give --train.steps instead"
            )

    def run(self) -> None:
        """Train to the last step, evaluate, and write result.json."""
        try:
            with self.display:
                self.display.start(self.step)
                self._train()
                result = self.learner.final_result()
        finally:
            self.tracker.close()
        if self.writes:
            self.run_folder.write_result({"step": self.step, **result})
        self.accelerator.wait_for_everyone()

    def _train(self) -> None:
        steps, settings = self.settings.steps, self.settings
        last = self.step >= steps
        with StopRequest() as stop:
            while not last:
                self.tokens += self.learner.step(self._place())
                self.step, self.unread = self.step + 1, True
                self.display.advance(self.step)
                last = self.step == steps or self._place() == steps
                logs = last or self.step % settings.log_every == 0
                if logs:
                    self._log()
                paused = time.perf_counter()
                if last or self.step % settings.eval_every == 0:
                    self._evaluate()
                asked = self._agree_to_stop(stop, logs)
                if last or asked or self.step % settings.checkpoint_every == 0:
                    self.save()
                self.clock.pause(time.perf_counter() - paused)
                if asked and not last:
                    advice = f"go on with: expire-span resume {self.run_folder.path}"
                    raise Interrupted(f"stopped at step {self.step} of {steps} and saved; {advice}", asked)

    def _place(self) -> int:
        """The place in the schedule: steps made, or what the clock says where a time limit is ahead of them.

        Warm-up is counted in steps in any case: compiling takes longer than warm-up and must not pass for it.
        """
        seconds, steps = self.settings.seconds, self.settings.steps
        if seconds is None:
            return self.step
        passed = min(int(steps * self.clock.elapsed / seconds), steps)
        warming = self.step < self.settings.warmup and passed < steps
        return self.step if warming else max(self.step, passed)

    def _agree_to_stop(self, stop: StopRequest, logs: bool) -> int:
        """The signal to obey now, or 0. Processes agree at log steps, since all must stop after the same step."""
        if self.accelerator.num_processes == 1:
            return stop.signum
        if not logs:
            return 0
        asked = torch.tensor([stop.signum], device=self.accelerator.device)
        return int(self.accelerator.gather(asked).max())  # type: ignore[union-attr]

    def _log(self) -> None:
        self._check_finite()
        line = {"step": self.step, "split": "train", **self.learner.metrics()}
        reading = self.clock.read(self.step, self.tokens, self.settings.steps)
        self.tokens = 0
        if not self.writes:
            return
        self.run_folder.append_metrics(line)
        measured = {"seconds": reading.seconds, "tokens_per_second": reading.tokens_per_second}
        measured |= {"ms_per_step": reading.ms_per_step, "peak_bytes": peak_bytes()}
        self.run_folder.append_speed({"step": self.step, **measured})
        self.display.train(self.step, self.learner.describe(line), reading)
        self.tracker.add(line)

    def _evaluate(self) -> None:
        line = {"step": self.step, "split": "valid", **self.learner.evaluate()}
        forget_peak()
        if self.writes:
            self.run_folder.append_metrics(line)
            self.tracker.add(line)
            self.display.valid(self.step, self.learner.describe(line))

    def _check_finite(self) -> None:
        fault = self.learner.find_fault()
        self.unread = False
        if fault is not None:
            when = f"{fault.what} at step {self.step - fault.back} ({fault.place})"
            raise NonFinite(f"{when}; {checkpoint.last_good(self.run_folder)}; {fault.advice}")

    def save(self) -> None:
        """Write a checkpoint of this very moment; a run whose numbers are no longer finite is refused."""
        if self.unread:
            self._check_finite()
        checkpoint.save(
            self.run_folder,
            self.learner.snapshot(self.step),
            keep=self.settings.keep_checkpoints,
            rank=self.accelerator.process_index,
            barrier=self.accelerator.wait_for_everyone,
        )
        self.accelerator.wait_for_everyone()
