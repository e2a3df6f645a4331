"""What CONTRIBUTING promises: a memory system, a task and a user of the backbone come from outside the package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TASK = '''
"""A task from outside: say the token before last."""
from dataclasses import dataclass
from typing import Literal
import torch
from expire_span.tasks.contract import Batch, Score, Symbols
from expire_span.tasks.registry import register_task

@dataclass(frozen=True)
class EchoTask:
    """Say what was said two steps ago."""
    kind: Literal["echo"] = "echo"
    symbols: int = 5
    """Number of symbols."""

class Stream:
    def __init__(self, symbols, batch, block, seed):
        self.symbols, self.batch, self.block, self.seed, self.count = symbols, batch, block, seed, 0
    def __iter__(self):
        return self
    def __next__(self):
        g = torch.Generator().manual_seed(self.seed * 1000 + self.count)
        self.count += 1
        x = torch.randint(0, self.symbols, (self.batch, self.block), generator=g)
        mask = torch.ones_like(x, dtype=torch.bool)
        mask[:, :2] = False
        return Batch(x, x.roll(2, 1), mask, torch.ones(self.batch, dtype=torch.bool))
    def state_dict(self):
        return {"count": self.count}
    def load_state_dict(self, state):
        self.count = state["count"]

class Echo:
    score, longest = Score("success", True), 100
    def __init__(self, config):
        self.symbols, self.codec = config.symbols, Symbols(config.symbols, str)
    def stream(self, split, *, batch, block, seed):
        stream = Stream(self.symbols, batch, block, seed + ["train", "valid", "test"].index(split))
        return stream if split == "train" else (next(stream) for _ in range(2))
    def score_of(self, nll, correct, count):
        return correct / max(count, 1)

register_task(EchoTask, Echo)

if __name__ == "__main__":
    from dataclasses import replace
    from pathlib import Path
    from expire_span.recipes import recall
    from expire_span.runs import RunFolder
    from expire_span.train.supervised import train
    base = recall()
    settings = replace(base.train, steps=5, block=12, eval_every=5)
    run = train(replace(base, task=EchoTask(symbols=7), train=settings), Path("runs/echo"), shown=False)
    print(RunFolder.open(run.path).config.task, sorted(run.read_result())[:3])
'''
BACKBONE = """
import torch
from expire_span import Backbone, BackboneConfig, ExpireSpanConfig
from expire_span.models.systems.recurrent import GRUConfig
config = BackboneConfig(dim=16, heads=2, layers=4, ff_dim=16, mixer=ExpireSpanConfig(max_span=20, ramp=4),
                        partner=GRUConfig(), pattern="pppm")
backbone, readout = Backbone(config), torch.nn.Linear(16, 1)
x = torch.randn(3, 40, 16)
h, state, aux = backbone(x, keep="nothing")
(readout(h).square().mean() + 1e-3 * aux.loss).backward()
backbone.eval()
with torch.no_grad():
    whole, parts, state = backbone(x)[0], [], None
    for n in range(40):
        y, state, aux = backbone(x[:, n : n + 1], state)
        parts.append(y)
difference, live = float((torch.cat(parts, 1) - whole).abs().max()), aux.live.tolist()
"""


def run(tmp_path: Path, *command: str, plugins: str = "") -> str:
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "EXPIRE_SPAN_PLUGINS": plugins, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_a_memory_system_from_outside_is_listed_trained_and_compared(tmp_path):
    """The short twin is test_examples.py::test_own_memory_system, which registers and trains one."""
    shutil.copy(ROOT / "examples" / "04_own_memory_system.py", tmp_path / "fading.py")
    listed = json.loads(run(tmp_path, "-m", "expire_span", "memories", "--json", plugins="fading"))
    assert listed[-1]["kind"] == "fading_mean" and "half" not in listed[-1]["state"]
    small = ["--task.min-length", "2", "--task.max-length", "6", "--train.block", "8", "--train.steps", "3"]
    small += ["--train.test-batches", "1", "--train.eval-batches", "1"]
    command = ["-m", "expire_span", "compare", "recall", "--mixers", "fading_mean,gru", "--name", "both", *small]
    shown = run(tmp_path, *command, plugins="fading")
    assert "fading_mean" in shown and "gru" in shown
    options = ["--mixer", "fading_mean", "--model.mixer.half-life", "3", *small]
    run(tmp_path, "-m", "expire_span", "train", "recall", *options, plugins="fading")
    assert '"half_life": 3.0' in (tmp_path / "runs" / "recall" / "config.json").read_text()


def test_a_plugin_that_cannot_be_imported_is_named(tmp_path, monkeypatch, capsys):
    from expire_span.cli import main

    monkeypatch.setenv("EXPIRE_SPAN_PLUGINS", "no_such_plugin")
    assert main(["memories"]) == 2
    said = capsys.readouterr().err
    assert "names the module 'no_such_plugin', which cannot be imported" in said and "must be in PYTHONPATH" in said


@pytest.mark.long
def test_the_command_of_the_example_finds_it():
    """With the installed script, which does not look for modules in the current folder; the test above is the short twin."""
    text = (ROOT / "examples" / "04_own_memory_system.py").read_text()
    given = dict(part.split("=") for part in re.findall(r"^(PYTHONPATH=.*) expire-span compare", text, re.M)[0].split())
    script = (
        "import sys; from expire_span.__main__ import main; sys.argv[1:] = ['memories', '--json']; sys.exit(main())"
    )
    environment = {**os.environ, **given, "PYTHONPATH": os.pathsep.join([given["PYTHONPATH"], str(ROOT)])}
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "examples", env=environment, timeout=120)
    assert done.returncode == 0 and json.loads(done.stdout)[-1]["kind"] == "fading_mean", done.stderr


@pytest.mark.slow
def test_a_task_from_outside_is_trained_and_its_run_is_read_again(tmp_path):
    (tmp_path / "echo.py").write_text(TASK)
    assert "EchoTask(kind='echo', symbols=7)" in run(tmp_path, "echo.py")


def test_two_systems_of_one_kind_are_refused():
    from dataclasses import replace

    from expire_span.models.systems import SYSTEMS, register

    with pytest.raises(ValueError, match="kind 'gru' is registered already; choose another kind"):
        register(replace(SYSTEMS["gru"], layer="elsewhere:GRU"))


def test_a_backbone_in_a_model_of_ones_own_with_layers_that_differ():
    names: dict[str, Any] = {}
    exec(BACKBONE, names)
    assert names["difference"] < 1e-5
    assert names["live"][:3] == [1.0, 1.0, 1.0] and names["live"][3] < 10
