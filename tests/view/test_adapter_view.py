"""A retrofitted Hugging Face model in traces and on the page."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")

from expire_span.cli import main
from expire_span.generate import Sampling
from expire_span.hf import loading
from expire_span.hf.loading import open_model
from expire_span.lab.figures.traces import FIGURES, draw_spans
from expire_span.runs import UserError
from expire_span.view.adapter import AdapterReader
from expire_span.view.limit import Cut
from expire_span.view.server import Source
from expire_span.view.source import open_adapter
from expire_span.view.trace import Trace, encode
from tests.browser import Watched, made_trace, serving, wait_until
from tests.hf_models import forgetful, llama_gguf, model_folder, tiny, word_tokenizer

TEXT = "The old fox saw a red hen. <b>The hen</b> saw it too, é. " * 3


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def adapter(request, tmp_path_factory):
    """A model of each kind: spans in all layers, and windows in two of three."""
    folder = tmp_path_factory.mktemp(request.param)
    model, _ = open_model(str(model_folder(folder / "base", request.param)), device="cpu")
    forgetful(model, max_span=40, ramp=8).save(folder / "retrofit" / "adapter")
    return folder / "retrofit"


def living_of(tracer):
    """Memories that the next token can read: for each layer, the mean over heads."""
    return [float(part["memory"].live(part["position"]).float().mean()) for part in tracer.state]


def test_the_trace_is_what_the_model_does(adapter):
    reader = open_adapter(adapter / "adapter")
    tracer = reader.tracer()
    tokens = reader.encode(TEXT.encode())
    trace = Trace.of([tracer.header(), *tracer.read(tokens)])
    header = trace.header
    layers = reader.retrofitted.layers
    assert (header["heads"], header["layers"], header["vocabulary"]) == (2, len(layers), "pieces")
    with torch.no_grad():
        logs = reader.retrofitted.model(tokens.unsqueeze(0), use_cache=False).logits[0].log_softmax(-1)
    wanted = -logs[:-1].gather(1, tokens[1:, None])[:, 0] / math.log(2)
    assert trace.steps[0]["text"] == "T" and "".join(x["text"] for x in trace.steps[:20]) == TEXT[:20]
    # Read in blocks through the cache against all at once: float32 sums in another order, then four decimals.
    torch.testing.assert_close(torch.tensor(trace.bits[1:]).float(), wanted, rtol=1e-4, atol=2e-4)
    alive = [
        float(part["memory"].live(part["position"]).float().mean()) for part in tracer.state
    ]  # what the next token can still read
    ends = [
        [i for i, s in enumerate(row) if i + math.ceil(s + header["ramp"]) > len(trace)] for row in trace.spans.max(1)
    ]
    assert all(living <= len(end) for living, end in zip(alive, ends)) and max(alive) > 0
    by_head = [
        [sum(i + math.ceil(s + header["ramp"]) > len(trace) for i, s in enumerate(head)) for head in layer]
        for layer in trace.spans
    ]
    assert [sum(heads) / len(heads) for heads in by_head] == alive
    for layer, spans in zip(layers, trace.spans):
        if layer.window is not None:
            assert set((spans + header["ramp"]).flatten()) == {layer.window - 0.5}, "all end with the window"
    dead = {tuple(death) for step in trace.steps for death in step["deaths"]}
    assert len(dead) > 50 and sum(len(step["deaths"]) for step in trace.steps) == len(dead), "each dies once"


def test_first_tokens_that_are_kept_do_not_die_in_the_trace(tmp_path):
    model, _ = open_model(str(model_folder(tmp_path / "base")), device="cpu")
    forgetful(model, max_span=40, ramp=8, keep_first=3).save(tmp_path / "adapter")
    reader = open_adapter(tmp_path / "adapter")
    tracer = reader.tracer()
    trace = Trace.of([tracer.header(), *tracer.read(reader.encode(TEXT.encode()))])
    living = (trace.spans + 8 + range(len(trace)) > len(trace)).sum(-1).mean(-1)
    assert living.tolist() == living_of(tracer) and living.min() > 3
    assert not {birth for step in trace.steps for _, _, birth, *_ in step["deaths"]} & {0, 1, 2}
    trace.steps[5]["text"] = "\n"  # what is drawn of a trace stays on its line
    for name, axes in ((name, draw(trace).axes[0]) for name, draw in FIGURES.items() if name in ("tokens", "layers")):
        said = axes.get_title("left")
        assert said.endswith("; tokens kept for good: 3") and re.search(r"to \d\d steps \(dark\)", said), name
        assert axes.texts[5].get_text() == "⏎", name
    assert draw_spans(trace).axes[0].get_xlim()[1] < 100, "their spans, which have no end, are not drawn"


def test_the_texts_of_all_steps_are_the_text():
    """Also where the tokenizer marks the beginnings of words."""
    tracer = AdapterReader(forgetful(tiny(), max_span=40, ramp=8), word_tokenizer(), "a").tracer()
    steps = [*tracer.read(torch.tensor([1, 2])), *tracer.read(torch.tensor([3, 4]))]
    assert [step["text"] for step in steps] == ["a", " fox", " named", "."]


def test_cutting_and_writing(adapter):
    reader = open_adapter(adapter / "adapter")
    before = Trace.of(reader.trace_text(TEXT.encode()))
    after = Trace.of(reader.trace_text(TEXT.encode(), Cut(max_span=3.0)))
    learned = [n for n, layer in enumerate(reader.retrofitted.layers) if layer.window is None]
    assert before.spans[learned].max() > 10 and after.spans[learned].max() <= 3
    assert Trace.of(reader.trace_text(TEXT.encode())) == before, "the cut is gone"
    header, *steps = reader.generate(b"The fox", Sampling(temperature=0), 5)
    assert len(steps) == len(b"The fox") + 5 and header["task"] == "text"
    with pytest.raises(UserError, match="the text is empty"):
        reader.encode(b"")


def test_commands_and_source(adapter, tmp_path, capsys):
    assert main(["trace", str(adapter), "--tokens", "6"]) == 0
    header, *steps = map(json.loads, capsys.readouterr().out.splitlines())
    assert header["name"] == "base with retrofit" and len(steps) == 6
    info = Source(adapter=adapter / "adapter").describe()
    assert info["model"] and info["text"] and info["generate"] and not info["error"]
    lost = Source(adapter=adapter / "adapter", model=str(tmp_path / "nowhere")).describe()
    assert not lost["model"] and "nowhere" in lost["error"]
    capsys.readouterr()
    assert main(["view", str(adapter), "--model", str(tmp_path / "nowhere")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("name", ["base", "base/model.gguf"])
def test_an_adapter_finds_its_model_from_anywhere(tmp_path, monkeypatch, name):
    """The model was named by a relative path, as a folder or as a file, and the adapter is used from another folder."""
    monkeypatch.chdir(model_folder(tmp_path / "base").parent)
    if name.endswith(".gguf"):
        llama_gguf(tmp_path / name)
    for kind in (loading.AutoConfig, loading.AutoModelForCausalLM, loading.AutoTokenizer):
        monkeypatch.setattr(kind, "from_pretrained", _without_file(kind.from_pretrained))
    forgetful(open_model(name, device="cpu")[0]).save("adapter")
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    assert loading.open_base(tmp_path / "adapter", device="cpu")[0] == str(tmp_path / name)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(
        UserError, match=r"no model .*base.*; this is where adapter .* was made: give its .* with --model"
    ):
        loading.open_base(tmp_path / "adapter")
    now = str(tmp_path / "moved" / Path(name).relative_to("base"))
    assert loading.open_base(tmp_path / "adapter", now, "cpu")[0] == now


def _without_file(load):
    """Loads a folder's safetensors whether or not a .gguf file was asked for, which needs the package gguf."""
    return lambda name, gguf_file=None, quantization_config=None, **options: load(name, **options)


