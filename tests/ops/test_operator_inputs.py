"""What the operator makes of unusual inputs: plain defaults, empty shapes, and refusals in one sentence with both values."""

import math
import sys
import types
import warnings

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from expire_span.ops import expire_attention, inputs, resolve_impl
from tests.operator_cases import Case

B, H, T, D = 2, 3, 12, 8


def make(**change) -> dict:
    g = torch.Generator().manual_seed(0)
    x = {n: torch.randn(B, H, T, D, generator=g) for n in "qkv"}
    return x | {"span": torch.rand(B, T, generator=g) * 9, "ramp": 4.0} | change


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_positions_default_to_consecutive_ones(impl):
    pos, x = torch.arange(T), make(impl=impl)
    assert torch.equal(expire_attention(**x), expire_attention(**x, q_pos=pos, k_pos=pos))
    x["q"] = x["q"][:, :, -5:]  # fewer queries than memories: the last of them
    assert torch.equal(expire_attention(**x), expire_attention(**x, q_pos=pos[-5:], k_pos=pos))


def test_no_rows_and_no_queries_give_nothing():
    for impl in ("reference", "chunked"):
        none = make(q=torch.zeros(B, H, 0, D, requires_grad=True), impl=impl)
        y = expire_attention(**none)
        assert y.shape == (B, H, 0, D) and torch.autograd.grad(y.sum(), none["q"])[0].shape == y.shape
        empty = {n: x[:0] if isinstance(x, torch.Tensor) else x for n, x in make(impl=impl).items()}
        assert expire_attention(**empty).shape == (0, H, T, D)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_boundaries_may_be_a_tensor_or_a_list(impl):
    ids = torch.tensor([0] * 5 + [1] * 4 + [2] * 3)
    want = expire_attention(**make(impl=impl), documents=ids)
    for bounds in (
        [0, 5, 9, 12],
        np.array([0, 5, 9, 12]),
        torch.tensor([0, 5, 9, 12], dtype=torch.int32),
        [0, 5, 5, 9, 12],
    ):
        assert torch.equal(expire_attention(**make(impl=impl), cu_seqlens=bounds), want)


