"""Figures of the memory systems: who reads whom, and what a longer stream costs, measured on the layers themselves."""

import json

import numpy as np
import pytest

from expire_span.cli import main
from expire_span.lab.figures.systems import FAINTEST, draw_system_growth, measure_growth, measure_pattern
from expire_span.models.systems import SYSTEMS


@pytest.mark.parametrize("kind", SYSTEMS)
def test_patterns_are_causal_and_every_step_reads(kind):
    pattern = measure_pattern(kind, 40)
    assert np.triu(pattern, 1).max() <= 1e-12, "a step reads a later one"
    assert (pattern.max(1) == 1).all() and np.tril(pattern, -1)[1:].max(1).min() > 0


def test_patterns_show_what_each_system_forgets():
    far = {
        kind: measure_pattern(kind, 64)[60, :40] > FAINTEST for kind in ("full", "sliding_window", "streaming_sinks")
    }
    assert far["full"].all() and not far["sliding_window"].any()
    sinks = SYSTEMS["streaming_sinks"].example.get("sinks", 4)
    assert far["streaming_sinks"][:sinks].all() and not far["streaming_sinks"][sinks:].any()
    spans = measure_pattern("expire_span", 64)[:, 5:40] > FAINTEST
    assert len(set(spans.sum(0).tolist())) > 5, "memories of learned expiry live for different times"


@pytest.mark.parametrize("kind", ["full", "sliding_window", "gated_deltanet", "expire_span"])
def test_growth_is_what_the_declaration_says(kind):
    row = measure_growth(kind, [256, 512, 1024])
    growth = row["bytes"][-1] / row["bytes"][0]
    assert growth > 3 if kind == "full" else growth < 1.1
    assert len(row["ms_per_block"]) == 3 and min(row["ms_per_block"]) > 0


def test_no_system_of_the_growth_figure_hides_another():
    """Equal figures are drawn at different heights, each beside its name, the largest first."""
    row = lambda kind, held: {"system": kind, "lengths": [256, 512], "bytes": held, "ms_per_block": [1.0, 1.0]}  # noqa: E731
    figure = draw_system_growth([row("b", [8, 8]), row("a", [8, 8]), row("c", [8, 16])])
    left = figure.axes[0]
    assert [text.get_text() for text in left.get_yticklabels()] == ["c", "b", "a"]
    places = [line.get_ydata()[0] for line in left.lines]
    low, high = sorted(left.get_ylim())
    assert len(set(places)) == 3 and low < min(places) and max(places) < high


def test_the_commands(tmp_path, capsys):
    out = tmp_path / "growth.svg"
    assert main(["figure", "growth", "--mixers", "full,linear", "--longest", "512", "--out", str(out)]) == 0
    told = json.loads(out.with_suffix(".json").read_text())
    assert [row["system"] for row in told] == ["full", "linear"] and told[0]["lengths"] == [256, 512]
    assert main(["figure", "patterns", "--mixers", "full,gru", "--out", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG") and out.read_text().count("<svg") == 1
    bad = {
        ("patterns", "--mixers", "fulll"): "did you mean full",
        ("growth", "--out", "x.gif"): "got x.gif",
        ("growth", "--longest", "0"): "--longest must lie between 1 and 1,048,576 steps, got 0",
        ("patterns", "some-run"): "takes no run, got some-run",
    }
    capsys.readouterr()
    for args, words in bad.items():
        assert main(["figure", *args]) == 2 and words in capsys.readouterr().err
