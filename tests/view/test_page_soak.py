"""The command `expire-span view` as a process: it says where it is, and hostile and parallel requests leave it as it was."""

from __future__ import annotations

import http.client
import json
import math
import random
import re
import signal
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import psutil
import pytest

from expire_span.train.supervised import train
from expire_span.view.server import bind_port
from tests.browser import wait_until
from tests.forked import Forked
from tests.tiny import tiny_config, write_text

WORKERS = 6
"""Threads that ask at the same time."""
TEXT = "one two three memory fades \U0001f600 <script>alert(1)</script> "


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[tuple[int, psutil.Process]]:
    """Port and process of the real command, which was asked for a port that is taken and says which one it takes instead."""
    folder = tmp_path_factory.mktemp("soak")
    run = train(tiny_config(write_text(folder), steps=2), folder / "runs" / "tiny", shown=False)
    taken = bind_port(8980)
    wanted = taken.getsockname()[1]
    process = Forked("view", str(run.path), "--no-browser", "--port", str(wanted))
    try:
        wait_until(lambda: process.said("out").count("\n") >= 2 or process.poll() is not None, 60)
        first, second, *_ = process.said("out").splitlines()
        said = re.fullmatch(rf"port {wanted} is in use, taking (\d+)", first)
        assert said and int(said[1]) > wanted  # the next one may be somebody else's
        assert f"{run.path} at http://127.0.0.1:{said[1]}/" in second
        yield int(said[1]), psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        _, complaints = process.communicate(20)
        taken.close()
    assert "Traceback" not in complaints


