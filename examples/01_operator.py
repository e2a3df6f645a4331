"""Attention over memories that expire, and a check that deleting dead memories changes no output.

python examples/01_operator.py
"""

import torch

from expire_span import expire_attention

torch.manual_seed(0)
batch, heads, length, dim, ramp = 1, 4, 512, 32, 8
q, k, v = (torch.randn(batch, heads, length, dim) for _ in range(3))

# Every memory gets a lifetime in steps: most are short, one in fifty is kept long.
long_lived = torch.rand(batch, length) < 0.02
span = torch.where(long_lived, torch.tensor(400.0), torch.rand(batch, length) * 10).requires_grad_()
positions = torch.arange(length)

y = expire_attention(q, k, v, span, positions, positions, ramp=ramp)
y.square().mean().backward()
print(f"output {tuple(y.shape)}; gradient reaches {int((span.grad != 0).sum())} of {length} spans: those on their ramp")

# Now only the last 64 queries, over only those memories that are still alive for them.
first = length - 64
alive = (positions + span[0] + ramp > first) | (positions >= first)
kept = positions[alive]  # positions with gaps: that is how a compacted store looks
few = expire_attention(
    q[:, :, first:], k[:, :, alive], v[:, :, alive], span[:, alive], positions[first:], kept, ramp=ramp
)
difference = (few - y[:, :, first:]).abs().max().item()
print(f"{len(kept)} of {length} memories kept; the outputs differ by {difference:.1e}")
assert difference < 1e-5 and len(kept) < length / 4
