"""The gated delta rule: chunks against the definition, and what the layer promises beside the shared test matrix."""

import warnings

import pytest
import torch

from expire_span.models.kit import fla
from expire_span.models.systems.gated_deltanet import DeltaShape, GatedDeltaNetConfig
from expire_span.models.systems.gated_deltanet.layer import GatedDeltaNet
from expire_span.models.systems.gated_deltanet.rule import chunked_delta_rule, recurrent_delta_rule
from tests.error_budget import DOUBLE


def draw_inputs(count: int, dtype=torch.float64, device="cpu", heads=2, key=6, value=10) -> list[torch.Tensor]:
    """q, k, v, log gate, strength and a state, with gates from nearly closed to nearly open."""
    torch.manual_seed(count)
    q, k = (torch.nn.functional.normalize(torch.randn(2, heads, count, key), dim=-1) for _ in range(2))
    v, state = torch.randn(2, heads, count, value), torch.randn(2, heads, key, value)
    log_gate = -(torch.rand(2, heads, count) ** 4) * 3
    strength = torch.rand(2, heads, count)
    return [x.to(device, dtype).requires_grad_() for x in (q, k, v, log_gate, strength, state)]


def gradients(y, state, inputs) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    wanted = [torch.randn(x.shape, generator=generator).to(x) for x in (y, state)]
    return list(torch.autograd.grad([y, state], inputs, wanted))


@pytest.mark.parametrize("count", [1, 63, 111])
@pytest.mark.parametrize("chunk", [16, 64])
def test_chunks_give_the_definition_and_its_gradients(count, chunk):
    inputs = draw_inputs(count)
    want = recurrent_delta_rule(*inputs)
    got = chunked_delta_rule(*inputs, chunk)
    for a, b in zip([*got, *gradients(*got, inputs)], [*want, *gradients(*want, inputs)]):
        torch.testing.assert_close(a, b, rtol=0, atol=DOUBLE)


def test_a_written_value_is_read_back_and_replaced():
    """Strength 1 and no fading: a key gives the value last written to it, whatever was written before."""
    key = torch.zeros(1, 1, 3, 4, dtype=torch.float64)
    key[..., 0] = 1
    value = torch.tensor([[[[1.0, 2.0], [5.0, -3.0], [7.0, 8.0]]]], dtype=torch.float64)
    ones, state = torch.ones(1, 1, 3, dtype=torch.float64), torch.zeros(1, 1, 4, 2, dtype=torch.float64)
    y, _ = recurrent_delta_rule(key, key, value, 0 * ones, ones, state)
    torch.testing.assert_close(y, value * 4**-0.5)


def test_strong_fading_does_not_overflow():
    inputs = draw_inputs(40)
    inputs[3] = torch.full_like(inputs[3], -300.0)
    y, state = chunked_delta_rule(*inputs, 64)
    want, _ = recurrent_delta_rule(*inputs)
    assert state.isfinite().all()
    torch.testing.assert_close(y, want)


def test_heads_follow_the_authors_share_of_parameters():
    layer = GatedDeltaNet(512, 8)
    assert layer.own == DeltaShape(heads=3, key=128, value=256, conv=4)
    large = sum(p.numel() for p in layer.parameters())
    assert abs(large / (6 * 512**2) - 1) < 0.01
    assert GatedDeltaNet(64, 4, key_dim=16, own_heads=2, value_factor=1).own == DeltaShape(2, 16, 16, 4)


def test_untrained_gates_forget_at_different_rates():
    torch.manual_seed(0)
    log_gate, strength = GatedDeltaNet(512, 8, key_dim=16)._gates(torch.zeros(1, 1, 512))
    lives = -1 / log_gate.flatten()
    assert lives.min() < 30 and lives.max() > 100
    assert strength.eq(0.5).all()


def test_kernels_are_refused_where_they_cannot_run(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    with pytest.raises(ValueError, match="forgetting with impl='fla' needs a CUDA device, got cpu"):
        fla.resolve_kernels("fla", "forgetting", cpu)
    assert fla.resolve_kernels("auto", "forgetting", cpu) == "torch"
    monkeypatch.setattr(fla, "_INSTALLED", False)
    monkeypatch.setattr(fla, "_warned", set())
    with pytest.warns(UserWarning, match="gated_deltanet runs in plain PyTorch on this GPU.*fla-core.*\\[fla\\]"):
        assert fla.resolve_kernels("auto", "gated_deltanet", cuda) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fla.resolve_kernels("auto", "gated_deltanet", cuda) == "torch"  # it is said once
    monkeypatch.setattr(fla, "_INSTALLED", True)
    assert fla.resolve_kernels("auto", "gated_deltanet", cuda, torch.bfloat16, count=64) == "fla"
    assert fla.resolve_kernels("auto", "gated_deltanet", cuda, torch.bfloat16, count=1) == "torch"
    with pytest.raises(ValueError, match="serves bfloat16, float16 and float32, got float64"):
        fla.resolve_kernels("fla", "gated_deltanet", cuda, torch.float64)


def test_keys_that_triton_miscompiles_take_another_way(monkeypatch):
    """Only tiles of fewer than 128 channels, only on Hopper GPUs, only with the Triton versions that have the fault."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(fla, "_INSTALLED", True)
    for triton, major, keys, wanted in [
        ((3, 6, 0), 9, 64, "torch"),
        ((3, 6, 0), 9, 33, "torch"),
        ((3, 6, 0), 9, 32, "torch"),
        ((3, 6, 0), 9, 65, "fla"),
        ((3, 6, 0), 9, 128, "fla"),
        ((3, 6, 0), 8, 64, "fla"),
        ((3, 7, 1), 9, 64, "fla"),
        ((3, 3, 1), 9, 64, "fla"),
    ]:
        monkeypatch.setattr(fla, "_TRITON", triton)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, major=major: (major, 0))
        monkeypatch.setattr(fla, "_warned", set())
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert fla.resolve_kernels("auto", "gated_deltanet", cuda, torch.bfloat16, 64, keys) == wanted
        assert [f"got {keys}" in str(w.message) for w in said] == [True] * (wanted == "torch")


@pytest.mark.parametrize("field", ["key_dim", "own_heads", "value_factor", "conv", "chunk"])
def test_settings_that_cannot_be_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        GatedDeltaNetConfig(**{field: 0})
