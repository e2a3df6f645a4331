"""Many clients at once: chats that go on, texts that are abandoned, a server that is killed and started again on its folder.

Every answer must be the one that the same request gets alone, without sessions.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import random
import signal
import threading
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from expire_span.serve.protocol import Chat, Completion
from expire_span.serve.scheduler import Scheduler
from expire_span.serve.text import open_retrofit
from tests.served import save_served, served

pytestmark = pytest.mark.slow
WORDS = (
    "the old fox saw a red hen. ",
    "where is the river? ",
    "my friend took the road home, ",
    "\u00fcber den Flu\u00df ",
)
SESSIONS = 3_000_000
ROOM = 80_000_000
"""Bytes by which a server may grow after its first requests, sessions not counted: buffers of as many rows, and connections."""
GONE = (ConnectionError, http.client.HTTPException, TimeoutError)


class Alone:
    """Answers of the same model, one at a time, without sessions."""

    def __init__(self, folder: Path) -> None:
        self.text = open_retrofit(str(folder / "base"), folder / "adapter", "fp32", "cpu")
        self.scheduler = Scheduler(self.text, rows=1)
        self.known: dict[str, list[str]] = {}
        self.lock = threading.Lock()

    def answer(self, path: str, body: dict) -> list[str]:
        name = path + json.dumps(body, sort_keys=True)
        with self.lock:
            if name not in self.known:
                pieces: queue.Queue = queue.Queue()
                kind = Chat if "chat" in path else Completion
                requests = kind(**body).requests(self.text, 9, lambda n: lambda piece: pieces.put((n, piece)))
                self.scheduler.submit(*requests)
                texts, left = [""] * len(requests), len(requests)
                while left:
                    index, piece = pieces.get(timeout=60)
                    assert not isinstance(piece, Exception), piece
                    texts[index] += piece or ""
                    left -= piece is None
                self.known[name] = texts
            return self.known[name]


class Client(threading.Thread):
    """Asks so many requests, some of them as a chat. What the server cannot answer while it is down is asked again."""

    def __init__(self, number: int, requests: int, place: Place, alone: Alone) -> None:
        super().__init__(daemon=True)
        self.draws, self.requests, self.place, self.alone = random.Random(number), requests, place, alone
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            messages: list[dict] = []
            for _ in range(self.requests):
                messages = self.one(messages)
                self.place.answered()
        except BaseException as error:  # raised by the test
            self.failure = error

    def one(self, messages: list[dict]) -> list[dict]:
        """One request: of a chat, a completion, one that is abandoned, or one that is wrong."""
        what = self.draws.choice(["chat", "chat", "chat", "completion", "abandoned", "wrong"])
        options = {"max_tokens": self.draws.choice([3, 8]), "temperature": self.draws.choice([0, 0.9]), "seed": 4}
        if what == "chat":
            if not messages or len(messages) > 6:
                messages = [
                    {
                        "role": "system",
                        "content": WORDS[0] * self.draws.choice([1, 5]),
                        "keep": self.draws.random() < 0.5,
                    }
                ]
            wish = self.draws.choice([{}, {}, {"expires": 20}])
            messages = [*messages, {"role": "user", "content": self.draws.choice(WORDS), **wish}]
            text = self.compare("/v1/chat/completions", {"messages": messages, **options})
            return [*messages, {"role": "assistant", "content": text}]
        prompt = self.draws.choice(WORDS) * self.draws.choice([1, 3, 30])
        if what == "completion":
            self.compare("/v1/completions", {"prompt": prompt, **options, "n": self.draws.choice([1, 2])})
        elif what == "abandoned":
            self.abandon({"prompt": prompt, "max_tokens": 10**5, "stream": True})
        else:
            status, _ = self.ask("/v1/completions", {"prompt": prompt, "n": -1})
            assert status == 400
        return messages

    def compare(self, path: str, body: dict) -> str:
        status, answer = self.ask(path, body)
        assert status == 200, answer
        texts = [x["text"] if "text" in x else x["message"]["content"] for x in answer["choices"]]
        assert texts == self.alone.answer(path, body), body
        return texts[0]

    def ask(self, path: str, body: dict) -> tuple[int, dict]:
        while True:
            with contextlib.suppress(*GONE), self.place.connection() as connection:
                connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
                answer = connection.getresponse()
                told = json.loads(answer.read())
                if answer.status not in (429, 503):  # asked to come again
                    return answer.status, told
            self.place.wait()

    def abandon(self, body: dict) -> None:
        with contextlib.suppress(*GONE), self.place.connection() as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            connection.getresponse().read(100)


class Place:
    """Where the server is now, and how many requests were answered."""

    def __init__(self) -> None:
        self.port, self.count = 0, 0
        self.changed = threading.Condition()

    @contextlib.contextmanager
    def connection(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            yield connection
        finally:
            connection.close()

    def answered(self) -> None:
        with self.changed:
            self.count += 1
            self.changed.notify_all()

    def moved(self, port: int) -> None:
        with self.changed:
            self.port = port
            self.changed.notify_all()

    def wait(self) -> None:
        """Until something happens: another answer, or another server; a moment at most."""
        with self.changed:
            self.changed.wait(0.1)

    def wait_for(self, count: int, clients: list[Client]) -> None:
        with self.changed:
            while self.count < count and not any(x.failure for x in clients):
                self.changed.wait(0.1)


def memory_of(server) -> int:
    """Resident bytes of a server's process."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmRSS")))


@pytest.mark.parametrize(("clients", "requests"), [(8, 6), pytest.param(200, 10, marks=pytest.mark.long)])
def test_every_answer_is_the_one_computed_alone(clients, requests, tmp_path):
    folder, sessions = save_served(tmp_path), tmp_path / "sessions"
    alone, place, total = Alone(folder), Place(), clients * requests
    options = ["--session-memory", str(SESSIONS), "--session-folder", str(sessions), "--session-disk", "20000000"]
    crowd = [Client(n, requests, place, alone) for n in range(clients)]
    with served(folder, *options) as server:
        place.moved(server.port)
        for client in crowd:
            client.start()
        place.wait_for(total // 3, crowd)
        server.send(signal.SIGKILL)
        assert server.ended(20) == -signal.SIGKILL
    with served(folder, *options) as server:
        place.moved(server.port)
        place.wait_for(total // 2, crowd)
        early = memory_of(server)
        for client in crowd:
            client.join(600)
        for client in crowd:
            if client.failure is not None:
                raise client.failure
        assert place.count == total
        assert memory_of(server) < early + SESSIONS + ROOM
        _, _, metrics = server.ask("GET", "/metrics")
        found = dict(line.rsplit(" ", 1) for line in metrics.decode().splitlines() if not line.startswith("#"))
        assert int(found['expire_span_session_lookups_total{found="yes"}']) > 0
        assert int(found['expire_span_session_bytes{place="memory"}']) <= SESSIONS
        assert int(found['expire_span_session_bytes{place="disk"}']) <= 20_000_000
        assert found['expire_span_requests_total{reason="failed"}'] == "0"
        assert "Traceback" not in server.log.read_text()
    assert not [
        x
        for x in sessions.rglob("*")
        if x.is_file() and x.suffix != ".safetensors" and str(server.process.pid) in x.name
    ]
    alone.scheduler.close()
