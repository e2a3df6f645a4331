"""`expire-span serve`: a retrofitted model over HTTP."""

from __future__ import annotations

import importlib.util
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from expire_span.errors import UserError, describe

from .parsing import PROGRAM, check_port, options_at_least, parse


@dataclass(frozen=True)
class Serve:
    """Serve completions and chat as OpenAI's API does; on this machine only, unless --host says otherwise."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder, .gguf file or hub name of a causal language model."""
    adapter: Path
    """Adapter folder."""
    host: str = "127.0.0.1"
    """Address to listen on. The server has no authentication: put a proxy that has one before any other address."""
    port: int = 8000
    """Port to listen on."""
    rows: int = 8
    """Largest number of requests that run at a time; others wait."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of the model."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""


def run_serve(args: list[str]) -> int:
    command = parse(Serve, args, f"{PROGRAM} serve")
    check_port(command.port)
    options_at_least(command, 1, "rows")
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"serve needs {package}; install it with: pip install 'expire-span[hf,serve]'")
    import uvicorn

    from expire_span.hf.adapter import read_head
    from expire_span.hf.engine import AnswerEngine
    from expire_span.hf.handle import load_adapter
    from expire_span.hf.loading import open_model
    from expire_span.hf.serve import build_app

    read_head(command.adapter)  # before the model is loaded, which takes a while
    with _listen(command.host, command.port) as listener:
        model, tokenizer = open_model(command.model, command.dtype, command.device)
        engine = AnswerEngine(load_adapter(model, command.adapter), tokenizer, rows=command.rows)
        config = uvicorn.Config(build_app(engine, command.model), log_level="warning")
        server = _stopping_first(uvicorn.Server, engine)(config)
        print(f"serving {command.model} at http://{command.host}:{command.port}/v1; Ctrl-C stops", file=sys.stderr)
        try:
            server.run(sockets=[listener])
        finally:
            engine.close()
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens already, so that a port in use is found before the model is loaded."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=100)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}, port {port}: {describe(error)}; give another --port or --host"
        ) from error


def _stopping_first(kind: Any, engine: Any) -> Any:
    """A uvicorn server that ends the engine's requests when it is asked to stop: it waits for all connections to close, and an
    answer may be endless."""

    class Stopping(kind):
        def handle_exit(self, *signal: Any) -> None:
            engine.stop()
            super().handle_exit(*signal)

    return Stopping
