"""Tiny random models of every causal family of the installed transformers, shrunk by rules that know no family."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from expire_span import Stream
from expire_span.hf import RetrofitConfig, retrofit
from expire_span.hf.comparing import difference
from expire_span.hf.layouts import check_config

WORKS, REFUSED, UNTRIED = "works", "refused", "not tried"
LIMIT = 1e-5
"""The largest difference of float32 logits, relative to their spread, that can be rounding: about four times the largest that
was measured. What expires in this test changes them by more than a hundred times as much."""
VOCAB = 97
LAYERS = 4
WINDOW = 16
LARGEST = 16_000_000
_WIDTHS = dict(hidden_size=32, d_model=32, n_embd=32, model_dim=32, embed_dim=32, dim_model=32, embedding_size=32)
_WIDTHS |= dict(intermediate_size=48, n_inner=48, ffn_dim=48, d_ff=48, decoder_ffn_dim=48, encoder_ffn_dim=48, dff=48)
_WIDTHS |= dict(moe_intermediate_size=24, shared_expert_intermediate_size=24, ffn_hidden_size=48, mlp_hidden_size=48)
_WIDTHS |= dict(shared_intermediate_size=24, expert_ffn_hidden_size=24, lru_width=32, emb_dim=32)
_COUNTS = dict(num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, encoder_attention_heads=4)
_COUNTS |= dict(num_key_value_heads=2, n_kv_heads=2, head_dim=8, kv_channels=8, attention_head_dim=8, global_head_dim=8)
_COUNTS |= dict(num_hidden_layers=LAYERS, n_layer=LAYERS, n_layers=LAYERS, num_layers=LAYERS, decoder_layers=LAYERS)
_COUNTS |= dict(encoder_layers=LAYERS, decoder_attention_heads=4, vocab_size=VOCAB, decoder_vocab_size=VOCAB)
_COUNTS |= dict(rotary_dim=8, max_position_embeddings=2048, n_positions=2048, n_ctx=2048)
_MEMORY = dict(sliding_window=WINDOW, local_window=WINDOW, attention_window_size=WINDOW, window_size=WINDOW)
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
_KINDS = ("full_attention", "sliding_attention")
_HYBRID = ["linear_attention", "full_attention"] * 2
_LISTS = ("layer_types", "layers_block_type")
_GEMMA4 = dict(per_layer_config={n: {"head_dim": 16} for n in (1, 3)}, num_kv_shared_layers=0)
PER_FAMILY: dict[str, dict[str, Any]] = {
    "bamba": dict(attn_layer_indices=[1, 3]),
    "cohere_compass_text": dict(rope_parameters={x: dict(rope_type="default", rope_theta=1e4) for x in _KINDS}),
    "cpmant": dict(prompt_length=4, dim_head=8),
    "dots1": dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1),
    "gemma2": dict(attn_logit_softcapping=1.0, query_pre_attn_scalar=1),  # scores of a tiny model are small
    "vaultgemma": dict(attn_logit_softcapping=1.0, query_pre_attn_scalar=1),
    "gemma3n_text": dict(intermediate_size=[48] * LAYERS, activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0]),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]], attention_layers=["global", "local"] * 2),
    "granitemoehybrid": dict(layer_types=_HYBRID),
    "hrm_text": dict(num_layers_per_stack=1, H_cycles=2, L_cycles=1, L_bp_cycles=[1]),
    "hunyuan_v1_dense": dict(head_dim=8),
    "hunyuan_v1_moe": dict(head_dim=8, moe_topk=2),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "laguna": dict(num_attention_heads_per_layer=[4] * LAYERS),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2),
    "ministral": dict(head_dim=8),
    "nemotron": dict(num_key_value_heads=2),
    "zamba": dict(attention_hidden_size=64, attention_head_dim=16, mamba_dt_rank=4, n_mamba_heads=2),
    "zamba2": dict(
        hybrid_layer_ids=[1, 3],
        attention_hidden_size=64,
        attention_head_dim=16,
        n_mamba_heads=4,
        mamba_headdim=16,
        mamba_ngroups=1,
    ),
    "zaya": dict(num_experts_per_tok=1),
}
"""Settings that keep a family's own layers in four of them, or that its sizes need to agree."""


