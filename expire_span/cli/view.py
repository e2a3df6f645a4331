"""`expire-span view [RUN|ADAPTER|TRACE]`: serves the page that shows what a model remembers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from expire_span.checks import Port
from expire_span.extras import install_command
from expire_span.runs import UserError, find_run

from .parsing import PROGRAM, parse
from .runs import find_adapter


@dataclass(frozen=True)
class View:
    """Show what a model remembers, on a page that only this computer can open."""

    source: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN|ADAPTER|TRACE]")] = None
    """Name or folder of a run, an adapter folder, or a trace file; without it, the model that ships with the package."""
    runs_dir: Path = Path("runs")
    """Folder that holds the run folders."""
    model: str | None = None
    """Of an adapter: its base model, a folder, a .gguf file or a hub name; None is where the adapter was made."""
    port: Port = 8700
    """Port to listen on; if it is taken, the next free one."""
    no_browser: bool = False
    """Print the address only, and open no browser."""


def run_view(args: list[str]) -> int:
    command = parse(View, args, f"{PROGRAM} view")
    path = None if command.source is None else Path(command.source)
    trace = path if path is not None and path.is_file() else None
    adapter = find_adapter(command.source)
    run = None if trace or adapter else find_run(command.source, command.runs_dir)
    _check_extra()
    from expire_span.view.server import Source, bind_port, leave_a_core, serve
    from expire_span.view.trace import read_lines
    from expire_span.web.server import exempt_loaded

    if trace is not None:
        next(read_lines(trace))  # a file that is not a trace is refused before a server starts
    source = Source(run, trace, adapter=adapter, model=command.model)
    if adapter is not None:
        source.reader()  # a base model that cannot be found is refused before a server starts
    sock = bind_port(command.port)
    port = sock.getsockname()[1]
    if port != command.port:
        print(f"port {command.port} is in use, taking {port}")
    address = f"http://127.0.0.1:{port}/"
    print(f"{source.path} at {address} (Ctrl+C ends)", flush=True)
    leave_a_core()
    source.warm()
    exempt_loaded()
    serve(source, sock, ready=None if command.no_browser else lambda _: _open_browser(address))
    return 0


def _check_extra() -> None:
    import importlib.util

    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"view needs {' and '.join(missing)}; install with: {install_command('view')}")


def _open_browser(address: str) -> None:
    """Open the address a moment after the server has started; without a browser, nothing happens."""
    import threading
    import webbrowser

    threading.Timer(0.5, webbrowser.open, [address]).start()
