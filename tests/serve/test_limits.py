"""The server of `serve` against clients that ask too much, too slowly or from elsewhere, and when it is asked to stop.

It runs in a process of its own, as the command line starts it.
"""

from __future__ import annotations

import functools
import json
import signal
import socket
import time
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from expire_span.web.hosts import OwnHosts, is_loopback
from tests.served import HEAD, listen_with_small_buffers, save_served, served

pytestmark = pytest.mark.slow
PATIENCE = 0.5
CONNECTIONS = 40
ENDLESS = 100_000
"""Tokens of an answer that is not over before its test, the most that a client may ask for."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_served(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def shared(folder):
    limits = ["--patience", str(PATIENCE), "--rows", "2", "--max-prompt", "1000", "--max-body", "100000"]
    patches = {
        "expire_span.web.server.MOST_CONNECTIONS": CONNECTIONS,
        "expire_span.cli.serve._listen": listen_with_small_buffers,
    }
    with served(folder, *limits, "--max-waiting", "200", "--allow-host", "box", patches=patches) as server:
        yield server


@pytest.fixture
def server(shared):
    """The shared server; after each test it still answers, and has written nothing."""
    told = shared.log.read_text()
    yield shared
    assert shared.complete()[0] == 200
    assert shared.log.read_text() == told


def refused(answer, status: int, words: str) -> None:
    """An answer (status, body) is a refusal in OpenAI's form, of one sentence with these words."""
    got, body = answer
    assert got == status, body
    message = body["error"]["message"]
    assert words in message and "\n" not in message and body["error"]["type"], message


def raw_answer(sock: socket.socket):
    """Status and body of the one answer on a connection that the server closes."""
    head, _, body = sock.makefile("rb").read().partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def test_requests_of_other_web_sites_are_refused(server):
    for host in ("evil.example", "127.0.0.1.evil.example", "", "localhost:x", "[::1", "192.168.0.7"):
        status, _, body = server.ask("GET", "/v1/models", host=host)
        refused((status, body), 403, "only, got host")
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        status, _, body = server.ask("POST", "/v1/completions", {"prompt": "x"}, Origin=origin)
        refused((status, body), 403, f"only, got origin {origin}")
    for host in ("127.0.0.1", "localhost:99", "LOCALHOST", "[::1]:8000", "box"):
        assert server.ask("GET", "/v1/models", host=host, Origin=f"http://{host}")[0] == 200


def test_addresses_of_a_server_that_others_may_reach():
    hosts = OwnHosts(("box",), any_address=True)
    fault = lambda host: hosts.find_fault([(b"host", host.encode())])  # noqa: E731
    assert not any(fault(host) for host in ("box:80", "10.0.0.1", "[fe80::1]:8000", "0.0.0.0:1"))
    assert fault("10.0.0.1.example") == "this server answers IP addresses and box only, got host 10.0.0.1.example"
    assert "got host none" in str(hosts.find_fault([])) and fault("box, box")
    assert is_loopback("::1") and is_loopback("127.3.0.1") and not is_loopback("0.0.0.0") and not is_loopback("box")


def test_no_pages_of_documentation(server):
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert server.ask("GET", path)[0] == 404


def test_connections_that_ask_for_nothing_are_closed(server):
    """Silent ones, headers and bodies that never end, and those that begin a second request; nobody else waits for them."""
    head = f"POST /v1/completions {HEAD}Content-Length: 50\r\n\r\n"
    half = ["", "GET /v1/mod", f"GET /v1/models {HEAD}", "GET /v1"]
    held = [(start, server.connect(5)) for start in half for _ in range(5)]
    for n, (start, sock) in enumerate(held):
        if n >= 15:  # their first request is answered
            sock.sendall(f"GET /v1/models {HEAD}\r\n".encode())
            while not sock.recv(1000).endswith(b"}"):
                pass
        sock.sendall(start.encode())
    slow = server.connect(5)
    slow.sendall(head.encode())
    end, got = time.monotonic() + 5, b""
    slow.settimeout(0.05)
    while not got and time.monotonic() < end:
        slow.sendall(b"x")
        try:
            got = slow.recv(1000)
        except TimeoutError:
            continue
    slow.settimeout(5)
    got += slow.recv(1000) if got.endswith(b"\r\n\r\n") else b""
    assert b" 408 " in got and b"the body did not arrive within 0.5 s, got " in got
    slow.close()
    for start, sock in held:
        answer = sock.makefile("rb").read()  # ends when the server closes
        assert (b" 408 " in answer) == (start != ""), (start, answer)
        sock.close()


