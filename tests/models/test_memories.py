"""The list of memory systems: command, docs and registry agree, and each can be trained, resumed, scored and reported."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from expire_span import cli
from expire_span.checkpoint import load_model
from expire_span.generate import Sampling, generate_text
from expire_span.memories import as_markdown, find_limits, receptive_field_of, state_bytes
from expire_span.models.decoder import Decoder
from expire_span.models.systems import SYSTEMS, mixer_config
from expire_span.recipes import recall
from expire_span.runs import RunFolder
from expire_span.settings.run import DecoderConfig, RunConfig, from_dict, to_dict
from expire_span.tasks.text import BYTES
from expire_span.train.supervised import SupervisedLearner, resume, train
from expire_span.view.report import write_report
from tests.models.test_mixers import SMALL
from tests.tiny import tiny_config, write_text

DOCS = Path(__file__).parent.parent.parent / "docs" / "memories.md"
KINDS = sorted(SYSTEMS)


def test_docs_and_registry_agree():
    assert as_markdown() in DOCS.read_text(), "rewrite the table of docs/memories.md with memories.as_markdown()"


def test_the_command_lists_every_system(capsys):
    assert cli.main(["memories"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {kind} " in shown and memory.state in shown for kind, memory in SYSTEMS.items())
    assert cli.main(["memories", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in told] == list(SYSTEMS)
    assert all(row["rule"] and row["state"] for row in told)


def test_an_unknown_mixer_is_refused_with_the_known_ones(capsys):
    assert cli.main(["train", "recall", "--mixer", "nothing"]) == 2
    assert "unknown mixer 'nothing', known are: expire_span, full" in capsys.readouterr().err


def test_the_command_takes_a_mixer_and_its_fields(tmp_path, capsys):
    options = ["--mixer", "gru", "--model.mixer.hidden", "7", "--train.steps", "1", "--train.batch", "2"]
    options += [
        "--task.max-length",
        "12",
        "--task.min-length",
        "5",
        "--runs-dir",
        str(tmp_path),
        "--train.device",
        "cpu",
    ]
    assert cli.main(["train", "recall", *options]) == 0, capsys.readouterr().err
    saved = json.loads((tmp_path / "recall" / "config.json").read_text())
    assert '"hidden": 7' in json.dumps(saved) and '"kind": "gru"' in json.dumps(saved)


@pytest.mark.parametrize("kind", KINDS)
def test_configs_survive_json(kind):
    config = DecoderConfig(mixer=mixer_config(kind))
    assert from_dict(DecoderConfig, json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    "kind, fields, message",
    [
        ("transformer_xl", {"span": 0}, "span must be at least 1, got 0"),
        ("reformer", {"buckets": 3}, "buckets must be 1 or even, got 3"),
        ("compressive", {"reconstruction": True}, "got pooling mean; use conv"),
        ("forgetting", {"initial_gate": 1.0}, "initial_gate must lie between 0 and 1, got 1.0"),
        ("gru", {"hidden": 0}, "hidden must be at least 1, got 0"),
        ("adaptive_span", {"initial_span": 2}, r"initial_span must lie in \[0, 1\], got 2"),
        ("longformer", {"growth": 0.5}, "growth must be at least 1, got 0.5"),
    ],
)
def test_bad_settings_are_refused(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        mixer_config(kind, **fields)


@pytest.mark.parametrize(
    "kind, fields, message",
    [
        ("longformer", {"dilated_heads": 5}, "at most the 4 key/value heads, got 5"),
        ("routing", {"local_heads": 4}, "fewer than the 4 heads, got 4"),
    ],
)
def test_settings_that_do_not_fit_the_decoder_are_refused(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        Decoder(DecoderConfig(dim=32, mixer=mixer_config(kind, **fields)))


def run_config(tmp_path: Path, kind: str, **train_fields) -> RunConfig:
    config = tiny_config(write_text(tmp_path), **train_fields)
    mixer = mixer_config(kind, **SMALL.get(kind, {"max_span": 30, "ramp": 4}))
    return replace(config, model=replace(config.model, mixer=mixer))


@pytest.mark.parametrize("kind", KINDS)
def test_each_system_trains_resumes_generates_and_reports(kind, tmp_path):
    config = run_config(tmp_path, kind, steps=4, checkpoint_every=2, eval_every=4, log_every=1)
    run = train(config, tmp_path / "run", shown=False)
    result = run.read_result()
    assert len(result["live"]) == len(result["span"]) == config.model.layers
    assert all(live > 0 for live in result["live"]) and result["peak_bytes"] > 0
    decoder, _ = load_model(run)
    assert len(list(generate_text(decoder, BYTES, b"one two", Sampling(seed=1), max_tokens=5, samples=2))) == 5
    assert write_report(run).stat().st_size > 1000


@pytest.mark.parametrize("kind", ["compressive", "routing", "forgetting", "lstm", "bigbird"])
def test_a_resumed_run_goes_on_bit_for_bit(kind, tmp_path, monkeypatch):
    """Weights, buffers and every kind of state survive a checkpoint: the finished run equals an unbroken one."""
    config = run_config(tmp_path, kind, steps=6, log_every=1, checkpoint_every=3, eval_every=5)
    unbroken = train(config, tmp_path / "unbroken", shown=False)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SupervisedLearner, "evaluate", _stop)
        train(config, tmp_path / "broken", shown=False)
    broken = resume(RunFolder.open(tmp_path / "broken"), shown=False)
    assert (broken.path / "result.json").read_bytes() == (unbroken.path / "result.json").read_bytes()
    assert (broken.path / "metrics.jsonl").read_bytes() == (unbroken.path / "metrics.jsonl").read_bytes()


def _stop(*_):
    raise KeyboardInterrupt


COMPILED = ("expire_span", "sliding_window")
"""A system whose memories expire and one whose window is fixed; the others are compiled among the long tests."""


@pytest.mark.parametrize(
    "kind", [kind if kind in COMPILED else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS]
)
def test_blocks_compile(kind):
    """Sequences that stand alone run compiled blocks; here without code generation, which would take minutes."""
    torch.manual_seed(0)
    config = DecoderConfig(vocab=30, dim=16, layers=1, heads=2, ff_dim=16)
    fields = {**SMALL.get(kind, {"max_span": 30, "ramp": 4})}
    model = Decoder(replace(config, mixer=mixer_config(kind, **fields))).train()
    x = torch.randint(0, 30, (2, 24))
    want = model(x, keep="nothing")[0]
    for block in model.layers():
        block.compiled = torch.compile(block.forward, backend="aot_eager")
    got = model(x, keep="nothing")[0]
    torch.testing.assert_close(got, want)
    got.sum().backward()


def test_state_bytes_of_the_paper_sized_model():
    model = DecoderConfig.modern(dim=512, layers=12, heads=8, mixer=mixer_config("full"))
    assert state_bytes(model, 1000) == 12 * 1000 * (2 * 8 * 64 * 4 + 12)


# What a system cannot do, said before it is trained

LIMITED = {
    "expire_span": {"max_span": 6, "ramp": 2, "initial_span": 0.999},
    "transformer_xl": {"span": 5},
    "adaptive_span": {"max_span": 6, "ramp": 2, "initial_span": 1.0},
    "compressive": {"window": 3, "compressed": 2, "rate": 2},
    "sliding_window": {"window": 5},
    "longformer": {"window": 3, "growth": 2.0, "dilation": 2, "dilated_heads": 1, "global_tokens": 0},
    "streaming_sinks": {"window": 4, "sinks": 0},
}


@pytest.mark.parametrize("kind", sorted(LIMITED))
def test_nothing_beyond_the_reach_matters_and_something_at_it_does(kind):
    mixer = replace(mixer_config(kind), **LIMITED[kind])
    layers = 1 if kind == "compressive" else 2  # groups begin alike in all its layers, so that the sum is seldom met
    model = DecoderConfig.modern(vocab=8, dim=16, layers=layers, heads=2, ff_dim=16, positions="none", mixer=mixer)
    field = receptive_field_of(model)
    assert field is not None
    torch.manual_seed(0)
    decoder = Decoder(model).double().eval()
    tokens = torch.randint(0, 8, (1, 3 * field))
    changes = []
    for place in range(field):
        other = tokens.clone()
        other[0, place] = (other[0, place] + 1) % 8
        moved = (decoder(other)[0] - decoder(tokens)[0]).abs().amax(-1)[0]
        changes.append(int(moved.nonzero().max()) - place)
    assert max(changes) == field


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(LIMITED)))
def test_systems_without_a_limit_say_none(kind):
    model = DecoderConfig.modern(dim=16, layers=2, heads=2, ff_dim=16, mixer=mixer_config(kind))
    assert receptive_field_of(model) is None


def test_a_memory_too_short_for_the_task_is_said_before_training():
    short = replace(recall().model, mixer=replace(mixer_config("transformer_xl"), span=10))
    assert find_limits(replace(recall(), model=short)) == [
        "transformer_xl sees 9 steps back at most, and recall asks for up to 401: beyond that it can only guess"
    ]
    assert find_limits(recall()) == []
    enough = replace(recall().model, mixer=replace(mixer_config("transformer_xl"), span=402))
    assert find_limits(replace(recall(), model=enough)) == []


def test_a_system_that_looks_ahead_in_training_says_so():
    ahead = replace(recall().model, mixer=replace(mixer_config("routing"), selection="top"))
    (said,) = find_limits(replace(recall(), model=ahead))
    assert said.startswith("routing sees more in training than in use")


def test_limits_are_said_by_the_command(tmp_path, capsys):
    (tmp_path / "recall").mkdir()
    options = ["--mixer", "transformer_xl", "--model.mixer.span", "10", "--runs-dir", str(tmp_path)]
    assert cli.main(["train", "recall", *options]) == 2  # the folder is there: nothing is trained, nothing is said
    assert "can only guess" not in capsys.readouterr().err
    assert cli.main(["train", "recall", *options, "--name", "new", "--train.device", "cuda:99"]) == 2
    assert "transformer_xl sees 9 steps back at most" in capsys.readouterr().err
