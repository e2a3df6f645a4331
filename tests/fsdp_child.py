"""Trains with FSDP in CPU processes: accelerate shards on GPUs only, so its state is patched; all other code is unchanged."""

import sys

from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from expire_span.cli import main
from expire_span.train import devices


class ShardingAccelerator(devices.Accelerator):
    def __init__(self, **options):
        super().__init__(**options)
        self.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
        )
        PartialState._shared_state["distributed_type"] = self.state.distributed_type = DistributedType.FSDP


devices.Accelerator = ShardingAccelerator
sys.exit(main())
