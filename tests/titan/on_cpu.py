"""torchtitan's trainer on CPU processes: `torchrun ... -m tests.titan.on_cpu --module expiring ...`.

torchtitan asks torch for an accelerator and its memory. Here it is told, before it is loaded, that there is only the CPU. It
is written for torch's nightly builds; of what it calls here, torch 2.13 lacks one function, which sets timeouts.
"""

import types

import torch
import torch._utils
import torch.distributed

torch._utils._get_available_device_type = lambda: "cpu"
CPU = types.SimpleNamespace(
    current_device=lambda: 0,
    set_device=lambda device: None,
    synchronize=lambda *device: None,
    empty_cache=lambda: None,
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: types.SimpleNamespace(total_memory=2**34),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
)
torch._utils._get_device_module = lambda kind: CPU
if not hasattr(torch.distributed, "set_timeout"):
    torch.distributed.set_timeout = lambda timeout, group=None: None  # type: ignore[attr-defined]

if __name__ == "__main__":
    torch.set_num_threads(1)
    from torchtitan.train import main

    main()
