"""The scheduler: vLLM's own, which also ends requests that ran out of slots."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

logger = init_logger("vllm.expire_span")

REASON = (
    'a head of the model has more memories than slots; give more "slots" in the expire_span options, or "when_full": '
    '"evict"'
)


class ExpireScheduler(Scheduler):
    """A head without a free slot makes the request's logits NaN (backend.py); such a request ends with an error, alone."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        nans = model_runner_output.num_nans_in_logits or {}
        failed = [name for name, count in nans.items() if count and name in scheduler_output.num_scheduled_tokens]
        for name in failed:
            if model_runner_output.sampled_token_ids:
                model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[name]] = []
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request in self.finish_requests(failed, RequestStatus.FINISHED_ERROR) if failed else ():
            logger.error("Request %s ended: %s", request.request_id, REASON)
            ended = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=FinishReason.ERROR,
                stop_reason=REASON,
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(ended)
        return outputs
