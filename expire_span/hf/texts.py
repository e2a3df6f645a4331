"""How a context begins: as the model's own tokenizer begins a text, and with a chat model as its template begins a user's turn.

A model that was pretrained with a first token predicts badly without it, so training, judging and serving all put the same
tokens before a text. An adapter records them (`begins_with`), and what reads with it follows the record.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.checks import as_whole, require, show
from expire_span.errors import UserError

PROBE = "Once upon a time"
SPECIMEN = "The 3 old foxes, it's said, left at 10:45 (über Straße, ночью, 猫が)\n\tif x == {1: 'a'}: return"
MARK = "the-text-stands-here"
SCORED, ROWS = 128, 4
"""Number of tokens, and of contexts, over which the losses with and without a beginning are compared."""
CLEAR = 0.25
"""Difference of losses, in nats a token, from which on a beginning that hurts is told as such."""


@dataclass(frozen=True)
class Beginning:
    """Tokens that stand before a text."""

    text: tuple[int, ...] = ()
    """Those that the tokenizer puts before every text."""
    context: tuple[int, ...] = ()
    """Those before the text of a training context: of a chat model, all that its template writes before a user's words."""
    tokenizer: str = field(default="", compare=False)
    """A mark of the tokenizer, so that another model's is noticed; empty where it is not known."""

    @classmethod
    def from_record(cls, record: Any) -> Beginning | None:
        """What an adapter's `begins_with` says; None for adapters that have no such record."""
        if record is None:
            return None
        wanted = '{"text": [tokens], "context": [tokens], "tokenizer": mark}'
        require(isinstance(record, dict) and {"text", "context"} <= set(record), f"begins_with must be {wanted}")
        mark = record.get("tokenizer", "")
        require(isinstance(mark, str), f"begins_with.tokenizer must be text, got {show(mark)}")
        for name in ("text", "context"):
            ids = record[name]
            whole = isinstance(ids, list) and all((as_whole(x) if type(x) is int else None) is not None for x in ids)
            require(whole and min(ids, default=0) >= 0, f"begins_with.{name} must be a list of tokens, got {show(ids)}")
        return cls(tuple(record["text"]), tuple(record["context"]), mark)

    @property
    def record(self) -> dict[str, Any]:
        marked = {"tokenizer": self.tokenizer} if self.tokenizer else {}
        return {"text": list(self.text), "context": list(self.context), **marked}


def find_beginning(tokenizer: Any) -> Beginning:
    """How the model of a tokenizer reads: what the tokenizer puts before a text, or its chat template before a user's words."""
    text = text_beginning(tokenizer)
    turn = template_of_turn(tokenizer)
    return Beginning(text, text if turn is None else tuple(turn[0]), mark_of(tokenizer))


def mark_of(tokenizer: Any) -> str:
    """A checksum of how a tokenizer reads a text with words, numbers, signs and letters of several alphabets."""
    return hashlib.sha256(repr(_plain(tokenizer, SPECIMEN)).encode()).hexdigest()[:16]


def check_tokenizer(retrofitted: Any, tokenizer: Any) -> None:
    """Refuse a tokenizer that reads a text as other tokens than the one with which an adapter was trained."""
    known = retrofitted.beginning
    if known is not None and known.tokenizer and known.tokenizer != (found := mark_of(tokenizer)):
        raise UserError(
            f"the tokenizer is another one than the adapter was trained with: it reads a text as tokens of mark {found}, the "
            f"adapter has {known.tokenizer}; put the tokenizer files of the adapter's base model beside the weights"
        )


def check_vocabulary(model: Any, documents: list[Tensor]) -> None:
    """Refuse tokens that a model does not have: its tokenizer is another model's."""
    largest = max((int(x.max()) for x in documents if len(x)), default=0)
    vocab = model.config.get_text_config().vocab_size
    if largest >= vocab:
        raise UserError(
            f"the tokenizer gives token {largest}, and {type(model).__name__} has tokens 0 to {vocab - 1}; put the model's own "
            "tokenizer files beside its weights"
        )


def text_beginning(tokenizer: Any) -> tuple[int, ...]:
    """The tokens that the tokenizer puts before every text: a BOS token, or none."""
    plain, whole = _plain(tokenizer, PROBE), tokenizer.encode(PROBE)
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start])
    return ()


