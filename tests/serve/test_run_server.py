"""A run's model is served as `generate` continues its text; it has no turns of a chat."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from fastapi.testclient import TestClient

from expire_span.generate import generate_text
from expire_span.sampling import Sampling
from expire_span.serve.http import build_app
from expire_span.serve.scheduler import Scheduler
from expire_span.serve.text import open_run


@pytest.fixture(scope="module")
def served():
    """The model that ships with the package, which reads bytes."""
    text = open_run(None, Path("runs"), "cpu")
    scheduler = Scheduler(text, rows=2)
    yield TestClient(build_app(scheduler, "wikibooks"), base_url="http://localhost"), text
    scheduler.close()


def test_completions_are_what_generate_writes(served):
    client, text = served
    asked = {"prompt": "Once upon a", "max_tokens": 12, "temperature": 0}
    answer = client.post("/v1/completions", json=asked).json()
    wanted = generate_text(text.model, text.tokenizer.codec, b"Once upon a", Sampling(temperature=0), max_tokens=12)
    assert answer["choices"][0]["text"].encode() == b"".join(byte for (byte,) in wanted)
    assert answer["usage"]["completion_tokens"] == 12


def test_a_chat_is_refused(served):
    asked = {"messages": [{"role": "user", "content": "hello"}]}
    answer = served[0].post("/v1/chat/completions", json=asked)
    assert answer.status_code == 400 and "no turns of a chat; ask /v1/completions" in answer.json()["error"]["message"]
