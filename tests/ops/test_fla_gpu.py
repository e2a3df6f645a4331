"""The fla package's kernels against our plain definitions. They need a GPU and the extra `fla`.

A kernel's products are in the dtype of its inputs; in float32 they are in TF32, whose ten digits after the point are more than
bfloat16's seven. The budget is the definition's own error when its inputs are rounded to the digits that the products have.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from expire_span.models.decoder import Decoder
from expire_span.models.kit.fla import find_miscompiled
from expire_span.models.kit.fla_kernels import forgetting_kernel, gated_delta_kernel
from expire_span.models.systems import mixer_config
from expire_span.models.systems.gated_deltanet.rule import chunked_delta_rule
from expire_span.settings.run import DecoderConfig
from tests.error_budget import FACTOR
from tests.models.test_gated_deltanet import draw_inputs, gradients

pytest.importorskip("fla", reason="the kernels of the extra fla")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DIGITS = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-11}
"""Largest relative rounding error of a number that enters a product; float32 enters as TF32."""
SHAPES = {"small": (2, 32, 64), "the enwik8 rows'": (3, 128, 256)}


def round_to(x: torch.Tensor, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """x in float64 with a random relative error of the size of one rounding."""
    generator = torch.Generator(x.device).manual_seed(seed)
    return x * (1 + DIGITS[dtype] * (2 * torch.rand(x.shape, generator=generator, device=x.device) - 1).double())


def assert_close(got: list, exact: list, rounded: list, dtype: torch.dtype) -> None:
    """Every result may be off by FACTOR times what one rounding of every input does, and one rounding of its own size."""
    for n, (g, e, r) in enumerate(zip(got, exact, rounded)):
        e, r = e.detach(), r.detach()
        error = float((g.detach().double() - e).norm())
        allowed = FACTOR * float((r - e).norm()) + FACTOR * DIGITS[dtype] * float(e.norm())
        assert error <= allowed, f"result {n}: error {error:.3g}, budget {allowed:.3g}, size {float(e.norm()):.3g}"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DIGITS)
@pytest.mark.parametrize("count", [16, 63, 200])
def test_gated_delta_kernel(count, dtype, shape):
    heads, key, value = SHAPES[shape]
    fault = find_miscompiled(torch.device("cuda"), key)
    if fault is not None:
        pytest.skip(f"the kernel {fault}")
    inputs = draw_inputs(count, torch.float64, "cuda", heads, key, value)
    q, k, v, log_gate, strength, state = inputs
    given = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    given += [x.detach().float().requires_grad_() for x in (log_gate, strength, state)]
    # The same numbers, so that only arithmetic differs.
    exact_inputs = [x.detach().double().requires_grad_() for x in given]
    exact = chunked_delta_rule(*exact_inputs, 64)
    other = [round_to(x.detach(), dtype, n).requires_grad_() for n, x in enumerate(exact_inputs)]
    rounded = chunked_delta_rule(*other, 64)
    y, after = gated_delta_kernel(*(x.transpose(1, 2) for x in given[:5]), given[5])
    got = (y.transpose(1, 2), after)
    assert_close(
        [*got, *gradients(*got, given)],
        [*exact, *gradients(*exact, exact_inputs)],
        [*rounded, *gradients(*rounded, other)],
        dtype,
    )


def forget(q, k, v, log_gate) -> torch.Tensor:
    """The definition: scores get the sum of log gates between a memory and its query. q [B, H, T, D], log_gate [B, H, T]."""
    sums, share = log_gate.cumsum(2), q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + sums.unsqueeze(3) - sums.unsqueeze(2)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("dtype", DIGITS)
@pytest.mark.parametrize("count,heads,kv_heads", [(16, 4, 2), (63, 4, 4), (300, 8, 8)])
def test_forgetting_kernel(count, heads, kv_heads, dtype):
    torch.manual_seed(count)
    shapes = [(2, h, count, 64) for h in (heads, kv_heads, kv_heads)]
    given = [torch.randn(s, device="cuda").to(dtype).requires_grad_() for s in shapes]
    given.append(F.logsigmoid(torch.randn(2, heads, count, device="cuda") + 2).detach().requires_grad_())
    exact_inputs = [x.detach().double().requires_grad_() for x in given]
    other = [round_to(x.detach(), dtype, n).requires_grad_() for n, x in enumerate(exact_inputs)]
    wanted = torch.randn(2, heads, count, 64, device="cuda", dtype=torch.float64)

    def outcome(y, inputs):
        return [y, *torch.autograd.grad(y, inputs, wanted.to(y.dtype))]

    y = forgetting_kernel(*(x.transpose(1, 2) for x in given)).transpose(1, 2)
    assert_close(outcome(y, given), outcome(forget(*exact_inputs), exact_inputs), outcome(forget(*other), other), dtype)


def build(kind: str, impl: str) -> Decoder:
    torch.manual_seed(0)
    fields = {"key_dim": 128} if kind == "gated_deltanet" else {}
    mixer = mixer_config(kind, impl=impl, **fields)
    return Decoder(DecoderConfig.modern(dim=128, layers=2, heads=2, ff_dim=128, mixer=mixer)).cuda()


@pytest.mark.parametrize("kind", ["gated_deltanet", "forgetting"])
def test_a_decoder_on_kernels_gives_the_plain_one_in_blocks(kind):
    """Blocks of different lengths with memory carried between them, short ones included, which run in plain PyTorch."""
    x = torch.randint(0, 256, (2, 260), device="cuda")
    plain, kernels = build(kind, "torch"), build(kind, "auto")
    kernels.load_state_dict(plain.state_dict())
    exact = plain.double()(x, keep="kv")[0].detach()
    state, parts = None, []
    with torch.no_grad():
        for part in x.split([130, 3, 64, 63], 1):
            y, state, _ = kernels(part, state, keep="kv")
            parts.append(y)
    error = float((torch.cat(parts, 1).double() - exact).norm() / exact.norm())
    assert error <= FACTOR * 2 * DIGITS[torch.float32], error  # two layers


@pytest.mark.parametrize("kind", ["gated_deltanet", "forgetting", "hybrid"])
@pytest.mark.parametrize("compiled", [False, True])
def test_training_steps_are_compiled_and_recorded(kind, compiled):
    """A step of bf16 training on kernels, as CUDA graph: the loss falls as it does without."""
    from expire_span.train.scorer import Scorer
    from expire_span.train.step import Pass, TrainStep

    losses = []
    for graphs in (False, True):
        decoder = build("gated_deltanet" if kind == "hybrid" else kind, "auto")
        if kind == "hybrid":
            partner = decoder.config.mixer
            config = replace(decoder.config, mixer=mixer_config("expire_span"), partner=partner, pattern="pm")
            torch.manual_seed(0)
            decoder = Decoder(config).cuda()
        if compiled:
            decoder.compile_blocks(carry=False)
        scorer = Scorer(decoder, "bf16").train()
        step = TrainStep(scorer, torch.Tensor.backward, graphs=graphs)
        optimizer = torch.optim.AdamW(scorer.parameters(), lr=3e-3, fused=True)
        generator = torch.Generator("cuda").manual_seed(0)
        tokens = torch.randint(0, 256, (4, 257), device="cuda", generator=generator)
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        mask, scale = torch.ones_like(y, dtype=torch.bool), torch.tensor(1 / y.numel(), device="cuda")
        found = []
        for _ in range(8):
            sums, _, _ = step(Pass(x, y, mask, None, None, scale, torch.tensor(0.0, device="cuda"), False))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            found.append(float(sums["nll"] * scale))
        losses.append(found)
    assert losses[1][-1] < losses[1][0] - 0.1
    assert abs(losses[0][-1] - losses[1][-1]) < 0.05 * losses[0][0], losses