ENDS = "cu_seqlens must begin with 0 and end with the number of queries, 12, "
BAD = {
    "forgotten 0": (dict(cu_seqlens=torch.tensor([5, 12])), ENDS + "got 5 and 12$"),
    "lengths": (
        dict(cu_seqlens=torch.tensor([5, 4, 3])),
        ENDS + "got 5 and 3; these look like lengths: give their running sum after a 0",
    ),
    "beyond the row": (dict(cu_seqlens=torch.tensor([0, 5, 13])), ENDS + "got 0 and 13"),
    "short of the row": (dict(cu_seqlens=[0, 5]), ENDS + "got 0 and 5"),
    "falling": (dict(cu_seqlens=torch.tensor([0, 7, 5, 12])), "cu_seqlens must not decrease, got 7 then 5"),
    "float boundaries": (dict(cu_seqlens=torch.tensor([0.0, 12.0])), r"got shape \(2,\) of torch.float32"),
    "float list": (dict(cu_seqlens=[0, 5.5, 12]), r"cu_seqlens must hold integers, got \[0, 5.5, 12\]"),
    "one number as boundaries": (dict(cu_seqlens=12), "cu_seqlens must hold integers, got 12"),
    "huge boundaries": (
        dict(cu_seqlens=[0, 2**70, 12]),
        r"cu_seqlens must hold integers, got \[0, 1180591620717411303424",
    ),
    "three documents": (dict(documents=(torch.zeros(T).long(),) * 3), "one tensor or two, .* got 3"),
    "complex documents": (
        dict(documents=torch.zeros(T, dtype=torch.complex64)),
        "must be integers of shape .*complex64",
    ),
    "relative keys as a list": (dict(relative_keys=[[1.0] * D]), "relative_keys must be a tensor, got list"),
    "integer relative keys": (
        dict(relative_keys=torch.ones(2, D).long()),
        "relative_keys must be a float tensor .*int64",
    ),
    "relative keys elsewhere": (
        dict(relative_keys=torch.ones(2, D, device="meta")),
        "relative_keys is on meta but q is on cpu",
    ),
    "sparse": (dict(k=torch.ones(B, H, T, D).to_sparse()), "k must be a dense tensor, got layout torch.sparse_coo"),
    "boundaries by row": (dict(cu_seqlens=torch.tensor([[0, 12]] * 2)), r"\(documents \+ 1,\), got shape \(2, 2\)"),
    "no boundaries": (dict(cu_seqlens=[]), r"got shape \(0,\)"),
    "boundaries and a store": (
        dict(q=torch.ones(B, H, 5, D), cu_seqlens=[0, 12]),
        "as many memories as queries, got 12 and 5; give documents=",
    ),
    "documents elsewhere": (
        dict(documents=torch.zeros(T, dtype=torch.int64, device="meta")),
        "documents of queries are on meta but q is on cpu",
    ),
    "integer q": (
        {n: torch.ones(B, H, T, D, dtype=torch.int64) for n in "qkv"},
        "q, k and v must be float tensors of 64, 32 or 16 bits, got torch.int64, torch.int64 and torch.int64",
    ),
    "eps nan": (dict(normalizer_eps=math.nan), "normalizer_eps must be 0 or a positive number, got nan"),
    "eps negative": (dict(normalizer_eps=-1e-8), "normalizer_eps must be 0 or a positive number, got -1e-08"),
    "eps infinite": (dict(normalizer_eps=math.inf), "normalizer_eps must be 0 or a positive number, got inf"),
    "softcap nan": (dict(softcap=math.nan), r"softcap must be 0 \(none\) or a positive number, got nan"),
    "softcap negative": (dict(softcap=-1.0), r"softcap must be 0 \(none\) or a positive number, got -1.0"),
    "sinks of another shape": (
        dict(sinks=torch.zeros(H + 1)),
        r"sinks must be a float tensor of shape \(\d+,\), one logit",
    ),
    "sinks elsewhere": (dict(sinks=torch.zeros(H, device="meta")), "sinks is on meta but q is on cpu"),
    "sinks and eps": (
        dict(sinks=torch.zeros(H), normalizer_eps=0.1),
        "sinks and normalizer_eps both add to the normaliser",
    ),
    "ramp nan": (dict(ramp=math.nan), r"ramp must be at least .* and at most .*, got nan"),
    "ramp infinite": (dict(ramp=math.inf), r"ramp must be at least .* and at most 1.07374e\+09, got inf"),
    "scale nan": (dict(scale=math.nan), "scale must be a finite number, got nan"),
    "float8": (
        {n: torch.ones(B, H, T, D).to(torch.float8_e4m3fn) for n in "qkv"},
        "q, k and v must be float tensors of 64, 32 or 16 bits, got torch.float8_e4m3fn",
    ),
    "span as a list": (dict(span=[[1.0] * T] * B), "span must be a tensor, got list; convert it by torch.as_tensor"),
    "an array": (dict(k=torch.ones(B, H, T, D).numpy()), "k must be a tensor, got ndarray"),
    "no values": (dict(v=None), "v must be a tensor, got NoneType"),
    "positions as a list": (dict(k_pos=list(range(T))), "k_pos must be a tensor, got list"),
    "documents as a list": (dict(documents=[0] * T), "documents of queries must be a tensor, got list"),
    "without numbers": (
        {
            n: x.to("meta")
            for n, x in make(q_pos=torch.arange(T), k_pos=torch.arange(T), ramp=torch.tensor(4.0)).items()
        },
        "the tensors are on the device meta, which holds no numbers",
    ),
    "ramp as text": (dict(ramp="8"), "ramp must be one number, got '8'"),
    "no ramp": (dict(ramp=None), "ramp must be one number, got None"),
    "a switch as ramp": (dict(ramp=True), "ramp must be one number, got True"),
    "causal as text": (dict(causal="no"), "causal must be True or False, got 'no'"),
    "a number for a switch": (dict(include_self=1), "include_self must be True or False, got 1"),
    "two ramps": (dict(ramp=torch.ones(2)), r"ramp must be one number, got a tensor of shape \(2,\)"),
    "eps as text": (dict(normalizer_eps="0"), "normalizer_eps must be one number, got '0'"),
    "head dim 0": (
        {n: torch.ones(B, H, T, 0) for n in "qkv"},
        r"q must have a head dim of at least 1, got shape \(2, 3, 12, 0\)",
    ),
    "other layout": (
        {n: torch.ones(B, T, H, D) for n in "qkv"},
        r"span must have shape \(2, 3\) or \(2, 12, 3\), got \(2, 12\); q, k and v look like \[B, T, H, D\]: .*transpose",
    ),
    "one position missing": (
        dict(q_pos=torch.arange(T)),
        "q_pos and k_pos must be given together, got q_pos without k_pos",
    ),
    "more queries than memories": (
        dict(q=torch.ones(B, H, T + 1, D)),
        "got 13 queries and 12 memories; give q_pos and k_pos",
    ),
    "bool positions": (
        dict(q_pos=torch.ones(T, dtype=torch.bool), k_pos=torch.arange(T)),
        "q_pos must be an integer tensor, got torch.bool",
    ),
}

NEEDS_DEFAULTS = ("one position missing", "more queries than memories", "other layout")
"""Cases that are about positions that are not given; all others give them."""


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_is_named_with_its_values(name):
    change, message = BAD[name]
    x = make(**change)
    if name not in NEEDS_DEFAULTS:
        x = {"q_pos": torch.arange(x["q"].shape[2]), "k_pos": torch.arange(T)} | x
    with pytest.raises(ValueError, match=message):
        expire_attention(**x)


