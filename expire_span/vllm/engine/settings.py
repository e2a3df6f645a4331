"""What vLLM's settings must be for expiring memories: refused, or switched off by name, before the model is loaded."""

from __future__ import annotations

import os
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from expire_span.errors import UserError
from expire_span.vllm.adapter import read_adapter
from expire_span.vllm.options import read_options

logger = init_logger("vllm.expire_span")

SCHEDULER = f"{__name__.rpartition('.')[0]}.scheduler.ExpireScheduler"


class ExpireSpanSettings(VerifyAndUpdateConfig):
    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        read_adapter(read_options(vllm_config.additional_config).adapter)
        refuse(vllm_config)
        switch_off(vllm_config)


def refuse(config: Any) -> None:
    """UserError for settings that cannot work with memories that expire."""
    parallel = config.parallel_config
    wrong = {
        "speculative decoding (a rejected token's memories cannot be taken back)": config.speculative_config
        is not None,
        "LoRA (spans were learned for the base model's hidden states)": config.lora_config is not None,
        "a KV connector (a block is no run of tokens)": config.kv_transfer_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism (a request's memories are in one block)": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        f"the cache dtype {config.cache_config.cache_dtype}": config.cache_config.cache_dtype != "auto",
    }
    if found := [name for name, is_set in wrong.items() if is_set]:
        raise UserError(f"memories that expire do not work with {', '.join(found)}; leave it out")


def switch_off(config: Any) -> None:
    """Change what vLLM chooses by itself, and say so."""
    off = []
    if config.cache_config.enable_prefix_caching:
        config.cache_config.enable_prefix_caching = False
        off.append("prefix caching (memories of a beginning may be gone)")
    if config.scheduler_config.async_scheduling is not False:
        config.scheduler_config.async_scheduling = False
        off.append("asynchronous scheduling (a request may end because a head has no slot)")
    if config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE):
        config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        off.append("CUDA graphs")
    if config.scheduler_config.scheduler_cls not in (None, SCHEDULER):
        raise UserError(
            f"memories that expire need the scheduler {SCHEDULER}, got {config.scheduler_config.scheduler_cls}; leave it out"
        )
    config.scheduler_config.scheduler_cls = SCHEDULER
    os.environ["VLLM_COMPUTE_NANS_IN_LOGITS"] = "1"  # how a worker tells the scheduler that a request has failed
    if off:
        logger.info("Expire-Span: switched off %s", ", ".join(off))
