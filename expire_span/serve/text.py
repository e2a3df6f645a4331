"""`TextModel`: a model with the tokens of its text, of a run or of a retrofit; what `serve`, `chat` and `generate` open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from expire_span.checkpoint import Warn, load_model
from expire_span.runs import find_run
from expire_span.stream.decoders import model_of
from expire_span.tasks.contract import Codec
from expire_span.tasks.registry import text_codec

from .encoding import ChatEncoder

START = "\n"
"""Stands for an empty prompt of a run's model, which must read a token before it can predict one."""


@dataclass(frozen=True)
class TextModel:
    """A model and its tokenizer."""

    model: Any
    """A `Decoder` or a `Retrofit`."""
    tokenizer: Any
    """Has encode(text), decode(tokens, skip_special_tokens=..) and bos_token_id."""
    ends: set[int] = field(default_factory=set)
    """Tokens that end a response."""
    chat_tokens: Callable[[list[dict[str, Any]]], list[int]] | None = None
    """The tokens of the messages of a chat; None for a model that knows no turns."""
    chat_text: Callable[[list[dict[str, Any]]], str] | None = None
    """The text that `chat_tokens` encodes, where it is known."""
    begins: tuple[int, ...] | None = None
    """Tokens that stand before every text; None leaves that to the tokenizer."""
    turn_tokens: Callable[..., list[int]] | None = None
    """The tokens of the next turn of a chat whose earlier turns are in memory; with first=True, of the first one."""

    @cached_property
    def chats(self) -> ChatEncoder:
        """What encodes the texts of chats."""
        return ChatEncoder(self.tokenizer)

    @cached_property
    def vocab(self) -> int:
        return model_of(self.model).vocab

    @classmethod
    def of_retrofit(cls, retrofitted: Any, tokenizer: Any) -> TextModel:
        from expire_span.hf.loading import chat_text, chat_tokens, end_tokens, turn_tokens
        from expire_span.hf.texts import check_tokenizer, text_beginning

        check_tokenizer(retrofitted, tokenizer)
        known = retrofitted.beginning
        begins = text_beginning(tokenizer) if known is None else known.text
        calls = [partial(call, tokenizer, begins=begins) for call in (chat_tokens, chat_text, turn_tokens)]
        chat: dict[str, Any] = dict(zip(("chat_tokens", "chat_text", "turn_tokens"), calls))
        return cls(retrofitted, tokenizer, end_tokens(retrofitted.model, tokenizer), begins=begins, **chat)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text behind its beginning."""
        if self.begins is None:
            return self.tokenizer.encode(text)
        from expire_span.hf.texts import encode_text

        return encode_text(self.tokenizer, text, self.begins)


class RunTokens:
    """The codec of a run's task, with the calls of a tokenizer of transformers."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.bos_token_id = self.encode(START)[0]

    def encode(self, text: str) -> list[int]:
        return self.codec.encode(text.encode(), "the prompt").tolist()

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return self.codec.decode(tokens).decode(errors="replace")


def open_run(name: str | None, runs_dir: Path, device: Any, warn: Warn | None = None) -> TextModel:
    """The model of a run's newest checkpoint."""
    run = find_run(name, runs_dir)
    tokens = RunTokens(text_codec(run.config.task, "serve"))
    return TextModel(load_model(run, device, warn)[0], tokens)


def open_retrofit(model: str, adapter: Path, dtype: str, device: str) -> TextModel:
    """A causal language model of transformers with an adapter."""
    from expire_span.hf.adapter import read_head
    from expire_span.hf.loading import open_model
    from expire_span.hf.retrofitted import load_adapter

    read_head(adapter)  # before the model is loaded, which takes a while
    opened, tokenizer = open_model(model, dtype, device)
    return TextModel.of_retrofit(load_adapter(opened, adapter), tokenizer)
