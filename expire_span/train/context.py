"""Training in which several processes share each row: the context group of a process, and what such training refuses."""

from __future__ import annotations

import hashlib
import importlib
import json
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh

from expire_span.errors import UserError
from expire_span.models.systems import find
from expire_span.ops.context import ContextGroup
from expire_span.settings.run import SupervisedRunConfig, to_dict


def build_context(config: SupervisedRunConfig, accelerator: Accelerator) -> ContextGroup | None:
    """The group of processes that share this process's rows, or None where none are shared.

    Processes are laid out as a `DeviceMesh` of (data, context): neighbours share rows, so that a context group lies on one
    machine where it fits. Gradients are averaged over all processes, as without a context.
    """
    check_parts(config)
    check_one_config(config, accelerator)
    size, processes = config.train.context_parallel, accelerator.num_processes
    if size == 1:
        return None
    kind = accelerator.device.type
    mesh = init_device_mesh(kind, (processes // size, size), mesh_dim_names=("data", "context"))
    return ContextGroup(mesh["context"])


def check_parts(config: SupervisedRunConfig) -> None:
    """Refuse, by name, what a model cannot do whose blocks are read in parts, by several processes or one after another."""
    train, model = config.train, config.model
    if train.context_parallel == 1 and train.pieces == 1:
        return
    option = f"context_parallel {train.context_parallel}" if train.pieces == 1 else f"pieces {train.pieces}"
    if model.layer_drop > 0:
        raise UserError(f"layer_drop skips a layer for all tokens at once, got {option} and {model.layer_drop}; give 0")
    for mixer in model.mixers:
        paper: Any = getattr(mixer, "paper", None)
        refused = {
            f"the memory system {mixer.kind}": not find_layer(mixer.kind).reads_parts,
            "paper.noisy": paper is not None and paper.noisy,
            "paper.initial_memories": paper is not None and paper.initial_memories > 0,
            "cap with carry": train.carry and getattr(mixer, "cap", None) is not None,
        }
        for name, found in refused.items():
            if found:
                raise UserError(f"{name} needs the whole block in one place, got {option}; leave one of the two out")


def find_layer(kind: str) -> Any:
    """The class of a memory system's layer."""
    module, name = find(kind).layer.split(":")
    return getattr(importlib.import_module(module), name)


def seed_shards(seed: int, context: ContextGroup | None) -> None:
    """Draw other dropout for each shard: all processes have begun with the same seed, from which the weights were drawn."""
    if context is not None:
        torch.manual_seed(seed * context.size + context.rank + 1)


def check_one_config(config: SupervisedRunConfig, accelerator: Accelerator) -> None:
    """Refuse processes that were started with different settings, on every process."""
    if accelerator.num_processes == 1 or not dist.is_initialized():
        return
    text = json.dumps(to_dict(config), sort_keys=True, default=str).encode()
    mark = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    marks = accelerator.gather(torch.tensor([mark], device=accelerator.device))
    different = (marks != marks[0]).nonzero().flatten().tolist()  # type: ignore[union-attr]
    if different:
        raise UserError(
            f"all processes must be given the same settings, got other ones in process {different[0]} than in process 0; "
            "start them with one command line"
        )
