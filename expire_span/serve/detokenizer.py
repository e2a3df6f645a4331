"""Text from tokens as they are drawn: whole characters only, nothing of a stop string, and constant time per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_PARTS = 8
"""Number of tokens after which a character that is still incomplete is given up, and written as a replacement character."""


class TextWriter:
    """Gives the text that each new token adds.

    A piece of a character is held back until the character is complete, and text that may be the beginning of a stop string
    until it is known not to be. Only the last few tokens are decoded again, so that an endless text does not get slower.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = (), prompt: Sequence[int] = ()) -> None:
        """prompt: the tokens that the text goes on from, so that it begins with the space that its first token has; without
        them, tokenizers that mark the beginnings of words drop that space."""
        self.tokenizer, self.stop = tokenizer, stop
        self.stopped = False
        """Whether a stop string has appeared."""
        self._before = list(prompt)[-MOST_PARTS:]
        if tokenizer.decode(self._before, skip_special_tokens=True).endswith("\ufffd"):
            self._before = []  # the prompt ends within a character
        self._new: list[int] = []
        self._held = ""

    def add(self, token: int) -> str:
        """The text that can be shown once this token is known; empty while it is incomplete."""
        self._new.append(token)
        decode = self.tokenizer.decode
        # Neighbours are decoded together, since some tokenizers drop the space before a first token.
        known = decode(self._before, skip_special_tokens=True)
        text = decode(self._before + self._new, skip_special_tokens=True)
        if text.endswith("\ufffd") and len(self._new) < MOST_PARTS:
            return ""
        self._before, self._new = self._new, []
        return self._release(text[len(known) :])

    def finish(self) -> str:
        """The text that was held back, once no token follows; a piece of a character is dropped."""
        text, self._held = self._held, ""
        return text

    def _release(self, text: str) -> str:
        """The held text and `text`, except for an end that may begin a stop string; nothing from a stop string on."""
        text = self._held + text
        cut = min((text.find(word) for word in self.stop if word in text), default=-1)
        if cut >= 0:
            self.stopped, self._held = True, ""
            return text[:cut]
        keep = max((_overlap(text, word) for word in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` with which `word` begins."""
    sizes = range(min(len(text), len(word) - 1), 0, -1)
    return next((n for n in sizes if text.endswith(word[:n])), 0)
