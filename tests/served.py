"""`expire-span serve` in a process of its own, on a free port of this machine, for tests that attack or stop it.

The processes are forked from one that has loaded all modules, so that each starts within a moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.forked import CONTEXT

HEAD = "HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


class Served:
    """A server that runs: its process, its port, and the file that its output goes to."""

    def __init__(self, process: Any, log: Path) -> None:
        self.process, self.log, self.port = process, log, 0

    def wait(self, seconds: float = 180) -> None:
        """Wait until it listens."""
        end = time.monotonic() + seconds
        while not (found := re.search(r"serving .* at http://[^ ]*:(\d+)/v1", self.log.read_text())):
            assert self.process.is_alive() and time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)
        self.port = int(found[1])
        while True:
            with contextlib.suppress(ConnectionError), self.connect() as sock:
                sock.sendall(f"GET /v1/models {HEAD}\r\n".encode())
                if sock.recv(100):
                    return
            assert time.monotonic() < end

    def connect(self, timeout: float = 30) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def ask(self, method: str, path: str, body: Any = None, *, host: str = "127.0.0.1", **headers: str) -> Any:
        """Status, headers and body (as JSON, if it is) of an answer."""
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        data = body if isinstance(body, (bytes, str)) or body is None else json.dumps(body)
        connection.request(method, path, data, {"Host": host, "Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        raw = answer.read()
        connection.close()
        with contextlib.suppress(ValueError):
            return answer.status, dict(answer.getheaders()), json.loads(raw)
        return answer.status, dict(answer.getheaders()), raw

    def complete(self, **fields: Any) -> Any:
        """Status and body of the answer to a completion of one token, unless the fields say otherwise."""
        options = {"prompt": "x", "max_tokens": 1, "temperature": 0, **fields}
        status, _, body = self.ask("POST", "/v1/completions", options)
        return status, body

    def begin(self, **fields: Any) -> socket.socket:
        """A connection on which a completion was asked for, and nothing was read."""
        body = json.dumps({"prompt": "x", "temperature": 0, **fields}).encode()
        sock = socket.socket()
        sock.settimeout(30)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", self.port))
        sock.sendall(f"POST /v1/completions {HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return sock

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def ended(self, seconds: float) -> int | None:
        """The exit code, if the process ends within so many seconds; signals are negative."""
        self.process.join(seconds)
        return self.process.exitcode


def listen_with_small_buffers(host: str, port: int) -> socket.socket:
    """In place of the command's own: what a client does not read soon waits in the server."""
    listener = socket.create_server((host, port), backlog=100)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listener


def _run(arguments: list[str], log: str, files: int, patches: dict[str, Any]) -> None:
    import importlib

    from expire_span.cli import main

    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a fork server's children ignore it
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    for place, value in patches.items():
        module, _, name = place.rpartition(".")
        setattr(importlib.import_module(module), name, value)
    os._exit(main(arguments))


@contextlib.contextmanager
def served(folder: Path, *options: str, files: int = 0, patches: dict[str, Any] | None = None) -> Iterator[Served]:
    """A server of the model in `folder/base` with the adapter in `folder/adapter`. files: how many it may open; patches: values
    of module attributes in its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = folder / f"serve-{port}.log"
    log.touch()
    adapter = ["--adapter", str(folder / "adapter"), "--device", "cpu", "--port", str(port)]
    arguments = ["serve", str(folder / "base"), *adapter, *options]
    process = CONTEXT.Process(target=_run, args=(arguments, str(log), files, patches or {}), daemon=True)
    process.start()
    server = Served(process, log)
    try:
        server.wait()
        yield server
    finally:
        process.kill()
        process.join()


def save_served(folder: Path) -> Path:
    """A tiny model and an adapter that forgets, where `served` looks for them."""
    from expire_span.hf.loading import open_model
    from tests.hf_models import forgetful, model_folder

    model, _ = open_model(str(model_folder(folder / "base")), device="cpu")
    forgetful(model, max_span=60, ramp=8).save(folder / "adapter")
    return folder
