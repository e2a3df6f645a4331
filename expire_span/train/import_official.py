"""A checkpoint of the paper's released code as a run folder: `expire-span import CHECKPOINT --out RUN`.

The file holds weights and no settings. Some settings follow from the weights' shapes; the caller gives the others. The released
code's tokens are indices into a dictionary of the training text's bytes, sorted by frequency. Here the embedding and the head
are reordered so that tokens are the bytes themselves, and the model reads and writes text as every other run does.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from expire_span import checkpoint
from expire_span.models import official
from expire_span.models.decoder import Decoder
from expire_span.ops.rule import full_until
from expire_span.runs import RunFolder, UserError, check_new
from expire_span.settings.run import RunConfig, TextTask, TrainConfig
from expire_span.tasks.registry import build_task

from .data_fingerprint import find_fingerprint
from .devices import build_accelerator, describe_environment, impl_of

BYTES = 256
IMPOSSIBLE = -1e4
"""Logit of a byte that the checkpoint's dictionary lacks: its probability is exactly zero in float32."""
END, UNKNOWN = "<eos>", "<unk>"
"""Symbols of the released code's dictionary that are not bytes: the end of a line, read as a newline, and anything unknown."""


@dataclass(frozen=True)
class Given:
    """The settings that the caller gives, since the file does not hold them."""

    ramp: int
    max_span: int | None = None
    """None derives it from the size of the file's mask, which is max_span + ramp."""
    temperature: float = 1.0
    heads: int | None = None
    """None derives it from the shapes of the weights."""
    dropout: float = 0.0
    path: str = ""
    """Text for evaluation and further training."""
    symbols: str | None = None
    """File with the symbol of each token, one per line; None derives them from the training part of the text."""


def import_checkpoint(file: Path, path: Path, given: Given, train: TrainConfig) -> RunFolder:
    """Make a run folder whose checkpoint of step 0 holds the file's weights. Nothing is written before all is checked."""
    check_new(path)
    state = read_state_dict(file)
    decoder = _load(state, given)
    task = TextTask(path=given.path)
    data = find_fingerprint(None, task) if given.path else {}
    if decoder.config.vocab != BYTES:
        decoder = as_bytes(decoder, find_symbols(decoder.config.vocab, task, given.symbols))
    block = decoder.config.relative_window
    config = RunConfig(task, replace(decoder.config, dropout=given.dropout), replace(train, block=block))
    accelerator = build_accelerator(train.device)
    environment = describe_environment(accelerator, impl_of(config.model, accelerator.device))
    return RunFolder.create(
        path,
        config,
        recipe="import",
        environment=environment,
        data=data,
        origin={"checkpoint": str(file), "bytes": file.stat().st_size},
        fill=lambda folder: checkpoint.write_weights(folder, decoder.state_dict()),
    )


def _load(state: dict[str, Tensor], given: Given) -> Decoder:
    told = official.read_settings(state)
    return official.load(
        state,
        heads=given.heads or told.heads,
        block=told.block,
        max_span=_find_max_span(told, given),
        ramp=given.ramp,
        pre_norm=told.pre_norm,
        temperature=given.temperature,
        layers=told.layers,
    )


def _find_max_span(told: official.Settings, given: Given) -> int:
    if given.max_span is None and told.life is None:
        raise UserError("the checkpoint has no mask that tells its longest span, got none; give it with --max-span")
    if told.life is None or given.max_span is None:
        return given.max_span if given.max_span is not None else full_until(told.life or 0, given.ramp)
    if given.max_span + given.ramp != told.life:
        raise UserError(
            f"max_span and ramp must add up to the size of the checkpoint's mask, {told.life}, "
            f"got {given.max_span} and {given.ramp}; leave --max-span away to read it off the file"
        )
    return given.max_span


