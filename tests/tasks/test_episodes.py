"""Traces of grid worlds: an agent's episode and a supervised twin's, with the pictures that belong to them."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from expire_span.cli import main
from expire_span.models.systems.recurrent import GRUConfig
from expire_span.runs import RunFolder, UserError
from expire_span.settings.run import DecoderConfig, ExpireSpanConfig, RunConfig, TrainConfig
from expire_span.settings.tasks import CorridorTask, InstructionTask, PortalTask
from expire_span.tasks.gridworlds import build_engine
from expire_span.tasks.gridworlds.engine import RIGHT
from expire_span.tasks.gridworlds.render import render_rgb
from expire_span.tasks.registry import build_task
from expire_span.train.actor_critic import train as train_agent
from expire_span.train.supervised import train
from expire_span.view.episodes import Describer, replay_twin
from expire_span.view.limit import Cut
from expire_span.view.report import write_report
from expire_span.view.sample import sample_of
from expire_span.view.source import open_reader
from expire_span.view.trace import Trace
from tests.tiny_agents import MIXER, tiny_agent, with_mixer

CORRIDOR = {"env": "ExpireSpan/Corridor-Easy-v0", "task": {"options": '{"max_length": 6}'}}


def agent_run(folder, config) -> RunFolder:
    return train_agent(config, folder, shown=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    return agent_run(tmp_path_factory.mktemp("agents") / "corridor", tiny_agent(**CORRIDOR, steps=1, test_episodes=4))


def decode(picture: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB"))


def deaths_by_definition(trace: Trace) -> list[list[list[int]]]:
    out = [[] for _ in trace.steps]
    for layer, heads in enumerate(trace.spans):
        for head, spans in enumerate(heads):
            for birth, span in enumerate(spans):
                end = birth + max(int(np.ceil(span + trace.header["ramp"])), 0)
                if end < len(trace):
                    out[end].append([layer, head, birth])
    return [sorted(step) for step in out]


def test_an_agents_episode(run):
    reader = open_reader(run)
    trace = Trace.of(reader.trace_sample())
    assert trace.header["task"] == "env" and trace.header["max_span"] == MIXER.max_span and trace.header["layers"] == 2
    assert [sorted(step["deaths"]) for step in trace.steps] == deaths_by_definition(trace)
    assert trace.steps[0]["text"].startswith("cue") and trace.steps[0]["action"].startswith("go ")
    assert isinstance(trace.steps[-1]["success"], bool) and all("success" not in step for step in trace.steps[:-1])
    assert sum(chance for _, chance in trace.steps[0]["top"]) == pytest.approx(1, abs=1e-3), "four moves"
    assert decode(trace.steps[0]["image"]).shape == (80, 80, 3)
    held = torch.get_rng_state()
    assert Trace.of(reader.trace_sample()) == trace, "the same episode, the same draws"
    assert torch.equal(torch.get_rng_state(), held), "nobody else's draws change"
    others = [Trace.of(reader.trace_sample(number=n)) for n in (1, 2)]
    assert any(other.steps != trace.steps for other in others)
    assert [other.header["episode"] for other in others] == [1, 2]
    assert Trace.of(reader.trace_sample(number=trace.header["episode"])).steps == trace.steps


def test_a_cue_that_is_passed_is_still_in_sight():
    """A step that sees the cue behind it may be the one that is remembered, so its words must name the cue."""
    engine = build_engine(CorridorTask(max_length=9), 1)
    engine.reset(0)
    describer, words = Describer(engine), []
    for _ in range(4):
        words.append(describer.words())
        engine.step(np.array([RIGHT]))
    assert words[0].startswith("cue ") and words[1:3] == [
        f"{words[0]} in sight{x[len(words[0]) + 9 :]}" for x in words[1:3]
    ]
    assert "cue" not in words[3], "two cells are seen to either side"


def test_an_agents_lives_can_be_cut(run):
    reader = open_reader(run)
    trace = Trace.of(reader.trace_sample(cut=Cut(max_span=1.0)))
    assert trace.spans.max() <= 1 and trace.header["max_span"] == 1
    assert Trace.of(reader.trace_sample()).spans.max() > 1
    with pytest.raises(UserError, match="an agent reads no text"):
        reader.trace_text(b"hello")


def test_an_agent_of_any_environment_and_a_recurrent_one(tmp_path):
    run = agent_run(tmp_path / "echo", tiny_agent(steps=1))
    trace = Trace.of(open_reader(run).trace_sample())
    assert trace.steps[0]["text"] == "step 0" and "image" not in trace.steps[0]
    assert trace.steps[0]["action"].startswith("action ")
    gru = agent_run(tmp_path / "gru", with_mixer(tiny_agent(**CORRIDOR, steps=1), GRUConfig()))
    trace = Trace.of(open_reader(gru).trace_sample())
    assert not trace.has_spans and len(trace.steps[0]["hidden"]) == 2, "the state of both layers"


def test_the_commands(run, tmp_path, capsys):
    assert main(["trace", str(run.path), "--episode", "1", "--tokens", "3"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["about"].startswith("An agent plays") and len(lines) == 4
    assert main(["trace", str(run.path), "--episode", "-1"]) == 2
    page = write_report(run).read_text()
    assert 'id="es-trace"' in page and "Lifelines in layer" in page


@pytest.mark.parametrize(
    "task",
    [CorridorTask(max_length=9), PortalTask(rooms=2, max_steps=60), InstructionTask(instructions=1, talk=8, size=2)],
    ids=lambda task: task.kind,
)
def test_a_twins_pictures_belong_to_its_tokens(task, tmp_path):
    twin = build_task(task)
    tokens, _ = sample_of(twin, seed=0)
    shown = replay_twin(twin, tokens, 0)
    assert shown is not None and len(shown) == len(tokens)
    engine = build_engine(task, 1)
    engine.reset(0)  # another episode begins with the same kind of picture
    assert decode(shown[0]["image"]).shape == render_rgb(engine).shape
    assert replay_twin(twin, tokens[:-1], 0) is None, "half an episode is none"
    assert len({step["image"] for step in shown}) > 1 and len({step["action"] for step in shown}) > 1


def test_a_twins_run_is_traced_with_its_pictures(tmp_path):
    model = DecoderConfig.modern(
        dim=16, layers=1, heads=2, ff_dim=16, mixer=ExpireSpanConfig(max_span=20, ramp=2, initial_span=0.5)
    )
    settings = TrainConfig(steps=1, batch=4, block=18, carry=False, device="cpu", eval_batches=1, test_batches=1)
    run = train(RunConfig(CorridorTask(max_length=9), model, settings), tmp_path / "twin", shown=False)
    trace = Trace.of(open_reader(run).trace_sample())
    assert all(decode(step["image"]).shape == (80, 80, 3) for step in trace.steps)
    assert [step for step in trace.steps if "answer" in step], "the doors are asked about"


def test_every_picture_of_the_page_in_the_docs_has_a_command_that_draws_it(run, tmp_path):
    """Drawn here: the agent's. The other two are drawn in test_page_browser.py."""
    pytest.importorskip("playwright")
    from benchmarks import view_pictures

    shown = {path.name for path in (Path(__file__).parent.parent.parent / "docs" / "img").glob("view*")}
    assert shown == set(re.findall(r"view\w*\.(?:png|gif)", view_pictures.__doc__ or ""))
    with Image.open(view_pictures.draw_agents_picture(run, tmp_path, episode=2)) as picture:
        assert picture.width == view_pictures.WIDE and len(picture.convert("RGB").getcolors(10_000) or []) > 20
