"""Trackers that also get the scalars of metrics.jsonl: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Protocol

from expire_span.runs import RunFolder, StorageError, UserError, describe
from expire_span.settings.run import to_dict, walk


class Tracker(Protocol):
    def add(self, line: dict[str, Any]) -> None:
        """Take one line of metrics."""
        ...

    def close(self) -> None: ...


def check_tracker(name: str) -> None:
    """Refuse a tracker whose library is not installed, before anything is written."""
    library = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}.get(name)
    try:
        missing = library is not None and find_spec(library) is None
    except ValueError:  # a module of that name without a specification is not the library
        missing = True
    if missing:
        raise UserError(
            f"--train.tracker {name} needs the library {library}, which is not installed; "
            f"install it with: pip install {library}, or give --train.tracker none"
        )


def build_tracker(run: RunFolder, step: int, *, writes: bool = True) -> Tracker:
    """The tracker of a run that continues after `step`; processes other than the first (writes=False) get one that does
    nothing."""
    name = run.config.train.tracker
    if not writes or name == "none":
        return NoTracker()
    return TensorBoard(run, step) if name == "tensorboard" else Remote(run, name)


def scalars_of(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and values of a line of metrics: split/name, and split/name/layer for values per layer."""
    for name, value in line.items():
        if isinstance(value, list):
            for layer, x in enumerate(value):
                yield f"{line['split']}/{name}/{layer}", x
        elif isinstance(value, (int, float)) and name != "step":
            yield f"{line['split']}/{name}", value


class NoTracker:
    def add(self, line: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoard:
    """Event files in the run folder. Events of steps that a resumed run repeats are hidden (`purge_step`).

    A thread of the library writes them. What it cannot write becomes an error of the next call here, so until `close` its
    own traceback is kept off the terminal.
    """

    def __init__(self, run: RunFolder, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = run.path / "tensorboard"
        self.hook, threading.excepthook = threading.excepthook, self._on_dying_thread
        with self._resumable():
            self.writer = SummaryWriter(str(self.folder), purge_step=step + 1)

    def add(self, line: dict[str, Any]) -> None:
        with self._resumable():
            for name, value in scalars_of(line):
                self.writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the same scalars are in metrics.jsonl
            self.writer.close()
        self._restore_hook()

    @contextlib.contextmanager
    def _resumable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._restore_hook()
            advice = f"once that is fixed, continue with: expire-span resume {self.folder.parent}"
            raise StorageError(f"cannot write {self.folder}: {describe(error)}; {advice}") from error

    def _on_dying_thread(self, args: threading.ExceptHookArgs) -> None:
        if not isinstance(args.exc_value, OSError):
            self.hook(args)

    def _restore_hook(self) -> None:
        if threading.excepthook == self._on_dying_thread:
            threading.excepthook = self.hook


class Remote:
    """Weights & Biases or MLflow through accelerate; they are configured by their own environment variables."""

    def __init__(self, run: RunFolder, name: str) -> None:
        from accelerate import tracking

        if name == "wandb":
            self.tracker: Any = tracking.WandBTracker("expire-span", name=run.name, dir=str(run.path))
        else:
            self.tracker = tracking.MLflowTracker("expire-span", run_name=run.name)
        try:
            # Newer releases of accelerate start a tracker in a second call.
            start = getattr(self.tracker, "start", None)
            if start is not None:
                start()
            config = to_dict(run.config) if name == "wandb" else dict(walk(run.config))
            self.tracker.store_init_configuration(config)
        except Exception as error:  # a service that is down or wants a login fails with errors of its own library
            cause = " ".join(str(error).split())[:120] or type(error).__name__
            advice = f"fix that, then continue with: expire-span resume {run.path}"
            raise UserError(f"--train.tracker {name} could not be started ({cause}); {advice}") from error

    def add(self, line: dict[str, Any]) -> None:
        self.tracker.log(dict(scalars_of(line)), step=line["step"])

    def close(self) -> None:
        self.tracker.finish()
