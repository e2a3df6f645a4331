"""Models with soft caps or sinks decode by the fused kernel over slots, as the definition says; interpreted, or on a GPU."""

import pytest
import torch

pytest.importorskip("transformers")

from expire_span import Stream
from expire_span.hf import slots
from expire_span.hf.comparing import difference
from tests.hf_families import LIMIT, VOCAB, by_definition, forget, tiny_model
from tests.triton_interpreter import DEVICE, ON_GPU

pytestmark = [pytest.mark.gpu] if ON_GPU else []
STEPS = 3 if ON_GPU else 1


@pytest.mark.parametrize("kind", ["gpt_oss", pytest.param("gemma2", marks=() if ON_GPU else pytest.mark.long)])
@torch.no_grad()
def test_the_fused_step_equals_the_definition(kind, monkeypatch):
    if not ON_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(slots, "slot_kernel_serves", lambda impl, like: True)
    ids = torch.randint(4, VOCAB, (1, 40), generator=torch.Generator().manual_seed(2))
    retrofitted = forget(tiny_model(kind, layers=2))
    want = by_definition(retrofitted, ids)
    retrofitted.model.to(DEVICE)
    stream = Stream(retrofitted, 1, static_shapes=True)
    stream.read([ids[0, :-STEPS]])
    found = []
    for n in range(40 - STEPS, 40):
        stream.feed(ids[:, n : n + 1].to(DEVICE))
        found.append(stream.logits.cpu())
    assert difference(torch.stack(found, 1), want[:, -STEPS:]) < LIMIT
