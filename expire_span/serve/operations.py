"""What those who run a server ask it: whether it is up, what it does (for Prometheus), and what a chat's memory holds."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import fastapi
import torch
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, PlainTextResponse

from expire_span.checks import show
from expire_span.store import ExpiringMemory
from expire_span.store.slots import KEPT
from expire_span.web.guard import OWNER

from .batch import Batch
from .scheduler import STOPPED, Scheduler
from .sessions import Snapshot

ENDINGS = ("stop", "length", "cancelled", "failed")
READINGS = ("read", "known", "written")


def add_operations(app: FastAPI, scheduler: Scheduler, name: str) -> None:
    """GET /health, /metrics and /v1/memory/{session}."""

    @app.get("/health")
    async def health() -> JSONResponse:
        alive = scheduler.alive
        return JSONResponse({"status": "ok" if alive else "stopping"}, status_code=200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        try:
            living, held = await asyncio.wrap_future(scheduler.ask(_measure))
        except RuntimeError as error:
            raise HTTPException(503, STOPPED) from error
        text = write_metrics(scheduler, living, held)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/memory/{session}")
    async def memory(session: str, http: fastapi.Request) -> dict[str, Any]:
        sessions = scheduler.sessions
        if sessions is None:
            raise HTTPException(404, "this server keeps no sessions; start it with --session-memory")
        found = await asyncio.to_thread(sessions.look, http.scope.get(OWNER, ""), session)
        if found is None:
            shown = show(session)[1:-1]
            raise HTTPException(404, f"no session is known by this name, got {shown}; an answer's choice names its own")
        return {"object": "memory", "session": session, "model": name, **await asyncio.to_thread(list_living, found)}


def _measure(batch: Batch) -> tuple[int, int]:
    """Living memories of all requests that run, over layers and heads, and the bytes that are held for them."""
    if not batch.responses:
        return 0, 0
    return sum(int(layer.sum()) for layer in batch.stream.live_by_head), batch.stream.bytes_held


def write_metrics(scheduler: Scheduler, living: int, held: int) -> str:
    """All metrics in Prometheus' text format."""
    counts, sessions = scheduler.counts, scheduler.sessions
    ended = {f'{{reason="{x}"}}': counts[x] for x in ENDINGS}
    tokens = {f'{{kind="{x}"}}': counts[x] for x in READINGS}
    lines = [
        *_metric("requests_total", "counter", "Requests that have ended, by how they ended.", ended),
        *_metric("tokens_total", "counter", "Prompt tokens that were read or known, and tokens written.", tokens),
        *_metric("requests_running", "gauge", "Requests that run.", scheduler.running),
        *_metric("requests_waiting", "gauge", "Requests that wait for a row.", scheduler.waiting),
        *_metric("memories_alive", "gauge", "Living memories of running requests, over layers and heads.", living),
        *_metric("memory_bytes", "gauge", "Bytes held for running requests, spare slots included.", held),
    ]
    if sessions is not None:
        in_memory, on_disk = sessions.bytes_held()
        places = {'{place="memory"}': in_memory, '{place="disk"}': on_disk}
        found = {f'{{found="{x}"}}': sessions.counts[y] for x, y in (("yes", "hits"), ("no", "misses"))}
        lines += _metric("session_lookups_total", "counter", "Prompts, by whether a beginning was known.", found)
        lines += _metric("session_bytes", "gauge", "Bytes of sessions.", places)
        lines += _metric("sessions", "gauge", "Snapshots that are known.", len(sessions))
        for word, told in (
            ("evictions", "Snapshots that left the memory."),
            ("written", "Snapshots written to the folder."),
            ("failed", "Files of snapshots that could not be written or read."),
        ):
            lines += _metric(f"session_{word}_total", "counter", told, sessions.counts[word])
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, told: str, values: Any) -> list[str]:
    name = f"expire_span_{name}"
    samples = values if isinstance(values, dict) else {"": values}
    return [f"# HELP {name} {told}", f"# TYPE {name} {kind}", *(f"{name}{label} {x}" for label, x in samples.items())]


def list_living(found: Snapshot) -> dict[str, Any]:
    """What is alive of each message: how many memories over layers and heads, of how many tokens, from when, for how long."""
    assert found.read is not None
    born, left = _living(found.read.state)
    whole = {"tokens": found.length, "bytes": found.size, "alive": len(born)}
    messages = []
    for place in found.places:
        inside = (born >= place["begin"]) & (born < place["end"])
        messages.append({**place, **_summary(born[inside], left[inside])})
    return {**whole, "messages": messages}


def _living(state: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Position of birth and steps left of every living memory of all layers that have lifetimes."""
    born, left = [torch.empty(0, dtype=torch.int64)], [torch.empty(0)]
    for part in state:
        memory = part.get("memory") if isinstance(part, dict) else None
        if isinstance(memory, ExpiringMemory):
            remaining = memory.remaining(part["position"])
            alive = remaining > 0
            born.append(memory.pos[alive])
            left.append(remaining[alive].float())
    return torch.cat(born), torch.cat(left)


def _summary(born: torch.Tensor, left: torch.Tensor) -> dict[str, Any]:
    if not len(born):
        return {"alive": 0, "tokens_alive": 0, "since": None, "for": 0}
    longest = float(left.max())
    lasts = "ever" if longest > KEPT / 2 else math.ceil(longest)
    return {"alive": len(born), "tokens_alive": len(born.unique()), "since": int(born.min()), "for": lasts}
