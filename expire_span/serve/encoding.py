"""Texts of chats as tokens. A chat that goes on is encoded from the last special token of what is known of it, so that the time
for a turn does not follow the length of the chat."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MOST_CHARACTERS = 16_000_000
"""Characters of the texts that are known, of all owners together; each of their tokens takes twelve bytes more."""
SAMPLE = "Is it so?\n One, two ... 3\u00e9\n"
"""What stands around special tokens when it is tried whether a tokenizer's texts may be cut there."""


@dataclass(frozen=True)
class Encoded:
    """A text as tokens; tokens, and the first and last characters of each."""

    text: str
    tokens: array[int]
    begins: array[int]
    ends: array[int]

    def tokens_of(self, begin: int, end: int) -> tuple[int, int]:
        """The tokens, as a range, that share a character with begin..end - 1."""
        first = bisect_right(self.ends, begin)
        return first, max(first, bisect_left(self.begins, end))

    def before(self, place: int) -> int:
        """Number of tokens that end at a character or before it."""
        return bisect_right(self.ends, place)


class ChatEncoder:
    """Encodes texts, and knows those that it has encoded last. Any thread may call it."""

    def __init__(self, tokenizer: Any, most_characters: int = MOST_CHARACTERS) -> None:
        self._tokenizer, self.most_characters = tokenizer, most_characters
        self.encoded = 0
        """Number of characters that the tokenizer has encoded."""
        self._known: OrderedDict[tuple[str, str], Encoded] = OrderedDict()
        """By owner and text, those that were used last at the end."""
        self._lock = threading.Lock()
        self._special, self._tried = _special_tokens(tokenizer), dict[int, bool]()

    def encode(self, owner: str, text: str) -> Encoded:
        """The tokens of a text without what a tokenizer puts before every text. What one owner's texts make faster is not seen
        by another."""
        with self._lock:
            mine = [known for (whose, _), known in self._known.items() if whose == owner]
        best, count = max(
            ((x, self._shared_tokens(x, text)) for x in mine), key=lambda pair: pair[1], default=(None, 0)
        )
        found = self._encode_all(text) if best is None or not count else self._go_on(best, count, text)
        with self._lock:
            if best is not None and count and text.startswith(best.text[: best.begins[-1]]):
                self._known.pop((owner, best.text), None)  # the new text serves what the old one served
            self._known[owner, text] = found
            self._known.move_to_end((owner, text))
            size = sum(len(x.text) for x in self._known.values())
            while size > self.most_characters:
                size -= len(self._known.popitem(last=False)[1].text)
        return found

    def _encode_all(self, text: str) -> Encoded:
        self.encoded += len(text)
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spots = found["offset_mapping"]
        return Encoded(text, _numbers(found["input_ids"]), _numbers(a for a, _ in spots), _numbers(b for _, b in spots))

    def _go_on(self, known: Encoded, count: int, text: str) -> Encoded:
        """The first `count` tokens are known; the next one is special, and stands in the new text too."""
        at = known.begins[count]
        rest = self._encode_all(text[at:])
        begins, ends = (_numbers(at + x for x in own) for own in (rest.begins, rest.ends))
        return Encoded(
            text, known.tokens[:count] + rest.tokens, known.begins[:count] + begins, known.ends[:count] + ends
        )

    def _shared_tokens(self, known: Encoded, text: str) -> int:
        """How many of the known tokens a new text begins with, up to a special token that both have next."""
        shared = count_shared(known.text, text)
        at = known.before(shared) - 1  # the last token that lies in what both share
        while at > 0 and not self._may_cut(known.tokens[at]):
            at -= 1
        return max(at, 0)

    def _may_cut(self, token: int) -> bool:
        """Whether a text has the same tokens if it is encoded in two parts, the second of which begins with this token."""
        if token not in self._special:
            return False
        if token not in self._tried:
            self._tried[token] = self._try_cut(self._special[token])
        return self._tried[token]

    def _try_cut(self, own: str) -> bool:
        for before in (SAMPLE, SAMPLE.rstrip(), own):
            whole, first, second = (
                self._tokenizer(x, add_special_tokens=False, return_offsets_mapping=True)
                for x in (before + own + SAMPLE, before, own + SAMPLE)
            )
            if whole["input_ids"] != first["input_ids"] + second["input_ids"]:
                return False
            moved = [(a + len(before), b + len(before)) for a, b in second["offset_mapping"]]
            if [tuple(x) for x in whole["offset_mapping"]] != [*map(tuple, first["offset_mapping"]), *moved]:
                return False
        return True


def count_shared(one: str, other: str) -> int:
    """Number of characters with which both texts begin."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """The texts of special tokens that take no white space before them with them, and are no part of another such text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    plain = {n: x.content for n, x in added.items() if x.special and not x.lstrip and not x.single_word}
    every = [x.content for x in added.values()]
    return {n: own for n, own in plain.items() if sum(own in other for other in every) == 1}


def _numbers(values: Any) -> array[int]:
    return array("i", values)
