"""`expire-span study word-rnn`: a gated word model, and how long the units of its hidden state stay nearly constant.

A stretch of a unit is a run of words over which its value varies by at most `EPS` of its whole range on the passage. Stretches
are found greedily: a new one begins with the first word that would make the last one vary too much. A unit that carries
something through a sentence has long stretches; one that changes with every word has stretches of one word.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expire_span.checkpoint import load_model
from expire_span.checks import Count, checked
from expire_span.models.decoder import Decoder
from expire_span.recipes import words
from expire_span.settings.run import RunConfig
from expire_span.tasks.words import Words
from expire_span.train.randomness import seed_everything

from .folder import StudyFolder
from .page import write_page
from .pool import run_jobs
from .sections.words import draw_sections
from .training import finish_run

EPS = 0.1
"""Share of a unit's range within which it counts as constant."""
HELD = 5
"""Least length of a stretch, in words, that counts as held."""
PASSAGE = 600
"""Number of words over which stretches are measured."""
SHOWN = 110
"""Number of words in the heat map."""
LEAD = (
    "A network of gated units reads a text word by word and predicts the next one. Its hidden state is all that it "
    "remembers. Where a unit's value stays the same over many words, it is holding something: memory in action. This "
    "page shows the hidden state over a passage, and measures how long units hold still, in the trained model and in "
    "the same model before training."
)


@dataclass(frozen=True)
@checked
class WordSettings:
    """Which word models are trained; saved as the settings of the study folder."""

    path: str = ""
    steps: Count = 400
    seeds: Count = 2

    @property
    def jobs(self) -> list[WordModel]:
        return [WordModel(self.path, self.steps, seed) for seed in range(self.seeds)]


@dataclass(frozen=True)
class WordModel:
    path: str
    steps: int
    seed: int

    @property
    def name(self) -> str:
        return f"seed-{self.seed}"

    @property
    def cost(self) -> float:
        return float(self.steps)


def config_of(model: WordModel) -> RunConfig:
    """The recipe `words` on this text."""
    config = words()
    steps = replace(config.train, steps=model.steps, device="cpu")
    return replace(config, task=replace(config.task, path=model.path), train=steps, seed=model.seed)


def run_job(model: WordModel, folder: StudyFolder, tick: Callable[[float], None]) -> dict[str, Any]:
    """Train one seed (or continue it) in a run folder of its own, and compare it with the same model before training."""
    begin, busy = time.perf_counter(), time.process_time()
    path = folder.path / "runs" / model.name
    run = finish_run(config_of(model), path, "words", model.cost, tick)
    decoder, config = load_model(run)
    seed_everything(config.seed)
    untrained = Decoder(config.model).eval()
    task = Words(config.task)  # type: ignore[arg-type]
    tokens = torch.from_numpy(task.split("test")[:PASSAGE])
    trained_states, before = read_states(decoder, tokens), read_states(untrained, tokens)
    return {
        "seed": model.seed,
        "weights": sum(p.numel() for p in decoder.parameters()),
        "vocabulary": task.codec.size,
        "training_words": len(task.split("train")),
        "perplexity": (run.read_result("score") or {})["score"],
        "unigram_perplexity": unigram_perplexity(task),
        "words": task.codec.show(tokens[:SHOWN]),
        "trained": [describe_layer(states) for states in trained_states],
        "untrained": [describe_layer(states) for states in before],
        "seconds": time.perf_counter() - begin,
        "processor_seconds": time.process_time() - busy,
    }


@torch.no_grad()
def read_states(decoder: Decoder, tokens: Tensor) -> list[np.ndarray]:
    """Feed words one by one and record the hidden state of every layer: [units, T] each."""
    state, seen = None, []
    for token in tokens:
        _, state, _ = decoder(token.view(1, 1), state)
        seen.append([part["h"][0] for part in state])
    return [torch.stack(layer, 1).numpy() for layer in zip(*seen)]


