"""The former place of expire_span.checkpoint; this alias stays for one release."""

from expire_span.checkpoint import (
    Snapshot,
    find_fault,
    folder_of,
    last_good,
    list_checkpoints,
    load,
    load_model,
    newest_sound,
    save,
)

__all__ = [
    "Snapshot",
    "find_fault",
    "folder_of",
    "last_good",
    "list_checkpoints",
    "load",
    "load_model",
    "newest_sound",
    "save",
]
