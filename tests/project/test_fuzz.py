"""The fuzzer: some seconds of it with a fresh seed, and proof that it finds a fault, shrinks it and can repeat it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.fuzz import operator
from tests.fuzz.faces import FACES
from tests.fuzz.runner import failure, fuzz

SECONDS = 4.0
"""For each face."""


@pytest.mark.slow
@pytest.mark.parametrize("face", FACES, ids=lambda face: face.NAME)
def test_random_cases_of_every_face_equal_float64(face):
    """What fails is printed as one command that repeats it; the seed is printed with it."""
    seed = str(random.SystemRandom().randrange(10**9))
    tally = fuzz([face], SECONDS, seed)[face.NAME]
    new = [str(x) for x in tally.found.values() if x.known is None]
    assert tally.cases and not new, "\n".join([f"--face {face.NAME} --seed {seed}, {tally}", *new])


def test_a_failing_case_is_shrunk_to_what_matters():
    """A face that fails for queries above 17 in grouped heads, whatever the other options are."""

    def check(case: dict[str, Any]) -> None:
        assert case["queries"] <= 17 or case["group"] == 1, f"off by {case['seed']}"

    face: Any = SimpleNamespace(NAME="toy", SIMPLE=operator.SIMPLE, draw=operator.draw, check=check)
    said: list[str] = []
    (finding,) = fuzz([face], 5, "0", said.append, stop_at_first=True)["toy"].found.values()
    odd = {name: x for name, x in finding.case.items() if x != operator.SIMPLE[name]}
    assert odd == {"queries": 18, "group": 2} and '--case \'{"face": "toy"' in said[0]


def test_a_wrong_result_is_found(monkeypatch):
    """A mask that ends one step early, as a store that deletes too soon would have it."""
    real = operator.expire_attention

    def wrong(*tensors, span, ramp, **options):
        return real(*tensors, span=(span - 1).clamp_min(-ramp), ramp=ramp, **options)

    case = operator.SIMPLE | {"queries": 40, "dim": 8, "spans": "edges", "impl": "chunked"}
    assert failure(operator, case) is None  # type: ignore[arg-type]
    monkeypatch.setattr(operator, "expire_attention", wrong)
    assert "error" in (failure(operator, case) or "")  # type: ignore[arg-type]
