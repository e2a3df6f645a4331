"""The exchange with kvpress, with presses of our own in its place.

A press that keeps everything answers as the full cache does, bytes are counted as they are, and answers that exist are not
asked again. `python -m benchmarks.kvpress_rivals` runs the real ones.
"""

import contextlib
import importlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import safetensors.torch
import torch

pytest.importorskip("transformers")

from expire_span.cli import main
from expire_span.errors import UserError
from tests.hf_models import llama_gguf, model_folder


@dataclass
class FirstPress:
    """Keeps the first entries of every layer, and may mask some more without freeing them."""

    compression_ratio: float
    masks: bool = False

    @contextlib.contextmanager
    def __call__(self, model):
        made = {}

        def keep(module, args, kwargs, output):
            made[module] = layer = kwargs["past_key_values"].layers[module.layer_idx]
            count = round(layer.keys.shape[2] * (1 - self.compression_ratio))
            layer.keys, layer.values = layer.keys[:, :, :count], layer.values[:, :, :count]
            module.masked_key_indices = [range(10)] * 3 if self.masks else None

        hooks = [x.self_attn.register_forward_hook(keep, with_kwargs=True) for x in model.model.layers]
        yield
        for hook in hooks:
            hook.remove()


@dataclass
class HeadPress(FirstPress):
    masks: bool = True


@pytest.fixture
def worker(monkeypatch):
    stub = ModuleType("kvpress")
    stub.FirstPress, stub.HeadPress = FirstPress, HeadPress  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvpress", stub)
    monkeypatch.delitem(sys.modules, "benchmarks.kvpress_worker", raising=False)
    found = importlib.import_module("benchmarks.kvpress_worker")
    monkeypatch.setattr(found, "_version", lambda: "none")
    yield found
    sys.modules.pop("benchmarks.kvpress_worker", None)


def test_presses_answer_the_same_prompts(worker, tmp_path: Path, capsys, monkeypatch) -> None:
    from benchmarks import kvpress_rivals

    folder, out = model_folder(tmp_path / "model"), tmp_path / "suite"
    asked = ["--suite", "ruler", "--tasks", "passkey,pairs", "--context", "300", "--prompts", "1", "--methods", "none"]
    assert main(["evaluate-cache", str(folder), *asked, "--out", str(out), "--device", "cpu"]) == 0

    def run(command, **options):
        worker.main(json.loads(command[-1]))
        return type("Ran", (), {"returncode": 0})

    monkeypatch.setattr(kvpress_rivals.subprocess, "run", run)
    call = [str(out), "--presses", "First,Head", "--budgets", "1.0,0.5", "--python", sys.executable, "--device", "cpu"]
    assert kvpress_rivals.main(call) == 0
    lines = [json.loads(x) for x in (tmp_path / "suite.rivals.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 2 * 2
    found = json.loads((tmp_path / "suite.json").read_text())
    full = {x["task"]: x for x in found["answers"] if x["method"] == "none"}
    for line in lines:
        one = 2 * 8 * 4
        masked = 20 if line["method"] == "kvpress Head" else 0
        assert line["held_bytes"] == full[line["task"]]["held_bytes"] * line["budget"]
        assert line["kept_bytes"] == line["held_bytes"] - masked * one and line["peak_bytes"] == 300 * 2 * 2 * one
        if line["method"] == "kvpress First" and line["budget"] == 1:
            assert line["answer"] == full[line["task"]]["answer"] and line["live"] == 1
    assert [x["method"] for x in found["rows"]] == ["none", *["kvpress First"] * 2, *["kvpress Head"] * 2]
    assert "kvpress Head 0.5" in (tmp_path / "suite.html").read_text()

    path = tmp_path / "suite.rivals.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"method": "kvp')  # as a kill leaves it
    monkeypatch.setattr(worker, "ask", lambda *_: pytest.fail("asked again"))
    assert kvpress_rivals.main(call) == 0
    with pytest.raises(SystemExit, match="kvpress has no press Magic; it has First, Head"):
        worker.make_press("Magic", 0.5)
    assert path.read_bytes() == whole


def test_a_gguf_file_becomes_a_folder_once(monkeypatch, tmp_path: Path) -> None:
    """And again where the file has changed."""
    pytest.importorskip("gguf")
    from benchmarks import kvpress_rivals
    from expire_span.hf.loading import open_model

    monkeypatch.setattr(kvpress_rivals, "PLACE", tmp_path / "made")
    file = llama_gguf(tmp_path / "x.gguf")
    folder = kvpress_rivals.plain_folder(str(file))
    model, tokenizer = open_model(str(file), device="cpu")
    found = safetensors.torch.load_file(folder / "model.safetensors")
    assert all(torch.equal(found[name], x) for name, x in model.state_dict().items())
    assert open_model(str(folder), device="cpu")[1].encode("abc") == tokenizer.encode("abc")
    assert kvpress_rivals.plain_folder(str(folder)) == folder
    llama_gguf(file, more={"x": torch.ones(4)})
    with pytest.raises(UserError, match="holds 32,100 numbers"):
        kvpress_rivals.plain_folder(str(file))
    llama_gguf(file)
    os.utime(file, (1, 1))
    other = kvpress_rivals.plain_folder(str(file))
    monkeypatch.setattr("expire_span.hf.loading.open_model", lambda *_: pytest.fail("it was there"))
    assert other != folder and kvpress_rivals.plain_folder(str(file)) == other


def test_workers_share_prompts_and_the_first_prompts_come_first(worker) -> None:
    prompts = [{"context_tokens": [], "task": task, "index": n} for task in ("a", "b", "c") for n in range(4)]
    job = {"each": 3, "tasks": [], "presses": ["First"], "budgets": [0.5, 0.25], "workers": 2}
    parts = [worker.choose({**job, "worker": n}, prompts, []) for n in range(2)]
    asked = [(x["task"], x["index"], budget) for part in parts for x, _, budget in part]
    assert len(asked) == len(set(asked)) == 3 * 3 * 2
    assert all([x["index"] for x, *_ in part] == sorted(x["index"] for x, *_ in part) for part in parts)
    given = [{"method": "kvpress First", "budget": 0.5, "task": "b", "index": 1}]
    left = [x for n in range(2) for x in worker.choose({**job, "worker": n}, prompts, given)]
    assert len(left) == len(asked) - 1


def test_packages_come_before_those_of_the_interpreter(monkeypatch, tmp_path: Path) -> None:
    from benchmarks import kvpress_rivals

    paths = []

    def run(command, env, **options):
        paths.append(env["PYTHONPATH"].split(":"))
        return type("Ran", (), {"returncode": int(json.loads(command[-1])["worker"] == 1)})

    monkeypatch.setattr(kvpress_rivals.subprocess, "run", run)
    monkeypatch.setenv("PYTHONPATH", "mine")
    assert kvpress_rivals.run_workers(None, tmp_path, {}, 3) == 1
    assert paths == [[str(tmp_path), str(kvpress_rivals.ROOT), "mine"]] * 3
