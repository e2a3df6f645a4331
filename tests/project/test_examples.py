"""The examples run as they are, and print what they promise."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from expire_span.models import systems

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def run_example(capsys, monkeypatch):
    """Run an example as `python examples/NAME ARGUMENTS` does, in this process: a new one would load torch again."""

    def run(name: str, *arguments: str) -> str:
        path = str(ROOT / "examples" / name)
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def no_system_stays(monkeypatch):
    """Forget the memory systems that the test registers: other tests read the list."""
    monkeypatch.setattr(systems, "MixerConfig", systems.MixerConfig)
    before = dict(systems.SYSTEMS)
    yield
    systems.SYSTEMS.clear()
    systems.SYSTEMS.update(before)


def test_operator(run_example):
    assert "memories kept" in run_example("01_operator.py")


def test_stream(run_example):
    held = re.findall(r"(\d+) bytes held", run_example("02_stream.py"))
    assert len(held) == 6 and len(set(held[2:])) == 1


@pytest.mark.long
def test_train_tiny(run_example, tmp_path):
    """The short twin is test_cli.py::test_demo_and_report, which trains and reports with fewer steps."""
    out = run_example("03_train_tiny.py", str(tmp_path))
    success = re.search(r"success ([\d.]+)%", out)
    alive = re.search(r"alive: ([\d.]+)", out)
    assert success and float(success[1]) >= 90, out
    assert alive and float(alive[1]) < 12, out
    assert (tmp_path / "tiny" / "report.html").is_file()


def test_own_memory_system(run_example, no_system_stays, tmp_path):
    assert "100% of the colours" in run_example("04_own_memory_system.py", str(tmp_path))


def test_the_trainer_of_transformers_teaches_a_model_to_forget(run_example, tmp_path):
    from expire_span.cli import main
    from tests.hf_models import model_folder, text

    (tmp_path / "text").write_text(text(60))
    said = run_example(
        "08_trainer.py", str(model_folder(tmp_path / "M")), str(tmp_path / "text"), str(tmp_path / "out"), "3", "32"
    )
    assert "adapter in" in said
    assert main(["verify", str(tmp_path / "out" / "adapter"), "--tokens", "64", "--device", "cpu"]) == 0


class Harness:
    """Stands for lm-eval's HFLM where the package is not installed: the two places in which it calls a model."""

    def __init__(self, pretrained, tokenizer, batch_size):
        self.model, self.tokenizer = pretrained, tokenizer

    def _model_generate(self, context, max_length, stop, **options):
        self.cache = options["past_key_values"]
        return self.model.generate(context, max_length=max_length, do_sample=False, **options)


def score(lm, tasks):
    """Stands for lm-eval's `simple_evaluate`: a likelihood, and a text that is generated."""
    ids = lm.tokenizer("the old fox took a stone " * 3, return_tensors="pt").input_ids
    written = lm._model_generate(ids, ids.shape[1] + 4, [])
    mean = float(lm.model(ids).logits.mean())
    held = lm.cache.get_seq_length()
    return {"results": {task: {"mean": mean, "written": float(written.shape[1] - held)} for task in tasks}}


def test_lm_eval_scores_a_model_with_deletion(run_example, tmp_path, monkeypatch):
    from types import ModuleType

    from transformers import AutoModelForCausalLM

    from tests.hf_models import forgetful, model_folder

    folder = model_folder(tmp_path / "M")
    retrofitted = forgetful(AutoModelForCausalLM.from_pretrained(folder).eval())
    retrofitted.save(tmp_path / "adapter")
    retrofitted.detach()
    modules = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface")}
    modules["lm_eval"].simple_evaluate = score  # type: ignore[attr-defined]
    modules["lm_eval.models.huggingface"].HFLM = Harness  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    said = run_example("07_lm_eval.py", str(folder), str(tmp_path / "adapter"), "one,two")
    assert re.search(r"one \{'mean': .*'written': 1\.0\}", said) and "two" in said


def test_every_example_is_tested():
    source = Path(__file__).read_text()
    assert all(path.name in source for path in (ROOT / "examples").glob("*.py"))