def families() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(kind: str) -> Any:
    """A small config of a family: every size that it has by a name of `SMALL` is made small; lists of layers are cut."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    plain = made().to_dict()
    for name in _TOKENS:
        if isinstance(plain.get(name), int):
            plain[name] = min(plain[name], 3)
    return made.from_dict(_shrunk(plain, kind))


def _shrunk(settings: dict[str, Any], kind: str) -> dict[str, Any]:
    out, layers = copy.deepcopy(settings), settings.get("num_hidden_layers")
    for name, value in settings.items():
        if name in SMALL and value is not None and not isinstance(value, (list, dict)):
            out[name] = SMALL[name]
        elif isinstance(value, list) and (name.endswith(_LISTS) or ((layers or 0) > 3 and len(value) == layers)):
            out[name] = _few(value)
        elif name.endswith("_token_id") and isinstance(value, int):
            out[name] = min(value, 3)
        elif name.endswith("_token_id") and isinstance(value, list):
            out[name] = 2
        elif name.endswith("_config") and isinstance(value, dict):
            out[name] = _shrunk(value, value.get("model_type", ""))
        elif name == "is_decoder":
            out[name] = True  # or encoders would attend in both directions
    return out | PER_FAMILY.get(kind, {})


def _few(types: list[str]) -> list[str]:
    """As many entries as there are layers, with each kind among them."""
    kinds = list(dict.fromkeys(types))
    return (kinds * LAYERS)[:LAYERS]


def tiny_model(kind: str, seed: int = 0, layers: int = LAYERS) -> Any:
    torch.manual_seed(seed)
    config = tiny_config(kind)
    if layers != LAYERS:
        config.num_hidden_layers = layers
        for name in _LISTS:
            if getattr(config, name, None):
                setattr(config, name, getattr(config, name)[:layers])
    with torch.device("meta"):
        size = sum(x.numel() for x in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{kind} keeps {size:,} parameters")
    # Before transformers 5.22, Gemma 2 was given sdpa, which leaves soft caps out.
    chosen = dict(attn_implementation="eager") if getattr(config, "attn_logit_softcapping", None) else {}
    model = AutoModelForCausalLM.from_config(config, **chosen).eval()
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
    retrofitted = retrofit(model, RetrofitConfig(max_span=40, ramp=4))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        predictors: Any = retrofitted.predictors.values()
        for predictor in predictors:
            predictor.weight.copy_(torch.randn(predictor.weight.shape, generator=generator))
            predictor.bias.fill_(-1.0)
    return retrofitted


@torch.no_grad()
def errors(retrofitted: Any, count: int = 80, rows: int = 2) -> dict[str, float]:
    """How far logits with deletion are from those of the same spans under the definition's mask, by how the tokens are read."""
    ids = torch.randint(4, VOCAB, (rows, count), generator=torch.Generator().manual_seed(2))
    want = by_definition(retrofitted, ids)
    learned = any(x.window is None for x in retrofitted.layers)
    assert not learned or expired(retrofitted, ids, want) > 100 * LIMIT, "no logit depends on what has expired"
    cache = retrofitted.new_cache()
    sizes = [count // 2, 7, 1, 1, count // 2 - 9]
    parts = [retrofitted.model(x, past_key_values=cache, use_cache=True).logits for x in ids.split(sizes, 1)]
    kept = torch.cat([live.flatten().float() for live in cache.live()]).mean() / count
    assert kept < 0.5, f"{kept:.0%} of the memories are kept"
    found = {"chunks": difference(torch.cat(parts, 1), want)}
    stepped = {"stream": False} | ({"slots": True} if retrofitted.for_stream().can_step else {})
    for name, static_shapes in stepped.items():
        found[name] = _streamed(Stream(retrofitted, rows, static_shapes=static_shapes), ids, want)
    return found


def by_definition(retrofitted: Any, ids: Tensor) -> Tensor:
    """Logits of one pass without a cache, with expired memories masked by the definition and nothing deleted."""
    chosen, retrofitted.config = retrofitted.config, replace(retrofitted.config, impl="reference")
    try:
        return retrofitted.model(ids, use_cache=False).logits
    finally:
        retrofitted.config = chosen


def expired(retrofitted: Any, ids: Tensor, want: Tensor) -> float:
    """How far the logits are from those of the base model, which forgets nothing."""
    with retrofitted.paused():
        return difference(want, retrofitted.model(ids, use_cache=False).logits)


def _streamed(stream: Any, ids: Tensor, want: Tensor) -> float:
    """The difference of a stream's logits: it reads half, then token by token; its second row has joined later."""
    half, alone, late = ids.shape[1] // 2, 6, 14
    stream.read(list(ids[:, :half]))
    logits = [stream.logits]
    for n in range(half, half + alone):
        stream.feed(ids[:, n : n + 1])
        logits.append(stream.logits)
    error = difference(torch.stack(logits, 1), want[:, half - 1 : half + alone])
    stream.join(ids[1, : half + late], row=1)
    for n in range(half, half + 4):
        stream.feed(torch.stack([ids[0, n + alone], ids[1, n + late]])[:, None])
        wanted = torch.stack([want[0, n + alone], want[1, n + late]])
        error = max(error, difference(stream.logits, wanted))
    return error


@dataclass(frozen=True)
class Outcome:
    """What became of a family: it works, it is refused, or no tiny model of it can be made."""

    kind: str
    verdict: str
    said: str
    """What is special about it where it works, else the reason."""


def outcome(kind: str) -> Outcome:
    """Try a family. AssertionError if it is neither refused nor what the definition says."""
    try:
        model = tiny_model(kind)
    except Exception as error:
        return Outcome(kind, UNTRIED, _reason(error))
    try:
        retrofitted = forget(model)
    except ValueError as error:
        return Outcome(kind, REFUSED if _runs(model) else UNTRIED, _reason(error))
    found = errors(retrofitted)
    assert max(found.values()) < LIMIT, f"{kind} differs from the definition: {found}"
    return Outcome(kind, WORKS, "; ".join(special(retrofitted)))


def _runs(model: Any) -> bool:
    """Whether the model itself runs; compressed keys are refused before it matters that a tiny model's sizes do not fit."""
    try:
        check_config(model.config, type(model).__name__)
    except ValueError:
        return True
    try:
        model(torch.arange(4, 12)[None])
    except Exception:
        return False
    return True


def special(retrofitted: Any) -> list[str]:
    """What distinguishes a family's attention, as a forward pass has shown it."""
    layers, layout = retrofitted.layers, retrofitted.layout
    said = []
    windows, capped, sinks = (sum(map(bool, x)) for x in zip(*((x.window, x.softcap, x.sinks) for x in layers)))
    if windows:
        said.append("a window in every layer" if windows == len(layers) else "a window in some layers")
    said += ["soft-capped scores"] * bool(capped) + ["sinks"] * bool(sinks)
    said += ["layers that read another layer's keys"] * bool(layout.readers)
    said += ["recurrent states"] * bool(layout.recurrent)
    said += ["a table of positions, where a stream ends"] * (layout.table is not None)
    return said or ["nothing"]


def _reason(error: Exception) -> str:
    """The first line of an error without the model's name, numbers and advice, so that equal reasons read alike."""
    text = str(error).strip().splitlines()[0]
    text = re.sub(r"^(retrofit needs .*?), (got|but) .*", r"\1", text)
    text = re.sub(r"^\w+ \([\w.-]+\) ", "", text).split("; take a model")[0].split(", so that")[0].split(": without")[0]
    return re.sub(r" [\d,.]*\d\b(?!-)", "", text).replace("|", "/")[:200]
