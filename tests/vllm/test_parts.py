"""The plugin's options and how it reads adapters: without vLLM, in the package's own environment."""

import pytest
import torch

from expire_span.errors import UserError
from expire_span.vllm.adapter import check_weights, predict_spans, read_adapter, slice_heads
from expire_span.vllm.options import Options, count_slots, read_options


def test_options_are_read_and_checked():
    given = {"expire_span": {"adapter": "a", "slots": 12, "when_full": "evict"}}
    assert read_options(given) == Options("a", 12, "evict")
    assert read_options({"expire_span": {"adapter": "a"}}) == Options("a", None, "error")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, 'needs the adapter as --additional-config \'{"expire_span": {"adapter": "DIR"}}\', got {}'),
        ({"expire_span": "a"}, "needs the adapter"),
        (None, "needs the adapter"),
        ({"expire_span": {}}, "adapter must be the folder of an adapter, got None"),
        ({"expire_span": {"adapter": 3}}, "adapter must be the folder of an adapter, got 3"),
        ({"expire_span": {"adapter": "a", "slot": 3}}, "are adapter, slots, when_full, got slot"),
        ({"expire_span": {"adapter": "a", "slots": 0}}, "slots must be a whole number of at least 1, got 0"),
        ({"expire_span": {"adapter": "a", "slots": 2.5}}, "slots must be a whole number of at least 1, got 2.5"),
        ({"expire_span": {"adapter": "a", "slots": True}}, "slots must be a whole number of at least 1, got True"),
        ({"expire_span": {"adapter": "a", "when_full": "drop"}}, "when_full must be one of error, evict, got 'drop'"),
    ],
)
def test_wrong_options_are_told_in_a_sentence(given, said):
    with pytest.raises(UserError) as caught:
        read_options(given)
    assert said in str(caught.value)


def test_slots_follow_from_the_longest_life_and_what_is_asked():
    assert count_slots(100, 4, None, None, 10**6) == 103
    assert count_slots(100, 4, None, None, 50) == 50  # a request can be no longer
    assert count_slots(100, 4, None, 30, 10**6) == 30
    assert count_slots(100, 4, 20, 30, 10**6) == 20  # the adapter's own cap
    assert count_slots(100, 4, None, 10**9, 10**6) == 103
    assert count_slots(1, 0, None, None, 10**6) == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A retrofitted model, its adapter folder and the weights as its checkpoint has them."""
    pytest.importorskip("transformers")
    from tests.hf_models import forgetful, tiny

    handle = forgetful(tiny("llama"), keep_first=3)
    folder = tmp_path_factory.mktemp("vllm") / "adapter"
    handle.save(folder)
    return handle, folder, dict(handle.model.state_dict())


def test_spans_are_those_of_the_retrofit(model):
    handle, folder, _ = model
    adapter = read_adapter(folder)
    assert adapter.config == handle.config and adapter.longest_life == handle.longest_life
    hidden = torch.randn(1, 9, 32)
    for layer in handle.layers:
        form = adapter.span_form(layer.index, layer.dim, layer.kv_heads)
        want = handle.spans(layer, hidden)[0].T
        assert torch.allclose(predict_spans(hidden[0], form), want, rtol=1e-5)
        assert all(torch.equal(part, whole[1:]) for part, whole in zip(slice_heads(form, 1, 1), form))
    with pytest.raises(UserError, match=r"2.weight must have shape \(2, 32\), got none"):
        adapter.span_form(2, 32, 2)
    with pytest.raises(UserError, match=r"0.weight must have shape \(2, 16\), got \(2, 32\)"):
        adapter.span_form(0, 16, 2)


def test_weights_of_another_model_are_refused(model):
    _, folder, weights = model
    adapter = read_adapter(folder)
    assert dict(check_weights(weights.items(), adapter, tied=False)).keys() == weights.keys()
    extra = weights | {"model.rotary_emb.inv_freq": torch.ones(4)}
    assert dict(check_weights(extra.items(), adapter, tied=False)).keys() == weights.keys()
    other = weights | {"model.norm.weight": weights["model.norm.weight"] + 1}
    with pytest.raises(ValueError, match="load the model it was made for"):
        list(check_weights(other.items(), adapter, tied=False))


def test_an_output_layer_that_files_leave_out_counts_as_the_embedding(tmp_path):
    pytest.importorskip("transformers")
    from tests.hf_models import forgetful, tiny

    handle = forgetful(tiny("gemma"))
    handle.save(tmp_path)
    weights = dict(handle.model.state_dict())
    assert weights.pop("lm_head.weight") is not None
    assert len(list(check_weights(weights.items(), read_adapter(tmp_path), tied=True))) == len(weights)


def test_nothing_of_transformers_is_needed_to_read_an_adapter(model):
    import subprocess
    import sys

    code = "import sys; sys.modules['transformers'] = None; from expire_span.vllm.adapter import read_adapter\n"
    code += "import expire_span.hf.rotary; print(read_adapter(sys.argv[1]).config.keep_first)"
    done = subprocess.run([sys.executable, "-c", code, str(model[1])], capture_output=True, text=True)
    assert done.stdout.strip() == "3", done.stderr


def test_adapters_with_low_rank_additions_are_refused(model, monkeypatch):
    monkeypatch.setattr("expire_span.vllm.adapter.read_head", lambda folder: {"lora_rank": 8})
    with pytest.raises(UserError, match="low-rank additions of rank 8"):
        read_adapter(model[1])
