"""Scores of answers, from 0 to 1: all strings found, the final number, rules that were followed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy


def strings_found(answer: str, wanted: Sequence[str]) -> float:
    """Fraction of the wanted strings that the answer contains, in any case of letters."""
    said = answer.lower()
    return sum(x.lower() in said for x in wanted) / len(wanted)


def final_number(answer: str, wanted: Sequence[str]) -> float:
    """Whether the number after the first #### of the answer is the wanted one."""
    return float(number_after_mark(answer) == number_after_mark(f"#### {wanted[0]}"))


def number_after_mark(text: str) -> float | None:
    """The number after ####, without signs of currency and commas between its digits."""
    found = re.search(r"####\s*[^\d\s-]*(-?)\s*[^\d\s-]*(\d[\d,]*(?:\.\d+)?)", text)
    return float(found[1] + found[2].replace(",", "")) if found else None


def rules_followed(answer: str, wanted: Sequence[str]) -> float:
    """Fraction of the rules that the answer follows; an answer without a word follows none."""
    if not re.search(r"\w", answer):
        return 0.0
    return sum(follows(answer, *rule.partition(":")[::2]) for rule in wanted) / len(wanted)


def follows(answer: str, rule: str, value: str) -> bool:
    """Whether an answer follows one of the rules of `conduct.RULES`."""
    words = re.findall(r"\w+", answer)
    if rule == "begin":
        return words[0].lower() == value.lower()
    if rule == "end":
        return words[-1].lower() == value.lower()
    if rule == "capitals":
        return answer == answer.upper()
    if rule == "no comma":
        return "," not in answer
    if rule == "words":
        return len(words) <= int(value)
    assert rule == "mention", f"no rule {rule}"
    return value.lower() in answer.lower()


RULES: dict[str, Callable[[str, Sequence[str]], float]] = {
    "strings": strings_found,
    "number": final_number,
    "rules": rules_followed,
}


def is_settled(rule: str, answer: str, wanted: Sequence[str]) -> bool:
    """Whether further tokens cannot change the score, so that the answer may end here."""
    if rule == "number":
        return bool(re.search(r"####\s*\S*\d\S*\s", answer))
    return rule == "strings" and strings_found(answer, wanted) == 1


def paired_interval(
    ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]], rounds: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """Mean over tasks of the difference ours - theirs on the same prompts, and its 95% interval.

    The interval is a bootstrap: prompts are drawn anew within each task, the same for both.
    """
    rng, means, drawn = numpy.random.default_rng(seed), [], []
    for task in sorted(ours):
        difference = numpy.array(ours[task], dtype=float) - numpy.array(theirs[task], dtype=float)
        means.append(difference.mean())
        drawn.append(difference[rng.integers(len(difference), size=(rounds, len(difference)))].mean(1))
    low, high = numpy.quantile(numpy.mean(drawn, 0), [0.025, 0.975])
    return float(numpy.mean(means)), float(low), float(high)
