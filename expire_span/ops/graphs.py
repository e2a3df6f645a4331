"""Recording of CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def record_graph(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Record the work of this context as `graph`, in a memory pool of its own or in `pool`.

    Before it records, PyTorch sets the registered random generators' offsets on the device to zero, on the stream that
    records. PyTorch promises nowhere that a replay on the current stream waits for that. On a busy GPU, first replays were
    seen to draw numbers that had already been drawn, as they would with an offset of zero. So the current stream waits here.
    """
    recorder = torch.cuda.Stream()
    with torch.cuda.graph(graph, pool=pool, stream=recorder):
        yield
    torch.cuda.current_stream().wait_stream(recorder)
