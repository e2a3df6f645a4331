"""The server of `expire-span view`: it answers this machine's own pages, and every bad request in one sentence."""

from __future__ import annotations

import gc
import http.client
import json
import re
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from expire_span.cli import main
from expire_span.runs import RunFolder, UserError
from expire_span.train.supervised import train
from expire_span.view.assets import SCRIPTS, parts, render_page
from expire_span.view.frame import show
from expire_span.view.server import Source, bind_port, serve
from tests.browser import made_trace, serving, wait_until
from tests.tiny import tiny_config, write_text


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    folder = tmp_path_factory.mktemp("page")
    return train(tiny_config(write_text(folder), steps=2), folder / "runs" / "tiny", shown=False)


@pytest.fixture(scope="module")
def server(run):
    with serving(Source(run)) as (port, app):
        yield port, app


def ask(port: int, path: str, body: Any = None, method: str = "POST", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(method, path, data, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    out = answer.status, answer.read()
    connection.close()
    return out


def lines_of(answer: tuple[int, bytes]) -> list[dict[str, Any]]:
    status, body = answer
    assert status == 200, body
    return [json.loads(line) for line in body.splitlines()]


def refused(answer: tuple[int, bytes], *words: str, status: int = 400) -> None:
    got, body = answer
    assert got == status, body
    error = json.loads(body)["error"]
    assert "\n" not in error and all(word in error for word in words), error


def test_page_and_its_rules(server):
    port, _ = server
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/")
    answer = connection.getresponse()
    page, rules = answer.read().decode(), answer.getheader("content-security-policy")
    nonce = re.search(r"script-src 'nonce-([\w-]+)'", rules)[1]
    assert f'nonce="{nonce}"' in page and "default-src 'none'" in rules and "connect-src 'self'" in rules
    assert "<textarea" in page and 'data-live="yes"' in page


def test_reads_text_and_samples(server):
    port, _ = server
    text = "héllo <script>alert(1)</script> \U0001f600"
    header, *steps = lines_of(ask(port, "/api/trace", {"text": text}))
    assert header["version"] == 2 and bytes(step["token"] for step in steps) == text.encode()
    header, *cut = lines_of(ask(port, "/api/trace", {"text": text, "max_span": 2}))
    assert max(x for step in cut for layer in step["spans"] for x in layer) <= 2 < steps[0]["spans"][0][0]
    assert len(lines_of(ask(port, "/api/sample"))) > 100
    raw = b"\xff\xfe\x00 broken \xe2\x28"
    _, *steps = lines_of(ask(port, "/api/trace", raw, content_type="application/octet-stream"))
    assert bytes(step["token"] for step in steps) == raw
    _, *steps = lines_of(ask(port, "/api/trace", b'{"text": "\\ud800"}'))
    assert len(steps) == 1, "half a character becomes a question mark"


BAD = [
    ("/api/trace", {"text": ""}, ["the text is empty"]),
    ("/api/trace", {}, ["the text is empty"]),
    ("/api/trace", {"text": 7}, ["text must be a string, got int"]),
    ("/api/trace", [1], ["must be a JSON object, got a list"]),
    ("/api/trace", b"\xff{", ["not JSON"]),
    ("/api/trace", b"[" * 50_000, ["not JSON"]),
    ("/api/trace", {"text": "a", "max_span": -1}, ["max_span must be a number", "got -1"]),
    ("/api/trace", {"text": "a", "max_span": "x"}, ["got 'x'"]),
    ("/api/trace", {"text": "a" * 200_001}, ["at most 200,000 bytes", "got 200,001"]),
    ("/api/generate", {"text": "a", "temperature": -1}, ["temperature", "got -1"]),
    ("/api/generate", {"text": "a", "temperature": True}, ["got True"]),
    ("/api/generate", {"text": "a", "max_tokens": 10**9}, ["max_tokens", "100000"]),
    ("/api/generate/none/pause", None, ["no text 'none'"]),
    ("/api/generate/none/explode", None, ["unknown action 'explode'"]),
]


@pytest.mark.parametrize(("path", "body", "words"), BAD, ids=range(len(BAD)))
def test_bad_requests_are_refused_in_a_sentence(server, path, body, words):
    port, _ = server
    refused(ask(port, path, body), *words)
    assert ask(port, "/api/info", method="GET")[0] == 200


def test_a_paste_of_ten_megabytes_is_refused_before_it_is_read(server):
    port, _ = server
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        head = f"POST /api/trace HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 10485760\r\n\r\n"
        sock.sendall(head.encode())
        assert b"413" in sock.recv(100)
    sender = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    parts = (b"x" * 100_000 for _ in range(30))
    try:
        sender.request("POST", "/api/trace", parts, {"content-type": "application/octet-stream"}, encode_chunked=True)
        refused((sender.getresponse().status, b'{"error": "at most"}'), "at most", status=413)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server may hang up before all was sent
    assert ask(port, "/api/info", method="GET")[0] == 200


def test_other_hosts_and_origins_are_refused(server):
    port, _ = server
    for headers in (
        {"host": "example.org"},
        {"host": f"127.0.0.1.example.org:{port}"},
        {"host": "127.0.0.1:1"},
        {"origin": "http://example.org"},
        {"origin": "null"},
        {"origin": f"https://127.0.0.1:{port}"},
    ):
        refused(ask(port, "/api/info", method="GET", **headers), "only, got", status=403)
    for host in ("127.0.0.1", "localhost"):
        own = {"host": f"{host}:{port}", "origin": f"http://{host}:{port}"}
        assert ask(port, "/api/info", method="GET", **own)[0] == 200


def test_a_connection_that_asks_for_nothing_is_closed(run, monkeypatch):
    monkeypatch.setattr("expire_span.view.server.PATIENCE", 0.1)
    with serving(Source(run)) as (port, _):
        half = "POST /api/trace HTTP/1.1\r\nHost: "
        starts = ["", half, f"{half}127.0.0.1:{port}\r\nContent-Length: 9\r\n\r\n1"]
        held = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in starts]
        for sock, start in zip(held, starts):
            sock.sendall(start.encode())
        answers = [sock.makefile("rb").read() for sock in held[:2]] + [held[2].recv(1000)]
        for sock in held:
            sock.close()
    assert answers[0] == b"" and all(b" 408 " in x and b"did not arrive within 0.1 s" in x for x in answers[1:])


def test_writing_can_be_paused_stepped_and_stopped(server):
    port, app = server
    sessions = app.state.sessions
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/api/generate", json.dumps({"text": "abc", "max_tokens": 500, "paused": True}))
    answer = connection.getresponse()
    name = json.loads(answer.readline())["name"]
    kinds = [json.loads(answer.readline()) for _ in range(4)]
    assert [line["kind"] for line in kinds] == ["header", "step", "step", "step"]
    for n in range(3):
        assert ask(port, f"/api/generate/{name}/step")[0] == 200
        assert json.loads(answer.readline())["i"] == 3 + n
    assert ask(port, f"/api/generate/{name}/resume")[0] == 200
    assert json.loads(answer.readline())["i"] == 6
    assert ask(port, f"/api/generate/{name}/stop")[0] == 200
    answer.read()
    wait_until(lambda: not sessions.open)
    connection.close()


@pytest.mark.parametrize("paused", [False, True])
def test_a_closed_tab_ends_the_writing(server, paused):
    port, app = server
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/api/generate", json.dumps({"text": "abc", "max_tokens": 100_000, "paused": paused}))
    answer = connection.getresponse()
    answer.readline()
    assert app.state.sessions.open
    answer.close()
    connection.close()
    wait_until(lambda: not app.state.sessions.open)


def test_a_server_that_is_stopped_cuts_answers_off_without_a_word(run, capfd):
    sock, servers = bind_port(8900), []
    thread = threading.Thread(target=serve, args=(Source(run), sock), kwargs={"ready": servers.append}, daemon=True)
    thread.start()
    connection = http.client.HTTPConnection("127.0.0.1", sock.getsockname()[1], timeout=30)
    connection.request("POST", "/api/generate", json.dumps({"text": "abc", "paused": True}))
    answer = connection.getresponse()
    answer.readline()
    servers[0].handle_exit(signal.SIGINT, None)  # as Ctrl-C does
    thread.join(10)
    answer.close()
    connection.close()
    assert not thread.is_alive() and capfd.readouterr().err == ""


def test_too_many_writings_are_refused(server):
    port, app = server
    held = []
    for _ in range(8):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", "/api/generate", json.dumps({"text": "a", "paused": True}))
        held.append((connection, connection.getresponse()))
    refused(ask(port, "/api/generate", {"text": "a"}), "8 texts are being generated")
    for connection, answer in held:
        answer.close()
        connection.close()
    wait_until(lambda: not app.state.sessions.open)


def test_parallel_requests_do_not_disturb_each_other(server):
    port, _ = server
    alone = ask(port, "/api/trace", {"text": "one two three"})
    out: dict[int, Any] = {}

    def work(n: int) -> None:
        out[n] = ask(port, "/api/trace", {"text": "one two three", "max_span": 3 if n % 2 else None})

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(out[n] == alone for n in (0, 2, 4)) and out[1] == out[3] == out[5] != alone


def test_run_without_a_checkpoint_says_so_and_moves_on(run, tmp_path):
    """A run that has no checkpoint yet, and later a newer one: each page shows the last good one."""
    import shutil

    shutil.copytree(run.path, tmp_path / "young")
    held = tmp_path / "held"
    (tmp_path / "young" / "result.json").unlink()
    shutil.move(tmp_path / "young" / "checkpoints", held)
    (tmp_path / "young" / "checkpoints").mkdir()
    source = Source(RunFolder.open(tmp_path / "young"))
    info = source.describe()
    assert not info["model"] and "no checkpoint yet" in info["error"] and info["training"]
    with pytest.raises(UserError, match="no checkpoint yet"):
        source.sample()
    (step,) = held.iterdir()
    shutil.copytree(step, tmp_path / "young" / "checkpoints" / "step-00000002")
    assert source.describe()["checkpoint"] == "step-00000002"
    first = source.reader()
    assert source.reader() is first
    shutil.copytree(step, tmp_path / "young" / "checkpoints" / "step-00000003")
    broken = tmp_path / "young" / "checkpoints" / "step-00000004"
    shutil.copytree(step, broken)
    (broken / "model.safetensors").write_bytes(b"half")
    assert source.reader() is not first, "the newest intact one"


def test_a_trace_alone_can_be_served(tmp_path):
    made_trace(30).save(tmp_path / "a.jsonl")
    with serving(Source(trace=tmp_path / "a.jsonl")) as (port, _):
        assert len(lines_of(ask(port, "/api/sample"))) == 31
        refused(ask(port, "/api/trace", {"text": "a"}), "a trace without a model")
        assert not json.loads(ask(port, "/api/info", method="GET")[1])["model"]


# Starting


def test_a_taken_port_gives_the_next():
    first = bind_port(8900)
    first.listen()
    second = bind_port(first.getsockname()[1])
    assert second.getsockname()[1] > first.getsockname()[1] and second.getsockname()[0] == "127.0.0.1"
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nothing"], "'nothing'"),
        (["a.txt"], "a.txt is not a trace"),
        (["old.jsonl"], "has version 0"),
        (["a.txt", "--port", "0"], "--port must lie between 1 and 65535, got 0"),
    ],
)
def test_command_refuses(tmp_path, monkeypatch, capsys, args, words):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("hello")
    Path("old.jsonl").write_text('{"kind":"header","version":0}\n')
    assert main(["view", *args]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(("threads", "used"), [(3, 2), (1, 1)])
def test_the_command_leaves_a_core_to_the_browser(run, monkeypatch, threads, used):
    seen, usual = [], torch.get_num_threads()

    def note(source, sock, **_):
        sock.close()
        source.reader().model.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
        list(source.sample())
        seen.append(gc.get_freeze_count() > 0)

    monkeypatch.setattr("expire_span.view.server.serve", note)
    torch.set_num_threads(threads)
    try:
        assert main(["view", str(run.path), "--no-browser"]) == 0
    finally:
        gc.unfreeze()
        torch.set_num_threads(usual)
    assert {*seen[:-1]} == {used} and seen[-1] is True, "and collects no garbage among what it has loaded"


# The page as a file


def test_frozen_page_needs_nothing(tmp_path):
    trace = made_trace(50)
    trace.header["name"] = "<b>&"
    page = render_page(trace)
    assert "&lt;b&gt;&amp;" in page and "<b>&" not in page
    assert not re.search(r"(src|href)=\"(?!#|data:)", page) and page.count("<script") == 2
    assert set(re.findall(r"https?://[\w./]+", page)) == {"http://www.w3.org/2000/svg"}, "a name, never asked for"
    assert render_page(trace) == page, "the same trace gives the same page"
    frame = show(trace)
    assert frame._repr_html_().startswith("<iframe sandbox") and "<script" not in frame._repr_html_()
    frame.save(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text() == page


def test_scripts_can_stand_in_a_page():
    assert "</script" not in parts()["view_script"] and "<!--" not in parts()["view_script"]
    folder = Path(__file__).parent.parent.parent / "expire_span" / "view" / "page"
    assert {path.stem for path in folder.glob("*.js")} == set(SCRIPTS)
    assert all(len(path.read_text().splitlines()) < 400 for path in folder.iterdir())


def test_report_of_two_thousand_tokens_is_small():
    trace = made_trace(2048, layers=6)
    assert len(render_page(trace)) < 2_000_000
