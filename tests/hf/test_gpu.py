"""Retrofitted models on a GPU: recorded decoding equals the cache, and learning equals the CPU's."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, LlamaConfig

from expire_span.sampling import Sampling
from expire_span.store.slots import FRESH
from expire_span.stream import Stream
from tests.hf_models import forgetful, read, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def build(device="cuda", dtype=torch.float32):
    """A Llama whose heads have a size that the kernels serve."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=97, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(**sizes, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096)
    model = AutoModelForCausalLM.from_config(config).eval().to(dtype)
    return forgetful(model.to(device), max_span=150, ramp=16, keep_first=3)


@pytest.mark.parametrize("dtype, rounding", [(torch.float32, 1e-4), (torch.bfloat16, 0.05)], ids=["fp32", "bf16"])
@torch.no_grad()
def test_recorded_steps_equal_the_cache(dtype, rounding):
    retrofitted = build(dtype=dtype)
    cache, _ = read(retrofitted, tokens(3, 200).cuda())
    stream = Stream(retrofitted, 3)
    stream.read(list(tokens(3, 200)))
    for token in tokens(3, 2 * FRESH + 20, seed=4).T:
        stream.feed(token)
        wanted = retrofitted.model(token.cuda()[:, None], past_key_values=cache, use_cache=True).logits[:, -1].float()
        assert (stream.logits - wanted).abs().max() <= rounding * wanted.abs().max()
    assert stream._engine._graphs, "nothing was recorded"


@pytest.mark.parametrize("prompt", [90, 1])
def test_streams_generate_the_same_recorded_and_plainly(prompt):
    """A prompt of one token is shorter than the first tokens that are kept."""
    retrofitted, texts = build(), []
    for static_shapes in (True, False):
        stream = Stream(retrofitted, 2, static_shapes=static_shapes)
        stream.read(list(tokens(2, prompt)))
        texts.append([step.tokens.tolist() for step in stream.generate(Sampling(temperature=0), 150 + FRESH)])
    assert texts[0] == texts[1]


def test_a_learning_step_equals_the_cpu():
    grads, losses = [], []
    for device in ("cpu", "cuda"):
        retrofitted = build(device)
        retrofitted.model.requires_grad_(False)
        cache, total = retrofitted.new_cache(learning=True), 0.0
        for part in tokens(2, 192).to(device).split(64, 1):
            loss = retrofitted.model(part, past_key_values=cache, use_cache=True).logits.square().mean()
            loss.backward()
            total += float(loss)
        losses.append(total)
        grads.append(torch.cat([p.grad.flatten().cpu() for p in retrofitted.parameters()]))
    assert abs(losses[0] - losses[1]) < 1e-4 * losses[0]
    assert (grads[0] - grads[1]).norm() < 1e-2 * grads[0].norm() and grads[0].norm() > 0
