"""What cannot be retrofitted or used is refused in one sentence, and the model stays as it was."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, BertConfig, BertModel, LlamaModel, T5Config  # noqa: E402
from transformers import T5ForConditionalGeneration as T5  # noqa: E402

from expire_span.errors import StorageError, UserError  # noqa: E402
from expire_span.hf import RetrofitConfig, load_adapter, retrofit  # noqa: E402
from expire_span.hf.adapter import _settings_sha256  # noqa: E402
from expire_span.hf.loading import open_model  # noqa: E402
from tests.hf_models import FAMILIES, forgetful, llama_gguf, model_folder, read, tiny, tokens  # noqa: E402

SMALL = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


def untouched(model):
    assert not any(m._forward_pre_hooks for m in model.modules()) and not hasattr(model, "_expire_span_retrofit")
    assert model.config._attn_implementation != "expire_span"


def bert():
    return BertModel(BertConfig(**SMALL))


def t5():
    return T5(T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))


def bidirectional():
    config = FAMILIES["gemma3"]()
    config.use_bidirectional_attention = True
    return AutoModelForCausalLM.from_config(config)


def packed():
    """A model as transformers leaves it where a kernel for the blocks of GGUF files is installed."""
    rounding = pytest.importorskip("transformers.utils.quantization_config")
    blocks = pytest.importorskip("transformers.integrations.gguf.utils")
    model = tiny()
    model.lm_head, model.config.quantization_config = blocks.GgufLinear(32, 97, 3), rounding.GgufConfig()
    return model


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (bert, r"needs a causal language model with an output layer .* got BertModel"),
        (t5, "needs a decoder-only model, got the encoder-decoder T5ForConditionalGeneration"),
        (
            lambda: LlamaModel(FAMILIES["llama"]()),
            "needs a causal language model with an output layer .* got LlamaModel",
        ),
        (bidirectional, "attends in both directions"),
        (packed, r"LlamaForCausalLM holds its weights in the blocks of a GGUF file.*GgufConfig\(dequantize=True\)"),
    ],
)
def test_models_that_cannot_be_retrofitted(build, said):
    model = build()
    with pytest.raises(ValueError, match=said):
        retrofit(model)
    untouched(model)


def test_not_a_model():
    with pytest.raises(ValueError, match="needs a transformers causal language model, got Linear"):
        retrofit(torch.nn.Linear(2, 2))


def test_an_attention_layer_that_is_missing():
    model = tiny()
    del model.model.layers[1]
    with pytest.raises(ValueError, match=r"cache layer 1 .* that no attention layer writes"):
        retrofit(model)
    untouched(model)


def test_retrofitting_twice():
    model = tiny()
    retrofitted = retrofit(model)
    with pytest.raises(ValueError, match="is retrofitted already; call detach"):
        retrofit(model)
    retrofitted.detach()
    retrofit(model).detach()


def test_a_context_beyond_the_position_table():
    model = tiny("gpt2")
    retrofitted = retrofit(model, RetrofitConfig(max_span=64, ramp=8))
    cache = retrofitted.new_cache()
    with torch.no_grad():
        model(tokens(1, 2040), past_key_values=cache)
        with pytest.raises(ValueError, match="learned table of 2048 positions, got a context of 2050 tokens"):
            model(tokens(1, 10), past_key_values=cache)


def test_a_forgotten_cache_is_explained():
    model = tiny()
    retrofit(model, own_cache=False)
    with pytest.raises(ValueError, match=r"got a DynamicCache; pass past_key_values=retrofitted.new_cache\(\)"):
        model.generate(tokens(1, 5), max_new_tokens=4, pad_token_id=0)
    with pytest.raises(ValueError, match=r"needs its own cache, got a StaticCache; pass past_key_values"):
        model.generate(tokens(1, 5), max_new_tokens=4, pad_token_id=0, cache_implementation="static")
    model(tokens(1, 5))  # a plain forward pass makes an empty cache of its own, and needs none


def test_a_cache_without_its_model():
    model = tiny()
    retrofitted = retrofit(model)
    cache = retrofitted.new_cache()
    retrofitted.detach()
    with pytest.raises(ValueError, match="this model has no span predictors"):
        model(tokens(1, 5), past_key_values=cache)


def test_a_cache_of_another_batch_or_device():
    model = tiny()
    retrofitted = retrofit(model)
    cache = retrofitted.new_cache()
    model(tokens(2, 5), past_key_values=cache)
    with pytest.raises(ValueError, match="holds a batch of 2 rows, got 3"):
        model(tokens(3, 5), past_key_values=cache)
    cache.to("meta")
    with pytest.raises(ValueError, match="the cache is on meta but the model is on cpu"):
        model(tokens(2, 5), past_key_values=cache)


def test_a_cache_of_another_retrofit():
    """Its memories would be deleted by the ramp and cap of the one that made it."""
    model, ids = tiny(), tokens(1, 5)
    first = retrofit(model, RetrofitConfig(max_span=60, ramp=8))
    old, other = first.new_cache(), retrofit(tiny("gemma3"), RetrofitConfig(max_span=60, ramp=8)).new_cache()
    first.detach()
    retrofit(model, RetrofitConfig(max_span=60, ramp=16, cap=40))
    with pytest.raises(
        ValueError, match=r"made by a retrofit with ramp 8 and cap None, .* one with ramp 16 and cap 40"
    ):
        model(ids, past_key_values=old)
    with pytest.raises(ValueError, match="this cache has 3 layers, the model has 2; make one with new_cache"):
        model(ids, past_key_values=other)


def test_another_attention_implementation():
    model, ids = tiny(), tokens(1, 50)
    forgetful(model, max_span=20, ramp=4)
    want = model(ids).logits
    model.set_attn_implementation("eager")
    with pytest.raises(
        ValueError, match="implementation was set to 'eager', which forgets nothing; set it back to 'exp"
    ):
        model(ids)
    model.set_attn_implementation("expire_span")
    assert torch.equal(model(ids).logits, want)


def test_masks_and_dropout_that_the_operator_does_not_have():
    model = tiny("gpt2")
    retrofit(model)
    with pytest.raises(ValueError, match=r"takes 2-D attention masks .* got \(1, 1, 5, 5\)"):
        model(tokens(1, 5), attention_mask=torch.ones(1, 1, 5, 5), use_cache=False)
    with pytest.raises(ValueError, match=r"no attention dropout, got 0.1; set it to 0 or call model.eval"):
        model.train()(tokens(1, 5), use_cache=False)


def test_taking_tokens_back():
    model = tiny()
    retrofitted = retrofit(model)
    with pytest.raises(ValueError, match=r"cannot take back .* without prompt lookup"):
        model.generate(
            tokens(1, 20).repeat(1, 2),
            past_key_values=retrofitted.new_cache(),
            prompt_lookup_num_tokens=3,
            max_new_tokens=12,
            pad_token_id=0,
        )


def test_settings_are_checked():
    for wrong, said in (
        (dict(max_span=0), "max_span must be"),
        (dict(ramp=0), "ramp must be"),
        (dict(cap=0), "cap must"),
    ):
        with pytest.raises(ValueError, match=said):
            RetrofitConfig(**wrong)


# Adapters


def test_an_adapter_loads_with_one_call(tmp_path):
    model, ids = tiny(), tokens(1, 80)
    retrofitted = forgetful(model, max_span=40, ramp=4)
    want = model(ids, use_cache=False).logits
    retrofitted.save(tmp_path / "adapter")
    other = tiny()
    load_adapter(other, tmp_path / "adapter")
    assert torch.equal(other(ids, use_cache=False).logits, want)
    half = load_adapter(tiny().to(torch.bfloat16), tmp_path / "adapter")  # the same model in another precision
    assert half.config == retrofitted.config
    with pytest.raises(ValueError, match="holds its weights in the blocks of a GGUF file"):
        load_adapter(packed(), tmp_path / "adapter")


def test_adapters_that_do_not_fit(tmp_path):
    retrofitted = forgetful(tiny(), max_span=40, ramp=4)
    retrofitted.save(tmp_path / "adapter")
    other = tiny(seed=5)
    with pytest.raises(ValueError, match=r"was made for LlamaForCausalLM .hash .*load the model it was made for"):
        load_adapter(other, tmp_path / "adapter")
    untouched(other)
    with pytest.raises(ValueError, match="was made with max_span 40, this retrofit has 50"):
        retrofit(tiny(), RetrofitConfig(max_span=50, ramp=4)).load(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"no adapter at .*: it has no adapter.json"):
        load_adapter(other, tmp_path)
    path = tmp_path / "adapter" / "adapter.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    model = tiny()
    with pytest.raises(ValueError, match="does not match its checksum"):
        load_adapter(model, tmp_path / "adapter")
    untouched(model)
    head = json.loads((tmp_path / "adapter" / "adapter.json").read_text())
    (tmp_path / "adapter" / "adapter.json").write_text(json.dumps(head | {"format": 9}))
    with pytest.raises(
        ValueError, match="has format 9, this version reads format 1; make it anew with: expire-span retrofit"
    ):
        load_adapter(model, tmp_path / "adapter")
    base = head["base"]
    for change, words in [
        ({"base": None}, "base must be a table of fields, got None"),
        ({"base": base | {"hash": 7}}, "base.hash must be text, got 7"),
        ({"config": head["config"] | {"ramp": "x"}}, "config.ramp must be a whole number, got 'x'"),
        ({"sha256": None}, "sha256 must be text, got None"),
        ({"lora_rank": -1}, "lora_rank must be a whole number of at least 0, got -1"),
        ({"config": head["config"] | {"max_span": 41}}, "its settings do not match their checksum"),
        ({"settings_sha256": None}, "its settings do not match their checksum"),
    ]:
        (tmp_path / "adapter" / "adapter.json").write_text(json.dumps(head | change))
        with pytest.raises(UserError, match=rf"adapter.json: {words}; copy the adapter again"):
            load_adapter(model, tmp_path / "adapter")
    for damage in ("[]", "[" * 100_000):
        (tmp_path / "adapter" / "adapter.json").write_text(damage)
        with pytest.raises(UserError, match=r"adapter.json (is not valid JSON|must hold a JSON table)"):
            load_adapter(model, tmp_path / "adapter")


def test_adapters_whose_weights_do_not_fit(tmp_path):
    """The checksum fits, and yet the weights are not those of the model or of adapter.json."""
    import hashlib

    import safetensors.torch

    forgetful(tiny(), max_span=40, ramp=4).save(tmp_path / "adapter")
    path, model = tmp_path / "adapter" / "adapter.safetensors", tiny()
    head = json.loads((tmp_path / "adapter" / "adapter.json").read_text())
    weights = safetensors.torch.load_file(path)
    less = {name: x for name, x in weights.items() if name != "0.weight"}
    for data, rank, said in [
        (safetensors.torch.save(weights), 10**9, "has LoRA weights of rank 0, adapter.json says 1000000000"),
        (safetensors.torch.save(less), 0, r"0.weight must have shape \(2, 32\), got none"),
        (
            safetensors.torch.save({**weights, "0.bias": torch.zeros(3)}),
            0,
            r"0.bias must have shape \(2,\), got \(3,\)",
        ),
        (safetensors.torch.save({**weights, "0.bias": torch.full((2,), torch.nan)}), 0, "0.bias must be finite"),
        (safetensors.torch.save(weights)[:99], 0, "cannot be read"),
    ]:
        path.write_bytes(data)
        changed = head | {"lora_rank": rank, "sha256": hashlib.sha256(data).hexdigest()}
        changed["settings_sha256"] = _settings_sha256(changed)
        (tmp_path / "adapter" / "adapter.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match=said + ".*; copy (it|the adapter) again"):
            load_adapter(model, tmp_path / "adapter")
        untouched(model)
    with pytest.raises(UserError, match=r"it has no adapter.json; there is one at .*adapter"):
        load_adapter(model, tmp_path)


def test_an_adapter_on_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("expire_span.disk.files.write_synced", full)
    with pytest.raises(StorageError, match=r"the adapter could not be saved to .*adapter: the disk is full; save it"):
        forgetful(tiny(), max_span=40, ramp=4).save(tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_saved_caches_that_cannot_be_loaded(tmp_path):
    retrofitted, path = forgetful(tiny(), max_span=40, ramp=4), tmp_path / "cache.safetensors"
    cache, _ = read(retrofitted, tokens(1, 9))
    cache.fork().save(path)
    with pytest.raises(
        UserError, match=r"was saved by another model .weights .*; load it with the model that wrote it"
    ):
        forgetful(tiny(seed=5), max_span=40, ramp=4).new_cache().load(path)
    with pytest.raises(UserError, match="is not a saved cache that can be read: No such file"):
        cache.load(tmp_path / "nothing")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(UserError, match="does not match its checksum"):
        cache.load(path)
    path.write_bytes(data.replace(b'"sha256"', b'"sha255"', 1))
    with pytest.raises(UserError, match="does not match its checksum"):
        cache.load(path)
    cache.identify, identify = None, cache.identify
    cache.fork().save(path)
    cache.identify = identify
    with pytest.raises(
        UserError, match=r"was saved by another model .weights None, .*; load it with the model that wrote"
    ):
        cache.load(path)
    path.write_bytes(data.replace(b"seen", b'se"n', 1))
    with pytest.raises(UserError, match="is not a saved cache that can be read"):
        cache.load(path)
    assert cache.seen == 9
    with pytest.raises(StorageError, match=r"the cache could not be saved to .*: there is no such file or folder"):
        cache.save(tmp_path / "none" / "cache.safetensors")


# Model folders


def change(**settings):
    def write(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return write


def break_file(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def save_without_head(folder):
    config = FAMILIES["llama"]()
    config.vocab_size = 259
    LlamaModel(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (change(quantization_config={"quant_method": "gptq", "bits": 4}), "cannot load the model .*GPTQ"),
        (change(head_dim="x"), "config.json: head_dim must be a whole number of at least 1, got 'x'"),
        (
            change(num_key_value_heads=1),
            r"do not fit its config.json: .*k_proj.weight has the shapes \(16, 32\) and \(8, 32\)",
        ),
        (
            change(num_hidden_layers=3),
            "lacks weights of a causal language model .9 in all, the first is model.layers.2",
        ),
        (save_without_head, "lacks weights of a causal language model .1 in all, the first is lm_head.weight"),
        (change(model_type="x", auto_map={"AutoConfig": "code.C"}), "contains custom code"),
        (break_file("model.safetensors", b""), "model.safetensors is not a safetensors file that can be read"),
        (break_file("tokenizer.json", b"{"), "tokenizer.json is not valid JSON"),
        (break_file("tokenizer.json", b'{"model": 3}'), "has no tokenizer that can be read, see .*tokenizer.json: "),
        (change(num_hidden_layers=1), "hold model.layers.1.* which its config.json does not describe"),
        (break_file("adapter_config.json", b"{}"), "merge that adapter into its model"),
    ],
)
def test_model_folders_that_cannot_be_used(tmp_path, monkeypatch, damage, said):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody is asked whether to run a model's own code"))
    damage(model_folder(tmp_path))
    with pytest.raises(UserError, match=said):
        open_model(str(tmp_path), device="cpu")


def test_a_file_that_cannot_be_loaded_is_named(monkeypatch, tmp_path):
    def fail(*_, **__):
        raise ImportError("Please install gguf")

    llama_gguf(tmp_path / "x.gguf")
    monkeypatch.setattr("expire_span.hf.loading.AutoConfig.from_pretrained", fail)
    with pytest.raises(UserError, match=r"cannot load the model .*x\.gguf: Please install gguf"):
        open_model(str(tmp_path / "x.gguf"))


def test_paths_of_models_that_do_not_exist(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("./nothing", "../nothing", str(tmp_path / "nothing")):
        with pytest.raises(UserError, match=r"no model at .*nothing: give a folder"):
            open_model(name)