def find_stretches(values: np.ndarray, eps: float = EPS) -> np.ndarray:
    """Lengths of the stretches of one unit [T], in order; they add up to T. A unit that never moves is one stretch."""
    limit = eps * float(values.max() - values.min())
    lengths, low, high = [1], values[0], values[0]
    for value in values[1:]:
        low, high = min(low, value), max(high, value)
        if high - low > limit:
            lengths.append(0)
            low = high = value
        lengths[-1] += 1
    return np.array(lengths)


def describe_layer(states: np.ndarray) -> dict[str, Any]:
    """Stretches of every unit, and the states of the shown words, with the unit of the longest stretches first."""
    found = [find_stretches(row) for row in states]
    means = np.array([lengths.mean() for lengths in found])
    order = np.argsort(-means, kind="stable")
    return {
        "stretches": means[order].round(3).tolist(),
        "mean": float(means.mean()),
        "steadiest_tenth": float(means[order[: max(1, len(order) // 10)]].mean()),
        "held_share": float(np.mean([lengths[lengths >= HELD].sum() / lengths.sum() for lengths in found])),
        "states": states[order, :SHOWN].round(3).tolist(),
    }


def unigram_perplexity(task: Words) -> float:
    """Perplexity on the test words of a model without memory, which predicts each word by its frequency."""
    counts = np.bincount(task.split("train"), minlength=task.codec.size) + 1.0
    share = counts / counts.sum()
    return float(np.exp(-np.log(share[task.split("test")]).mean()))


def run_study(settings: WordSettings, out: Path, processes: int) -> tuple[Path, dict[str, Any]]:
    """Run the cells that are not finished, then write study.json and report.html; returns the page and the numbers."""
    begin = time.perf_counter()
    check_text(settings)
    folder = StudyFolder.open(out, "word-rnn", asdict(settings))
    found = run_jobs(run_job, settings.jobs, folder, processes)
    models = [found[job.name] for job in settings.jobs]
    result = {
        "study": "word-rnn",
        "settings": asdict(settings),
        "eps": EPS,
        "held": HELD,
        "passage": PASSAGE,
        "models": models,
    }
    result["seconds"] = {"all_models": sum(m["seconds"] for m in models), "this_call": time.perf_counter() - begin}
    folder.write_result(result)
    title, facts = "What a word model holds on to", collect_facts(result)
    page = folder.path / "report.html"
    write_page(page, title=title, lead=LEAD, facts=facts, sections=draw_sections(result), headline=tell_headline(facts))
    return folder.path, result


def check_text(settings: WordSettings) -> None:
    """Refuse a text that is too short, before anything is written."""
    config = config_of(settings.jobs[0])
    task = Words(config.task)  # type: ignore[arg-type]
    for split in ("train", "valid", "test"):
        task.stream(split, batch=config.train.batch, block=config.train.block, seed=0)


def tell_headline(facts: list[tuple[str, str]]) -> str:
    trained, before, held, held_before, perplexity, without = (value for _, value in facts)
    return (
        f"A trained unit keeps its value for {trained} words on average, an untrained one for {before}; {held} of the state "
        f"(before training {held_before}) is held for {HELD} words or more. Perplexity {perplexity}, without memory {without}."
    )


def collect_facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The few numbers at the head of the page, and of what the command prints: means over seeds and layers."""
    models = result["models"]
    mean = lambda kind, key: np.mean([layer[key] for m in models for layer in m[kind]])  # noqa: E731
    return [
        ("words: mean stretch of a unit, trained", f"{mean('trained', 'mean'):.2f}"),
        ("words: the same before training", f"{mean('untrained', 'mean'):.2f}"),
        (f"of the state held for {HELD} words or more, trained", f"{mean('trained', 'held_share'):.1%}"),
        ("the same before training", f"{mean('untrained', 'held_share'):.1%}"),
        ("perplexity", f"{np.mean([m['perplexity'] for m in models]):.2f}"),
        ("perplexity without memory (word frequencies)", f"{models[0]['unigram_perplexity']:.1f}"),
    ]
