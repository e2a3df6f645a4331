"""The former place of `expire_span.checkpoint`, which moved in 0.2.0; this alias is removed in 0.3.0."""

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
