"""`expire-span serve`: a run's model, or a retrofitted one, over HTTP."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from expire_span.checks import Count, Natural, NonNegative, Port, at_least
from expire_span.errors import UserError, describe
from expire_span.extras import install_command
from expire_span.shipped import SHIPPED

from .parsing import PROGRAM, parse, warn

if TYPE_CHECKING:
    from expire_span.serve.scheduler import Scheduler
    from expire_span.serve.sessions import Sessions
    from expire_span.serve.text import TextModel

KEYS = "EXPIRE_SPAN_API_KEYS"
"""Variable of the environment with the keys that may ask, separated by commas."""


@dataclass(frozen=True)
class Serve:
    """Serve completions and chat as OpenAI's API does; on this machine only, unless --host says otherwise."""

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = None
    """A run of text, by name or folder; with --adapter, the folder, .gguf file or hub name of a causal language model; without
    either, the model that ships with the package."""
    adapter: Path | None = None
    """Adapter folder, for a retrofitted model."""
    runs_dir: Path = Path("runs")
    """Folder of runs."""
    host: str = "127.0.0.1"
    """Address to listen on. For any other address, set keys (EXPIRE_SPAN_API_KEYS) and put a proxy with TLS before it."""
    port: Port = 8000
    """Port to listen on."""
    rows: Count = 8
    """Largest number of requests that run at a time; others wait."""
    pause: Annotated[float, at_least(0.01)] = 1.0
    """Seconds for which running answers wait at most while a part of another prompt is read, on a CPU. Less lets their tokens
    come more evenly, and reads prompts more slowly."""
    dtype: Literal["fp32", "bf16", "fp16", "int8", "nf4"] = "fp32"
    """Precision of a retrofitted model; a run has its own."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N; with an adapter also spread: layers on all GPUs, and the rest in the memory beside them."""
    allow_host: tuple[str, ...] = ()
    """Names under which clients may ask, besides this machine's addresses and localhost: that of a proxy, for example."""
    max_waiting: Count = 1024
    """Largest number of texts that wait for their turn; more are refused with 429."""
    max_prompt: Count = 500_000
    """Largest number of tokens of a prompt."""
    max_kept: Natural = 4096
    """Largest number of tokens of a chat that are marked "keep"."""
    max_answer: Count = 100_000
    """Largest number of tokens of an answer that a client may ask for (max_tokens)."""
    session_memory: Natural = 1_000_000_000
    """Bytes of memory for what earlier requests have read, so that a prompt that begins as they did goes on from there; 0 reads
    every prompt whole."""
    session_folder: Path | None = None
    """Folder for sessions that leave the memory, and for the ends of answers, so that chats outlive the server. It holds what
    the model remembers of texts: protect it as you would protect them."""
    session_disk: Natural = 10_000_000_000
    """Bytes of files in that folder; the sessions that were not used for longest are deleted."""
    max_body: Count = 4_000_000
    """Largest number of bytes of a request."""
    patience: Annotated[float, at_least(0.1)] = 30.0
    """Seconds that a client may let the server wait: for a whole request, or for reading on in an answer."""
    grace: NonNegative = 5.0
    """Seconds that answers have to end after SIGTERM or Ctrl-C; then they are cut off. A second signal ends at once."""


def run_serve(args: list[str]) -> int:
    command = parse(Serve, args, f"{PROGRAM} serve")
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"serve needs {package}; install it with: {install_command('hf')}")
    from expire_span.serve.scheduler import Scheduler

    with _listen(command.host, command.port) as listener:
        keys, text = _keys(), _open(command)
        sizes = dict(rows=command.rows, waiting=command.max_waiting)
        scheduler = Scheduler(text, **sizes, sessions=_sessions(command, text), pause=command.pause)
        try:
            _serve(command, scheduler, listener, keys)
        finally:
            scheduler.close()
    return 0


def _open(command: Serve) -> TextModel:
    from expire_span.serve.text import open_retrofit, open_run
    from expire_span.train.devices import check_device

    if command.adapter is not None:
        if command.model is None:
            raise UserError(
                f"--adapter {command.adapter} needs its MODEL, got none; give a folder, a .gguf file or a hub name"
            )
        return open_retrofit(command.model, command.adapter, command.dtype, command.device)
    return open_run(command.model, command.runs_dir, check_device(command.device), warn)


def _keys() -> list[str]:
    """The keys that may ask; none lets everybody."""
    given = os.environ.get(KEYS)
    keys = [key.strip() for key in (given or "").split(",") if key.strip()]
    if given is not None and not keys:
        raise UserError(f"{KEYS} must hold keys with commas between them, got none; give some, or unset it")
    if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise UserError(
            f"{KEYS} must hold keys of printable ASCII characters without spaces, got others; give such keys"
        )
    return keys


def _sessions(command: Serve, text: TextModel) -> Sessions | None:
    from expire_span.serve.sessions import Sessions
    from expire_span.stream.decoders import model_of

    if command.session_memory == 0:
        if command.session_folder is not None:
            raise UserError(
                f"--session-folder {command.session_folder} needs memory to write from, got --session-memory 0; give more"
            )
        return None
    if model_of(text.model).capped:
        warn("this model has a cap, and what it evicts depends on where reading pauses; it is served without sessions")
        return None
    return Sessions(text.model, command.session_memory, command.session_folder, command.session_disk)


def _serve(command: Serve, scheduler: Scheduler, listener: socket.socket, keys: list[str]) -> None:
    from expire_span.serve.http import Limits, build_app, problem
    from expire_span.web.guard import Keys
    from expire_span.web.hosts import LOOPBACK, OwnHosts, is_loopback
    from expire_span.web.server import Server, ServerConfig, exempt_loaded

    sizes = command.max_body, command.max_prompt, command.max_kept, command.max_answer
    limits = Limits(*sizes, patience=command.patience)
    names = {*LOOPBACK, command.host, *command.allow_host}
    hosts = OwnHosts(names, any_address=not is_loopback(command.host), hint="; allow a name with --allow-host")
    name = command.model or SHIPPED.name
    who = Keys(keys, open_paths=("/health",)) if keys else None
    app = build_app(scheduler, name, limits=limits, hosts=hosts, keys=who)

    def refuse() -> None:
        told = f"answers under way have {command.grace:g} s to end; a second signal ends at once"
        print(f"stopping: {told}", file=sys.stderr)
        scheduler.refuse()

    config = ServerConfig(app, patience=command.patience, grace=command.grace, problem=problem)
    address = f"http://{command.host}:{listener.getsockname()[1]}/v1"
    print(f"serving {name} at {address}; Ctrl-C stops", file=sys.stderr, flush=True)
    exempt_loaded()
    Server(config, refuse, scheduler.stop).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens already, so that a port in use is found before the model is loaded."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=100)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}, port {port}: {describe(error)}; give another --port or --host"
        ) from error
