"""The fused kernels inside PyTorch: compiled, checkpointed, under dispatch modes, refused, and without Triton."""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from expire_span.ops import expire_attention, resolve_impl
from tests.operator_cases import GRADS, Case
from tests.triton_interpreter import DEVICE, ON_GPU, PAPER, small_tiles

pytestmark = [pytest.mark.usefixtures(small_tiles.__name__), *([pytest.mark.gpu] if ON_GPU else [])]


def test_compiled_equals_eager_in_one_graph():
    case = Case(1, 2, 1, 40, 10, 32, relative=8, options=PAPER)
    names = (*GRADS, "relative_keys")
    x = {n: t.detach().to(DEVICE).requires_grad_(n in names) for n, t in case.tensors(torch.float32).items()}

    def loss(x):
        return expire_attention(**x, ramp=7.0, impl="triton", **case.options).square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    for got, want in zip(*(torch.autograd.grad(f(x), [x[n] for n in names]) for f in (compiled, loss))):
        torch.testing.assert_close(got, want)  # the same kernels; around them compilers may fuse other operations


def test_what_watches_ops_sees_one_op():
    """Eager calls bypass the dispatcher, except where a dispatch mode is active."""
    seen = []

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = {
        n: t.detach().to(DEVICE).requires_grad_(n in GRADS)
        for n, t in Case(1, 1, 1, 3, 0, 32).tensors(torch.float32).items()
    }
    alone = expire_attention(**x, ramp=7.0, impl="triton")
    with Listener():
        y = expire_attention(**x, ramp=7.0, impl="triton")
    assert "expire_span.attention.default" in seen
    for a, b in zip(*(torch.autograd.grad(z.sum(), [x[n] for n in GRADS]) for z in (alone, y))):
        torch.testing.assert_close(a, b)


def test_activation_checkpointing_and_autocast():
    case = Case(1, 2, 1, 40, 10, 32)
    x = {n: t.detach().to(DEVICE).requires_grad_(n in GRADS) for n, t in case.tensors(torch.float32).items()}
    names = list(x)

    def attend(*values):
        with torch.autocast(DEVICE, torch.bfloat16):
            return expire_attention(**dict(zip(names, values)), ramp=7.0, impl="triton")

    plain, again = attend(*x.values()), checkpoint(attend, *x.values(), use_reentrant=False)
    assert plain.dtype == torch.bfloat16
    for a, b in zip(*(torch.autograd.grad(y.float().sum(), [x[n] for n in GRADS]) for y in (plain, again))):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:impl=.auto. uses the slower")
def test_what_is_refused_says_what_to_use_instead(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    with pytest.raises(ValueError, match=r"needs a CUDA device, got cpu; use impl='chunked'"):
        resolve_impl("triton", cpu)
    dispatcher = sys.modules["expire_span.ops.choice"]
    monkeypatch.setattr(dispatcher, "_capability", lambda device: (9, 0))
    assert resolve_impl("auto", gpu, head_dim=64, dtype=torch.bfloat16) == "triton"
    refusals = {
        "head dims 32, 64, 96, 128, 256, got 48": dict(head_dim=48),
        "got float64": dict(dtype=torch.float64),
        "serves causal=True, got causal=False": dict(causal=False),
    }
    for words, request in refusals.items():
        assert resolve_impl("auto", gpu, **request) == "chunked"
        with pytest.raises(ValueError, match=words):
            resolve_impl("triton", gpu, **request)
    monkeypatch.setattr(dispatcher, "_capability", lambda device: (7, 5))
    assert resolve_impl("auto", gpu) == "chunked"
    with pytest.raises(ValueError, match=r"capability 8.0 or higher, got 7.5"):
        resolve_impl("triton", gpu)


def test_everything_else_runs_without_triton():
    code = """
import sys; sys.modules["triton"] = None
import torch, expire_span
from expire_span.ops import expire_attention
x, pos = torch.randn(1, 1, 4, 8), torch.arange(4)
print(expire_attention(x, x, x, torch.ones(1, 4), pos, pos, ramp=2.0).shape)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "torch.Size([1, 1, 4, 8])" in out.stdout, out.stderr
