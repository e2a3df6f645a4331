"""`expire-span measure-slots`: how many slots the heads of an adapter need, for the plugin of vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from expire_span.checks import Count

from .parsing import PROGRAM, parse


@dataclass(frozen=True)
class MeasureSlots:
    """Read text with an adapter, and write into its folder how many memories each head holds at most. The plugin of vLLM then
    gives each head so many slots and a quarter more, in place of as many as the longest life could fill."""

    adapter: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ADAPTER")]
    """Folder of the adapter."""
    data: Path
    """Text to read: a file, or a folder of .txt files. It should be like what will be served."""
    model: str | None = None
    """The base model; None takes the one that the adapter names."""
    context: Count = 8192
    """Number of tokens of each document."""
    documents: Count = 8
    """Largest number of documents to read."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""


def run_measure_slots(args: list[str]) -> int:
    command = parse(MeasureSlots, args, f"{PROGRAM} measure-slots")
    import torch

    from expire_span.hf import load_adapter
    from expire_span.hf.adapter import read_head
    from expire_span.hf.loading import open_base, read_documents
    from expire_span.hf.texts import find_beginning
    from expire_span.vllm.peaks import measure_peaks, save_peaks

    head = read_head(command.adapter)
    _, model, tokenizer = open_base(command.adapter, command.model, command.device)
    retrofitted = load_adapter(model, command.adapter)
    begins = (retrofitted.beginning or find_beginning(tokenizer)).context
    most, front = command.context * command.documents, torch.tensor(begins, dtype=torch.long)
    found = read_documents(tokenizer, command.data, most)
    texts = [torch.cat([front, x]) for ids in found for x in ids.split(max(1, command.context - len(begins)))]
    peaks: list[list[int]] = [[] for _ in retrofitted.layers]
    for n, text in enumerate(texts[: command.documents], start=1):
        found = measure_peaks(retrofitted, [text])
        peaks = [[max(pair) for pair in zip(old or new, new)] for old, new in zip(peaks, found)]
        print(f"document {n} of {min(len(texts), command.documents)}: {len(text):,} tokens", flush=True)
    longest = max(map(len, texts[: command.documents]))
    save_peaks(command.adapter, head, longest, peaks)
    heads = [x for layer in peaks for x in layer]
    if heads:
        mean = sum(heads) / len(heads)
        print(f"of {longest:,} tokens, a head holds {mean:.0f} memories at most on average, the fullest {max(heads):,}")
    print(f"wrote {command.adapter / 'slots.json'}")
    return 0
