"""How many long requests fit into an engine's cache at once: `python -m benchmarks.vllm_fit MODEL --adapter DIR`.

It runs where vLLM is installed (docs/vllm.md), with the plugin or, without --adapter, with vLLM's own cache. As many requests
as are asked for are submitted at once; each has so many tokens, prompt and answer together, and writes long enough for all
prompts to be read meanwhile. The result is the largest number of requests that held their whole prompt at the same time. With
--prompt, a request reads less than it may have: a block of ours is then taken whole all the same, vLLM's own are not. With
--each, all prompts are read at once, so many tokens of each in a step; with --finish, all but so many requests are ended once
all of them run, since reading all takes long on a CPU. With an adapter it also says what slots would take if every head had as
many as the longest of its layer, or of the model.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

import torch

from .record import save


def start(args: argparse.Namespace) -> Any:
    from vllm import LLM

    from expire_span.vllm.options import ARCHITECTURE

    ours: dict[str, Any] = {}
    if args.adapter:
        ours["hf_overrides"] = {"architectures": [ARCHITECTURE]}
        slots = {} if args.slots is None else {"slots": args.slots}
        ours["additional_config"] = {"expire_span": {"adapter": args.adapter, **slots}}
    sizes = {"max_model_len": args.tokens, "kv_cache_memory_bytes": args.bytes, "max_num_seqs": args.requests}
    sizes |= {"max_num_batched_tokens": args.chunk, "enable_prefix_caching": False}
    if args.each:
        sizes |= {"long_prefill_token_threshold": args.each, "max_num_batched_tokens": args.each * args.requests}
    return LLM(args.model, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, **sizes, **ours)


def run(engine: Any, prompts: list[list[int]], written: int, finish: int | None) -> dict[str, Any]:
    """The most requests that ran at once, and that held their whole prompt, how often a request was preempted, and the seconds.
    finish: end all but so many once as many run as can."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    core = engine.llm_engine.engine_core.engine_core
    sampling = SamplingParams(max_tokens=written, ignore_eos=True, detokenize=False, temperature=0)
    for n, prompt in enumerate(prompts):
        engine.llm_engine.add_request(str(n), TokensPrompt(prompt_token_ids=prompt), sampling)
    most, running, preempted, begin, ended = 0, 0, 0, time.perf_counter(), []
    while engine.llm_engine.has_unfinished_requests():
        ended += [x for x in engine.llm_engine.step() if x.finished]
        before, running = running, max(running, len(core.scheduler.running))
        if finish is not None and running == before:
            read = [x.num_computed_tokens for x in core.scheduler.running]
            print(
                f"{running} of {len(prompts)} requests run, which have read {min(read)} to {max(read)} tokens",
                flush=True,
            )
            engine.llm_engine.abort_request([str(n) for n in range(finish, len(prompts))])
            core.scheduler.scheduler_config.long_prefill_token_threshold = 0
            finish = None
        whole = sum(x.num_computed_tokens >= x.num_prompt_tokens for x in core.scheduler.running)
        preempted = max(preempted, sum(x.num_preemptions for x in core.scheduler.running))
        if whole > most:
            most = whole
            print(f"{most} requests at once after {time.perf_counter() - begin:.0f} s", flush=True)
    assert all(x.outputs[0].finish_reason in ("length", "abort") for x in ended), "a request ended with an error"
    seconds = time.perf_counter() - begin
    return {"ran": running, "at_once": most, "preempted": preempted, "ended": len(ended), "seconds": seconds}


def padding(engine: Any) -> dict[str, float]:
    """Bytes of a request, and what they would be with heads padded to the longest of their layer, or of the model."""
    core = engine.llm_engine.engine_core.engine_core
    slots = [x.impl.slots for x in core.model_executor.driver_worker.worker.model_runner.model.attentions]
    own = sum(x.block_bytes for x in slots)
    of_layer = sum(x.block_bytes * x.widest * x.heads / x.total for x in slots)
    widest = max(x.widest for x in slots)
    of_model = sum(x.block_bytes * widest * x.heads / x.total for x in slots)
    return {"bytes": own, "padded_to_layer": of_layer, "padded_to_model": of_model}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--adapter", help="folder of the adapter; without it, vLLM's own cache is measured")
    parser.add_argument(
        "--text", type=Path, help="a file with token numbers, one a line; without it, tokens are random"
    )
    parser.add_argument("--slots", type=int, help="of every head, in place of what was measured")
    parser.add_argument("--bytes", type=int, default=2_000_000_000, help="of the cache")
    parser.add_argument("--tokens", type=int, default=8192, help="of a request")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=2048, help="tokens that the engine reads in a step")
    parser.add_argument(
        "--prompt", type=int, help="tokens of a prompt that are read; without it, all but those of the answer"
    )
    parser.add_argument("--each", type=int, help="tokens of every prompt that are read in a step, all at once")
    parser.add_argument("--finish", type=int, help="requests that are answered, once as many run as can")
    parser.add_argument("--out", default="benchmarks/out")
    args = parser.parse_args()
    engine = start(args)
    written = args.requests * (-(-args.tokens // args.chunk) + 1)
    length = args.prompt or args.tokens - written
    vocab = engine.llm_engine.model_config.get_vocab_size()
    ids = torch.randint(3, vocab, (args.requests, length), generator=torch.Generator().manual_seed(0)).tolist()
    if args.text:
        words = [int(x) for x in args.text.read_text().split()]
        assert len(words) >= args.requests * length, "the text is too short"
        ids = [words[n * length : (n + 1) * length] for n in range(args.requests)]
    result = {
        "settings": vars(args),
        **(padding(engine) if args.adapter else {}),
        **run(engine, ids, written, args.finish),
    }
    print({name: x for name, x in result.items() if name != "settings"})
    print(save("vllm-fit-" + ("ours" if args.adapter else "full"), result, args.out))


if __name__ == "__main__":
    main()
