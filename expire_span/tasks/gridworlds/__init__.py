"""Grid worlds that need selective memory: Corridor, Portal, Instruction and Endless T-Maze, from the published
descriptions.

Importing this package registers `ExpireSpan/<Name>-{Easy,Medium,Hard}-v0` with Gymnasium where that is installed (the extra
`rl`). The engines themselves need only numpy, or torch to run on a GPU.
"""

from __future__ import annotations

from importlib.util import find_spec

from .levels import LEVELS, build_engine, level_config

__all__ = ["LEVELS", "build_engine", "level_config", "list_ids"]

_API = "expire_span.tasks.gridworlds.gymnasium_api"


def list_ids() -> list[str]:
    """Ids of all environments."""
    return [f"ExpireSpan/{name}-{level}-v0" for name, levels in LEVELS.items() for level in levels]


def _register() -> None:
    import gymnasium

    for name, levels in LEVELS.items():
        for level in levels:
            gymnasium.register(
                f"ExpireSpan/{name}-{level}-v0",
                entry_point=f"{_API}:GridWorldEnv",
                vector_entry_point=f"{_API}:GridWorldVectorEnv",
                kwargs={"world": name, "level": level},
            )


if find_spec("gymnasium") is not None:
    _register()
