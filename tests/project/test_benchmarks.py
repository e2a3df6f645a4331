"""The benchmarks run, refuse what is wrong, and judge as they say.

Imports stay inside the tests: they load triton, which the kernels' tests must set up first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.error_budget import DOUBLE


def test_attention_smoke(tmp_path: Path) -> None:
    from benchmarks import attention, plots

    attention.main(["--smoke", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "attention.json").read_text())
    assert {row["system"] for row in found["anchors"]} >= {"ours", "cudnn", "flash"}
    assert {row["system"] for row in found["lengths"]} == {"ours", "cudnn", "reference"}
    assert found["linear"] and found["shares"] and found["ratios"]
    assert set(found["checks"]["ours, " + found["anchors"][0]["workload"]]) >= {"y", "dq", "dk", "dv"}
    assert all(row["both"]["min"] <= row["both"]["median"] <= row["both"]["max"] for row in found["anchors"])
    assert found["environment"]["commit"] is None or found["environment"]["commit"]
    plots.main([str(tmp_path / "attention.json"), "--out", str(tmp_path / "img")])
    assert {p.name for p in (tmp_path / "img").iterdir()} == {"attention_time.png", "attention_share.png"}


def test_a_wrong_system_is_not_timed(tmp_path: Path) -> None:
    from benchmarks.attention import Session, is_correct
    from benchmarks.systems import ours
    from benchmarks.timing import Deadline
    from benchmarks.workloads import Workload

    session, w = Session(Deadline(60), tmp_path, smoke=True), Workload(1, 2, 300, 32, 0.05, 20.0)
    assert is_correct(session, "ours", w, lambda x: ours)
    assert {"y", "dq", "dk", "dv", "dspan"} == set(session.result["checks"][f"ours, {w.name}"])
    assert not is_correct(session, "ours", w, lambda x: lambda x: 1.05 * ours(x))
    assert "wrong, not timed" in session.result["errors"][f"check ours, {w.name}"]
    assert not is_correct(session, "ours", w, lambda x: lambda x: ours(x) * float("nan"))


@pytest.mark.parametrize("length", [500, 512])
def test_flex_computes_expiring_attention_over_the_right_blocks(length: int) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    from benchmarks.systems import Flex, expiry_blocks, reference
    from benchmarks.workloads import Workload

    x = Workload(2, 2, length, 32, 0.01, 5.0).tensors("cpu", torch.float64)
    x["span"] = x["span"].double()
    x["span"][0, :128] = 2.0 * length  # a block all of whose memories live on
    got = expiry_blocks(x["span"])
    want = create_block_mask(got.mask_mod, 2, 1, length, length, device="cpu")
    assert torch.equal(got.to_dense(), want.to_dense())
    assert got.full_kv_num_blocks is not None and want.full_kv_num_blocks is not None
    assert got.full_kv_num_blocks.sum() > 0
    assert torch.equal(got.full_kv_num_blocks, want.full_kv_num_blocks)
    with torch.no_grad():
        torch.testing.assert_close(Flex(compiled=False).prepare(x)(x), reference(x), atol=DOUBLE, rtol=0)


def test_living_pairs_are_counted_exactly() -> None:
    from benchmarks.attention import pairs, rates
    from benchmarks.workloads import RAMP, Workload

    w = Workload(2, 3, 400, 32, 0.1, 30.0)
    span = w.tensors("cpu", torch.float32)["span"]
    age = torch.arange(400)[:, None] - torch.arange(400)
    alive = (age >= 0) & (age < span[:, None] + RAMP)
    assert pairs(w, span) == (int(alive.sum()), 2 * int((age >= 0).sum()))
    row = {"both": {"median": 1.0}}
    speed = rates(row, "ours", w, 1000, 5000)
    assert speed["real_tflops"] == pytest.approx(14 * 32 * 3 * 1000 / 1e9)
    assert speed["dense_equivalent_tflops"] == pytest.approx(5 * speed["real_tflops"])
    assert rates(row, "cudnn", w, 1000, 5000)["real_tflops"] == pytest.approx(speed["dense_equivalent_tflops"])


def test_list_building_is_all_of_the_forward_pass_but_its_attention() -> None:
    from benchmarks.attention import list_building

    forward = {"_forward": 60.0, "_classify": 3.0, "fill": 2.0}
    found = list_building(forward, {**forward, "_memory_gradients": 35.0})
    assert found["plan_share"] == pytest.approx(0.05)
    with pytest.raises(ValueError, match="no kernel named _forward"):
        list_building({"renamed": 60.0}, forward)


def test_growth_tells_linear_from_quadratic() -> None:
    from benchmarks.attention import growth

    def row(queries: int, gib: float | None) -> dict[str, Any]:
        return {"queries": queries, "extra_gib": gib, "both": {"median": float(queries)}}

    linear, square = growth([row(1000, 1.0), row(8000, 8.0)]), growth([row(1000, 1.0), row(8000, 64.0)])
    assert linear is not None and (linear["memory"], linear["time"], linear["verdict"]) == (1.0, 1.0, "won")
    assert square is not None and square["verdict"] == "missed"
    assert growth([row(1000, None), row(8000, None)]) is None


def test_ratios_are_judged_by_the_goal_of_their_workload() -> None:
    from benchmarks.attention import ratios

    def row(system: str, ms: float) -> dict[str, Any]:
        both = {"both": {"median": ms}}
        return {"workload": "w", "system": system, "queries": 65536, "share": 0.02, "short": 128.0, **both}

    found = {
        entry["against"]: entry
        for entry in ratios([row("ours", 1), row("cudnn", 11), row("flex", 21), row("flash", 9)])
    }
    assert (found["cudnn"]["goal"], found["cudnn"]["verdict"]) == (12.0, "missed")
    assert (found["flex"]["goal"], found["flex"]["verdict"]) == (20.0, "won")
    assert found["flash"]["ratio"] == 9 and "goal" not in found["flash"]


def test_what_fails_or_comes_too_late_is_recorded() -> None:
    from benchmarks.timing import Deadline, guarded

    errors: dict[str, str] = {}
    assert guarded(errors, "broken", lambda: 1 / 0) is None
    assert guarded(errors, "late", lambda: 1, Deadline(-1)) is None
    assert guarded(errors, "fine", lambda: 1, Deadline(60)) == 1
    assert errors["broken"].startswith("ZeroDivisionError") and "no time left" in errors["late"] and len(errors) == 2


def test_a_cue_lies_half_a_million_tokens_back() -> None:
    from benchmarks.far_cue import ASK, MARK, MILLION, PIECES, VALUES, draw_rows

    for early, pieces in ((False, PIECES - 1), (True, 1)):
        x, y = draw_rows(64, 256, torch.Generator().manual_seed(0), torch.device("cpu"), early)
        at = (x == MARK).nonzero()[:, 1]
        assert len(at) == 64 and bool((x[:, -1] == ASK).all()) and torch.equal(y, x[torch.arange(64), at + 1])
        assert bool((y < VALUES).all()) and 256 // PIECES * (pieces - 0.2) < int(at.max()) < 256 // PIECES * pieces - 1
    assert MILLION - MILLION // PIECES > 500_000


def test_rows_of_the_far_cue_grow_once_answers_are_right() -> None:
    """Lives are parts of the row: what lives to the end of a short row does so in a long one."""
    from benchmarks.far_cue import Lesson, Size, build_recall, draw_rows, learn_in_pieces

    def right(decoder: Any, x: torch.Tensor, y: torch.Tensor, weight: float) -> torch.Tensor:
        learn_in_pieces(decoder, x, y, weight)
        return torch.nn.functional.one_hot(y, 6)

    lesson = Lesson(Size(length=128, start=32, rows=64, steps=1), right, torch.device("cpu"), 60.0)
    found = lesson.run()
    assert [length for length, _ in lesson.done] == [32, 128]
    assert (found["length"], found["least_distance"]) == (128, 96) and len(found["live"]) == 2
    draw, lives = torch.Generator().manual_seed(0), []
    for length in (32, 128):
        decoder = build_recall(length, 0, torch.device("cpu"))
        aux = decoder(draw_rows(2, length, draw, torch.device("cpu"))[0])[2]
        lives.append(torch.stack([layer.live for layer in aux.layers]) / length)
    assert torch.allclose(*lives, atol=0.05) and float(lives[0].min()) > 0.45


def test_ratios_to_full_attention_say_what_is_extrapolated() -> None:
    from benchmarks.million import compare

    ours = [{"spans": "few", "tokens": n, "pieces": 16, "seconds": s} for n, s in ((1000, 2.0), (500, 1.0))]
    full = [{"tokens": 250, "seconds": 5.0}, {"tokens": 500, "seconds": 20.0}]
    assert compare(ours, full, 1000) == [
        "few, 16 pieces: 40.0 x full attention (extrapolated from 500 tokens)",
        "few, 500 tokens: 20.0 x full attention (measured)",
    ]
    whole = [*full, {"tokens": 1000, "seconds": 60.0}]
    assert compare(ours, whole, 1000) == ["few, 16 pieces: 30.0 x full attention (measured)"]


def test_training_smoke(tmp_path: Path) -> None:
    from benchmarks import training

    names = [case.name for case in training.cases() if "small" in case.name]
    for options, wanted in (["--only", "small"], names), (["--only", names[-1], "--profile"], names[-1:]):
        training.main(["--smoke", *options, "--out", str(tmp_path)])
        found = json.loads((tmp_path / "training.json").read_text())
        assert not found["errors"] and [row["case"] for row in found["rows"]] == wanted
    assert all((tmp_path / name).stat().st_size > 1000 for name in found["profiles"]) and found["profiles"]
    with pytest.raises(SystemExit, match="no case's name contains 'nothing'"):
        training.main(["--smoke", "--only", "nothing", "--out", str(tmp_path)])


def test_training_fills_the_memory_before_it_times() -> None:
    from benchmarks.training import Bench, cases, shrink

    bench = Bench(shrink(cases()[0]), torch.device("cpu"))
    seen = []
    for _ in range(bench.case.fill + 3):
        bench.step()
        assert bench.live is not None
        seen.append(bench.live.mean().item())
    # Full is what a timing needs: a mean over tokens and layers that no longer grows, though the weights go on learning.
    assert seen[bench.case.fill - 1 :] == pytest.approx([seen[-1]] * 4, rel=1e-3)


def test_training_goals_are_for_the_released_models_only() -> None:
    from benchmarks.training import against, cases

    paper, modern = (
        next(c for c in cases() if c.name.startswith(kind) and c.size == "small") for kind in ("paper", "modern")
    )
    found = against(paper, 2_500_000.0, 1.2)
    assert (found["speed_verdict"], found["memory_verdict"]) == ("won", "missed")
    assert "speed_verdict" not in against(modern, 2_500_000.0, 1.0)


def test_decode_smoke(tmp_path: Path) -> None:
    from benchmarks import decode

    decode.main(["--smoke", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "decode.json").read_text())
    assert not found["errors"] and max(found["exact"].values()) < 1e-5
    assert found["cpu"]["ratio"] > 0 and found["cpu"]["live"] > 0


def test_decode_judges_each_figure_by_its_goal() -> None:
    from benchmarks.decode import verdicts

    def row(system: str, batch: int, ms: float, held: int, **more: Any) -> dict[str, Any]:
        found = {"system": system, "batch": batch, "ms": {"median": ms}, "bytes_held": held}
        return {**found, "tokens_per_s": 1e3 * batch / ms, **more}

    rows = [row("ours", 16, 0.5, 10), row("ring, compiled", 16, 0.4, 5, slots=256), row("ours", 256, 1.0, 100)]
    rows += [row("full, graph", 16, 4.0, 2000, slots=65_536), row("ring, graph", 256, 0.9, 5, slots=256)]
    marks = [row("ours", 1, 1.0, 100, mark=10_000), row("ours", 1, 1.04, 106, mark=10_000_000)]
    found = {v["figure"]: v["won"] for v in verdicts(rows, marks, None)}
    assert list(found.values()) == [True, True, False, False, True, True, False], found


def test_grid_worlds_are_timed_in_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import gridworlds

    gridworlds.main(["--envs", "2", "--seconds", "0.001", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "gridworlds-cpu.json").read_text())
    assert len(found["rows"]) == 9 and all(row["steps_per_second"] > 0 < row["with_info"] for row in found["rows"])
    assert "goal 200,000 steps/s: missed by Corridor-Easy" in capsys.readouterr().out  # two rows cannot reach it
