"""The best published scores that were found for environments of other packages, for the tables of `compare --envs`.

They are quoted from other papers' tables, by agents with other sizes and numbers of steps; none was run again here.
"""

from __future__ import annotations

BEST: dict[str, float] = {
    "popgym-AutoencodeEasy-v0": 0.50,
    "popgym-RepeatPreviousMedium-v0": 0.65,
    "popgym-RepeatPreviousHard-v0": -0.19,
}
"""Mean return by the environment's id, without the module that registers it."""


def published(env: str) -> float | None:
    return BEST.get(env.rpartition(":")[2])
