"""`expire-span serve`: a retrofitted model over HTTP."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from expire_span.errors import UserError

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

    from expire_span.hf.engine import Engine
    from expire_span.hf.handle import load_adapter
    from expire_span.hf.loading import open_model
    from expire_span.hf.serve import build_app

    model, tokenizer = open_model(command.model, command.dtype, command.device)
    engine = Engine(load_adapter(model, command.adapter), tokenizer, rows=command.rows)
    try:
        uvicorn.run(build_app(engine, command.model), host=command.host, port=command.port, log_level="warning")
    finally:
        engine.close()
    return 0
