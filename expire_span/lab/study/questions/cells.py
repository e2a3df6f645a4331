"""The cells of the study: each trains and measures one small model and returns plain numbers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from expire_span.lab.study.folder import StudyFolder
from expire_span.models.decoder import Decoder
from expire_span.models.encoder import Encoder
from expire_span.models.systems.full import FullConfig
from expire_span.models.systems.transformer_xl import TransformerXLConfig
from expire_span.settings.run import BudgetConfig, DecoderConfig, ExpireSpanConfig, MixerConfig, RecallTask, TrainConfig
from expire_span.tasks.contract import Batch
from expire_span.tasks.recall import Recall

from .fit import Measured, fit, measure
from .labelling import Labelling, LabellingTask
from .penalty import Drop, PenalisedAttention, Penalty, penalise

Tick = Callable[[float], None]
TaskName = Literal["notes", "chores", "recall"]
TRAIN = TrainConfig(lr=5e-3, warmup=10, schedule="linear", decay_share=0.3, span_lr_scale=0.5)
BUDGET = BudgetConfig(initial_weight=1e-3, gain=0.3, max_weight=1e-2, start_loss=0.1, patience_loss=0.03)
"""As in the recall recipe: the span loss starts only once the task is solved, and its weight falls if the loss rises again."""
ENCODER_TASK = LabellingTask(length=256, min_distance=48)
LONG = 2048
"""Length of the sequences on which trained encoders are timed."""
NOTES = LabellingTask(length=128, min_distance=24, direction="past")
RECALL = RecallTask(min_length=5, max_length=120, blank_prob=0.2)
THRESHOLDS = (0.01, 0.03, 0.1, 0.3)
KEPT = (1, 2, 4, 8, 16, 32)
HINDSIGHT = (4, 8)
"""Numbers of memories kept with which the hindsight rule is tried on every trained model."""


def small_model(vocab: int, layers: int, positions: Any, mixer: MixerConfig) -> DecoderConfig:
    return DecoderConfig.modern(
        vocab=vocab, dim=64, layers=layers, heads=4, ff_dim=64, positions=positions, mixer=mixer
    )


def learned_spans(max_span: int) -> ExpireSpanConfig:
    return ExpireSpanConfig(max_span=max_span, ramp=4, initial_span=0.999, span_loss="l1")


# (a) Encoders


@dataclass(frozen=True)
class EncoderCell:
    """An encoder of one kind on long-range labelling."""

    system: Literal["full", "spans", "window"]
    memory: int
    """With spans, the budget of living tokens per query; with a window, its width on either side; with full attention, 0."""
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"encoder-{self.system}-{self.memory}-seed{self.seed}"

    @property
    def cost(self) -> float:
        """Cost in units of one training step of the cheapest cell."""
        return 2.0 * self.steps

    @property
    def mixer(self) -> MixerConfig:
        if self.system == "spans":
            return learned_spans(ENCODER_TASK.length)
        return TransformerXLConfig(span=self.memory + 1) if self.system == "window" else FullConfig()


def run_encoder(cell: EncoderCell, tick: Tick) -> dict[str, Any]:
    begin = time.process_time()
    torch.manual_seed(cell.seed)
    task = Labelling(ENCODER_TASK)
    encoder = Encoder(small_model(task.codec.size, 2, "rotary", cell.mixer))
    budget = replace(BUDGET, live=cell.memory) if cell.system == "spans" else BUDGET
    config = replace(TRAIN, steps=cell.steps, budget=budget)
    fit(encoder, task.stream("train", batch=4, seed=cell.seed), config, lambda n: tick(2.0 * n))
    trained = time.process_time() - begin
    test = list(itertools.islice(task.stream("test", batch=16, seed=cell.seed), 4))
    found: dict[str, Any] = {"cell": asdict(cell), **asdict(measure(encoder, test, task.asked))}
    for side, sign in (("before", -1), ("after", 1)):
        found[f"accuracy_{side}"] = measure(encoder, test, partial(asked_on_side, task, sign)).accuracy
    found["spans"] = spans_by_kind(encoder, task, test[0].x) if cell.system == "spans" else {}
    found["long"] = measure_long(encoder, cell.seed)
    return found | {"train_seconds": trained, "seconds": time.process_time() - begin}


def asked_on_side(task: Labelling, sign: int, batch: Batch) -> Tensor:
    """Mask [B, T] of the questions after (sign +1) or before (-1) the note for which they ask."""
    asked = task.asked(batch)
    colours = task.config.colours
    note = torch.where(batch.x < task.first_rumour, batch.x // colours, -1)  # name of the note here
    name = batch.x - task.first_question
    same = note.unsqueeze(1) == name.unsqueeze(2)  # [B, question at, note at]
    place = torch.arange(batch.x.shape[1])
    distance = place[:, None] - place
    return asked & (same & (distance * sign > 0)).any(2)


@torch.no_grad()
def spans_by_kind(encoder: Decoder, task: Labelling, x: Tensor) -> dict[str, list[float]]:
    """Mean span that each layer gives to notes, rumours, questions and fillers."""
    _, _, aux = encoder(x, keep="nothing")
    kinds = {"note": 0, "rumour": task.first_rumour, "question": task.first_question, "filler": task.first_filler}
    ends = [*list(kinds.values())[1:], task.first_topic]
    spans = [layer.span for layer in aux.layers if layer.span is not None]
    return {
        kind: [float(span[(x >= first) & (x < end)].mean()) for span in spans]
        for (kind, first), end in zip(kinds.items(), ends)
    }


def measure_long(encoder: Decoder, seed: int) -> dict[str, float]:
    """Accuracy on sequences eight times as long as in training, with the same distances between question and note, and the
    time of one forward pass."""
    task = Labelling(replace(ENCODER_TASK, length=LONG, max_distance=ENCODER_TASK.length))
    batches = list(itertools.islice(task.stream("test", batch=1, seed=seed), 4))
    found = measure(encoder, batches, task.asked)
    times = []
    for batch in batches:
        begin = time.process_time()
        measure(encoder, [batch], task.asked)
        times.append(time.process_time() - begin)
    return {**asdict(found), "milliseconds": 1e3 * sorted(times)[len(times) // 2]}


# (b) Penalised attention


@dataclass(frozen=True)
class CacheCell:
    """A decoder whose memories expire, or one with penalised attention whose cache drops memories that get no attention."""

    task: TaskName
    system: Literal["spans", "attention"]
    penalty: Penalty
    strength: float
    """With spans, the budget of living memories; with attention, the weight of the penalty."""
    seed: int
    steps: int

    @property
    def name(self) -> str:
        kind = "spans" if self.system == "spans" else self.penalty
        return f"cache-{self.task}-{kind}-{self.strength:g}-seed{self.seed}"

    @property
    def cost(self) -> float:
        return (1.0 if self.system == "spans" else 1.6) * self.steps


def build_task(name: str) -> Labelling | Recall:
    return Recall(RECALL) if name == "recall" else Labelling(replace(NOTES, chores=0.1 if name == "chores" else 0.0))


def asked_in(task: Labelling | Recall, batch: Batch) -> Tensor:
    return task.asked(batch) if isinstance(task, Labelling) else batch.mask


def build_cache_model(cell: CacheCell, vocab: int) -> Decoder:
    mixer = learned_spans(256) if cell.system == "spans" else FullConfig()
    decoder = Decoder(small_model(vocab, 1, "none", mixer))
    if cell.system == "spans":
        return decoder
    return penalise(decoder, cell.penalty)


def run_cache(cell: CacheCell, tick: Tick) -> dict[str, Any]:
    begin = time.process_time()
    torch.manual_seed(cell.seed)
    task = build_task(cell.task)
    rows, longest = (16, RECALL.max_length + 2) if cell.task == "recall" else (4, NOTES.length)
    decoder = build_cache_model(cell, task.codec.size)
    budget = replace(BUDGET, live=cell.strength) if cell.system == "spans" else BUDGET
    weight = 0.0 if cell.penalty == "none" else cell.strength
    config = replace(TRAIN, steps=cell.steps, budget=budget, span_weight=weight)
    share = cell.cost / cell.steps
    fit(decoder, task.stream("train", batch=rows, block=longest, seed=cell.seed), config, lambda n: tick(n * share))
    trained = time.process_time() - begin
    test = list(itertools.islice(task.stream("test", batch=32, block=longest, seed=cell.seed), 2))
    look = partial(measure, decoder, test, partial(asked_in, task))
    found = {"cell": asdict(cell), **asdict(look()), "change_by_deletion": 0.0}
    if cell.system == "spans":
        found["change_by_deletion"] = change_by_streaming(decoder, test[0].x[:8])
    else:
        found |= measure_drops(decoder, test, look, partial(asked_in, task))
        found["idle_reading"] = idle_reading(decoder, task, test[0]) if isinstance(task, Labelling) else None
    return found | {"train_seconds": trained, "seconds": time.process_time() - begin}


@torch.no_grad()
def change_by_streaming(decoder: Decoder, x: Tensor, block: int = 8) -> float:
    """Largest change of a log-probability when tokens are read in blocks and dead memories are deleted between them."""
    decoder.eval()
    whole = decoder(x, keep="nothing")[0].log_softmax(-1)
    state, parts = None, []
    for part in x.split(block, 1):
        logits, state, _ = decoder(part, state)
        parts.append(logits.log_softmax(-1))
    return float((torch.cat(parts, 1) - whole).abs().max())


def measure_drops(
    decoder: Decoder, test: list[Batch], look: Callable[[], Measured], asked: Callable[[Batch], Tensor]
) -> dict[str, Any]:
    """Accuracy and memories held for every rule of the cache, and by how much answers change when 8 memories are kept."""
    mixer = decoder.layers()[0].mixer
    assert isinstance(mixer, PenalisedAttention)
    rules = [Drop(threshold=value) for value in THRESHOLDS] + [Drop(keep=count) for count in KEPT]
    rules += [Drop(keep=count, hindsight=True) for count in HINDSIGHT]
    curve = []
    for rule in rules:
        mixer.drop = rule
        curve.append({"rule": asdict(rule), **asdict(look())})
    change = change_by_dropping(decoder, mixer, test[0].x, asked(test[0]))
    mixer.drop = None
    return {"curve": curve, "change_by_deletion": change}


@torch.no_grad()
def change_by_dropping(decoder: Decoder, mixer: PenalisedAttention, x: Tensor, asked: Tensor) -> float:
    """Mean, over questions, of the largest change of a probability when all but 8 old memories are dropped."""
    answers = []
    for rule in (None, Drop(keep=8)):
        mixer.drop = rule
        answers.append(decoder(x, keep="nothing")[0].softmax(-1)[asked])
    return float((answers[0] - answers[1]).abs().amax(-1).mean())


@torch.no_grad()
def idle_reading(decoder: Decoder, task: Labelling, batch: Batch) -> float:
    """Attention that fillers, which are queries without a question, pay to a note, relative to any other memory.

    Attention is the maximum over heads, as the cache uses it. A ratio of 1 means that fillers attend to notes no more than to
    other memories.
    """
    block = decoder.layers()[0]
    mixer = block.mixer
    assert isinstance(mixer, PenalisedAttention)
    weight = mixer.attention(block.norm1(decoder.embed(batch.x)))[1].amax(1)  # [B, T, T]
    idle = (batch.x >= task.first_filler) & (batch.x < task.first_topic)
    note = batch.x < task.first_rumour
    seen = torch.ones(weight.shape[-2:], dtype=torch.bool).tril(-1) & idle.unsqueeze(2)
    return float(weight[seen & note.unsqueeze(1)].mean() / weight[seen & ~note.unsqueeze(1)].mean())


def run_cell(cell: EncoderCell | CacheCell, folder: StudyFolder, tick: Tick) -> dict[str, Any]:
    """One cell, in a process of its own."""
    with without_onednn():
        return run_encoder(cell, tick) if isinstance(cell, EncoderCell) else run_cache(cell, tick)


@contextmanager
def without_onednn() -> Iterator[None]:
    """A context without oneDNN: on some CPUs it does not support q k^T, and finding that out takes a hundred times as long as
    the product."""
    backend: Any = torch.backends.mkldnn
    before = backend.enabled
    backend.enabled = False
    try:
        yield
    finally:
        backend.enabled = before
