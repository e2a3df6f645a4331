"""Inputs for the operator's tests, shared by every implementation."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from expire_span.ops import expire_attention
from tests.error_budget import assert_all_within_budget

GRADS = ("q", "k", "v", "span")
LEAVES = (*GRADS, "relative_keys", "sinks")


@dataclass
class Case:
    """A problem and its options; `stored` memories come before the T queries' own."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    queries: int = 63
    stored: int = 0
    dim: int = 16
    per_head: bool = False
    spans: str = "mixed"
    start: int = 0
    gaps: bool = False
    relative: int = 0
    sinks: bool = False
    options: dict = field(default_factory=dict)
    span_rows: int = 0
    """Rows of spans, where heads share some; 0 is one for all heads, or per_head one for each."""

    def tensors(self, dtype=torch.float64, seed=0) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(seed)
        total = self.stored + self.queries
        rows = self.span_rows or (self.kv_heads if self.per_head else 0)
        shape = (self.batch, rows, total) if rows else (self.batch, total)
        out = {
            "q": torch.randn(self.batch, self.heads, self.queries, self.dim, generator=g),
            "k": torch.randn(self.batch, self.kv_heads, total, self.dim, generator=g),
            "v": torch.randn(self.batch, self.kv_heads, total, self.dim, generator=g),
            "span": make_spans(self.spans, shape, g),
        }
        if self.relative:
            out["relative_keys"] = torch.randn(self.relative, self.dim, generator=g)
        if self.sinks:
            out["sinks"] = torch.randn(self.heads, generator=g)
        out = {name: x.to(dtype).requires_grad_() for name, x in out.items()}
        steps = torch.randint(1, 4, (total,), generator=g) if self.gaps else torch.ones(total, dtype=torch.int64)
        pos = steps.cumsum(0) + self.start
        return out | {"q_pos": pos[self.stored :], "k_pos": pos}

    def run(self, impl: str, dtype=torch.float64, ramp: float = 7.0, seed=0) -> dict[str, Tensor]:
        """The output and the gradient of every differentiable input, for a fixed random direction."""
        inputs = self.tensors(dtype, seed)
        y = expire_attention(**inputs, ramp=ramp, impl=impl, **self.options)
        names = [n for n in LEAVES if n in inputs]
        direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed + 1)).to(y)
        grads = torch.autograd.grad(y, [inputs[n] for n in names], direction)
        return {"y": y.detach()} | {f"d{n}": x for n, x in zip(names, grads)}


def make_spans(kind: str, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    if kind == "mixed":
        # In steps of 1/64: exactly on an edge of the ramp for some query, or well off it. A span of 1e-9 is alive at
        # age = ramp in float64 and dead in float32: there the gradient jumps, and no two precisions can agree.
        return (torch.rand(shape, generator=g) ** 4 * 200 * 64).round() / 64
    if kind == "short":  # most are born on their ramp, and some dead
        # In steps of 1/2: where all that lives has a weight of 1/500, any span gradient loses as many digits.
        return (torch.rand(shape, generator=g) * 18).round() / 2 - 7
    if kind == "alive":
        return torch.full(shape, 1e6)
    if kind == "expired":
        return torch.zeros(shape)
    if kind == "scattered":
        return torch.where(torch.rand(shape, generator=g) < 0.05, 1e6, 3.5)
    if kind == "edges":  # spans that end exactly where the ramp begins or ends for some query
        return torch.randint(0, 30, shape, generator=g).float()
    raise ValueError(kind)


def assert_same(case: Case, impl: str, **options) -> None:
    """In float64, output and gradients equal the definition's up to the rounding of float64."""
    got, exact = case.run(impl, **options), case.run("reference", **options)
    assert_all_within_budget(got, exact, case.run("reference", torch.float32, **options))


def as_dtype(x: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs of a case with all float tensors in `dtype`, detached."""
    return {n: t.detach().to(dtype) if t.is_floating_point() else t for n, t in x.items()}
