"""The bodies of OpenAI's protocol: their fields, those that this server refuses, and the requests made from them."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from pydantic import BaseModel

from expire_span.checks import check_count, require, show
from expire_span.sampling import Sampling
from expire_span.stream.decoders import model_of

from .requests import Request
from .text import TextModel
from .turns import Prompt, read_chat

MOST_CHOICES = 128
"""Largest number of texts in one answer: prompts times n."""
MOST_STOPS, MOST_STOP = 16, 1000
"""Largest number of stop strings, each of which is looked for at every token, and of the characters of one."""
MOST_MESSAGES = 10_000
"""Largest number of messages of a chat."""
MOST_KEPT = 4096
"""Largest number of tokens of a chat that never expire, unless the server is given another."""
MOST_PROMPT = 500_000
"""Largest number of tokens of a prompt, unless the server is given another."""
MOST_ANSWER = 100_000
"""Largest number of tokens that a client may ask for, unless the server is given another."""
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


class Body(BaseModel, extra="allow"):
    """The fields that completions and chat share."""

    continues: ClassVar[bool] = False
    """Whether the answer goes on within the prompt's text."""
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Any = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: int | None = None

    @property
    def choices(self) -> int:
        """Number of texts for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def given(self) -> int:
        """Number of prompts."""
        return 1

    @abstractmethod
    def prompts(self, text: TextModel, owner: str = "") -> list[Prompt]:
        """The prompts; a ValueError says what is wrong with them. owner: whose earlier chats may make it faster."""

    def requests(
        self,
        text: TextModel,
        default: int,
        receiver: Callable[[int], Any],
        most_prompt: int = MOST_PROMPT,
        most_kept: int = MOST_KEPT,
        most_answer: int = MOST_ANSWER,
        owner: str = "",
    ) -> list[Request]:
        """One request for each text of the answer: `choices` for each prompt, with seeds that count up.

        default: number of tokens where the client gives none; receiver: gives the function that gets the text of an index;
        most_prompt: largest number of tokens of a prompt; most_kept: of those that never expire; most_answer: of an answer;
        owner: whose sessions it uses.
        """
        self._check()
        limit = next((x for x in (self.max_completion_tokens, self.max_tokens) if x is not None), default)
        check_count("max_tokens", limit)
        require(limit <= most_answer, f"max_tokens may be {most_answer:,}, got {show(limit)}; ask for fewer")
        stops, prompts = self._stops(), self.prompts(text, owner)
        longest = max(len(prompt.tokens) for prompt in prompts)
        require(longest <= most_prompt, f"a prompt may have {most_prompt:,} tokens, got {longest:,}; cut it")
        kept = max(prompt.kept for prompt in prompts)
        require(
            kept <= most_kept,
            f"a chat may keep {most_kept:,} tokens, which fill slots for good, got {kept:,}; keep fewer",
        )
        for prompt in prompts:
            if prompt.marks is not None:
                model_of(text.model).check_marks(torch.tensor(prompt.marks))
        seed = self.seed if self.seed is not None else uuid.uuid4().int % 2**31
        made = []
        for prompt in prompts:
            for choice in range(self.choices):
                sampling = Sampling(
                    1.0 if self.temperature is None else self.temperature, None, self.top_p, seed + choice
                )
                request = Request(prompt.tokens, limit, sampling, stops, receiver(len(made)), continues=self.continues)
                request.chat, request.owner = prompt, owner
                made.append(request)
        return made

    def _check(self) -> None:
        for name, neutral in REFUSED.items():
            value = (self.model_extra or {}).get(name)
            asks = not any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in neutral)
            require(not asks, f"this server does not have {name}, got {show(value)}; leave it out")
        check_count("n", self.choices)
        total = self.given * self.choices
        require(
            total <= MOST_CHOICES,
            f"prompts times n must be at most {MOST_CHOICES}, got {show(total)}; ask several times",
        )

    def _stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else [] if self.stop is None else self.stop
        fits = isinstance(stops, list) and all(isinstance(x, str) for x in stops)
        require(fits, f"stop must be text or a list of texts, got {show(self.stop)}")
        require(len(stops) <= MOST_STOPS, f"there may be {MOST_STOPS} stop strings, got {len(stops):,}; leave some out")
        require(all(stops), f"stop must be text of at least one character, got {show(self.stop)}")
        longest = max(map(len, stops), default=0)
        require(longest <= MOST_STOP, f"a stop string may have {MOST_STOP:,} characters, got {longest:,}; cut it")
        return tuple(stops)


class Completion(Body):
    continues = True
    prompt: Any = ""
    """Text, tokens, or a list of either; checked below, since pydantic would describe what is wrong with each of a million
    items."""

    @property
    def given(self) -> int:
        return len(self.prompt) if self._several() else 1

    def _several(self) -> bool:
        return isinstance(self.prompt, list) and bool(self.prompt) and not isinstance(self.prompt[0], int)

    def prompts(self, text: TextModel, owner: str = "") -> list[Prompt]:
        each = self.prompt if self._several() else [self.prompt if self.prompt not in (None, []) else ""]
        for one in each:
            fits = isinstance(one, str) or _is_tokens(one)
            require(fits, f"prompt must be text, tokens, or a list of either, got {show(one)}")
        return [Prompt(_encode(text, one)) for one in each]


class Chat(Body):
    messages: Any
    """A list of objects; checked below, as the prompts of a completion are."""

    def prompts(self, text: TextModel, owner: str = "") -> list[Prompt]:
        if text.chat_tokens is None:
            raise ValueError("this model has learned plain text and no turns of a chat; ask /v1/completions instead")
        require(isinstance(self.messages, list), f"messages must be a list, got {show(self.messages)}")
        require(bool(self.messages), "messages must hold at least one message, got none")
        count = len(self.messages)
        require(count <= MOST_MESSAGES, f"a chat may have {MOST_MESSAGES:,} messages, got {count:,}; leave some out")
        prompt = read_chat(text, [_plain(said) for said in self.messages], owner)
        _check_tokens(prompt.tokens, text.vocab)
        return [prompt]


def _plain(said: Any) -> dict[str, Any]:
    """A message whose content is text; parts of text are joined."""
    fits = isinstance(said, dict) and isinstance(said.get("role"), str) and "content" in said
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


def _is_tokens(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(x) is int for x in given)


def _encode(text: TextModel, prompt: str | list[int]) -> list[int]:
    ids = text.encode(check_text(prompt)) if isinstance(prompt, str) else prompt
    start = text.tokenizer.bos_token_id
    return _check_tokens(ids or ([start] if start is not None else []), text.vocab)


def _check_tokens(ids: list[int], vocab: int) -> list[int]:
    require(bool(ids), "the prompt must have at least one token, got none")
    wrong = next((x for x in ids if not 0 <= x < vocab), None)
    require(wrong is None, f"tokens must lie in 0..{vocab - 1}, the model's vocabulary, got {wrong}")
    return ids
