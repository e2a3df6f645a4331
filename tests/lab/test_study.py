"""The recurrent-memory study: each claim of its page, and the studies from end to end."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expire_span.cli import main
from expire_span.lab.study import counter, entrances, gating, leaky, sensitivity, tanh_stack, word_rnn
from expire_span.lab.study.exercise import TASK, Size, first_below, measure, train_size
from expire_span.lab.study.expire import Model, config_of, kinds_of
from expire_span.lab.study.folder import StudyFolder
from expire_span.lab.study.networks import Networks
from expire_span.lab.study.sections.handmade import copy_weights, two_grus
from expire_span.lab.study.training import finish_run
from expire_span.models.systems.recurrent.gated import GatedCell
from expire_span.runs import RunFolder, UserError
from expire_span.settings.run import DecoderConfig
from expire_span.tasks.entrances import Series, count_entrances
from expire_span.view.report import write_report
from tests.error_budget import DOUBLE

SERIES = st.lists(st.floats(-3, 3) | st.sampled_from([0.0, 1.0, 0.5]), min_size=1, max_size=60)


def double(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# 1. The hard-coded counter


@given(SERIES)
def test_the_counter_counts_maximal_runs(values):
    rows = counter.run_counter(np.array(values))
    runs = sum(inside for inside, _ in itertools.groupby(values, lambda x: 0 <= x <= 1))
    assert rows[1, -1] == runs
    assert np.array_equal(rows[1], count_entrances(np.array(values)))


@given(SERIES)
def test_the_count_changes_exactly_where_inside_goes_from_0_to_1(values):
    inside, count = counter.run_counter(np.array(values))
    edges = np.diff(inside, prepend=0) == 1
    assert np.array_equal(np.diff(count, prepend=0), edges.astype(int))


# 2. The tanh cell


@given(angle=st.floats(0, 6.3), scale=st.floats(0.1, 5), bias=st.floats(-2, 2))
def test_the_cell_is_bounded_and_monotone_along_its_mixture(angle, scale, bias):
    grid = np.linspace(-1, 1, 9)
    plane = tanh_stack.family(angle, scale, bias, grid)
    assert (np.abs(plane) < 1).all()
    x, h = np.meshgrid(grid, grid)
    order = np.argsort((x * np.cos(angle) + h * np.sin(angle)).ravel(), kind="stable")
    assert (np.diff(plane.ravel()[order]) >= -1e-12).all()


# 3. The hand-made stack


def test_the_stack_tells_inside_from_outside():
    inside = tanh_stack.detect(np.linspace(0.2, 0.8, 50))
    outside = tanh_stack.detect(np.concatenate([np.linspace(-4, -0.2, 50), np.linspace(1.2, 4, 50)]))
    assert np.abs(inside - 0.964).max() < 1e-3 and np.abs(outside).max() < 2e-3


def test_the_other_sign_of_the_bias_answers_to_the_wrong_interval():
    assert np.abs(tanh_stack.detect(np.linspace(0.2, 4, 50), sign=-1)).max() < 2e-3
    assert np.abs(tanh_stack.detect(np.linspace(-0.8, -0.2, 50), sign=-1) + 0.964).max() < 1e-3


# 4. The leaky counter


def test_retention_is_bought_with_increment():
    increment, retention = leaky.sweep().T
    assert (np.diff(increment) < 0).all() and (np.diff(retention) > 0).all()
    assert increment[0] > 0.6 and retention[0] < 1e-6
    assert increment[-1] < 0.05 and retention[-1] > 0.7


def test_the_leaky_counter_adds_on_every_step_inside():
    trace = leaky.run_leaky(np.full(5, tanh_stack.INSIDE), *leaky.weights_of(32))
    assert (np.diff(trace) > 0.8 * trace[0]).all()


# 5. Sensitivity


def test_sensitivity_falls_geometrically_for_tanh_and_not_at_all_behind_a_shut_gate():
    fall = sensitivity.sensitivity(sensitivity.tanh_step(), 60)
    steps, logs = np.arange(60), np.log(fall)
    slope = np.polyfit(steps, logs, 1)[0]
    assert slope < np.log(0.9) and np.corrcoef(steps, logs)[0, 1] < -0.99
    shut = sensitivity.sensitivity(sensitivity.gated_step(0.0), 60)
    assert (shut == shut[0]).all() and shut[0] > 0.5
    ajar = sensitivity.sensitivity(sensitivity.gated_step(0.01), 60)
    assert np.allclose(ajar[1:] / ajar[:-1], 0.99, atol=1e-9)


@pytest.mark.parametrize("step", [sensitivity.tanh_step(), sensitivity.gated_step(0.3)], ids=["tanh", "gated"])
def test_sensitivity_is_the_derivative(step):
    x = 0.5 * torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moved = x.clone()
    moved[0] += 1e-6
    state, states = torch.zeros(2, sensitivity.UNITS, dtype=torch.float64), []
    for t, values in enumerate(torch.stack([x, moved], 1)):
        state = step(values, state, t == 0).detach()
        states.append(state)
    slope = torch.stack(states).diff(dim=1).squeeze(1).norm(dim=-1) / 1e-6
    assert np.allclose(sensitivity.sensitivity(step, 12), slope, rtol=1e-5)  # off by the step, 1e-6


# 6. Gates


def test_a_shut_gate_holds_bit_for_bit_and_an_open_one_overwrites():
    values = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    writes = torch.zeros_like(values)
    writes[[0, 20]] = 1
    held = gating.run_gated_unit(values, writes)
    assert (held[:20] == held[0]).all() and (held[20:] == held[20]).all() and held[0] != held[20]
    assert torch.equal(held[[0, 20]], torch.tanh(0.5 * values[[0, 20]]))
    leaking = gating.run_gated_unit(values, writes, 0.05)
    assert (leaking[1:20] != leaking[0]).all()


def test_five_gated_units_made_by_hand_count_exactly():
    found = measure(lambda values: gating.read_count(gating.run_counter(values)))
    assert all(part["all"] == [0.0] for part in found["lengths"].values())
    assert sum(gating.UNITS) == 5 and found["lengths"]["80"]["mean_count"] > 10
    values = Series(TASK, "test", 1).whole(np.arange(2), 2000)
    assert np.array_equal(gating.read_count(gating.run_counter(values)), count_entrances(values))


# 7. The two gated units


def gru_step(x, h, w, u, b, *, posts: bool):
    """One step written out for weights of (z, r, c), in float64: the post's equations or torch's."""
    z, r = (torch.sigmoid(x @ w[n].T + h @ u[n].T + b[n]) for n in (0, 1))
    if posts:
        return (1 - z) * h + z * torch.tanh(x @ w[2].T + (r * h) @ u[2].T + b[2])
    return z * h + (1 - z) * torch.tanh(x @ w[2].T + r * (h @ u[2].T) + b[2])


@pytest.mark.parametrize("posts", [True, False])
def test_each_gru_is_its_own_equations_and_not_the_other(posts):
    torch.manual_seed(0)
    ours, theirs = GatedCell(3, 4).double(), torch.nn.GRU(3, 4, batch_first=True).double()
    copy_weights(ours, theirs, keep=1)
    w, b = ours.input.weight.split(4), ours.input.bias.split(4)
    u = (*ours.gates.weight.split(4), ours.candidate.weight)
    x, h = torch.randn(2, 9, 3, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64)
    got = ours(x, h)[0] if posts else theirs(x)[0]
    other = theirs(x)[0] if posts else ours(x, h)[0]
    for t in range(9):
        h = gru_step(x[:, t], h, w, u, b, posts=posts)
        assert torch.allclose(got[:, t], h, atol=DOUBLE)
    assert (got - other).abs().max() > 1e-2


def test_turning_z_round_leaves_only_the_place_of_r():
    ours, theirs, turned = two_grus().values()
    assert np.abs(ours - theirs).max() > np.abs(ours - turned).max() > 1e-4


# 8. The exercise


def test_networks_are_stacks_of_the_posts_unit():
    networks = Networks(2, 3, [0, 1]).double()
    values = torch.randn(2, 4, 7, dtype=torch.float64)
    got = networks(values)
    for n in range(2):
        h = values[n, :, :, None]
        for layer in networks.layers:
            cell = GatedCell(h.shape[-1], 3).double()
            cell.input.weight.data = torch.cat([layer.gates[n], layer.candidate[n]], 1).T
            cell.input.bias.data = torch.cat([layer.gate_bias[n], layer.candidate_bias[n]], 1)[0]
            cell.gates.weight.data, cell.candidate.weight.data = layer.gates_back[n].T, layer.candidate_back[n].T
            h, _ = cell(h, h.new_zeros(4, 3))
        assert torch.allclose(got[n], (h @ networks.out[n] + networks.out_bias[n])[..., 0], atol=DOUBLE)


def test_a_network_does_not_hang_on_those_beside_it():
    both, alone = (train_size(Size(1, 4, seeds=n, steps=6, batch=8)) for n in (2, 1))
    assert np.allclose(both["curve"][-1][1][0], alone["curve"][-1][1][0])
    # A share of wrong counts, in which rounding may turn a few; the network beside it differs by 0.02.
    assert both["lengths"]["20"]["all"][0] == pytest.approx(alone["lengths"]["20"]["all"][0], abs=0.01)
    assert both["lengths"]["20"]["all"][0] != both["lengths"]["20"]["all"][1]


def test_each_network_is_clipped_by_itself():
    networks = Networks(1, 3, [0, 1])
    for weight in networks.parameters():
        weight.grad = torch.full_like(weight, 0.01)
        weight.grad[1] = 100.0
    networks.clip(1.0)
    grads = [weight.grad for weight in networks.parameters()]
    norms = torch.stack([grad.flatten(1).square().sum(1) for grad in grads]).sum(0).sqrt()
    assert all((grad[0] == 0.01).all() for grad in grads) and norms[1] == pytest.approx(1.0)


def test_training_lowers_the_error():
    found = train_size(Size(2, 8, seeds=1, steps=150, batch=16))
    (_, first), *_, (_, last) = found["curve"]
    assert last[0] < first[0] - 0.08
    assert found["solved"] in (0.0, 1.0) and found["weights"] == sum(
        p[0].numel() for p in Networks(2, 8, [0]).parameters()
    )


def test_measures_tell_last_all_and_seen_counts_apart():
    right = measure(count_entrances, (20, 40))
    assert all(part[key] == [0.0] for part in right["lengths"].values() for key in ("last", "all", "seen_counts"))
    capped = measure(lambda values: np.minimum(count_entrances(values), right["largest_seen"]), (20, 40))["lengths"]
    assert capped["40"]["seen_counts"] == [0.0] and capped["40"]["last"][0] > 0.1
    assert (
        first_below([(25, [0.5, 0.0]), (50, [0.05, 0.1])], 0, 0.05) == 50 and first_below([(25, [0.5])], 0, 0.1) is None
    )


@given(SERIES)
def test_kinds_of_steps_cover_a_series_and_runs_begin_and_end(values):
    kinds = kinds_of(np.array([values]))
    assert (sum(mask.astype(int) for mask in kinds.values()) == 1).all()
    left = kinds["entrance"].sum() - kinds["exit"].sum()
    assert kinds["entrance"].sum() == count_entrances(np.array(values))[-1] and left == int(0 <= values[-1] <= 1)


# 9. Stretches of the word model


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=50), st.floats(0.01, 0.5))
def test_stretches_cover_all_and_stay_within_eps(values, eps):
    series = np.array(values)
    lengths = word_rnn.find_stretches(series, eps)
    assert lengths.sum() == len(series) and (lengths >= 1).all()
    ends = np.cumsum(lengths)
    limit = eps * (series.max() - series.min())
    for start, end in zip(ends - lengths, ends):
        assert np.ptp(series[start:end]) <= limit + 1e-12
        assert end == len(series) or np.ptp(series[start : end + 1]) > limit


def test_a_slow_drift_is_no_stretch():
    assert word_rnn.find_stretches(np.linspace(0, 1, 101), 0.1).max() <= 11
    assert word_rnn.find_stretches(np.zeros(7)).tolist() == [7]
    assert word_rnn.find_stretches(np.array([0, 0, 0, 1, 1, 0.0])).tolist() == [3, 2, 1]


# The studies from end to end

TINY = entrances.EntrancesSettings((1,), (2, 3), 1, 3, (("expire_span", 1),), 2)


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> tuple[Path, dict]:
    return entrances.run_study(TINY, tmp_path_factory.mktemp("study") / "out", 0)


@pytest.fixture(scope="module")
def word_study(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("words")
    (folder / "text.txt").write_text("<b>one</b> fish, two $fish$; red fish. Blue fish!\n\n" * 200)
    return word_rnn.run_study(word_rnn.WordSettings(str(folder / "text.txt"), 2, 1), folder / "out", 0)


@pytest.mark.parametrize("which", ["study", "word_study"])
def test_pages_stand_alone_and_name_their_numbers(which, request):
    path, result = request.getfixturevalue(which)
    page = (path / "report.html").read_text()
    assert "http" not in page and not re.search(r"<(script|link|iframe)\b", page)
    assert not re.search(r"(src|href)=\"(?!#|data:)", page) and "prefers-color-scheme: dark" in page
    assert "words on average" in page or which == "study", "the headline"
    assert page.count("<svg") == (11 if which == "study" else 3)
    collect = entrances.collect_facts if which == "study" else word_rnn.collect_facts
    assert all(f"<b>{value}</b>" in page for _, value in collect(result))
    assert json.loads((path / "study.json").read_bytes())["study"] == result["study"]


def test_word_models_are_measured_against_themselves_untrained(word_study):
    (model,) = word_study[1]["models"]
    assert len(model["trained"]) == len(model["untrained"]) == 2 and "fish" in model["words"]
    assert model["trained"][0]["states"] != model["untrained"][0]["states"]
    assert model["unigram_perplexity"] > 1 and model["trained"][0]["mean"] >= 1


def test_the_decoders_run_can_be_reported(study):
    page = write_report(RunFolder.open(study[0] / "runs" / "decoder-expire_span-0")).read_text()
    assert "step of the episode" in page and "Lifelines in layer" in page and "byte of the sample" not in page


def test_finished_cells_are_not_run_again(study, monkeypatch):
    path, result = study
    monkeypatch.setattr(entrances, "run_job", None)
    monkeypatch.setattr(entrances, "write_page", lambda *args, **page: None)
    assert entrances.run_study(TINY, path, 0)[1]["exercise"] == result["exercise"]


def test_a_folder_with_something_else_is_refused(study, tmp_path):
    path, _ = study
    with pytest.raises(UserError, match="holds study entrances, not word-rnn; give another --out"):
        StudyFolder.open(path, "word-rnn", {})
    with pytest.raises(UserError, match=r"with settings .* not .*; give another --out"):
        entrances.run_study(entrances.EntrancesSettings.quick(), path, 0)
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="holds something that is no study"):
        StudyFolder.open(tmp_path, "entrances", {})
    with pytest.raises(UserError, match="is a file; give a folder"):
        StudyFolder.open(tmp_path / "letter.txt", "entrances", {})
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]
    for damage in ("[]", "[" * 100_000):
        (tmp_path / "settings.json").write_text(damage)
        with pytest.raises(UserError, match=r"settings.json (is not valid|must hold a) JSON.*; give another --out"):
            StudyFolder.open(tmp_path, "entrances", {})
    folder = StudyFolder.open(tmp_path / "new", "entrances", {})
    (folder.path / "cells" / "x.json").write_text("{")
    with pytest.raises(UserError, match=r"x\.json is not valid JSON"):
        folder.read_cell("x")


@pytest.mark.parametrize("count, words", [(10, "holds 10 words, but words needs 1000"), (1200, "words for train")])
def test_a_short_text_is_refused(tmp_path, monkeypatch, capsys, count, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("word " * count)
    assert main(["study", "word-rnn", "--path", "short.txt"]) == 2
    assert words in capsys.readouterr().err and [p.name for p in tmp_path.iterdir()] == ["short.txt"]


def test_the_work_of_a_run_is_told_once(tmp_path):
    told = []
    config = replace(config_of(Model("gru", 12)), model=DecoderConfig(dim=8, layers=1, heads=2, ff_dim=8))
    config = replace(config, train=replace(config.train, batch=2, eval_batches=1, log_every=4))
    for _ in range(2):  # the second finds it finished
        told.append([])
        run = finish_run(config, tmp_path / "run", "entrances", 6.0, told[-1].append)
        assert run.finished and sum(told[-1]) == pytest.approx(6.0)
