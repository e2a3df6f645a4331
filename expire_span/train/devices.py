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

from expire_span.models.kit.fla import resolve_kernels
from expire_span.models.systems import find
from expire_span.ops import resolve_impl
from expire_span.settings.run import BackboneConfig, RunConfig

from .launcher import follow_launcher


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


def build_accelerator(device: str, precision: str = "fp32") -> Accelerator:
    """An Accelerator on the configured device. Its autocast stays off, since it would also cast the carried memories; `Scorer`
    uses one of its own."""
    follow_launcher()
    chosen = check_device(device)
    if chosen.type == "cpu":  # on a CPU without bf16 instructions, torch prints long warnings and falls back
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    elif precision == "bf16":  # products that stay in float32, such as running sums, may use TF32
        torch.set_float32_matmul_precision("high")
    if not torch.distributed.is_initialized():
        # Accelerate keeps the first device of a process, but a later run in this process may need another.
        AcceleratorState._reset_state(reset_partial_state=True)
    if chosen.type == "cuda" and chosen.index is not None and "LOCAL_RANK" not in os.environ:
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(chosen)
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    return Accelerator(cpu=chosen.type == "cpu", mixed_precision="no", kwargs_handlers=[ddp])


def check_processes(config: RunConfig, accelerator: Accelerator) -> None:
    """Refuse settings that do not work with the kind of processes."""
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if accelerator.distributed_type != DistributedType.FSDP:
        if asked:  # accelerate would silently use DDP
            raise ValueError(f"FSDP needs several GPUs, got device {accelerator.device}; launch without FSDP")
        return
    if config.train.optimizer == "muon":
        raise ValueError(
            "optimizer muon needs whole matrices, but FSDP shards them; use --train.optimizer adamw or DDP"
        )
    if config.model.positions == "relative":
        raise ValueError("positions relative shares one weight between layers, which FSDP cannot shard; use DDP")


def describe_environment(accelerator: Accelerator, impl: str) -> dict[str, Any]:
    """The device, versions and processes that config.json records, and the name of the implementation that attention runs."""
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
        "impl": impl,
    }


def impl_of(model: BackboneConfig, device: torch.device) -> str:
    """Name of the implementation that will run: of the operator, or "torch" or "fla" for systems that do not use it."""
    mixer = model.mixer
    if not find(mixer.kind).operator:
        return resolve_kernels(getattr(mixer, "impl", "torch"), mixer.kind, device)
    return resolve_impl(getattr(mixer, "impl", "auto"), device, head_dim=model.head_dim)