# The file


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """The weights in a checkpoint file, loaded without running any code in it."""
    if not file.is_file():
        raise UserError(f"no checkpoint file {file}; give the path of the file that the released code wrote")
    saved = safetensors.torch.load_file(file) if file.suffix == ".safetensors" else _read_saved(file)
    if isinstance(saved, dict) and isinstance(saved.get("model"), dict):
        saved = saved["model"]
    if not isinstance(saved, dict) or not saved or not all(isinstance(x, Tensor) for x in saved.values()):
        raise UserError(f"{file} must hold named tensors, alone or under the name model, got {_kinds(saved)}")
    return {str(name): x for name, x in saved.items()}


def _read_saved(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or hostile file makes the reader fail in ways without a common type
        if isinstance(error, OSError) and error.filename is not None:
            raise  # the file cannot be opened; an error inside a damaged one names no file
        kind = "an archive" if zipfile.is_zipfile(file) else "a file"
        cause = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{file} is {kind} that cannot be loaded as weights alone ({cause}); code in it is never run"
        ) from error


def _kinds(saved: Any) -> str:
    return ", ".join(map(str, list(saved)[:5])) if isinstance(saved, dict) else type(saved).__name__


# Tokens as bytes


def find_symbols(vocab: int, task: TextTask, file: str | None) -> list[int | None]:
    """The byte of each token; None for symbols that are not bytes."""
    if file is not None:
        words = Path(file).read_text(encoding="utf8", errors="replace").split()
        source = f"{file} names {len(words)} symbols"
    elif task.path:
        words = count_symbols(build_task(task).split("train").tobytes())  # type: ignore[attr-defined]
        source = f"the training part of {task.path} has {len(words)} symbols"
    else:
        raise UserError(
            f"the checkpoint has {vocab} tokens, not the {BYTES} bytes; give the text it learned from with --path, "
            "or a file that names each token's byte with --symbols"
        )
    if len(words) != vocab:
        raise UserError(f"{source}, but the checkpoint has {vocab} tokens; give its dictionary with --symbols")
    return [_byte_of(word) for word in words]


def count_symbols(data: bytes) -> list[str]:
    """The dictionary that the released code builds from a text: the most frequent symbol first; of equals, the one met last.

    The symbols of a line are its bytes (as decimal numbers) and its end; the unknown symbol is always listed, with count 0.
    """
    values, first, counts = np.unique(np.frombuffer(data, np.uint8), return_index=True, return_counts=True)
    met = [(UNKNOWN, -1, 0)]
    met += [(str(v), int(f), int(c)) for v, f, c in zip(values, first, counts) if v != 10]
    lines = data.split(b"\n")
    met.append((END, len(lines[0]), len(lines) if lines[-1] else len(lines) - 1))
    met.sort(key=lambda symbol: symbol[1])
    return [word for word, _, _ in sorted(met, key=lambda symbol: symbol[2])[::-1]]


def _byte_of(word: str) -> int | None:
    if word == END:
        return 10
    if word.isdecimal() and int(word) < BYTES:
        return int(word)
    if word.startswith("<"):
        return None
    raise UserError(f"a symbol must be a byte as a number below {BYTES}, {END} or another name in <>, got {word!r}")


def as_bytes(decoder: Decoder, symbols: Sequence[int | None]) -> Decoder:
    """The same model over the 256 bytes: a byte without a token gets an embedding of zeros and is never predicted."""
    known = {byte: token for token, byte in enumerate(symbols) if byte is not None}
    if len(known) < sum(byte is not None for byte in symbols):
        raise UserError("each byte must have one token, got a byte that is named twice in --symbols")
    state = decoder.state_dict()
    places, tokens = torch.tensor(list(known)), torch.tensor(list(known.values()))
    for name, empty in (("embed.weight", 0.0), ("head.weight", 0.0), ("head.bias", IMPOSSIBLE)):
        old = state[name]
        state[name] = old.new_full((BYTES, *old.shape[1:]), empty).index_copy(0, places, old[tokens])
    larger = Decoder(replace(decoder.config, vocab=BYTES))
    larger.load_state_dict(state)
    return larger.eval()
