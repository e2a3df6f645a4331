"""Where else the scalars of metrics.jsonl go: a viewer that people already use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from expire_span.runs import RunFolder


class Tracker(Protocol):
    def add(self, line: dict[str, Any]) -> None:
        """Take one line of metrics."""
        ...

    def close(self) -> None: ...


def build_tracker(run: RunFolder, step: int, *, writes: bool = True) -> Tracker:
    """The tracker of a run that goes on after `step`; processes that write nothing get one that does nothing."""
    return TensorBoard(run, step) if writes else NoTracker()


def scalars_of(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and values of a line of metrics: split/name, and split/name/layer where there is one value a layer."""
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
    """Event files in the run folder; those of steps that a resumed run makes again are hidden."""

    def __init__(self, run: RunFolder, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)

    def add(self, line: dict[str, Any]) -> None:
        for name, value in scalars_of(line):
            self.writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        self.writer.close()
