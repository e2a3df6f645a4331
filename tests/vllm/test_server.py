"""vLLM's own server with the plugin, over HTTP: `make test-vllm` runs this in an environment that has one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-vllm")
pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from expire_span import Sampling, Stream
from expire_span.vllm.options import ARCHITECTURE
from tests.hf_models import byte_tokenizer

pytestmark = pytest.mark.slow
PROMPTS = ("The old fox saw a red hen.", "Where is the river?", "Home.")
LONG = "zq" * 100
COUNT = 30
SLOTS = 50
"""Enough for the prompts above, but not for the long one, of which a head keeps as many memories as can live at once, 67."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server with few slots, and what streams write after each prompt."""
    from tests.serve.chats import model  # answers are ASCII, so that text tells the tokens

    folder, tokenizer = tmp_path_factory.mktemp("server"), byte_tokenizer()
    retrofitted = model("llama", max_span=60, ramp=8)
    retrofitted.model.save_pretrained(folder / "base")
    retrofitted.save(folder / "adapter")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder / "base")
    wanted = {}
    for prompt in PROMPTS:
        stream = Stream(retrofitted, 1)
        stream.read([tokenizer.encode(prompt)])
        wanted[prompt] = tokenizer.decode([int(x.tokens) for x in stream.generate(Sampling(temperature=0), COUNT)])
    retrofitted.detach()
    with run(folder) as address:
        yield address, wanted


@contextlib.contextmanager
def run(folder: Path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    options = {"--model": str(folder / "base"), "--dtype": "float32", "--max-model-len": "512", "--port": port}
    options |= {"--host": "127.0.0.1", "--served-model-name": "tiny", "--kv-cache-memory-bytes": str(32 << 20)}
    options |= {"--hf-overrides": json.dumps({"architectures": [ARCHITECTURE]})}
    options |= {
        "--additional-config": json.dumps({"expire_span": {"adapter": str(folder / "adapter"), "slots": SLOTS}})
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [word for pair in options.items() for word in pair]
    told = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    told = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"} | told
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=told, stdout=out, stderr=out, cwd=Path(__file__).parents[2])
    try:
        address = f"http://127.0.0.1:{port}"
        while process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                break
            time.sleep(0.2)
        assert process.poll() is None, log.read_text()[-3000:]
        yield address
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()


def post(address: str, path: str, **fields) -> bytes:
    body = json.dumps({"model": "tiny", "max_tokens": COUNT, "temperature": 0, "ignore_eos": True, **fields}).encode()
    request = urllib.request.Request(f"{address}/v1/{path}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read()


def complete(address: str, prompt: str) -> str:
    return json.loads(post(address, "completions", prompt=prompt, add_special_tokens=False))["choices"][0]["text"]


def stream(address: str, prompt: str) -> str:
    answer = post(address, "completions", prompt=prompt, add_special_tokens=False, stream=True).decode()
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    assert len(events) > COUNT // 2, "token by token"
    return "".join(x["choices"][0]["text"] for x in events)


def test_answers_are_those_of_streams_whole_streamed_and_at_once(server):
    address, wanted = server
    with ThreadPoolExecutor(6) as pool:
        for ask in (complete, stream):
            got = list(pool.map(lambda prompt, ask=ask: ask(address, prompt), PROMPTS * 2))
            assert got == [wanted[x] for x in PROMPTS * 2]
    chat = json.loads(post(address, "chat/completions", messages=[{"role": "user", "content": PROMPTS[0]}]))
    assert chat["choices"][0]["message"]["content"] == wanted[PROMPTS[0]]


def test_a_request_without_slots_is_an_error_and_the_server_lives(server):
    address, wanted = server
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(address, "completions", prompt=LONG)
    assert caught.value.code == 500
    assert complete(address, PROMPTS[0]) == wanted[PROMPTS[0]]
