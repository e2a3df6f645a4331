"""What environments of other packages do wrong, in one sentence: they raise, hang, end the process, or return impossible
values."""

from __future__ import annotations

import signal
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from expire_span.errors import RunError, UserError
from expire_span.extras import EXTRAS, install_command
from expire_span.settings.agent import EnvTask, ObservationField


class NoAnswerError(RunError):
    """An environment has not answered in time."""


@contextmanager
def told(env: str, doing: str, options: str = "") -> Iterator[None]:
    """Turn whatever an environment raises into a sentence that names the environment, its error and the line that raised it.

    Args:
        doing: which of its parts runs: "reset", "step", or "its making", which takes the task's options.
    """
    try:
        yield
    except (UserError, RunError):
        raise  # it is a sentence already
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        raise RunError(
            f"a process of environment {env} was killed, as the system does when memory runs out; "
            "fewer --train.envs need less of it"
        ) from error
    except (Exception, SystemExit) as error:
        raise UserError(_sentence(error, env, doing, options)) from error


@contextmanager
def answer_within(task: EnvTask, doing: str, vector: Any = None) -> Iterator[None]:
    """Raise NoAnswerError if what runs inside takes longer than `task.patience` seconds, so that training does not hang.

    The system's timer interrupts it, which only the main thread of a Unix process can be; elsewhere nothing is limited.
    vector: environments in processes of their own, which are then ended.
    """
    if not _can_interrupt():
        yield
        return

    def interrupt(*given: Any) -> None:
        raise NoAnswerError(
            f"environment {task.env} has not answered for {task.patience:g} s in {doing}; if that is its usual time, give "
            "a larger --task.patience, and expire-span resume continues a run from its newest checkpoint"
        )

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, task.patience)
    try:
        yield
    except NoAnswerError:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if task.processes and vector is not None:
            with warnings.catch_warnings():  # that a step is pending is why it is closed
                warnings.simplefilter("ignore")
                vector.close(terminate=True)
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _can_interrupt() -> bool:
    """Whether this thread can be interrupted by the system's timer, and nobody else has set it."""
    ours = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    return ours and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def _sentence(error: BaseException, env: str, doing: str, options: str) -> str:
    words = " ".join(str(error).split()).rstrip(".")
    if doing == "its making":
        if type(error).__module__ == "gymnasium.error":
            hint = "" if ":" in env else f"; if another package registers it, write that module first, as module:{env}"
            return f"environment {env!r} cannot be made: {words}{hint}"
        if isinstance(error, ImportError):
            module = env.partition(":")[0].split(".")[0]
            if module in EXTRAS and find_spec(module) is None:
                return f"environment {env!r} needs the package {module}; install it with: {install_command(EXTRAS[module])}"
            advice = "a module of the current folder is found with PYTHONPATH=. before the command"
            return f"the module of environment {env!r} cannot be imported: {words.split('. Env')[0]}; {advice}"
        if isinstance(error, TypeError) and options:
            return f"task.options {options} do not fit {env}: {words}"
    name = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return f"environment {env} failed in {doing} with {name}{_place_of(error)}"


def _place_of(error: BaseException) -> str:
    """The line that raised, if it lies in the environment's code; one in a library that called it would tell nothing."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    if {"gymnasium", "numpy", "expire_span"} & set(Path(last.filename).parts) or last.filename.startswith("<"):
        return ""
    return f" ({Path(last.filename).name}, line {last.lineno})"


def check_values(env: str, name: str, values: Any, field: ObservationField | None = None) -> None:
    """Refuse numbers that are not finite, and choices or words outside of their range: a policy cannot read them."""
    array = np.asarray(values)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise UserError(f"the {name} of environment {env} must be finite, got {array[~np.isfinite(array)][0]}")
    if field is not None and field.form in ("choices", "words"):
        given, low = array.reshape(len(array), -1), np.asarray(field.lows or 0)
        wrong = (given < low) | (given >= low + np.asarray(field.sizes))
        if wrong.any():
            row, place = (int(x) for x in np.argwhere(wrong)[0])
            first = int(np.broadcast_to(low, len(field.sizes))[place])
            last = first + field.sizes[place] - 1
            raise UserError(f"the {name} of environment {env} must lie in {first}..{last}, got {given[row, place]}")
