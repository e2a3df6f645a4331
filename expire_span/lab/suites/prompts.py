"""Prompts: a context, a question that is asked after it was compressed, and how an answer is scored; as text and as tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from expire_span.errors import UserError


@dataclass(frozen=True)
class Prompt:
    """One prompt of a task, as text."""

    task: str
    index: int
    """Number of the prompt within its task; the same task and index are the same prompt for every method."""
    context: str
    """Text that is read, and compressed, before the question is known."""
    question: str
    """Text that is read after it."""
    answers: tuple[str, ...]
    """What is looked for in the answer, as `rule` says."""
    most_tokens: int
    """Largest number of tokens of the answer."""
    prefix: str = ""
    """Beginning of the answer, which the model goes on with."""
    system: str = ""
    """System prompt, at the very start of the context."""
    rule: str = "strings"
    """How the answer is scored: a name in `scoring.RULES`."""
    fills: bool = False
    """Whether the context's end may be cut off, where there is no more room."""


@dataclass(frozen=True)
class Sample:
    """A prompt as tokens."""

    prompt: Prompt
    context: tuple[int, ...]
    question: tuple[int, ...] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self.prompt), "context_tokens": list(self.context), "question_tokens": list(self.question)}


_MARK = "the-context-stands-here"
MOST_PADDING = 128
"""A context that ends at most so many tokens early begins with line breaks instead, so that all contexts of a suite are read
side by side."""


class Frame:
    """What stands before a context and after a question: the model's chat template, or the beginning of a text.

    plain: read prompts as plain text, though the tokenizer has a chat template.
    """

    def __init__(self, tokenizer: Any, *, plain: bool = False) -> None:
        self.tokenizer, self.chats = tokenizer, bool(tokenizer.chat_template) and not plain

    def around(self, system: str) -> tuple[str, str]:
        """Text before the context and after the question."""
        from expire_span.hf.loading import chat_text

        if not self.chats:
            return (f"{system}\n\n" if system else ""), ""
        user = {"role": "user", "content": _MARK}
        try:
            text = chat_text(self.tokenizer, [{"role": "system", "content": system}, user] if system else [user])
        except UserError:  # a template that knows no system prompt
            text = chat_text(self.tokenizer, [{"role": "user", "content": f"{system}\n\n{_MARK}"}])
        before, mark, after = text.partition(_MARK)
        if not mark:
            raise UserError("the model's chat template leaves out what a user says; give --plain to ask without it")
        return before, after

    def encode_start(self, text: str) -> list[int]:
        """Tokens of a text that begins a context, behind what the tokenizer puts before every text."""
        from expire_span.hf.texts import encode_text

        return encode_text(self.tokenizer, text, () if self.chats else None)

    def room(self, context: int, system: str = "") -> int:
        """Number of tokens that a context of `context` tokens leaves for a prompt's own text."""
        return context - len(self.encode_start(self.around(system)[0])) - 1  # a token may be added where texts meet

    def to_sample(self, prompt: Prompt, context: int) -> Sample:
        """The prompt's tokens; the context has `context` of them if the prompt fills, else at most so many."""
        before, after = self.around(prompt.system)
        read = self.encode_start(before + prompt.context)
        asked = self.tokenizer.encode(prompt.question + after + prompt.prefix, add_special_tokens=False)
        if len(read) > context:
            read = read[:context] if prompt.fills else _refuse(prompt, len(read), context)
        elif 0 < (missing := context - len(read)) <= MOST_PADDING:
            read = self._pad(read, before, missing)
        return Sample(prompt, tuple(read), tuple(asked))

    def _pad(self, read: list[int], before: str, count: int) -> list[int]:
        """The context with `count` line breaks behind what stands before every context."""
        front = self.encode_start(before)
        place = next((n for n, (theirs, ours) in enumerate(zip(front, read)) if theirs != ours), len(front))
        line = self.tokenizer.encode("\n", add_special_tokens=False)[-1]
        return [*read[:place], *[line] * count, *read[place:]]


def _refuse(prompt: Prompt, tokens: int, context: int) -> list[int]:
    raise UserError(f"a prompt of {prompt.task} has {tokens} tokens, got --context {context}; give a longer context")
