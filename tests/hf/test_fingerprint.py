"""An adapter accepts its base model in any precision, and no other model."""

import copy
import json

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, LlamaConfig

from expire_span.hf import load_adapter
from expire_span.hf.adapter import _settings_sha256
from expire_span.hf.fingerprint import ALIKE, check_record, find_difference, record_of
from tests.hf_models import forgetful


def base(seed: int = 0):
    """A random model with norms that are not all ones, as of trained models, and matrices with a few large numbers."""
    torch.manual_seed(seed)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, head_dim=16)
    config = LlamaConfig(vocab_size=97, num_key_value_heads=2, max_position_embeddings=256, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(1 + 0.3 * torch.randn_like(x)) if x.dim() == 1 else x.mul_(1 + torch.rand_like(x) ** 4)
    return model


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    retrofitted = forgetful(base())
    retrofitted.save(folder)
    retrofitted.detach()
    return folder


def rounded(model, bits: int, group: int = 32):
    """Matrices rounded symmetrically in groups, as formats of few bits do; vectors stay as they are."""
    most = 2 ** (bits - 1) - 1
    with torch.no_grad():
        for x in model.parameters():
            if x.dim() > 1:
                parts = x.view(-1, group)
                scale = parts.abs().amax(1, keepdim=True) / most
                parts.copy_((parts / scale).round() * scale)
    return model


def changed(change):
    model = base()
    with torch.no_grad():
        change(model)
    return model


def shuffle_layer(model):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def move_all(model):
    for x in model.parameters():
        x.add_(0.05 * x.std() * torch.randn_like(x) if x.dim() > 1 else 0.05 * x * torch.randn_like(x))


def shuffle_rows(model):
    x = model.model.layers[2].self_attn.q_proj.weight
    x.copy_(x.flip(0))


def scale_one(model):
    model.model.layers[1].mlp.up_proj.weight.mul_(2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: base().to(torch.bfloat16),
        lambda: base().to(torch.float16),
        lambda: base().to(torch.bfloat16).to(torch.float16).float(),
        lambda: rounded(base(), 8).to(torch.float16),
        lambda: rounded(base(), 4),
        lambda: rounded(base(), 4).to(torch.bfloat16),
    ],
    ids=["bf16", "fp16", "bf16-fp16", "int8-fp16", "int4", "int4-bf16"],
)
def test_the_same_model_in_another_precision_is_accepted(adapter, make):
    load_adapter(make(), adapter).detach()


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: base(1), "holds other numbers"),
        (lambda: changed(shuffle_layer), "differs by up to"),
        (lambda: changed(move_all), "more than rounding does"),
        (lambda: changed(shuffle_rows), "q_proj.weight holds other numbers"),
        (lambda: changed(scale_one), "up_proj.weight holds other numbers"),
        (lambda: rounded(base(), 2), "are alike to 0.|holds other numbers"),
    ],
    ids=["seed", "layers", "trained", "rows", "scaled", "int2"],
)
def test_another_model_is_refused(adapter, make, reason):
    model = make()
    with pytest.raises(ValueError, match=f"was made for Llama.*{reason}.*load the model it was made for"):
        load_adapter(model, adapter)
    assert not hasattr(model, "_expire_span_retrofit")


def test_an_adapter_made_from_a_rounded_model_fits_the_whole_one(tmp_path):
    retrofitted = forgetful(rounded(base(), 4).to(torch.float16))
    retrofitted.save(tmp_path)
    retrofitted.detach()
    load_adapter(base(), tmp_path).detach()
    with pytest.raises(ValueError, match="load the model it was made for"):
        load_adapter(base(1), tmp_path)


def test_an_adapter_without_a_fingerprint_is_refused(adapter, tmp_path):
    head = json.loads((adapter / "adapter.json").read_text())
    del head["base"]["fingerprint"]
    head["settings_sha256"] = _settings_sha256(head)
    (tmp_path / "adapter.json").write_text(json.dumps(head))
    (tmp_path / "adapter.safetensors").write_bytes((adapter / "adapter.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"base\.fingerprint must be a table of weights, got None; copy the adapter"):
        load_adapter(base(), tmp_path)


def test_rounding_leaves_matrices_well_inside_the_limits():
    plain, four = base(), rounded(base(), 4)
    likeness = [
        torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()
        for a, b in zip(plain.parameters(), four.parameters())
    ]
    assert min(likeness) > 0.98 > ALIKE


def test_what_cannot_be_read_is_left_out_and_nothing_at_all_is_refused():
    weights = dict(base().state_dict())
    record = record_of(weights)
    check_record(json.loads(json.dumps(record)))
    assert find_difference(record, lambda name, shape: None if "mlp" in name else weights[name]) is None
    assert "can be compared" in (find_difference(record, lambda name, shape: None) or "")
    vectors = copy.copy(weights)
    vectors["model.norm.weight"] = torch.ones(3)
    assert "has the shape (3,)" in (find_difference(record, lambda name, shape: vectors[name]) or "")
    for broken in ([], {"a": 1}, {"a": [[1], "?"]}):
        with pytest.raises(ValueError, match=r"base\.fingerprint"):
            check_record(broken)


@pytest.mark.slow
def test_weights_of_bitsandbytes_are_expanded(adapter):
    """The real library's four and eight bits."""
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for kind in (Linear4bit, Linear8bitLt):
        model = base()
        for name, x in list(model.named_modules()):
            if isinstance(x, torch.nn.Linear) and "lm_head" not in name:
                options = {} if kind is Linear4bit else {"has_fp16_weights": False}
                new = kind(x.in_features, x.out_features, bias=False, **options)
                new.load_state_dict(x.state_dict())
                model.set_submodule(name, new.to("cpu"))
        load_adapter(model, adapter).detach()
