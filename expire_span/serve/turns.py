"""The messages of a chat as tokens: where each message stands, which lifetimes it was given, and where a next turn may begin.

A template writes the messages as one text. Where a message stands in it is found by writing the same chat with other words in
every message; the tokens that share a character with it are its tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from expire_span.checks import as_whole, require, show
from expire_span.errors import UserError
from expire_span.models.marks import FREE, KEEP, LATEST

from .encoding import Encoded, count_shared
from .text import TextModel

MARK = "\u241e"
"""Stands around the words that show where a message's content goes."""


@dataclass(frozen=True)
class Place:
    """One message among the tokens of a chat."""

    role: str
    begin: int
    end: int
    """Its tokens are begin to end - 1."""
    keep: bool = False
    expires: int | None = None
    """Number of tokens after its end at which nothing of it is left."""


@dataclass(frozen=True)
class Prompt:
    """Tokens to read, and what is known about them."""

    tokens: list[int]
    marks: list[int] | None = None
    """A lifetime for each token, as models/marks.py defines them; None where nothing is marked."""
    points: tuple[int, ...] = ()
    """Numbers of tokens after which a later prompt may go on differently."""
    places: tuple[Place, ...] = ()

    def told(self, tokens: int, answer: int = 0) -> list[dict[str, Any]]:
        """The messages among the first `tokens` tokens, and an answer of so many tokens behind them, in the words of
        `/v1/memory`."""
        own = [place for place in self.places if place.end <= tokens]
        more = [Place("assistant", tokens, tokens + answer)] if answer and self.places else []
        return [asdict(place) for place in [*own, *more]]

    @property
    def kept(self) -> int:
        """Number of tokens that never expire."""
        return (self.marks or []).count(KEEP)


def read_chat(text: TextModel, messages: list[dict[str, Any]], owner: str = "") -> Prompt:
    """The messages as the model's template writes them; `keep` and `expires` of a message are taken out before. owner: whose
    earlier chats may make it faster."""
    assert text.chat_tokens is not None
    wishes = [_lifetime(said, n) for n, said in enumerate(messages)]
    plain = [{name: x for name, x in said.items() if name not in ("keep", "expires")} for said in messages]
    marked = any(keep or expires is not None for keep, expires in wishes)
    if text.chat_text is None or not getattr(text.tokenizer, "is_fast", False):
        require(not marked, "this model's tokenizer does not tell where a message stands; leave out keep and expires")
        return Prompt(text.chat_tokens(plain))
    whole = text.chat_text(plain)
    spots = text.chats.encode(owner, whole)
    tokens = spots.tokens.tolist()
    found = _find_contents(text, plain, whole)
    require(
        found is not None or not marked,
        "this model's chat template does not show where a message stands; leave out keep and expires",
    )
    places = tuple(
        Place(said["role"], *spots.tokens_of(*where), *wish) for said, where, wish in zip(plain, found or [], wishes)
    )
    marks = _mark(places, len(tokens)) if marked else None
    return Prompt(tokens, marks, _points(text, plain, whole, tokens, spots, found), places)


def _lifetime(said: dict[str, Any], index: int) -> tuple[bool, int | None]:
    keep, expires = said.get("keep"), said.get("expires")
    require(keep is None or isinstance(keep, bool), f"keep of message {index} must be true or false, got {show(keep)}")
    if expires is not None:
        number = None if isinstance(expires, bool) else as_whole(expires)
        fits = number is not None and 1 <= number <= LATEST // 2
        require(fits, f"expires of message {index} must be 1 to {LATEST // 2:,} tokens, got {show(expires)}")
        require(not keep, f"message {index} is marked to be kept and to expire after {number} tokens; choose one")
    return bool(keep), expires


def _mark(places: tuple[Place, ...], tokens: int) -> list[int]:
    marks = [FREE] * tokens
    for place in places:
        for at in range(place.begin, place.end):
            if place.keep:
                marks[at] = KEEP
            elif place.expires is not None:
                age = place.end - 1 - at + place.expires
                require(age <= LATEST, f"a message that expires may have {LATEST // 2:,} tokens, got more")
                marks[at] = age
    return marks


def _find_contents(text: TextModel, plain: list[dict[str, Any]], whole: str) -> list[tuple[int, int]] | None:
    """Where each message's content stands in the text, (begin, end) in characters; None where the template does not show it."""
    assert text.chat_text is not None
    words = [f"{MARK}{n}{MARK}" for n in range(len(plain))]
    try:
        rest = text.chat_text([{**said, "content": word} for said, word in zip(plain, words)])
    except UserError:
        return None
    found, at, read = [], 0, 0  # how far the chat's own text and the one with other words have been followed
    for word, said in zip(words, plain):
        place = rest.find(word, read)
        between = rest[read:place]
        if place < 0 or not whole.startswith(between, at):
            return None
        at, read = at + len(between), place + len(word)
        content = said["content"]
        fitting = next((x for x in (content, content.strip()) if whole.startswith(x, at)), None)
        if fitting is None:
            return None
        found.append((at, at + len(fitting)))
        at += len(fitting)
    return found if whole[at:] == rest[read:] and rest.count(MARK) == 2 * len(words) else None


def _points(
    text: TextModel,
    plain: list[dict[str, Any]],
    whole: str,
    tokens: list[int],
    spots: Encoded,
    found: list[tuple[int, int]] | None,
) -> tuple[int, ...]:
    """Numbers of tokens with which later chats may begin: up to the first message after the system's, and as far as the
    template writes this chat again once an answer and a further message follow."""
    places = []
    first = next((n for n, said in enumerate(plain) if said["role"] not in ("system", "developer")), 0)
    if found and first:
        places.append(found[first][0])
    later = [*plain, {"role": "assistant", "content": "-"}, {"role": "user", "content": "-"}]
    try:
        assert text.chat_text is not None
        again = text.chat_text(later)
        places.append(count_shared(whole, again))
    except UserError:
        places.append(0)  # a template that refuses such a chat
    special = {*text.tokenizer.all_special_ids, *text.tokenizer.get_added_vocab().values()}
    points = set()
    for place in places:
        count = spots.before(place)
        # The last token may be another one once other text follows, unless it is one that no text runs into.
        count -= count > 0 and tokens[count - 1] not in special
        points.add(count)
    return tuple(sorted(points - {0}))
