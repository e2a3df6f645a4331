"""vLLM engines in this process, and what they must answer: for the tests that `make test-vllm` runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}

import torch

from expire_span import Sampling, Stream
from expire_span.vllm.options import ARCHITECTURE

LENGTHS = (5, 60, 23, 90)
COUNT = 40
"""Tokens that each request writes."""
CERTAIN = 1e-4
"""Least distance between the best two logits of each step of a reference, far above what float32 rounds away: with less,
another order of sums could write another token."""


@dataclass
class Case:
    """A model folder with an adapter, prompts, and the greedy tokens of our own streams."""

    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]


def make_prompts(vocab: int, lengths=LENGTHS, seed: int = 0) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=g).tolist() for n in lengths]


def make_case(
    folder: Path, retrofitted: Any, prompts: list[list[int]], *, exact: bool = True, forgets: bool = True
) -> Case:
    """Save model and adapter, and compute what streams write. exact: check that the same model without deletion writes it too;
    forgets: that the model without expiry does not."""
    model = retrofitted.model
    model.save_pretrained(folder / "base")
    retrofitted.save(folder / "adapter")
    tokens = []
    for prompt in prompts:
        stream = Stream(retrofitted, 1)
        stream.read([prompt])
        tokens.append([int(step.tokens[0]) for step in stream.generate(Sampling(temperature=0), COUNT)])
    if exact:
        same = []
        for prompt, written in zip(prompts, tokens):
            ids = torch.tensor([prompt + written])
            with torch.no_grad():
                logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
                with retrofitted.paused():
                    base = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            best = logits.topk(2).values
            assert float((best[:, 0] - best[:, 1]).min()) > CERTAIN, "choose another seed"
            assert logits.argmax(-1).tolist() == written
            same.append(base.argmax(-1).tolist() == written)
        assert not forgets or not all(same), "expiry changes nothing here, so that the test would show nothing"
    retrofitted.detach()
    return Case(folder, prompts, tokens)


class Engine:
    """An engine that serves the model and the adapter of a case's folder."""

    def __init__(self, folder: Path, options: dict[str, Any], **settings: Any) -> None:
        from vllm import LLM

        settings = {"enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 32 << 20, **settings}
        self.llm = LLM(
            str(folder / "base"),
            skip_tokenizer_init=True,
            dtype="float32",
            hf_overrides=settings.pop("hf_overrides", {"architectures": [ARCHITECTURE]}),
            additional_config={"expire_span": {"adapter": str(folder / "adapter"), **options}},
            **settings,
        )
        self.core: Any = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]

    @property
    def model(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner.model

    def run(self, prompts: list[list[int]], count: int = COUNT, **sampling: Any) -> list[Any]:
        """The answers to all prompts at once."""
        outputs = self.llm.generate(self._inputs(prompts), self._sampling(count, **sampling), use_tqdm=False)
        return [x.outputs[0] for x in outputs]

    def write(self, prompts: list[list[int]], count: int = COUNT, **sampling: Any) -> list[list[int]]:
        return [list(x.token_ids) for x in self.run(prompts, count, **sampling)]

    def read_in_chunks(self, size: int) -> None:
        """Prompts are read in chunks of at most so many tokens; 0 sets no limit."""
        self.core.scheduler.scheduler_config.long_prefill_token_threshold = size

    def write_interrupted(self, prompts: list[list[int]], steps: tuple[int, ...]) -> tuple[list[list[int]], int]:
        """As `write`, but before these steps all requests are preempted and computed again; also how many were."""
        engine, done, step, preempted = self.llm.llm_engine, {}, 0, 0
        for n, prompt in enumerate(self._inputs(prompts)):
            engine.add_request(f"{n}", prompt, self._sampling(COUNT))
        while engine.has_unfinished_requests():
            if step in steps:
                preempted += len(self.core.scheduler.running)
                assert self.llm.reset_prefix_cache(reset_running_requests=True)
            for output in engine.step():
                if output.finished:
                    done[int(output.request_id)] = list(output.outputs[0].token_ids)
            step += 1
        return [done[n] for n in range(len(prompts))], preempted

    @staticmethod
    def _inputs(prompts: list[list[int]]) -> list[Any]:
        from vllm.inputs import TokensPrompt

        return [TokensPrompt(prompt_token_ids=x) for x in prompts]

    @staticmethod
    def _sampling(count: int, **sampling: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False, **{"temperature": 0, **sampling})


@contextlib.contextmanager
def serve(case: Case, options: dict[str, Any] | None = None, **settings: Any) -> Iterator[Engine]:
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = None
    try:
        engine = Engine(case.folder, options or {}, **settings)
        yield engine
    finally:
        if engine is not None:
            engine.llm.llm_engine.engine_core.shutdown()
        del engine
        cleanup_dist_env_and_memory()
