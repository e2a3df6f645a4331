"""BatchedMuon is torch.optim.Muon, only faster."""

import pytest
import torch

from expire_span.train.muon import BatchedMuon


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_same_updates_and_state_as_torch(adjust):
    torch.manual_seed(0)
    shapes = [(16, 16), (32, 16), (16, 16), (16, 48), (32, 16)]
    ours = [torch.nn.Parameter(torch.randn(s)) for s in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    options = dict(lr=0.1, weight_decay=0.01, adjust_lr_fn=adjust)
    pair = BatchedMuon(ours, **options), torch.optim.Muon(theirs, **options)
    for _ in range(3):
        for a, b in zip(ours, theirs):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in pair:
            optimizer.step()
    for a, b in zip(ours, theirs):
        rate = 0.1 * 3 * 2  # three steps of entries at most ~2 in size; products in bfloat16 round to about 1%
        torch.testing.assert_close(a, b, rtol=0, atol=0.02 * rate)
        saved = [optimizer.state[p]["momentum_buffer"] for optimizer, p in zip(pair, (a, b))]
        torch.testing.assert_close(*saved)
