"""Damaged model folders and GGUF files, and sizes that no machine holds, are refused before anything is loaded or allocated."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from expire_span.cli import main
from expire_span.errors import UserError
from expire_span.hf import loading
from expire_span.hf.gguf import check_gguf
from expire_span.settings.retrofit import DistillConfig
from expire_span.stream.verify import verify
from expire_span.train.estimate import check_retrofit_batch
from expire_span.train.loop import TrainingLoop
from tests.fuzz_models import fuzz, list_cases
from tests.hf_models import bos_tokenizer, forgetful, llama_gguf, model_folder, tiny

SAMPLE = 40
HUGE = 999_999_999_999


def test_a_sample_of_damaged_models(tmp_path):
    assert fuzz(list_cases()[:SAMPLE], tmp_path) == []


@pytest.mark.long
def test_all_damaged_models(tmp_path):
    cases = list_cases()
    assert len(cases) >= 500
    assert fuzz(cases, tmp_path) == []


def test_the_command_line_refuses_damaged_models(tmp_path, capsys):
    folder, book = model_folder(tmp_path / "model"), tmp_path / "book.txt"
    book.write_text("a b c")
    (folder / "tokenizer.json").write_text("null")
    assert main(["retrofit", str(folder), "--data", str(book), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("expire-span: ") and "tokenizer.json must hold a JSON table" in said[-1]
    assert not any("Traceback" in line for line in said)


# GGUF files


def without_reader(monkeypatch, folder):
    """Let transformers take the folder's safetensors for a GGUF file, since its reader needs the package gguf."""
    for kind in (loading.AutoConfig, loading.AutoModelForCausalLM, loading.AutoTokenizer):
        load = kind.from_pretrained
        monkeypatch.setattr(
            kind,
            "from_pretrained",
            lambda _, load=load, gguf_file=None, quantization_config=None, **o: load(folder, **o),
        )


def test_a_gguf_file_without_a_tensor_is_refused(tmp_path, monkeypatch):
    """transformers fills what is missing with random numbers, and reports it."""
    import safetensors.torch

    folder, file = model_folder(tmp_path / "model"), llama_gguf(tmp_path / "x.gguf", drop=["blk.1.ffn_up.weight"])
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    without_reader(monkeypatch, folder)
    with pytest.raises(
        UserError, match=r"x.gguf lacks weights .*1 in all, the first is model.layers.1.mlp.up_proj.weight"
    ):
        loading.open_model(str(file), device="cpu")


def test_a_gguf_file_with_a_tensor_that_transformers_drops(tmp_path, monkeypatch):
    """As rope_freqs.weight, without which positions are rotated by other angles."""
    folder, file = model_folder(tmp_path / "model"), llama_gguf(tmp_path / "x.gguf")
    without_reader(monkeypatch, folder)
    loading.open_model(str(file), device="cpu")
    llama_gguf(file, more={"rope_freqs.weight": torch.ones(4)})
    with pytest.raises(UserError, match=r"holds 32,100 numbers, and the model .* has 32,096, .* rope_freqs.weight"):
        loading.open_model(str(file), device="cpu")


def test_a_gguf_file_through_its_own_reader(tmp_path, capfd):
    """The same two files as transformers itself reads them; a log gets one line, not a bar."""
    pytest.importorskip("gguf")
    loading.open_model(str(llama_gguf(tmp_path / "x.gguf")), device="cpu")
    told = capfd.readouterr().err
    assert told.startswith("reading the ") and told.count("\n") == 1 and "\r" not in told, told
    for drop, more, said in [
        (["blk.1.ffn_up.weight"], {}, "lacks weights"),
        ([], {"rope_freqs.weight": torch.ones(4)}, "holds 32,100 numbers"),
    ]:
        with pytest.raises(UserError, match=said):
            loading.open_model(str(llama_gguf(tmp_path / "y.gguf", drop, more)), device="cpu")


