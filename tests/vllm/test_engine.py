"""The plugin in an unmodified vLLM: `make test-vllm` runs this in an environment that has one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-vllm")
pytest.importorskip("transformers")

from expire_span.errors import UserError
from expire_span.hf.adapter import read_head
from expire_span.vllm.peaks import measure_peaks, save_peaks
from tests.hf_models import byte_tokenizer, forgetful, model_folder, text, tiny
from tests.vllm.engines import COUNT, Case, make_case, make_prompts, serve
from tests.vllm.stories import VARIABLE, stories_case, stories_folder

FAMILIES = {
    "llama": dict(max_span=24, ramp=4),
    "qwen3": dict(max_span=40, ramp=8, keep_first=3),
    "gemma3": dict(max_span=24, ramp=4),
    "mistral": dict(max_span=24, ramp=4),
}
"""Settings of the adapters. Gemma 3 has layers with a window of 16 beside one that learns; Mistral's all have one of 24."""


CAPPED = dict(max_span=24, ramp=4, cap=9, keep_first=2)


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, Case]:
    """All cases, made before the first engine starts: from then on, layers of transformers are replaced by vLLM's."""
    folder, found = tmp_path_factory.mktemp("cases"), {}
    for name, settings in (FAMILIES | {"capped": CAPPED}).items():
        retrofitted = forgetful(tiny("llama" if name == "capped" else name), **settings)
        exact, forgets = name != "capped", name != "mistral"
        peaks = measure_peaks(retrofitted, [torch.tensor(x) for x in make_prompts(97, (400, 400))])
        found[name] = make_case(folder / name, retrofitted, make_prompts(97), exact=exact, forgets=forgets)
        if name == "qwen3":  # which is served with as many slots as each head needs
            save_peaks(folder / name / "adapter", read_head(folder / name / "adapter"), 400, peaks)
    found["trained"] = train_case(folder / "trained")
    if (stories := stories_folder()) is not None:
        found["stories"] = stories_case(stories, folder / "stories")
    tiny("llama", seed=5).save_pretrained(folder / "other" / "base")
    (folder / "other" / "adapter").symlink_to(folder / "llama" / "adapter")
    found["other"] = Case(folder / "other", [], [])
    return found


def train_case(folder: Path) -> Case:
    """A case whose adapter the command line has trained, as users do."""
    from transformers import AutoModelForCausalLM

    from expire_span.cli import main
    from expire_span.hf import load_adapter

    base = model_folder(folder / "model")
    (folder / "text").write_text(text(1500))
    options = (
        "--budget 0.3 --max-span 48 --ramp 8 --context 64 --block 32 --batch 2 --steps 12 --calibrate 2 --keep-first 2"
    )
    options += " --eval-every 12 --eval-contexts 1 --device cpu --tracker none"
    assert (
        main(["retrofit", str(base), "--data", str(folder / "text"), "--out", str(folder / "run"), *options.split()])
        == 0
    )
    retrofitted = load_adapter(AutoModelForCausalLM.from_pretrained(base).eval(), folder / "run" / "adapter")
    prompts = [byte_tokenizer().encode(text(30, seed)[:length]) for seed, length in enumerate((7, 80, 150))]
    case = make_case(folder / "case", retrofitted, prompts)
    (folder / "case" / "adapter").rename(folder / "copy")
    (folder / "run" / "adapter").rename(folder / "case" / "adapter")
    return case


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, cases):
    """A case of every family, and an engine that serves it."""
    with serve(cases[request.param]) as engine:
        yield cases[request.param], engine


@pytest.fixture(scope="module")
def llama(cases) -> Case:
    return cases["llama"]


def test_requests_of_different_lengths_write_what_streams_write(served):
    case, engine = served
    assert len(engine.model.angles) == 1, "exact angles are in place"
    assert engine.write(case.prompts) == case.tokens
    assert engine.write(case.prompts[::-1]) == case.tokens[::-1]
    assert [engine.write([x])[0] for x in case.prompts] == case.tokens


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 50])
def test_chunked_prefill_changes_nothing(served, size):
    case, engine = served
    engine.read_in_chunks(size)
    try:
        assert engine.write(case.prompts) == case.tokens
    finally:
        engine.read_in_chunks(0)


