"""The plugin's options and how it reads adapters: without vLLM, in the package's own environment."""

import pytest
import torch

from expire_span.errors import UserError
from expire_span.vllm.adapter import check_weights, predict_spans, read_adapter, slice_heads
from expire_span.vllm.options import Options, read_options
from expire_span.vllm.peaks import measure_peaks, most_alive, read_peaks, save_peaks, with_room


def test_options_are_read_and_checked():
    given = {"expire_span": {"adapter": "a", "slots": 12, "when_full": "evict"}}
    assert read_options(given) == Options("a", 12, "evict")
    assert read_options({"expire_span": {"adapter": "a"}}) == Options("a", None, "error")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, 'needs the adapter in its additional_config, as {"expire_span": {"adapter": "DIR"}}, got {}'),
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


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A retrofitted model, its adapter folder and the weights as its checkpoint has them."""
    pytest.importorskip("transformers")
    from tests.hf_models import forgetful, tiny

    retrofitted = forgetful(tiny("llama"), keep_first=3)
    folder = tmp_path_factory.mktemp("vllm") / "adapter"
    retrofitted.save(folder)
    return retrofitted, folder, dict(retrofitted.model.state_dict())


def test_spans_are_those_of_the_retrofit(model):
    retrofitted, folder, _ = model
    adapter = read_adapter(folder)
    assert adapter.config == retrofitted.config and adapter.longest_life == retrofitted.longest_life
    hidden = torch.randn(1, 9, 32)
    for layer in retrofitted.layers:
        form = adapter.span_form(layer.index, layer.dim, layer.kv_heads)
        want = retrofitted.spans(layer, hidden)[0].T
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

    retrofitted = forgetful(tiny("gemma"))
    retrofitted.save(tmp_path)
    weights = dict(retrofitted.model.state_dict())
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


def test_slots_follow_from_the_longest_life_what_is_asked_and_what_was_measured(model, tmp_path):
    from dataclasses import replace

    adapter = read_adapter(model[1])  # max_span 120, ramp 16, keep_first 3
    slots = lambda adapter, most=10**6, **options: adapter.capacities(0, 2, Options("a", **options), most)  # noqa: E731
    assert slots(adapter) == [138, 138]
    assert slots(adapter, most=50) == [50, 50]  # a request can be no longer
    assert slots(adapter, slots=30) == [30, 30]
    assert slots(adapter, slots=10**9) == [138, 138]
    capped = replace(adapter, config=replace(adapter.config, cap=20))
    assert slots(capped) == [20, 20] and slots(capped, slots=12) == [12, 12]
    measured = replace(adapter, peaks=[[40, 200], [1, 1]])
    assert slots(measured) == [50, 138] and slots(measured, slots=7) == [7, 7]
    with pytest.raises(UserError, match="does not fit the model; measure again"):
        measured.capacities(0, 3, Options("a"), 10**6)


def test_measured_peaks_are_the_largest_number_of_slots_in_use(model):
    """Slots of exactly this size lose nothing, and one less does."""
    from expire_span.ops.rule import lifetime
    from tests.vllm.test_slots import COUNT, RAMP, draw, feed, make_slots

    parts = draw()
    peaks = most_alive(lifetime(parts[3].t(), RAMP))
    for head in range(2):
        less = [peak - (n == head) for n, peak in enumerate(peaks)]
        assert feed(make_slots(less), parts, [1] * COUNT)[1] > 0
    assert feed(make_slots(peaks), parts, [1] * COUNT)[1] == 0


def test_peaks_of_a_model_are_measured_kept_and_checked(model, tmp_path):
    from tests.hf_models import tokens

    retrofitted, folder, _ = model
    ids = tokens(1, 150)[0]
    peaks, cache = measure_peaks(retrofitted, [ids, ids[:5]]), retrofitted.new_cache()
    most = [torch.zeros(2, dtype=torch.int64) for _ in retrofitted.layers]
    for token in ids.view(1, -1, 1).unbind(1):
        with torch.no_grad():
            retrofitted.model(token, past_key_values=cache, use_cache=True)
        most = [torch.maximum(a, b[0]) for a, b in zip(most, cache.live())]
    assert peaks == [x.tolist() for x in most] and len({n for layer in peaks for n in layer}) > 1
    head = read_adapter(folder).head
    save_peaks(tmp_path, head, 150, peaks)
    assert read_peaks(tmp_path, head) == peaks and read_peaks(folder, head) is None
    with pytest.raises(UserError, match="was measured with other predictors"):
        read_peaks(tmp_path, head | {"sha256": "another"})
    for wrong in ('{"format": 2}', '{"format": 1, "peaks": [[0]]}', '{"format": 1, "peaks": 3}'):
        (tmp_path / "slots.json").write_text(wrong)
        with pytest.raises(UserError, match="is not what this version writes"):
            read_peaks(tmp_path, head)
    assert with_room(1) == 2 and with_room(100) == 125


def test_the_command_line_measures_slots(tmp_path, capsys):
    pytest.importorskip("transformers")
    from expire_span.cli import main
    from expire_span.hf.loading import open_model
    from tests.hf_models import forgetful, model_folder, text

    base = model_folder(tmp_path / "base")
    forgetful(open_model(str(base), device="cpu")[0]).save(tmp_path / "adapter")
    (tmp_path / "text").write_text(text(200))
    options = ["--data", str(tmp_path / "text"), "--context", "200", "--documents", "2", "--device", "cpu"]
    assert main(["measure-slots", str(tmp_path / "adapter"), *options]) == 0
    assert "document 2 of 2: 200 tokens" in capsys.readouterr().out
    peaks = read_adapter(tmp_path / "adapter").peaks
    assert peaks is not None and [len(x) for x in peaks] == [2, 2]
    assert main(["measure-slots", str(tmp_path / "adapter"), *options[:3], "0"]) == 2
    assert "--context must be at least 1, got 0" in capsys.readouterr().err
