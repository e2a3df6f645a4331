"""What users set: {"expire_span": {"adapter": "DIR", "slots": 512, "when_full": "evict"}} as vLLM's --additional-config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from expire_span.checks import as_whole, show
from expire_span.errors import UserError

KEY = "expire_span"
ARCHITECTURE = "ExpireSpanForCausalLM"
"""The name by which vLLM knows the model class of this plugin."""
WhenFull = Literal["error", "evict"]


@dataclass(frozen=True)
class Options:
    """The plugin's options."""

    adapter: str
    """Folder of the adapter that `expire-span retrofit` wrote."""
    slots: int | None = None
    """Slots of every head that learns; None takes what `expire-span measure-slots` has measured for each head, with room, or,
    where nothing was measured, as many as the longest life can fill, so that no head ever runs out."""
    when_full: WhenFull = "error"
    """What happens when a head runs out of slots: the request ends with an error, or the memory with the fewest steps left is
    evicted, and counted."""


def read_options(additional: Any) -> Options:
    """The options in vLLM's additional_config. UserError for what is missing, unknown or wrong."""
    given = additional.get(KEY) if isinstance(additional, dict) else None
    if not isinstance(given, dict):
        raise UserError(
            f'vLLM needs the adapter in its additional_config, as {{"{KEY}": {{"adapter": "DIR"}}}}, got {show(additional)}'
        )
    known = list(Options.__dataclass_fields__)
    if unknown := sorted(set(given) - set(known)):
        raise UserError(f"the options of {KEY} are {', '.join(known)}, got {', '.join(map(str, unknown))}")
    adapter, slots, when_full = given.get("adapter"), given.get("slots"), given.get("when_full", "error")
    if not isinstance(adapter, str) or not adapter:
        raise UserError(f"adapter must be the folder of an adapter, got {show(adapter)}")
    if slots is not None and (as_whole(slots) is None or slots < 1):
        raise UserError(f"slots must be a whole number of at least 1, got {show(slots)}")
    if when_full not in get_args(WhenFull):
        raise UserError(f"when_full must be one of {', '.join(get_args(WhenFull))}, got {show(when_full)}")
    return Options(adapter, slots, when_full)
