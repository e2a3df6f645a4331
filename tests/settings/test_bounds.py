"""The limits of numbers that stand in the types of settings' fields."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

import pytest

from expire_span.checks import Bound, Count, Positive, Share, at_least, between, check_fields, checked, out_of_bounds
from expire_span.cli.parsing import check_bounds
from expire_span.errors import UserError
from expire_span.settings.agent import AgentTrainConfig
from expire_span.settings.retrofit import DistillConfig
from expire_span.settings.run import from_dict
from expire_span.settings.sequence_tasks import RecallTask
from expire_span.settings.train import LearningConfig, TrainConfig

ODD = Bound("be odd", lambda x: x % 2 == 1)


@dataclasses.dataclass(frozen=True)
@checked
class Settings:
    steps: Count = 1
    limit: Count | None = None
    parts: tuple[Share, ...] = ()
    size: Annotated[int, at_least(3), ODD] = 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps": 0}, "^steps must be at least 1, got 0$"),
        ({"limit": -2}, "^limit must be at least 1, got -2$"),
        ({"parts": (0.5, 1.5)}, r"^parts must lie in \[0, 1\], got \(0.5, 1.5\)$"),
        ({"size": 4}, "^size must be odd, got 4$"),
        ({"size": 1}, "^size must be at least 3, got 1$"),
        ({"steps": "x"}, "^steps must be a whole number, got 'x'$"),  # the type comes before the limit
    ],
)
def test_values_beyond_a_limit_are_refused_by_name(given, words):
    with pytest.raises(ValueError, match=words):
        Settings(**given)


def test_values_at_a_limit_and_none_pass():
    assert Settings(1, None, (0.0, 1.0), 5).size == 5
    assert not list(out_of_bounds(Settings()))


def test_settings_that_are_made_of_a_file_are_held_to_their_limits():
    with pytest.raises(ValueError, match=r"^colours must be at least 2, got 1$"):
        from_dict(RecallTask, {"colours": 1})


def test_a_number_that_is_none_breaks_every_limit():
    """A run says in which part an infinity is, so that type checks let it through: NaN must not pass with it."""

    @dataclasses.dataclass(frozen=True)
    class Rates:
        rate: Positive = 1.0

        def __post_init__(self) -> None:
            check_fields(self, finite=False)

    assert Rates(math.inf).rate == math.inf
    with pytest.raises(ValueError, match=r"^rate must be greater than 0, got nan$"):
        Rates(math.nan)


def test_options_of_a_command_are_held_to_the_limits_of_their_types():
    @dataclasses.dataclass(frozen=True)
    class Command:
        max_rows: Annotated[int, between(1, 1000, " rows")] = 1

    check_bounds(Command(1000))
    with pytest.raises(UserError, match=r"^--max-rows must lie between 1 and 1,000 rows, got 1001$"):
        check_bounds(Command(1001))


@pytest.mark.parametrize("kind", [TrainConfig, AgentTrainConfig, DistillConfig])
def test_a_field_that_is_given_another_default_keeps_its_limits(kind):
    """A subclass that writes a field anew with a plain type would lose the limit of its base."""
    budget = {"budget": 0.5} if kind is DistillConfig else {}
    own, base = ({field.name for field in dataclasses.fields(cls)} for cls in (kind, LearningConfig))
    usual = kind(**budget)
    numbers = [name for name in sorted(own & base - {"budget"}) if type(getattr(usual, name)) in (int, float)]
    assert len(numbers) > 5
    for name in numbers:
        with pytest.raises(ValueError, match=f"^{name} must "):
            kind(**budget, **{name: -1})
