"""A plain decoder of the same size as ours, for comparison: attention over a ring of the last tokens, or over a static cache.

It is the usual decoder without expiry: a joint projection of queries, keys and values, normalised and rotated queries and keys,
torch's fused attention. A ring holds the last `slots` tokens and is read whole; a static cache is read with a mask over its
empty slots.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expire_span.settings.run import DecoderConfig


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return (x * cos + torch.cat([-right, left], -1) * sin).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig, rows: int, slots: int) -> None:
        super().__init__()
        dim, self.heads = config.dim, config.heads
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, config.ff_dim, bias=False), nn.Linear(config.ff_dim, dim, bias=False)
        self.register_buffer("k", torch.zeros(rows, self.heads, slots, dim // self.heads), persistent=False)
        self.register_buffer("v", torch.zeros_like(self.k), persistent=False)

    def forward(self, x: Tensor, at: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(len(x), 3, self.heads, 1, -1).unbind(1)  # [B, H, 1, D]
        q, k = (turn(F.rms_norm(part, (part.shape[-1],)), cos, sin) for part in (q, k))
        self.k.index_copy_(2, at, k)
        self.v.index_copy_(2, at, v)
        y = F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask)
        x = x + self.out(y.flatten(1))
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class PlainDecoder(nn.Module):
    """`logits = decoder(tokens)` for one token of each row; positions and the place in the ring are kept on the device.

    masked: a static cache whose empty slots are masked, instead of a ring that is read whole.
    """

    def __init__(self, config: DecoderConfig, rows: int, slots: int, *, masked: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Layer(config, rows, slots) for _ in range(config.layers))
        self.norm, self.head = nn.RMSNorm(config.dim, eps=1e-6), nn.Linear(config.dim, config.vocab, bias=False)
        self.slots, self.masked = slots, masked
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64), persistent=False)
        power = torch.arange(0, config.head_dim, 2).double() / config.head_dim
        self.register_buffer("rates", config.rotary_base**-power, persistent=False)
        self.register_buffer("index", torch.arange(slots), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        angle = (self.position * self.rates).float().repeat(2)
        cos, sin = angle.cos(), angle.sin()
        x, at = self.embed(tokens), self.position % self.slots
        mask = (self.index <= self.position).expand(len(x), 1, 1, -1) if self.masked else None
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, at, cos, sin, mask)
        self.position += 1
        return self.head(self.norm(x))

    @property
    def bytes_held(self) -> int:
        return sum(b.numel() * b.element_size() for layer in self.layers for b in layer.buffers())