@pytest.mark.parametrize("rounded", [False, True])
def test_a_gguf_file_becomes_plain_weights_that_can_be_saved(tmp_path, monkeypatch, rounded):
    """Also where a kernel could compute with the blocks of a rounded file; transformers marks such a model as unsavable."""
    pytest.importorskip("gguf")
    module = pytest.importorskip("transformers.quantizers.quantizer_gguf")
    monkeypatch.setattr(module, "get_gguf_kernel", object)
    model, _ = loading.open_model(str(llama_gguf(tmp_path / "x.gguf", rounded=rounded)), device="cpu")
    model.save_pretrained(tmp_path / "plain")
    bos_tokenizer().save_pretrained(tmp_path / "plain")
    plain, _ = loading.open_model(str(tmp_path / "plain"), device="cpu")
    assert all(x.is_floating_point() for x in model.parameters())
    ids = torch.arange(4, 40)[None]
    assert torch.equal(plain(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"block_count": HUGE}, "block_count is 999999999999, which is more than 21"),
        ({"embedding_length": 0}, "embedding_length must be a whole number of at least 1, got 0"),
        ({"vocab_size": 2**60}, "vocab_size is 1152921504606846976, which is more than 64,192"),
    ],
)
def test_gguf_sizes_that_do_not_fit_the_tensors(tmp_path, fields, said):
    with pytest.raises(UserError, match=rf"x.gguf: {said}"):
        check_gguf(llama_gguf(tmp_path / "x.gguf", **fields))


# Sizes


def test_weights_of_few_bits_need_bitsandbytes(monkeypatch):
    cpu = torch.device("cpu")
    with pytest.raises(UserError, match="nf4 rounds a model of safetensors"):
        loading._options("nf4", {"gguf_file": "x.gguf"}, cpu)
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="int8 needs bitsandbytes, which is not installed"):
        loading._options("int8", {}, cpu)
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(loading, "BitsAndBytesConfig", dict)
    options = loading._options("nf4", {}, cpu)
    assert options["quantization_config"]["load_in_4bit"] and options["device_map"] == {"": cpu}
    assert options["dtype"] == torch.bfloat16 and "device_map" not in loading._options("fp16", {}, cpu)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_layers_are_spread_as_accelerate_says(place, tmp_path, monkeypatch):
    folder, ids = model_folder(tmp_path / "model"), torch.arange(4, 40)[None]
    whole, _ = loading.open_model(str(folder), device="cpu")
    true, maps = loading.AutoModelForCausalLM.from_pretrained, []

    def load(*args, device_map, **options):
        maps.append(device_map)
        names = (
            [name for name, _ in whole.named_children()]
            if place == "cpu"
            else ["lm_head", "model.norm", "model.rotary_emb"]
        )
        mapped = dict.fromkeys(names, "cpu")
        if place == "disk":
            mapped |= {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
        return true(*args, device_map=mapped, offload_folder=tmp_path / "off", **options)

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", load)
    spread, _ = loading.open_model(str(folder), device="spread")
    assert maps == ["auto"] and (place == "cpu" or any(x.is_meta for x in spread.parameters()))
    answers = [
        forgetful(x, max_span=20, ramp=4).model.generate(ids, max_new_tokens=8, do_sample=False)
        for x in (whole, spread)
    ]
    assert torch.equal(*answers)


def test_low_rank_additions_that_cannot_fit():
    retrofitted = forgetful(tiny(), max_span=40, ramp=4)
    with pytest.raises(UserError, match=r"\(rank 999,999,999,999\) needs at least .* TB, and cpu has"):
        retrofitted.add_lora(HUGE)
    assert not retrofitted.lora and not any("lora" in name for name, _ in retrofitted.model.named_modules())


@pytest.mark.parametrize("fields", [{"batch": HUGE}, {"calibrate": HUGE}, {"context": HUGE}], ids=str)
def test_contexts_that_cannot_fit(fields):
    config = dataclasses.replace(DistillConfig(budget=0.5), **fields)
    with pytest.raises(UserError, match=r"contexts of .* tokens .* needs at least .*; give smaller sizes"):
        check_retrofit_batch(config, torch.device("cpu"))


def test_a_time_limit_of_almost_nothing():
    """The time that has passed is then infinitely many limits, which is no whole number of steps."""
    settings = SimpleNamespace(seconds=1e-320, steps=7)
    learner = SimpleNamespace(warmup=0)
    for elapsed, place in ((0.0, 3), (1.0, 7)):
        loop = SimpleNamespace(settings=settings, learner=learner, clock=SimpleNamespace(elapsed=elapsed), step=3)
        assert TrainingLoop._place(loop) == place


def test_streams_to_verify_that_cannot_fit(capsys):
    with pytest.raises(UserError, match="one pass over 999,999,999,999 tokens"):
        verify(forgetful(tiny(), max_span=40, ramp=4), tokens=HUGE)
    assert main(["verify", "wikibooks", "--tokens", str(HUGE)]) == 2
    assert "one pass over 999,999,999,999 tokens" in capsys.readouterr().err