# On the page


@pytest.fixture(scope="module")
def tab(browser, tmp_path_factory):
    """The page of an adapter, as it is when it opens."""
    folder = tmp_path_factory.mktemp("page")
    model, _ = open_model(str(model_folder(folder / "base")), device="cpu")
    forgetful(model, max_span=40, ramp=8).save(folder / "adapter")
    with serving(Source(adapter=folder / "adapter")) as (port, _):
        watched = Watched(browser)
        watched.open(f"http://127.0.0.1:{port}/")
        yield watched
        watched.close(f"http://127.0.0.1:{port}/")


def test_characters_of_several_tokens_are_compared_as_they_were_given(tab):
    """A trace shows parts of a character as such, and joined they do not give it back."""
    text = "é 🦊 said"
    tab.page.set_input_files("#es-file", {"name": "a.txt", "mimeType": "text/plain", "buffer": text.encode()})
    wait_until(lambda: tab.page.input_value("#es-other") == text == tab.view("view.state.text"))
    tab.page.fill("#es-text", text + " yes")
    tab.press("write")
    tab.wait("Number(view.dataset.written) > 20")
    tab.press("stop")
    other = tab.page.input_value("#es-other")
    assert other.startswith(text + " yes") and len(other) > len(text + " yes") and other == tab.view("view.state.text")


def test_a_long_text_is_compared_whole(tab):
    """Its trace is a short one, which takes no time; what counts is the text that is asked for."""
    text, asked = "Egypt is far away. " * 2000, []
    made = b"".join(map(encode, made_trace(3).lines()))

    def answer(route):
        asked.append(route.request.post_data_json)
        route.fulfill(body=made)

    tab.page.route("**/api/trace", answer)
    tab.page.fill("#es-text", text)
    tab.press("read")
    wait_until(lambda: tab.page.input_value("#es-other") == text)
    tab.page.fill("#es-limit", "1")
    tab.press("compare")
    tab.page.wait_for_selector("#es-verdict:not([hidden])")
    tab.page.unroute("**/api/trace")
    assert [x["text"] == text for x in asked] == [True, True] and asked[1]["max_span"] == 1
