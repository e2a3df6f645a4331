"""What a client of the server may ask for: OpenAI's fields, those that this server refuses, and requests made from them."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import BaseModel

from expire_span.checks import check_count, require, show
from expire_span.sampling import Sampling

from .answers import Request
from .layouts import text_config
from .loading import chat_tokens

MOST_CHOICES = 128
"""Largest number of texts in one answer: prompts times n."""
REFUSED = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "web_search_options": (None,),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "min_tokens": (None, 0),
    "stop_token_ids": (None, []),
    "ignore_eos": (None, False),
}
"""Fields of OpenAI's API and of other servers that would change the answer and that this server does not have, with the values
that ask for nothing."""


class Asked(BaseModel, extra="allow"):
    """The fields that completions and chat share."""

    continues: ClassVar[bool] = False
    """Whether the answer goes on within the prompt's text."""
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: int | None = None

    @property
    def choices(self) -> int:
        """Number of texts for each prompt."""
        return 1 if self.n is None else self.n

    @abstractmethod
    def prompts(self, tokenizer: Any, vocab: int) -> list[list[int]]:
        """The prompts as tokens; a ValueError says what is wrong with them."""

    def requests(self, tokenizer: Any, handle: Any, default: int, receiver: Callable[[int], Any]) -> list[Request]:
        """One request for each text of the answer: `choices` for each prompt, with seeds that count up.

        default: number of tokens where the client gives none; receiver: gives the function that gets the text of an index.
        """
        self._check()
        limit = next((x for x in (self.max_completion_tokens, self.max_tokens) if x is not None), default)
        check_count("max_tokens", limit)
        prompts = self.prompts(tokenizer, text_config(handle.model).vocab_size)
        total = len(prompts) * self.choices
        require(
            total <= MOST_CHOICES, f"prompts times n must be at most {MOST_CHOICES}, got {total}; ask several times"
        )
        seed = self.seed if self.seed is not None else uuid.uuid4().int % 2**31
        made = []
        for prompt in prompts:
            for choice in range(self.choices):
                sampling = Sampling(
                    1.0 if self.temperature is None else self.temperature, None, self.top_p, seed + choice
                )
                give = receiver(len(made))
                made.append(Request(prompt, limit, sampling, self._stops(), give, continues=self.continues))
        return made

    def _check(self) -> None:
        for name, neutral in REFUSED.items():
            value = (self.model_extra or {}).get(name)
            asks = not any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in neutral)
            require(not asks, f"this server does not have {name}, got {show(value)}; leave it out")
        check_count("n", self.choices)

    def _stops(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        require(all(stop), f"stop must be text of at least one character, got {show(self.stop)}")
        return stop


class Completion(Asked):
    continues = True
    prompt: str | list[int] | list[str] | list[list[int]] | None = ""

    def prompts(self, tokenizer: Any, vocab: int) -> list[list[int]]:
        given: Any = self.prompt or ""
        several = isinstance(given, list) and not isinstance(given[0], int)
        return [_encode(tokenizer, one, vocab) for one in (given if several else [given])]


class Chat(Asked):
    messages: list[dict[str, Any]]

    def prompts(self, tokenizer: Any, vocab: int) -> list[list[int]]:
        require(bool(self.messages), "messages must hold at least one message, got none")
        return [_check_tokens(chat_tokens(tokenizer, [_plain(said) for said in self.messages]), vocab)]


def _plain(said: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is text; parts of text are joined."""
    fits = isinstance(said.get("role"), str) and "content" in said
    require(fits, f"a message needs a role and a content, got {show(said)}")
    content = said["content"]
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        require(all(isinstance(x, str) for x in texts), f"a message may hold text only, got {show(content)}")
        content = "".join(texts)  # type: ignore[arg-type]
    content = "" if content is None else content
    require(isinstance(content, str), f"the content of a message must be text, got {show(content)}")
    return {**said, "content": check_text(content)}


def check_text(text: str) -> str:
    """The text itself, if it can be encoded; JSON can hold half characters, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = f"{show(text[error.start])} at character {error.start}"
        raise ValueError(f"the text must consist of whole characters, got {place}; send it as UTF-8") from error
    return text


def _encode(tokenizer: Any, prompt: str | list[int], vocab: int) -> list[int]:
    ids = tokenizer.encode(check_text(prompt)) if isinstance(prompt, str) else prompt
    start = tokenizer.bos_token_id
    return _check_tokens(ids or ([start] if start is not None else []), vocab)


def _check_tokens(ids: list[int], vocab: int) -> list[int]:
    require(bool(ids), "the prompt must have at least one token, got none")
    wrong = next((x for x in ids if not 0 <= x < vocab), None)
    require(wrong is None, f"tokens must lie in 0..{vocab - 1}, the model's vocabulary, got {wrong}")
    return ids
