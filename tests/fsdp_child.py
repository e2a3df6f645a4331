"""Train with FSDP on CPU processes. Accelerate shards on GPUs only, so this tells it that it may, and runs the rest as it is."""

import sys

from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from expire_span.cli import main
from expire_span.train import devices


class ShardingAccelerator(devices.Accelerator):
    def __init__(self, **options):
        super().__init__(**options)
        self.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
        )
        self.state.distributed_type = DistributedType.FSDP


devices.Accelerator = ShardingAccelerator
sys.exit(main())
