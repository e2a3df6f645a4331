"""`python -m tests.fuzz`: see the package."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from .faces import fuzz_selected, select
from .runner import Finding, Tally, failure


def _repeat(text: str) -> int:
    case = json.loads(text)
    (face,) = select([case.pop("face")])
    message = failure(face, case)
    print(message or "passes")
    return message is not None


def _print(found: dict[str, Tally]) -> int:
    findings: list[Finding] = [x for tally in found.values() for x in tally.found.values()]
    for name, tally in found.items():
        print(f"{name}: {tally}")
    for finding in findings:
        print(f"{finding.times} x {finding}")
    new = [x for x in findings if x.known is None]
    print(f"{sum(t.cases for t in found.values())} cases, {len(new)} new findings, {len(findings) - len(new)} known")
    return bool(new)


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.fuzz", description="Differential fuzzing against float64.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="a fresh one is drawn and printed if none is given")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--face", action="append", help="only this face; may be given several times")
    parser.add_argument("--case", help="repeat one case, given as JSON")
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    given = parser.parse_args()
    if given.case is not None:
        return _repeat(given.case)
    seed = random.SystemRandom().randrange(10**9) if given.seed is None else given.seed
    print(f"seed {seed}, {time.strftime('%H:%M:%S')}", flush=True)
    seeds = [str(seed)] if given.workers == 1 else [f"{seed}.{n}" for n in range(given.workers)]
    jobs = [(given.face, given.seconds, one, given.first) for one in seeds]
    if len(jobs) == 1:
        return _print(fuzz_selected(*jobs[0]))
    with ProcessPoolExecutor(len(jobs), mp_context=multiprocessing.get_context("spawn")) as pool:
        first, *rest = [x.result() for x in [pool.submit(fuzz_selected, *job) for job in jobs]]
    for found in rest:
        for name, tally in found.items():
            first[name].join(tally)
    return _print(first)


if __name__ == "__main__":
    sys.exit(main())
