"""The Dockerfile and compose.yaml, tried without Docker."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request

import pytest
import tyro

from expire_span.cli import main
from tests.container import ROOT, Image, instructions, services
from tests.newcomer import make_environment

pytest.importorskip("yaml")


class Read(BaseException):
    """Ends a command once its options have been read without an error."""


def commands() -> dict[str, list[str]]:
    """The image's own command, and those of the services."""
    told = dict(instructions())
    own = json.loads(told["ENTRYPOINT"])[1:] + json.loads(told["CMD"])
    return {"image": own, **{name: each["command"] for name, each in services().items()}}


def test_the_files_and_options_that_are_named_exist(monkeypatch):
    """The short twin: every instruction is known, what is copied is there and not ignored, every command can be read."""
    let_in = {x[1:] for x in (ROOT / ".dockerignore").read_text().splitlines() if x.startswith("!")}
    for name, rest in instructions():
        assert hasattr(Image, f"do_{name.lower()}"), name
        if name == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists() and source in let_in, source
    cli = tyro.cli

    def read(*given, **options):
        cli(*given, **options)
        raise Read

    monkeypatch.setattr(tyro, "cli", read)
    comments = re.findall(r"^#   \w+: \[(.*)\]$", (ROOT / "compose.yaml").read_text(), re.MULTILINE)
    shown = [x.split(", ") for x in comments]
    assert len(shown) == len(services()) == 2
    for words in (*commands().values(), *shown):
        with pytest.raises(Read):
            main(words)


def test_ports_folders_and_variables_agree():
    from expire_span.cli.serve import KEYS, Serve
    from expire_span.cli.view import View

    told, server, page = dict(instructions()), services()["server"], services()["page"]
    port = str(Serve().port)
    assert told["EXPOSE"] == port and server["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert f"127.0.0.1:{port}/health" in server["healthcheck"]["test"][-1]
    assert server["environment"] == [KEYS] and server["image"] == page["image"]
    assert page["network_mode"] == "host", "the page listens on 127.0.0.1"
    text = (ROOT / "compose.yaml").read_text()
    assert f"127.0.0.1:{View().port}" in text and f"{told['WORKDIR']}/sessions" in text
    assert "sessions" in told["RUN"].split()
    assert float(server["stop_grace_period"].rstrip("s")) > Serve().grace


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def get(url: str, process: subprocess.Popen) -> bytes:
    """What an address answers, once it does."""
    while process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url) as answer:
            return answer.read()
        time.sleep(0.1)
    raise AssertionError(f"ended with {process.returncode}")


@pytest.mark.long
def test_the_image_s_commands_work_in_an_empty_environment(tmp_path):
    """Libraries come from this environment; `python -m tests.container` fetches them."""
    offline = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "false", "OMP_NUM_THREADS": "1"}
    image = Image(tmp_path, **offline)
    make_environment(image.env)
    image.build()
    shutil.rmtree(tmp_path / "root" / "source")  # the package was installed, not linked
    for name, command in commands().items():
        log, port = tmp_path / name, free_port()
        process = image.start([*command, "--port", str(port)], log)
        try:
            if name == "page":
                assert b"<html" in get(f"http://127.0.0.1:{port}/", process)
            else:
                assert json.loads(get(f"http://127.0.0.1:{port}/health", process)) == {"status": "ok"}
                asked = json.dumps({"prompt": "Once upon a time", "max_tokens": 5}).encode()
                headers = {"Content-Type": "application/json"}
                request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", asked, headers)
                with urllib.request.urlopen(request) as answer:
                    assert json.loads(answer.read())["usage"]["completion_tokens"] == 5
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) in (0, -signal.SIGTERM, 128 + signal.SIGTERM), log.read_text()
        except AssertionError:
            print(log.read_text())
            raise
        finally:
            process.kill()
            process.wait()
    assert list((tmp_path / "root/data/sessions").rglob("*.safetensors")), "ends of answers are kept"