def template_of_turn(tokenizer: Any) -> tuple[list[int], list[int]] | None:
    """The tokens that the chat template writes before a user's words in a new chat, and those between them and the answer; None
    where there is no template, or it does not show where they stand."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    from jinja2 import TemplateError

    said = [{"role": "user", "content": MARK}]
    try:
        written = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    except (TemplateError, ValueError, TypeError):
        return None
    before, found, after = written.partition(MARK)
    return (_plain(tokenizer, before), _plain(tokenizer, after)) if found else None


def encode_text(tokenizer: Any, text: str, begins: Sequence[int] | None = None) -> list[int]:
    """A text as tokens behind its beginning, which is not doubled where the text itself begins with it. begins: None takes the
    tokenizer's own."""
    begins = text_beginning(tokenizer) if begins is None else begins
    return with_beginning(begins, _plain(tokenizer, text))


def with_beginning(begins: Sequence[int], ids: list[int]) -> list[int]:
    return ids if ids[: len(begins)] == list(begins) else [*begins, *ids]


def join_short(documents: list[Tensor], length: int, tokenizer: Any, begins: Sequence[int] = ()) -> list[Tensor]:
    """Documents of at least `length` tokens as they are, and shorter ones joined until they are as long, as pretraining joins
    them: the token that ends a text, and what begins one, stand between them. The rest that does not fill a context stays as
    short as it is."""
    end = getattr(tokenizer, "eos_token_id", None)
    between = torch.tensor([*([] if end is None else [end]), *begins], dtype=torch.long)
    found, parts, count = [], [], 0
    for ids in documents:
        if len(ids) >= length:
            found.append(ids)
            continue
        parts += [between, ids] if parts else [ids]
        count += len(parts[-1]) + (len(between) if len(parts) > 1 else 0)
        if count >= length:
            found.append(torch.cat(parts))
            parts, count = [], 0
    return [*found, torch.cat(parts)] if parts else found


def cut_contexts(documents: list[Tensor], length: int, begins: Sequence[int] = ()) -> list[Tensor]:
    """All whole contexts [length] of documents; each begins with `begins`."""
    front, rest = torch.tensor(list(begins), dtype=torch.long), length - len(begins)
    if rest < 1:
        raise UserError(
            f"a context begins with {len(begins)} tokens of its model, got a context of {length}; give more"
        )
    return [torch.cat([front, part]) for ids in documents for part in ids.split(rest) if len(part) == rest]


@torch.no_grad()
def compare_losses(model: Any, documents: list[Tensor], begins: Sequence[int]) -> tuple[float, float]:
    """The loss in nats a token of the same tokens with `begins` before them, and without."""
    device = next(x.device for x in model.parameters() if x.device.type != "meta")
    length = min(SCORED, max(map(len, documents)))
    rows = torch.stack([x[:length] for x in documents if len(x) >= length][:ROWS]).to(device)
    front = torch.tensor([list(begins)] * len(rows), dtype=torch.long, device=device).view(len(rows), len(begins))
    losses = []
    for before in (front, front[:, :0]):
        ids = torch.cat([before, rows], 1)
        logits = model(ids, use_cache=False).logits[:, before.shape[1] : -1].float()
        losses.append(float(F.cross_entropy(logits.mT, rows[:, 1:])))
    return losses[0], losses[1]


def describe_beginning(model: Any, tokenizer: Any, documents: list[Tensor], beginning: Beginning) -> str:
    """How contexts begin, checked by the loss, as a sentence for the terminal."""
    bos = getattr(tokenizer, "bos_token_id", None)
    tried = beginning.context or (() if bos is None else (bos,))
    if not tried or max(map(len, documents), default=0) < 2:
        return "contexts begin with their text, as the model's tokenizer begins one"
    loss, plain = compare_losses(model, documents, tried)
    clear = CLEAR if max(map(len, documents)) >= SCORED else math.inf  # a few tokens do not tell
    told = f"{loss:.3f} nats a token with {_words(tokenizer, tried)} before a text, {plain:.3f} without"
    if not beginning.context:
        advice = '; set "add_bos_token": true in tokenizer_config.json to read with it' if loss < plain - clear else ""
        return f"contexts begin with their text, as the model's tokenizer begins one: {told}{advice}"
    why = "tokenizer begins one" if beginning.context == beginning.text else "chat template begins a user's turn"
    hurts = "; this beginning hurts: check the tokenizer's files" if loss > plain + clear else ""
    return f"contexts begin as the model's {why}: {told}{hurts}"


def _words(tokenizer: Any, ids: Sequence[int]) -> str:
    if len(ids) == 1:
        return str(tokenizer.convert_ids_to_tokens(list(ids))[0])
    return f"those {len(ids)} tokens"


def _plain(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
