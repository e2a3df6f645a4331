"""How far back the answers of object collision lie, and how far back a trained model finds them.

`python -m benchmarks.collision lookup` simulates both processes (easy questions about the latest collision, or about the
present colours) and states the error that is left when answers are looked up directly within a span: older ones are guessed.

`python -m benchmarks.collision ages runs/NAME` tests a run and counts its errors by the age of the answer. Answers older than
the span can only be right, beyond guessing, if a later memory has taken them on.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from expire_span.checkpoint import load_model
from expire_span.runs import RunFolder
from expire_span.settings.tasks import CollisionTask
from expire_span.tasks.collision import FRAME, Collision, Simulation
from expire_span.tasks.episodes import key_of
from expire_span.train.devices import check_device

SPANS = (16_384, 32_768, 65_536)
FAR = 2**40
"""More frames than any answer is old."""
CHUNK = 500
"""Frames simulated at a time."""


def simulate(config: CollisionTask, rows: int, frames: int, *, warm: int = 0, seed: int = 0) -> dict[str, np.ndarray]:
    """Of all scored questions after `warm` frames [questions]: the answer's age in frames, the label, and whether the pair is
    the one that the particles have now (present), or the one that collided last (latest).
    """
    simulation, parts = Simulation(config, rows, key=key_of("test", seed)), []
    for start in range(0, warm, CHUNK):
        simulation.run(min(CHUNK, warm - start))
    for start in range(0, frames, CHUNK):
        latest = simulation.latest.copy()
        out = simulation.run(min(CHUNK, frames - start))
        asked, colours = (x[..., 0] * config.colours + x[..., 1] for x in (out.asked, out.colours))
        met = (out.cells[:, :, 0] == out.cells[:, :, 1]).all(-1)
        last = np.concatenate([latest[None], np.where(met, colours, -1)])
        newest = np.maximum.accumulate(np.where(last >= 0, np.arange(len(last))[:, None], 0), 0)
        latest = np.take_along_axis(last, newest, 0)[1:]
        scored = out.age >= 0
        parts.append([x[scored] for x in (out.age, out.label, asked == colours, asked == latest)])
    return dict(zip(("age", "label", "present", "latest"), map(np.concatenate, zip(*parts))))


def lookup_error(age: np.ndarray, label: np.ndarray, span: int) -> float:
    """Share of wrong answers if those at most `span` tokens old are known and all others are guessed by the most frequent."""
    guess = np.bincount(label).argmax()
    return float(((age * FRAME > span) & (label != guess)).mean())


def describe(drawn: dict[str, np.ndarray]) -> dict[str, Any]:
    """Frequencies of questions, ages of answers in frames, and the error of direct lookup by span."""
    age = drawn["age"]
    return {
        "questions": len(age),
        "present": float(drawn["present"].mean()),
        "latest": float(drawn["latest"].mean()),
        "median": float(np.median(age)),
        "older": {frames: float((age > frames).mean()) for frames in (2048, 4096, 8192)},
        "lookup": {span: lookup_error(age, drawn["label"], span) for span in SPANS},
    }


class Ages:
    """Ages of the answers of consecutive blocks, counted from their tokens; -1 where a row has not shown the collision."""

    def __init__(self, task: Collision, rows: int) -> None:
        self.task, self.frame = task, 0
        self.when = np.full((rows, task.config.colours**2), -1)

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """[B, T] tokens -> [B, T / 8] ages in frames."""
        task, colours = self.task, self.task.config.colours
        frames = tokens.reshape(len(tokens), -1, FRAME)
        met = (frames[..., 0] == frames[..., 3]) & (frames[..., 1] == frames[..., 4])
        pair = (frames[..., 2] - task.first_colour) * colours + frames[..., 5] - task.first_colour
        asked = (frames[..., 6] - task.first_asked) * colours + frames[..., 7] - task.first_asked
        rows, out = np.arange(len(tokens)), np.empty(met.shape, np.int64)
        for n in range(met.shape[1]):
            hit = np.flatnonzero(met[:, n])
            self.when[hit, pair[hit, n]] = self.frame + n
            when = self.when[rows, asked[:, n]]
            out[:, n] = np.where(when >= 0, self.frame + n - when, -1)
        self.frame += met.shape[1]
        return out


@torch.no_grad()
def answers(run: RunFolder, *, batch: int, block: int, batches: int, device: str) -> Iterator[tuple[np.ndarray, ...]]:
    """Age, label (0 to 3) and correctness of a run's scored test questions, block by block, memory carried."""
    place = check_device(device)
    decoder, config = load_model(run, place)
    if not isinstance(config.task, CollisionTask):
        raise SystemExit(f"run {run.path} is of the task {config.task.kind}; ages needs one of collision")
    task = Collision(config.task)
    stream, ages, state = task.stream("test", batch=batch, block=block, seed=config.seed), Ages(task, batch), None
    half = torch.autocast(place.type, torch.bfloat16, enabled=config.train.precision == "bf16")
    for part in itertools.islice(stream, batches):
        with half:
            logits, state, _ = decoder(part.x.to(place), state)
        asked = slice(FRAME - 1, None, FRAME)
        found, y, mask = (
            logits[:, asked].argmax(-1).cpu().numpy(),
            part.y[:, asked].numpy(),
            part.mask[:, asked].numpy(),
        )
        yield ages.of(part.x.numpy())[mask], y[mask] - task.first_answer, (found == y)[mask]


