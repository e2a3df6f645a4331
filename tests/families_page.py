"""Writes docs/families.md, which model families can be retrofitted: `python -m tests.families_page` (about five minutes).

python -m tests.families_page gemma3 phi3    # tries only these again, and leaves what the page says of the others
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

import torch
import transformers

from tests.hf_families import REFUSED, UNTRIED, WORKS, Outcome, families, outcome

PAGE = Path(__file__).resolve().parent.parent / "docs" / "families.md"
HEAD = """# Model families

With this page you can see whether a model of `transformers` can be retrofitted. It is written by
`python -m tests.families_page`, here with transformers {version}: for each causal family, a tiny model with random weights gets
spans of which most expire within 80 tokens. It reads these tokens in chunks, in a stream and, where the family can, over slots,
while expired memories are deleted. Its logits must be those of one pass in which the definition masks the same memories and
nothing is deleted. What is neither equal nor refused fails the test.

<!-- parse -->
```bash
expire-span retrofit MODEL --data books --budget 0.25     # a family that cannot be retrofitted is refused in one sentence
```

What decides is not the name: `retrofit` reads it off [one forward pass](hf.md#a-family-that-is-not-listed), so that a family
that is newer than this page may work as well.

**{files} modelling files work, which serve {works} families; {refused} are refused, {untried} were not tried.**
"""
TABLES = {
    WORKS: (
        "Works",
        "Every family has a span for each token and key/value head.",
        ("what else is special", "families"),
    ),
    REFUSED: (
        "Refused",
        "Each is refused by name, with the reason, and the model stays as it was.",
        ("reason", "families"),
    ),
    UNTRIED: (
        "Not tried",
        "No tiny model of these could be made or run, by rules that know no family.",
        ("reason", "families"),
    ),
}


def as_markdown(outcomes: list[Outcome]) -> str:
    by_verdict = {v: [o for o in outcomes if o.verdict == v] for v in TABLES}
    counts = dict(works=len(by_verdict[WORKS]), refused=len(by_verdict[REFUSED]), untried=len(by_verdict[UNTRIED]))
    counts["files"] = len({file_of(o.kind) for o in by_verdict[WORKS]})
    parts = [HEAD.format(version=transformers.__version__, **counts)]
    for verdict, (title, words, columns) in TABLES.items():
        parts.append(f"\n## {title}\n\n{words}\n\n| {' | '.join(columns)} |\n|---|---|\n")
        grouped = defaultdict(list)
        for o in by_verdict[verdict]:
            grouped[o.said].append(f"`{o.kind}`")
        parts += [f"| {said} | {', '.join(sorted(kinds))} |\n" for said, kinds in sorted(grouped.items())]
    return "".join(parts)


def file_of(kind: str) -> str:
    """The folder of transformers that holds a family's modelling file."""
    return transformers.CONFIG_MAPPING[kind].__module__.split(".")[-2]


def read_page(text: str) -> tuple[str, dict[str, Outcome]]:
    """The version of transformers that a page was written with, and what it says of each family."""
    found = re.search(r"transformers (\S+):", text)
    assert found is not None, "the page names no version"
    outcomes = {}
    for verdict, (title, *_) in TABLES.items():
        part = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
        for said, kinds in re.findall(r"^\| (.*) \| (`.*`) \|$", part, flags=re.MULTILINE):
            outcomes |= {kind: Outcome(kind, verdict, said) for kind in kinds.strip("`").split("`, `")}
    return found[1], outcomes


def main(kinds: list[str]) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    outcomes = read_page(PAGE.read_text(encoding="utf-8"))[1] if kinds else {}
    wrong = []
    for kind in kinds or families():
        try:
            outcomes[kind] = outcome(kind)
            print(kind, outcomes[kind].verdict, outcomes[kind].said, flush=True)
        except Exception as error:
            wrong.append(f"{kind}: {type(error).__name__}: {error}")
            print(wrong[-1], flush=True)
    if wrong:
        raise SystemExit("\n".join(["neither equal nor refused, so nothing was written:", *wrong]))
    PAGE.write_text(as_markdown(list(outcomes.values())), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