@dataclass
class Soak:
    """Requests of all kinds, as fast as the server answers them: each worker goes through all of them, in orders of its own."""

    port: int
    rounds: float
    """How often, ..."""
    ends: float
    """... and until when."""
    done: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def seen(self) -> Counter[str]:
        """Requests of each kind that were answered as they should be."""
        return Counter(self.done)

    def run(self, seed: int) -> None:
        draw = random.Random(seed)
        kinds = [self.read, self.cut, self.sample, self.write_and_leave, self.bad_json, self.too_long, self.foreign]
        kinds += [self.half_a_request, self.unknown, self.page, self.odd_bytes, self.act_on_nothing]
        order: list[Callable[[random.Random], None]] = []
        left = self.rounds * len(kinds)
        while left > 0 and time.monotonic() < self.ends:
            order, left = order or draw.sample(kinds, len(kinds)), left - 1
            kind = order.pop()
            try:
                kind(draw)
                self.done.append(kind.__name__)
            except (OSError, http.client.HTTPException) as error:
                self.faults.append(f"{kind.__name__}: {type(error).__name__} {error}")
            except AssertionError as error:
                self.faults.append(f"{kind.__name__}: {error}")

    def ask(self, path: str, body: bytes | None = None, method: str = "POST", **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        out = answer.status, answer.read()
        connection.close()
        return out

    def expect(self, status: int, path: str, body: bytes | None = None, method: str = "POST", **headers: str) -> bytes:
        got, data = self.ask(path, body, method, **headers)
        assert got == status, f"{got} instead of {status}: {data[:200]!r}"
        return data

    def read(self, draw: random.Random) -> None:
        text = TEXT * draw.randrange(1, 20)
        lines = self.expect(200, "/api/trace", json.dumps({"text": text}).encode()).splitlines()
        assert len(lines) == len(text.encode()) + 1 and b'"error"' not in lines[-1]

    def cut(self, draw: random.Random) -> None:
        wanted = {"text": TEXT * 4, "max_span": draw.randrange(50), "live": draw.randrange(1, 30)}
        self.expect(200, "/api/trace", json.dumps(wanted).encode())

    def sample(self, draw: random.Random) -> None:
        self.expect(200, "/api/sample", b"{}")

    def write_and_leave(self, draw: random.Random) -> None:
        """A tab that is closed while the model writes; eight at once are the limit."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        wanted = {"text": "one", "max_tokens": 100_000, "seed": draw.randrange(1000), "paused": draw.random() < 0.3}
        connection.request("POST", "/api/generate", json.dumps(wanted).encode())
        answer = connection.getresponse()
        assert answer.status in (200, 400), answer.status
        answer.read1(draw.randrange(1, 3000))  # what there is: a paused text sends no more than its prompt
        connection.close()

    def bad_json(self, draw: random.Random) -> None:
        body = draw.choice([b"{", b"[" * 10_000, b"\xff\xfe", b"null", b'{"text": 3}', b'{"text":"a","live":-1}'])
        self.expect(400, "/api/trace", body)

    def too_long(self, draw: random.Random) -> None:
        self.expect(400, "/api/trace", json.dumps({"text": "x" * 300_000}).encode())

    def foreign(self, draw: random.Random) -> None:
        self.expect(403, "/api/info", method="GET", host="evil.example")
        self.expect(403, "/api/trace", b"{}", origin="http://evil.example")

    def half_a_request(self, draw: random.Random) -> None:
        """A connection that promises a body and goes away."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as sock:
            head = f"POST /api/trace HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Length: 1000\r\n\r\n"
            sock.sendall(head.encode()[: draw.randrange(5, 200)])

    def unknown(self, draw: random.Random) -> None:
        self.expect(404, f"/{draw.choice(['api/none', '..%2f..%2fetc/passwd', 'x' * 2000])}", method="GET")

    def page(self, draw: random.Random) -> None:
        assert b"es-view" in self.expect(200, "/", method="GET")

    def odd_bytes(self, draw: random.Random) -> None:
        raw = draw.randbytes(500)
        lines = self.expect(200, "/api/trace", raw, content_type="application/octet-stream").splitlines()
        assert len(lines) == 501

    def act_on_nothing(self, draw: random.Random) -> None:
        self.expect(400, f"/api/generate/{draw.randrange(99)}/{draw.choice(['pause', 'stop', 'explode'])}", b"")


def soak(
    port: int, process: psutil.Process, *, rounds: float = math.inf, seconds: float = math.inf
) -> tuple[Soak, list[float]]:
    """Ask so often or for so long; returns what was asked and the server's memory in MB, looked at throughout."""
    asked = Soak(port, rounds, time.monotonic() + seconds)
    threads = [threading.Thread(target=asked.run, args=(seed,)) for seed in range(WORKERS)]
    memory = []
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        memory.append(process.memory_info().rss / 1e6)
        time.sleep(min(1.0, seconds / 20) if seconds < math.inf else 0.1)
    return asked, memory


def check(asked: Soak, memory: list[float], still: Callable[[], int]) -> None:
    assert asked.faults == [], asked.faults[:5]
    assert still() == 200, "it still answers"


def test_hostile_and_parallel_requests(server):
    port, process = server
    asked, memory = soak(port, process, rounds=1)
    check(asked, memory, lambda: asked.ask("/api/info", method="GET")[0])
    assert set(asked.seen.values()) == {WORKERS} and len(asked.seen) == 12, asked.seen
    assert memory[-1] - memory[0] < 300, memory  # buffers that are made once; the long twin shows that nothing grows


@pytest.mark.long
def test_ten_minutes_of_them(server):
    port, process = server
    soak(port, process, seconds=20)  # every path has been taken once
    asked, memory = soak(port, process, seconds=600)
    check(asked, memory, lambda: asked.ask("/api/info", method="GET")[0])
    sixth = len(memory) // 6
    early, late = statistics.median(memory[:sixth]), statistics.median(memory[-sixth:])
    print(json.dumps({"requests": sum(asked.seen.values()), "kinds": asked.seen, "early_mb": early, "late_mb": late}))
    assert late < early * 1.05 + 5, (early, late, memory[:: max(len(memory) // 20, 1)])
    assert process.num_threads() < 100 and len(process.net_connections()) < 50