def test_preempted_requests_write_the_same(served):
    case, engine = served
    tokens, preempted = engine.write_interrupted(case.prompts, steps=(3, 11, 20))
    assert tokens == case.tokens and preempted >= 8


def test_drawn_tokens_follow_the_seed_in_any_company(served):
    case, engine = served
    how = dict(temperature=0.8, top_p=0.9, seed=5)
    together = engine.write(case.prompts, **how)
    assert together != case.tokens and together == [engine.write([x], **how)[0] for x in case.prompts]


def test_heads_get_as_many_slots_as_were_measured(cases):
    with serve(cases["qwen3"]) as engine:
        sizes = [x.impl.slots.capacity for x in engine.model.attentions]
        assert len({n for x in sizes for n in x}) > 1
        assert engine.write(cases["qwen3"].prompts) == cases["qwen3"].tokens


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_heads_are_divided_among_two_processes(cases, name):
    """With tensor parallelism; heads of different lengths make blocks of one size."""
    with serve(cases[name], tensor_parallel_size=2) as engine:
        assert engine.write(cases[name].prompts) == cases[name].tokens
        engine.read_in_chunks(7)
        assert engine.write(cases[name].prompts[::-1]) == cases[name].tokens[::-1]


def test_requests_queue_for_blocks(llama):
    """Memory for two requests at a time: four take turns, and blocks change hands."""
    block = 2 * 2 * 27 * (2 * 8 * 4 + 8)  # layers, heads, slots, bytes of a slot
    block = -(-block // 128) * 128
    with serve(llama, kv_cache_memory_bytes=3 * block) as engine:
        pool = engine.core.scheduler.kv_cache_manager.block_pool
        assert pool.num_gpu_blocks == 3  # vLLM keeps one block for itself
        running, step = [], engine.core.step_fn
        engine.core.step_fn = lambda: (step(), running.append(len(engine.core.scheduler.running)))[0]
        assert engine.write(llama.prompts) == llama.tokens
        assert max(running) == 2 and pool.get_num_free_blocks() == 2


def test_a_request_without_slots_ends_with_an_error_and_no_other(llama):
    with serve(llama, {"slots": 18}) as engine:
        for _ in range(2):  # what failed leaves nothing behind
            answers = engine.run(llama.prompts)
            reasons = [x.finish_reason for x in answers]
            assert "error" in reasons and "length" in reasons
            for answer, tokens in zip(answers, llama.tokens):
                written = list(answer.token_ids)
                assert written == tokens[: len(written)] and (len(written) == COUNT) == (
                    answer.finish_reason == "length"
                )
                assert answer.finish_reason == "length" or "more memories than slots; give more" in answer.stop_reason
        assert engine.write([x[:4] for x in llama.prompts], 3) and engine.model.evicted == 0


def test_eviction_is_counted_and_goes_on(llama):
    with serve(llama, {"slots": 9, "when_full": "evict"}) as engine:
        answers = engine.run(llama.prompts)
        assert [x.finish_reason for x in answers] == ["length"] * 4
        assert engine.model.evicted > 0
    with serve(llama, {"slots": 1000, "when_full": "evict"}) as engine:
        assert engine.write(llama.prompts) == llama.tokens and engine.model.evicted == 0


def test_an_adapter_with_a_cap_evicts_as_our_streams_do(cases):
    with serve(cases["capped"]) as engine:
        assert engine.write(cases["capped"].prompts) == cases["capped"].tokens and engine.model.evicted > 0


def test_a_trained_adapter(cases):
    with serve(cases["trained"]) as engine:
        assert engine.write(cases["trained"].prompts) == cases["trained"].tokens
        assert engine.model.adapter.config.keep_first == 2


@pytest.mark.parametrize("chunk", [0, 50])
def test_a_trained_model_with_a_trained_adapter(cases, chunk):
    if "stories" not in cases:
        pytest.skip(f"{VARIABLE} names no folder of stories260K")
    with serve(cases["stories"]) as engine:
        engine.read_in_chunks(chunk)
        assert engine.write(cases["stories"].prompts) == cases["stories"].tokens


REFUSED = {
    "no adapter there": (dict(), {"adapter": "nowhere"}, "no adapter at nowhere"),
    "an unknown option": (dict(), {"slot": 3}, "got slot"),
    "speculation": (
        dict(speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}),
        {},
        "do not work with speculative decoding",
    ),
    "another cache dtype": (dict(kv_cache_dtype="fp8"), {}, "do not work with the cache dtype fp8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_by_name(llama, name):
    settings, options, said = REFUSED[name]
    with pytest.raises((ValueError, UserError), match=said), serve(llama, options, **settings):
        pass


def test_an_adapter_of_another_model_is_refused(cases):
    with pytest.raises(ValueError, match="load the model it was made for"), serve(cases["other"]):
        pass


def test_prefix_caching_is_switched_off(llama):
    with serve(llama, enable_prefix_caching=True) as engine:
        assert engine.core.scheduler.cache_config.enable_prefix_caching is False
        assert engine.write(llama.prompts) == engine.write(llama.prompts) == llama.tokens


def test_an_engine_outside_the_range_is_told(monkeypatch, caplog):
    import vllm

    from expire_span.vllm import register

    monkeypatch.setattr(vllm, "__version__", "0.40.1+cpu")
    monkeypatch.setattr("expire_span.vllm.engine.registration.register_all", lambda: pytest.fail("registered"))
    logger = __import__("logging").getLogger("vllm")
    monkeypatch.setattr(logger, "propagate", True)
    register()
    assert "works with vLLM from 0.32 up to, not including, 0.33, got 0.40.1+cpu" in caplog.text


def test_other_models_are_served_as_without_the_plugin(llama):
    """With the plugin installed and not asked for, vLLM is what it was."""
    code = "import tests.vllm.engines; from vllm.plugins import load_general_plugins; load_general_plugins()\n"
    code += "from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry as R\n"
    code += "from vllm.v1.kv_cache_interface import FullAttentionSpec as F; import torch\n"
    code += "print(R.get_manager_class(F(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)).__name__)\n"
    code += "from vllm import ModelRegistry as M; print('ExpireSpanForCausalLM' in M.get_supported_archs())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.split() == ["FullAttentionManager", "True"], done.stderr[-2000:]


@pytest.mark.long
def test_compiled_models_get_the_spans_of_every_token(llama):
    """Spans as an attribute of the layer would be recorded once, and every later token get those."""
    with serve(llama, enforce_eager=False) as engine:
        assert engine.write(llama.prompts) == llama.tokens


def test_a_stream_of_100k_tokens_in_flat_memory(llama):
    """90,000 are read and 10,000 written; what is written follows from the last tokens alone."""
    import os

    def held() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    length = 100_000
    prompt = make_prompts(97, (90_000,))[0]
    override = {"architectures": ["ExpireSpanForCausalLM"], "max_position_embeddings": length + 512}
    with serve(llama, max_model_len=length + 256, hf_overrides=override) as engine:
        engine.write([prompt[:20_000]], 500)
        before, (tokens,) = held(), engine.write([prompt], length - len(prompt))
        assert len(tokens) == length - len(prompt)
        assert tokens[:COUNT] == engine.write([prompt[-100:]], COUNT)[0], "two layers know of the last 56 tokens"
        assert held() - before < 30e6  # the tokens themselves, and what the allocator keeps
        slots = engine.model.attentions[0].impl.slots
        assert (
            slots.widest == 27 and torch.isfinite(slots.fields.span).sum() <= slots.fields.span.shape[0] * slots.total
        )