def by_age(age: np.ndarray, label: np.ndarray, correct: np.ndarray, span: int) -> dict[str, Any]:
    """Errors of all questions, of direct lookup on the same questions, and by age in spans; ages of -1 are not known."""
    edges = [*(span * n // FRAME for n in range(5)), FAR]
    far = np.where(age < 0, FAR, age)
    parts = {f"{n} to {n + 1}": (far > low) & (far <= high) for n, (low, high) in enumerate(itertools.pairwise(edges))}
    parts["0 to 1"] |= far == 0
    parts["4 or more"] = parts.pop("4 to 5") & (age >= 0)
    parts["before the row begins"] = age < 0
    spans = {
        name: {"share": float(part.mean()), "error": float(1 - correct[part].mean()) if part.any() else None}
        for name, part in parts.items()
    }
    whole = {"questions": len(age), "error": float(1 - correct.mean()), "lookup": lookup_error(far, label, span)}
    return {"span": span, **whole, "by age in spans": spans}


def test(args: argparse.Namespace) -> dict[str, Any]:
    run = RunFolder.open(args.run)
    parts = answers(run, batch=args.batch, block=args.block, batches=args.batches, device=args.device)
    age, label, correct = map(np.concatenate, zip(*parts))
    return by_age(age, label, correct, args.span or run.config.model.mixer.max_span)


def look_up(args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for easy in ("now", "latest"):
        found[easy] = describe(simulate(CollisionTask(easy=easy), args.rows, args.frames, warm=args.warm))
    return found


def read_arguments(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    lookup = verbs.add_parser("lookup", help="simulate both processes")
    lookup.add_argument("--rows", type=int, default=64)
    lookup.add_argument("--warm", type=int, default=0, help="frames before the first question that counts")
    lookup.add_argument("--frames", type=int, default=60_000)
    lookup.set_defaults(run_verb=look_up)
    ages = verbs.add_parser("ages", help="test a run by the age of the answers")
    ages.add_argument("run", type=Path)
    ages.add_argument("--batch", type=int, default=16)
    ages.add_argument("--block", type=int, default=8192)
    ages.add_argument("--batches", type=int, default=40)
    ages.add_argument(
        "--span", type=int, default=None, help="unit of ages in tokens; the model's longest span by default"
    )
    ages.add_argument("--device", default="auto")
    ages.set_defaults(run_verb=test)
    return parser.parse_args(args)


def main(args: list[str] | None = None) -> None:
    given = read_arguments(args)
    print(json.dumps(given.run_verb(given), indent=2))


if __name__ == "__main__":
    main()
