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
    records. Nothing makes a replay on the current stream wait for that: on a busy GPU, the first replay can find the zero in
    place of its own offset, and then draws numbers that were already drawn. So the current stream waits here.
    """
    recorder = torch.cuda.Stream()
    with torch.cuda.graph(graph, pool=pool, stream=recorder):
        yield
    torch.cuda.current_stream().wait_stream(recorder)
