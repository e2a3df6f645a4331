"""A server in this process, with a tiny model that reads bytes, and chats with it."""

from __future__ import annotations

import contextlib
from typing import Any

from fastapi.testclient import TestClient

from expire_span.serve.http import Limits, build_app
from expire_span.serve.scheduler import Scheduler
from expire_span.serve.sessions import Sessions
from expire_span.serve.text import TextModel
from expire_span.web.guard import Keys
from tests.hf_models import FAMILIES, byte_tokenizer, forgetful

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)

ASCII = range(3, 97)
"""The tokens of printable ASCII characters without the space."""


def model(family: str = "llama", seed: int = 0, **settings: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    config = FAMILIES[family]()
    config.vocab_size = 259
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, x in base.named_parameters():
            if x.dim() == 2 and "embed" not in name:
                x.mul_(3)
        for others in (slice(0, ASCII.start), slice(ASCII.stop, None)):
            base.get_output_embeddings().weight[others] = 0  # answers are text, which comes back as the same tokens
    return forgetful(base, **{"max_span": 60, "ramp": 8, **settings})


def text_model(retrofitted: Any, template: str | None = TEMPLATE) -> TextModel:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return TextModel.of_retrofit(retrofitted, tokenizer)


class Chats:
    """A client of one server."""

    def __init__(
        self, text: TextModel, sessions: Sessions | None, rows: int, keys: Keys | None, limits: Limits
    ) -> None:
        self.scheduler = Scheduler(text, rows=rows, sessions=sessions)
        app = build_app(self.scheduler, "tiny", keys=keys, limits=limits)
        self.client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)

    def say(self, messages: list[dict[str, Any]], key: str | None = None, status: int = 200, **fields: Any) -> Any:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        asked = {"messages": messages, "max_tokens": 9, "temperature": 0, **fields}
        answer = self.client.post("/v1/chat/completions", json=asked, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    @property
    def read(self) -> int:
        """Number of prompt tokens that the model has read."""
        return self.scheduler.counts["read"]


@contextlib.contextmanager
def chats(
    text: TextModel,
    most_bytes: int = 10**8,
    *,
    rows: int = 2,
    keys: Keys | None = None,
    limits: Limits | None = None,
    **options: Any,
) -> Any:
    """most_bytes: of sessions; 0 serves without them. options: those of `Sessions`."""
    sessions = Sessions(text.model, most_bytes, **options) if most_bytes else None
    served = Chats(text, sessions, rows, keys, limits or Limits())
    try:
        yield served
    finally:
        served.scheduler.close()
        if sessions is not None:
            sessions.flush()


def cached(answer: Any) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def said(answer: Any) -> str:
    return answer["choices"][0]["message"]["content"]
