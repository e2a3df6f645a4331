"""Tiny random models of every causal family of the installed transformers, shrunk by rules that know no family."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from expire_span import Stream
from expire_span.hf import RetrofitConfig, retrofit
from expire_span.hf.comparing import difference

VOCAB = 97
LAYERS = 4
WINDOW = 16
LARGEST = 2_000_000
_WIDTHS = dict(hidden_size=32, d_model=32, n_embd=32, model_dim=32, embed_dim=32, dim_model=32, embedding_size=32)
_WIDTHS |= dict(intermediate_size=48, n_inner=48, ffn_dim=48, d_ff=48, decoder_ffn_dim=48, encoder_ffn_dim=48, dff=48)
_WIDTHS |= dict(moe_intermediate_size=24, shared_expert_intermediate_size=24, ffn_hidden_size=48, mlp_hidden_size=48)
_COUNTS = dict(
    num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, encoder_attention_heads=4, decoder_attention_heads=4
)
_COUNTS |= dict(num_key_value_heads=2, n_kv_heads=2, head_dim=8, kv_channels=8, attention_head_dim=8, global_head_dim=8)
_COUNTS |= dict(num_hidden_layers=LAYERS, n_layer=LAYERS, n_layers=LAYERS, num_layers=LAYERS, decoder_layers=LAYERS)
_COUNTS |= dict(encoder_layers=2, vocab_size=VOCAB, max_position_embeddings=2048, n_positions=2048, n_ctx=2048)
_MEMORY = dict(sliding_window=WINDOW, local_window=WINDOW, attention_window_size=WINDOW)
_EXPERTS = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2)
_EXPERTS |= dict(n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, moe_k=2, moe_topk=2)
_STATES = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_d_ssm=64, mamba_d_conv=4)
_STATES |= dict(mamba_expand=2, state_size=8, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=1)
_STATES |= dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
_STATES |= dict(mamba_chunk_size=8, chunk_size=8, time_step_rank=4, mamba_dt_rank=4)
_LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
_MORE = dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, laurel_rank=4, num_kv_shared_layers=2)
SMALL = _WIDTHS | _COUNTS | _MEMORY | _EXPERTS | _STATES | _LATENT | _MORE
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
PER_FAMILY: dict[str, dict[str, Any]] = {}
"""Settings that keep a family's own layers in four of them, or that its sizes need to agree."""


def families() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(kind: str) -> Any:
    """A small config of a family: sizes named in `SMALL` are made small; lists of layers are cut."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    plain = made().to_dict()
    for name in _TOKENS:
        if isinstance(plain.get(name), int):
            plain[name] = min(plain[name], 3)
    return made.from_dict(_shrunk(plain, PER_FAMILY.get(kind, {})))


def _shrunk(settings: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    out = copy.deepcopy(settings)
    for name, value in settings.items():
        if name in SMALL and value is not None and not isinstance(value, (list, dict)):
            out[name] = SMALL[name]
        elif name in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list):
            out[name] = _few(value)
        elif name.endswith("_token_id") and isinstance(value, int):
            out[name] = min(value, 3)
        elif name.endswith("_token_id") and isinstance(value, list):
            out[name] = 2
        elif name.endswith("_config") and isinstance(value, dict):
            out[name] = _shrunk(value, {})
    return out | own


def _few(types: list[str]) -> list[str]:
    """As many entries as there are layers, with each kind among them."""
    kinds = list(dict.fromkeys(types))
    return (kinds * LAYERS)[:LAYERS]


def tiny_model(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = tiny_config(kind)
    with torch.device("meta"):
        size = sum(x.numel() for x in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{kind} keeps {size:,} parameters")
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "sink" in name:
                x.copy_(torch.randn(x.shape, generator=generator))
            elif not torch.isfinite(x).all():
                x.normal_(0, 0.1, generator=generator)
            elif x.dim() == 2 and "embed" not in name and "wte" not in name and "wpe" not in name:
                x.mul_(3)
    return model


def forget(model: Any) -> Any:
    """A retrofit whose spans differ much from token to token; most memories of 80 tokens expire."""
    handle = retrofit(model, RetrofitConfig(max_span=40, ramp=4))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for predictor in handle.predictors.values():
            predictor.weight.copy_(torch.randn(predictor.weight.shape, generator=generator))
            predictor.bias.fill_(-1.0)
    return handle


@torch.no_grad()
def errors(handle: Any, count: int = 80, rows: int = 2) -> dict[str, float]:
    """How far logits with deletion are from those of the same spans without, by how the tokens are read; and what is kept."""
    ids = torch.randint(4, VOCAB, (rows, count), generator=torch.Generator().manual_seed(2))
    want = handle.model(ids, use_cache=False).logits
    cache = handle.new_cache()
    sizes = [count // 2, 7, 1, 1, count // 2 - 9]
    parts = [handle.model(x, past_key_values=cache, use_cache=True).logits for x in ids.split(sizes, 1)]
    kept = torch.cat([live.flatten().float() for live in cache.live()]).mean() / count
    found = {"cache": difference(torch.cat(parts, 1), want), "kept": float(kept)}
    stepped = {"stream": False} | ({"slots": True} if handle.for_stream().can_step else {})
    for name, static_shapes in stepped.items():
        found[name] = _streamed(Stream(handle, rows, static_shapes=static_shapes), ids, want)
    return found


def _streamed(stream: Any, ids: Tensor, want: Tensor) -> float:
    """The difference of a stream's logits: it reads half, then token by token; its second row has joined later."""
    half = ids.shape[1] // 2
    stream.read(list(ids[:, :half]))
    logits = [stream.logits]
    for n in range(half, half + 12):
        stream.feed(ids[:, n : n + 1])
        logits.append(stream.logits)
    error = difference(torch.stack(logits, 1), want[:, half - 1 : half + 12])
    stream.join(ids[1, : half + 20], row=1)
    late = [
        (stream.feed(torch.stack([ids[0, half + 12 + n], ids[1, half + 20 + n]])[:, None]), stream.logits)[1]
        for n in range(8)
    ]
    rows = torch.stack(late, 1)
    first, second = (want[0, half + 12 : half + 20], want[1, half + 20 : half + 28])
    return max(error, difference(rows[0], first), difference(rows[1], second))