def test_spans_rounded_below_minus_ramp_are_accepted():
    """-7.3 in bfloat16 is -7.3125."""
    span = torch.full((B, T), -7.3, dtype=torch.bfloat16)
    assert expire_attention(**make(span=span, ramp=7.3)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_spans_of_half_precision_are_the_same_numbers_in_float32(dtype):
    case = Case(batch=1, queries=5, stored=40, gaps=True)
    x = {n: t.detach() for n, t in case.tensors(torch.float32).items()}
    x["k_pos"] = x["k_pos"] * 90  # ages of up to 9000 steps, which no half precision can count
    x["q_pos"] = x["k_pos"][40:]
    x["span"] = (torch.rand(1, 45, generator=torch.Generator().manual_seed(0)) * 9000).to(dtype)
    for impl in ("reference", "chunked"):
        want = expire_attention(**x | {"span": x["span"].float()}, ramp=7.0, impl=impl)
        assert torch.equal(expire_attention(**x, ramp=7.0, impl=impl), want)
    learned = x | {"span": x["span"].requires_grad_()}
    y = expire_attention(**learned, ramp=7.0)
    assert torch.autograd.grad(y.sum(), learned["span"])[0].dtype == dtype


def test_a_gpu_that_falls_back_says_so_once(monkeypatch):
    choice = sys.modules["expire_span.ops.choice"]
    monkeypatch.setattr(choice, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(choice, "_warned", set())
    gpu = torch.device("cuda")
    with pytest.warns(UserWarning, match=r"'chunked' on this GPU, because impl='triton' serves head dims .*, got 48"):
        resolve_impl("auto", gpu, head_dim=48)
    with pytest.warns(UserWarning, match="got float64"):
        resolve_impl("auto", gpu, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_impl("auto", gpu, head_dim=48) == "chunked"
        assert resolve_impl("chunked", gpu, head_dim=49) == "chunked"  # asked for, so nothing to say
        assert resolve_impl("auto", torch.device("cpu"), head_dim=50) == "chunked"


def transform(name: str, impl: str, tangent: torch.Tensor) -> torch.Tensor:
    x = {n: y for n, y in make(impl=impl).items() if n != "q"}
    q, call = make()["q"], lambda q: expire_attention(q, **x)
    if name == "vmap":
        return torch.func.vmap(call)(torch.stack([q, q + tangent]))[1]
    if name == "grad":
        return torch.func.grad(lambda q: call(q).square().sum())(q)
    if name == "jvp":
        return torch.func.jvp(call, (q,), (tangent,))[1]
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(q, tangent))).tangent


@pytest.mark.parametrize("name", ["vmap", "grad", "jvp", "forward mode"])
def test_transforms_are_right_in_the_reference_and_refused_elsewhere(name):
    """A forward-mode derivative of the chunked operator would be zero, without a word."""
    tangent = torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(1))
    found = transform(name, "reference", tangent)
    q = make()["q"].double().requires_grad_()
    x = {n: y.double() if isinstance(y, torch.Tensor) else y for n, y in make(impl="reference").items() if n != "q"}
    if name == "vmap":
        wanted = expire_attention(q + tangent, **x)
    elif name == "grad":
        (wanted,) = torch.autograd.grad(expire_attention(q, **x).square().sum(), q)
    else:  # a derivative along the tangent, from both sides in float64: off by step^2 and by rounding / step
        sides = [expire_attention(q + step * tangent, **x) for step in (1e-6, -1e-6)]
        wanted = (sides[0] - sides[1]) / 2e-6
    assert torch.allclose(found, wanted.float(), rtol=0, atol=64 * torch.finfo(torch.float32).eps)
    for impl in ("chunked", "auto"):
        with pytest.raises(ValueError, match=rf"the operator needs impl='reference', got impl='{impl}'"):
            transform(name, impl, tangent)


@pytest.mark.parametrize("name", ["vmap", "grad", "jvp", "forward mode"])
def test_transforms_are_refused_by_a_torch_without_the_private_names_too(name, monkeypatch):
    """The names by which a transform is recognised are private to torch, and may go; nothing may then be wrong in silence."""
    monkeypatch.delattr(torch._C._functorch, "peek_interpreter_stack")
    monkeypatch.setattr(inputs, "forward_ad", types.SimpleNamespace(unpack_dual=forward_ad.unpack_dual))
    said = (
        "forward-mode differentiation the operator needs"
        if name == "forward mode"
        else "setup_context|forward-mode|vmap:"
    )
    with pytest.raises((ValueError, RuntimeError), match=said):
        transform(name, "chunked", torch.ones(B, H, T, D))
    assert expire_attention(**make()).isfinite().all()


def test_second_derivatives_are_refused_where_there_are_none():
    x = make()
    q = x.pop("q").requires_grad_()
    (first,) = torch.autograd.grad(expire_attention(q, **x).square().sum(), q, create_graph=True)
    with pytest.raises(ValueError, match="has first derivatives only; give impl='reference'"):
        torch.autograd.grad(first.sum(), q)