def test_a_refused_body_does_not_keep_a_connection(server):
    """After its answer, a client may go on sending for a moment only."""
    sock, begin = server.connect(5), time.monotonic()
    sock.sendall(f"POST /v1/completions {HEAD}Content-Length: 10000000000\r\n\r\n".encode())
    with pytest.raises(ConnectionError):
        while time.monotonic() < begin + 5:
            sock.sendall(b"x" * 1000)
            time.sleep(0.01)
    sock.close()


def test_too_many_connections_are_refused(server):
    held = [server.connect() for _ in range(CONNECTIONS)]
    with server.connect() as one_more:
        refused(raw_answer(one_more), 503, f"{CONNECTIONS} connections open; ask again")
    for sock in held:
        sock.close()
    end = time.monotonic() + 5
    while server.ask("GET", "/v1/models")[0] != 200:
        assert time.monotonic() < end


def test_what_is_too_long_is_refused(server):
    _, _, body = server.ask("POST", "/v1/completions", b"x" * 100_001)
    refused((413, body), 413, "a request may have 100,000 bytes, got 100,001")
    with server.connect(5) as sock:
        sock.sendall(f"POST /v1/completions {HEAD}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(5):
            sock.sendall(b"8000\r\n" + b"x" * 0x8000 + b"\r\n")
        assert b" 413 " in sock.recv(1000)
    status, _, body = server.ask("GET", "/v1/models", **{f"x{n}": "y" for n in range(120)})
    refused((status, body), 431, "a request may have 100 header lines, got 12")
    for text in ("GET / nonsense\r\n\r\n", f"GET / {HEAD}x: {'y' * 10**6}", "\0" * 100_000):
        with server.connect(5) as sock:
            try:
                sock.sendall(text.encode())
                answer = raw_answer(sock)
            except ConnectionError:
                continue  # the server has closed while more was being sent
            refused(answer, 400, "the request is no HTTP/1.1")
    refused(server.complete(prompt="x" * 1001), 400, "a prompt may have 1,000 tokens, got 1,001; cut it")
    refused(server.complete(prompt=[[5], [5] * 1001]), 400, "got 1,001")
    refused(server.complete(max_tokens=10**9), 400, "max_tokens may be 100,000, got 1000000000; ask for fewer")
    status, _, body = server.ask("POST", "/v1/chat/completions", {"messages": [], "max_completion_tokens": 100_001})
    refused((status, body), 400, "max_tokens may be 100,000, got 100001; ask for fewer")
    refused(server.complete(stop=["x"] * 10_000), 400, "there may be 16 stop strings, got 10,000")
    refused(server.complete(stop="x" * 1001), 400, "a stop string may have 1,000 characters, got 1,001")
    refused(server.complete(n=129), 400, "prompts times n must be at most 128, got 129")
    refused(server.complete(prompt=["x"] * 65, n=2), 400, "must be at most 128, got 130")
    status, _, body = server.ask("POST", "/v1/chat/completions", {"messages": [{}] * 10_001})
    refused((status, body), 400, "a chat may have 10,000 messages, got 10,001")


def test_wrong_values_cost_no_more_than_right_ones(server):
    text = "x" * 90_000
    several = ({}, [{}] * 20_000, [[]] * 20_000, [None, 1])
    own = {
        "prompt": [1.5],
        "stop": [text],
        "max_tokens": [text],
        "n": [text, 10**4000],
        "temperature": [text, 10**4000],
    }
    for field in own:
        for value in (*several, *own[field]):
            status, body = server.complete(**{field: value})
            assert status == 400 and len(body["error"]["message"]) < 300, (field, body)
    for depth in (200, 400, 800, 900, 950, 970, 980, 990, 1000, 40_000):
        for template in ('{"prompt": %s}', '{"n": %s}', '{"messages": [%s]}', '{"prompt": "x", "user": %s, "n": 0}'):
            deep = template % ("[" * depth + "]" * depth)
            for path in ("/v1/completions", "/v1/chat/completions"):
                status, _, body = server.ask("POST", path, deep)
                assert status == 200 or (status == 400 and "\n" not in body["error"]["message"]), body


def test_abandoned_texts_do_not_delay_the_neighbours(server):
    """Each of these clients asks for 100 endless texts and leaves, some at once. They are forgotten, or others were refused."""
    for n in range(10):
        sock = server.begin(n=100, max_tokens=ENDLESS, stream=n % 2 == 0)
        time.sleep(0.05 * (n > 5))
        sock.close()
    end = time.monotonic() + 10
    while (answer := server.complete())[0] == 429:
        assert time.monotonic() < end
    assert answer[0] == 200
    with server.begin(n=2, max_tokens=ENDLESS):  # both rows stay busy, so that what waits does not begin
        end = time.monotonic() + 20
        for _ in range(4):  # the queue would be full after two of them
            taken = False
            while not taken:
                assert time.monotonic() < end, "texts that nobody waits for must leave the queue, whatever runs"
                with server.begin(n=100, max_tokens=ENDLESS, stream=True) as sock:
                    taken = b" 200 " in sock.recv(1000)  # the head of an answer comes before its first token
    end = time.monotonic() + 10
    while (answer := server.complete())[0] == 429:
        assert time.monotonic() < end
    with server.begin(n=128, max_tokens=ENDLESS, stream=True) as held:
        held.recv(100)
        with server.begin(n=80) as more:
            answer = b""
            while b"got 80" not in answer and (part := more.recv(1000)):  # head and body may arrive apart
                answer += part
        assert b" 429 " in answer and b"retry-after: 1" in answer and b"texts wait, of at most 200, got 80" in answer


def test_clients_that_do_not_read_lose_their_rows(server):
    lazy = [server.begin(max_tokens=ENDLESS, stream=True) for _ in range(2)]  # as many as there are rows
    for sock in lazy:
        sock.recv(100)
    assert server.complete()[0] == 200
    for sock in lazy:
        sock.close()


def test_at_the_limit_of_open_files_the_server_waits_in_silence(folder):
    patches: dict[str, Any] = {"expire_span.web.server.most_connections": functools.partial(int, 1000)}
    patches["asyncio.constants.ACCEPT_RETRY_DELAY"] = 0.1  # asyncio waits so long before it tries again; else a second
    with served(folder, files=90, patches=patches) as server:
        begun = len(server.log.read_text())
        held = [server.connect() for _ in range(120)]
        time.sleep(0.6)
        told = server.log.read_text()[begun:]
        for sock in held:
            sock.close()
        assert server.complete()[0] == 200
    assert told.count("clients wait, since too many files are open") == 1 and told.count("\n") == 1


def test_the_first_signal_leaves_some_time_and_the_second_none(folder):
    """While a prompt is encoded, one answer ends by itself and another never would."""
    with served(folder, "--grace", "2") as server:
        endless = server.begin(max_tokens=ENDLESS, stream=True)
        endless.recv(100)
        short = server.begin(max_tokens=10)
        encoded = server.begin(prompt="the old fox saw a red hen. " * 140_000)
        time.sleep(0.3)
        server.send(signal.SIGTERM)
        assert server.ended(10) == -signal.SIGTERM
        assert raw_answer(short)[1]["usage"]["completion_tokens"] <= 10
        refused(raw_answer(encoded), 503, "the server was stopped before")
        rest = endless.makefile("rb").read()
        assert b"the server was stopped before the answer was complete" in rest and b"[DONE]" in rest
        assert "Traceback" not in server.log.read_text()
        for sock in (endless, short, encoded):
            sock.close()


def test_a_second_signal_ends_the_process_at_once(folder):
    with served(folder, "--grace", "60") as server, server.begin(max_tokens=ENDLESS, stream=True) as endless:
        endless.recv(100)
        server.send(signal.SIGINT)
        end = time.monotonic() + 10
        while "stopping" not in server.log.read_text():
            assert time.monotonic() < end
        assert server.ended(0.3) is None
        server.send(signal.SIGTERM)
        assert server.ended(5) == -signal.SIGTERM
