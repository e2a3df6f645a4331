"""The device on which training runs, and the processes that `accelerate launch` may have started."""

from __future__ import annotations

import os
import platform
import warnings
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from expire_span.config import RunConfig
from expire_span.models.kit.fla import resolve_kernels
from expire_span.models.systems import find
from expire_span.ops import resolve_impl


def check_device(device: str) -> torch.device:
    """The device that a config names, on this machine; a GPU that it does not have is refused."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}") from error
    count = torch.cuda.device_count()
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        raise ValueError(f"device {device} needs a GPU, got {count} here; give cpu or auto")
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    return chosen


def build_accelerator(config: RunConfig) -> Accelerator:
    """An Accelerator on the configured device. Its autocast stays off, since it would also cast the carried memories; `Scorer`
    uses one of its own."""
    device = check_device(config.train.device)
    if device.type == "cpu":  # on a CPU without bf16 instructions, torch prints long warnings and falls back
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    elif config.train.precision == "bf16":  # products that stay in float32, such as running sums, may use TF32
        torch.set_float32_matmul_precision("high")
    if not torch.distributed.is_initialized():
        # Accelerate keeps the first device of a process, but a later run in this process may need another.
        AcceleratorState._reset_state(reset_partial_state=True)
    if device.type == "cuda" and device.index is not None and "LOCAL_RANK" not in os.environ:
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="no", kwargs_handlers=[ddp])
    check_processes(config, accelerator)
    return accelerator


def check_processes(config: RunConfig, accelerator: Accelerator) -> None:
    """Refuse settings that do not work with the number and kind of processes."""
    train, processes = config.train, accelerator.num_processes
    if train.batch % (processes * train.accumulate):
        raise ValueError(
            f"batch must be a multiple of processes x accumulate, got batch {train.batch}, "
            f"{processes} processes and accumulate {train.accumulate}"
        )
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if accelerator.distributed_type != DistributedType.FSDP:
        if asked:  # accelerate would silently use DDP
            raise ValueError(f"FSDP needs several GPUs, got device {accelerator.device}; launch without FSDP")
        return
    if train.optimizer == "muon":
        raise ValueError(
            "optimizer muon needs whole matrices, but FSDP shards them; use --train.optimizer adamw or DDP"
        )
    if config.model.positions == "relative":
        raise ValueError("positions relative shares one weight between layers, which FSDP cannot shard; use DDP")


def describe_environment(config: RunConfig, accelerator: Accelerator) -> dict[str, Any]:
    """The device, versions and processes that config.json records."""
    device = accelerator.device
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "device": str(device.type),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "processes": accelerator.num_processes,
        "distributed": accelerator.distributed_type.value,
        "impl": _impl(config, device),
    }


def _impl(config: RunConfig, device: torch.device) -> str:
    """Name of the implementation that will run: of the operator, or "torch" or "fla" for systems that do not use it."""
    mixer = config.model.mixer
    if not find(mixer.kind).operator:
        return resolve_kernels(getattr(mixer, "impl", "torch"), mixer.kind, device)
    return resolve_impl(getattr(mixer, "impl", "auto"), device, head_dim=config.model.head_dim)
