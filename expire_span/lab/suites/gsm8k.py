"""GSM8K: word problems, with worked examples as the context and the problem as the question; memories expire while answering.

The file has one JSON object a line, with `question` and `answer`, as the published data has. Its first lines are the examples.
"""

from __future__ import annotations

import json
from pathlib import Path

from expire_span.disk.files import check_plain
from expire_span.errors import UserError, describe

from .prompts import Prompt

EXAMPLES = 8
MOST_TOKENS = 320
BEGIN = "Solve each problem step by step, and write the final number after ####.\n\n"


def make_problems(path: Path, count: int) -> list[Prompt]:
    """The problems after the examples, at most `count`."""
    problems = read_problems(path, EXAMPLES + count)
    if len(problems) <= EXAMPLES:
        raise UserError(f"{path} has {len(problems)} problems, more than {EXAMPLES} are needed: the first are examples")
    told = [f"Problem: {x['question']}\nSolution: {x['answer']}" for x in problems[:EXAMPLES]]
    context = BEGIN + "\n\n".join(told)
    return [
        Prompt(
            *("gsm8k", n, context, f"\n\nProblem: {x['question']}", (final(x["answer"]),), MOST_TOKENS),
            prefix="\nSolution:",
            rule="number",
        )
        for n, x in enumerate(problems[EXAMPLES:])
    ]


def final(answer: str) -> str:
    return answer.rpartition("####")[2].strip()


def read_problems(path: Path, limit: int) -> list[dict[str, str]]:
    try:
        check_plain(path)
        lines = path.read_text(encoding="utf-8").splitlines()[:limit]
    except (OSError, UnicodeDecodeError) as error:
        told = describe(error) if isinstance(error, OSError) else "it is no text"
        raise UserError(f"cannot read --data {path}: {told}; give the .jsonl file of GSM8K") from error
    found = []
    for n, line in enumerate(lines):
        try:
            problem = json.loads(line)
        except (ValueError, RecursionError):
            problem = None
        texts = problem if isinstance(problem, dict) else {}
        if not all(isinstance(texts.get(x), str) for x in ("question", "answer")) or "####" not in texts["answer"]:
            raise UserError(
                f"line {n + 1} of {path} must be a JSON table with question and answer (with ####), got {line[:40]!r}"
            )
        found.append(texts)
    return found
