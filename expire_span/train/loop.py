"""The training loop: steps, lines of metrics, evaluations, checkpoints, requests to stop. It knows no task and no model.

A `Learner` defines one step of learning, the numbers it measures, and a snapshot of everything that changes. supervised.py,
actor_critic.py and distill.py define one each; all use this loop, and the run folder and its checkpoints (session.py), as they
are.
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
    """A step whose numbers are not finite, described for an error message."""

    back: int
    """How many steps before the newest one it was; 0 is the newest."""
    what: str
    """What happened, like "the loss became nan"."""
    place: str
    """Where in the step it was seen, like the rows of the batch."""
    advice: str
    """What to try."""


class LoopSettings(Protocol):
    """The settings that the loop reads; those of every kind of training have them and document each."""

    @property
    def steps(self) -> int: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def log_every(self) -> int: ...
    @property
    def eval_every(self) -> int: ...
    @property
    def checkpoint_every(self) -> int: ...
    @property
    def keep_checkpoints(self) -> int: ...


class Learner(Protocol):
    """One step of learning, and everything that it changes. With several processes, every process calls every method."""

    accelerator: Accelerator
    impl: str
    """Name of the implementation that its attention runs, for config.json."""
    warmup: int
    """Steps in which the learning rate rises, which a time limit does not shorten."""

    def fingerprint(self) -> dict[str, Any]:
        """Identifies the data, so that a run is not resumed with other data; empty for generated data."""
        ...

    def step(self, index: int) -> int:
        """Do one training step and return the number of tokens read, over all processes. index: the step's place in the
        learning-rate schedule, from 0."""
        ...

    def metrics(self) -> dict[str, Any]:
        """The means over all steps since the last call, as JSON values; the next call then covers the steps after this one."""
        ...

    def find_fault(self) -> Fault | None:
        """The first step since the last call of `metrics` whose loss or gradient is not finite, or None."""
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
        """Everything that is needed to continue after `step` steps."""
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
        self.clock, self.tokens = Clock(first, settings.seconds), 0  # tokens since the last line of metrics
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
        """The place in the schedule, in steps: the number of steps made or, under a time limit, the share of time that has
        passed times all steps, whichever is larger.

        Warm-up is counted in steps in any case, since compiling takes longer than warm-up would.
        """
        seconds, steps = self.settings.seconds, self.settings.steps
        if seconds is None:
            return self.step
        passed = int(steps * min(self.clock.elapsed / seconds, 1.0))  # the quotient may be infinite
        warming = self.step < self.learner.warmup and passed < steps
        return self.step if warming else max(self.step, passed)

    def _agree_to_stop(self, stop: StopRequest, logs: bool) -> int:
        """The number of the signal to act on now, or 0. Processes agree on it at log steps: all must stop after the same
        step."""
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
        """Write a checkpoint of the current step, unless the loss or gradient is no longer finite, which is an error."""
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
