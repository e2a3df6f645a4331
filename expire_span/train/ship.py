"""`expire-span ship`: export a run on text as a small folder to share, with a model card.

The folder is a run folder that holds only weights, so every command that takes a run takes it. Matrices are stored in half
precision; the score on the card is that of the weights as stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from expire_span.checkpoint import load_model, newest_sound, write_weights
from expire_span.disk.files import seal, to_json, write_synced
from expire_span.errors import RunError, UserError
from expire_span.models.decoder import Decoder
from expire_span.runs import RunFolder, check_name
from expire_span.settings.run import RunConfig
from expire_span.settings.tasks import TextTask
from expire_span.shipped import SAMPLE
from expire_span.tasks.contract import Task
from expire_span.tasks.registry import build_task

from .devices import check_device
from .evaluate import Result, evaluate

MOST_BYTES = 8_000_000
"""Largest size of the weights in bytes, so that the package can include them."""
SMALL = 1024
"""Tensors with fewer numbers than this stay in float32: norms and span predictors take little space and need the precision."""
SAMPLE_BYTES = 4096
"""Bytes of the test data that are stored with the model."""
MOST_LOST = 0.01
"""Relative increase of the loss by half precision above which the export is refused."""


@dataclass(frozen=True)
class Shipment:
    """What the model card says beside what the run itself records."""

    data: str
    """Description of the training data, in words."""
    note: str = ""
    """A sentence at the top of the card."""
    sample: bytes | None = None
    """Text that is stored with the model; None takes the first bytes of the test data."""
    batches: int = 16
    """Number of batches of the test data on which the score is measured."""


@dataclass(frozen=True)
class Packed:
    """The weights as they are stored, and the scores before and after rounding."""

    weights: dict[str, Tensor]
    step: int
    size: int
    before: Result
    """Score in float32."""
    after: Result
    """Score of the weights as stored."""


def ship(run: RunFolder, out: Path, about: Shipment, *, path: str | None = None, device: str = "auto") -> RunFolder:
    """Write the folder `out`, which must not exist yet. path: where the data is now; None if it has not moved."""
    check_name(out.name)
    if out.exists():
        raise UserError(f"{out} already exists, and a model is never overwritten; move it away, or give another --out")
    decoder, config = load_model(run, check_device(device))
    if not isinstance(config.task, TextTask) or config.task.tokenizer:
        raise UserError(f"ship needs a run of bytes, got a run of task {config.task.kind}")
    own = replace(config.task, path=Path(config.task.path).name)  # the folder of the data means nothing to other users
    task = build_task(config.task if path is None else replace(config.task, path=path))
    packed = _pack(decoder, task, run, about.batches)
    sample = _sample(task, config) if about.sample is None else about.sample

    def fill(building: Path) -> None:
        write_weights(building, packed.weights, packed.step)
        write_synced(building / SAMPLE, sample)
        write_synced(building / "README.md", _write_card(out.name, run, own.path, about, packed).encode())
        write_synced(building / "result.json", to_json(seal(packed.after.to_dict() | {"step": packed.step})))

    kept = ("python", "torch", "device", "device_name", "impl")
    environment = {name: value for name, value in run.environment.items() if name in kept}
    origin = {"run": run.name, "step": packed.step, "weights": "matrices in float16"}
    settings = replace(config, task=own)
    head = {"recipe": run.recipe, "environment": environment, "data": run.data, "origin": origin}
    return RunFolder.create(out, settings, **head, fill=fill)


def _pack(decoder: Decoder, task: Task, run: RunFolder, batches: int) -> Packed:
    """Round the weights to half precision; refuse them if they are too large or if rounding raises the loss too much."""
    before = _score(decoder, task, run.config, batches)
    weights = _halve(decoder.state_dict())
    size = len(safetensors.torch.save(weights))
    if size > MOST_BYTES:
        raise UserError(f"the weights take {size:,} bytes, and {MOST_BYTES:,} can be shipped; train a smaller model")
    decoder.load_state_dict(weights)  # copies into float32
    after = _score(decoder, task, run.config, batches)
    if after.loss > before.loss * (1 + MOST_LOST):
        raise RunError(f"half precision raises the loss from {before.loss:.4f} to {after.loss:.4f}; train it in bf16")
    folder = newest_sound(run)
    assert folder is not None  # the model was loaded from it
    return Packed(weights, int(folder.name.removeprefix("step-")), size, before, after)


def _halve(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    out = {}
    for name, x in weights.items():
        small = x.numel() < SMALL or not x.is_floating_point()
        y = x if small else x.to(torch.float16)
        if not bool(y.isfinite().all()):
            raise RunError(f"weight {name} has values beyond float16, up to {float(x.abs().max()):g}; lower --train.lr")
        out[name] = y.cpu().contiguous()
    return out


def _score(decoder: Decoder, task: Task, config: RunConfig, batches: int) -> Result:
    train = config.train
    batch, block = train.eval_batch or train.batch, train.eval_block or train.block
    return evaluate(decoder, task, "test", batch=batch, block=block, batches=batches, seed=config.seed)


def _sample(task: Task, config: RunConfig) -> bytes:
    batch = next(iter(task.stream("test", batch=1, block=SAMPLE_BYTES, seed=config.seed)))
    return task.codec.decode(batch.x[0].tolist())


def _write_card(name: str, run: RunFolder, data: str, about: Shipment, packed: Packed) -> str:
    table = "\n".join(f"| {key} | {value} |" for key, value in _list_facts(run, about, packed))
    note = f"\n**{about.note}**\n" if about.note else ""
    return (
        f"# {name}\n{note}\nPredicts the next byte of English text and learns how long to keep each byte.\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        f"Recipe: `expire-span train {run.recipe} --task.path {data}`, then `expire-span ship RUN --out {name}`.\n"
        "Every setting is in config.json.\n\n"
        "It is small and made for looking at memory: what it writes is neither true nor useful, and it knows no facts.\n"
    )


def _list_facts(run: RunFolder, about: Shipment, packed: Packed) -> list[tuple[str, str]]:
    """Rows of the card's table."""
    before, after, model, train = packed.before, packed.after, run.config.model, run.config.train
    mixer: Any = model.mixer
    read, whole, speed = packed.step * train.batch * train.block, run.read_result("score"), run.read_speed()
    device = run.environment.get("device_name", "an unknown device")
    held, full = (x / after.rows for x in (after.mean_bytes, after.full_bytes))
    seconds = f", {speed[-1]['seconds']:,.0f} s" if speed else ""
    count = sum(x.numel() for x in packed.weights.values())
    live = ", ".join(f"{x:.0f}" for x in after.live)
    return [
        ("data", about.data),
        ("tokens", "bytes"),
        ("model", f"{model.layers} layers of {model.dim}, {model.heads} heads, {count:,} weights"),
        ("memory", f"{mixer.kind}, max_span {getattr(mixer, 'max_span', '-')}, ramp {getattr(mixer, 'ramp', '-')}"),
        ("training", f"{read:,} bytes read in {packed.step:,} steps on {device}{seconds}"),
        ("score", f"{after.score:.4f} bits per byte on {after.tokens:,} test bytes; {before.score:.4f} in float32"),
        ("whole test split", f"{whole['score']:.4f} bits per byte in float32" if whole else "not measured"),
        ("live memories", f"{live} (first to last layer): {after.live_share:.1%} of those seen"),
        ("bytes held a row", f"{held:,.0f} of {full:,.0f} without forgetting"),
        ("file", f"{packed.size:,} bytes; matrices in float16, loaded as float32"),
    ]
