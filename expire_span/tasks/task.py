"""Alias of `expire_span.tasks.contract` and `expire_span.tasks.registry`, kept for one release (until 0.3)."""

from .contract import Batch, BatchStream, Score, Split, Task, bits
from .registry import build_task

__all__ = ["Batch", "BatchStream", "Score", "Split", "Task", "bits", "build_task"]
