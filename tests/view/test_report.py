"""The report page: self-contained, escaped, honest about numbers, and there from the first line of metrics on."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from expire_span.disk.sizes import show_bytes
from expire_span.lab.analyse.analysis import analyse, write_analysis
from expire_span.models.systems import mixer_config
from expire_span.ops.rule import lifetime
from expire_span.runs import RunFolder
from expire_span.settings.run import (
    BudgetConfig,
    DecoderConfig,
    ExpireSpanConfig,
    RecallTask,
    RunConfig,
    TextTask,
    TrainConfig,
)
from expire_span.train.supervised import train
from expire_span.view.assets import environment
from expire_span.view.efficiency import Row, tabulate
from expire_span.view.findings import read_findings
from expire_span.view.pictures import (
    MOST_COLUMNS,
    count_alive,
    draw_curves,
    draw_lifelines,
    draw_span_map,
    pool_columns,
    to_svg,
)
from expire_span.view.report import (
    explain_budget,
    explain_spare,
    flatten,
    other_rules,
    series_of,
    show_value,
    show_values,
    tabulate_bands,
    write_report,
)
from expire_span.view.sample import Sample, find_keepsakes

MODEL = DecoderConfig.modern(dim=16, layers=2, heads=2, ff_dim=16, mixer=ExpireSpanConfig(max_span=32, ramp=4))
TRAIN = TrainConfig(steps=2, batch=2, block=32, eval_every=1, log_every=1, checkpoint_every=2, eval_batches=1, warmup=0)
RECALL = RunConfig(RecallTask(min_length=5, max_length=20), MODEL, replace(TRAIN, batch=32, carry=False, device="cpu"))


@pytest.fixture(scope="module")
def recall_page(tmp_path_factory) -> tuple[RunFolder, str]:
    run = train(RECALL, tmp_path_factory.mktemp("runs") / "corridor<b>", recipe="recall", shown=False)
    return run, write_report(run).read_text()


@pytest.fixture(scope="module")
def text_run(tmp_path_factory) -> RunFolder:
    """A run of text that was analysed."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "data.txt").write_bytes(b"<script>alert(1)</script> & more words of Egypt\n" * 60)
    config = RunConfig(TextTask(path=str(folder / "data.txt")), MODEL, replace(TRAIN, device="cpu"))
    run = train(config, folder / "text", shown=False)
    write_analysis(run.path, analyse(run, count=50, limits=[8, 2]))
    return run


@pytest.fixture(scope="module")
def text_page(text_run) -> str:
    return write_report(text_run).read_text()


def test_a_model_without_spans_is_not_said_to_have_them(recall_page):
    run, page = recall_page
    assert "its <em>span</em>" in page and other_rules(run) == {}
    model = replace(MODEL, mixer=mixer_config("gru"))
    rules = other_rules(replace(run, config=replace(RECALL, model=model)))
    assert list(rules) == ["gru"] and rules["gru"].startswith("One gated vector")
    values = {
        "run": run,
        "kind": run.config.kind,
        "facts": [],
        "efficiency": {},
        "findings": {},
        "tables": {},
        "rules": rules,
    }
    page = environment().get_template("report.html").render(values)
    assert "<b>gru</b>: One gated vector" in page and "its <em>span</em>" not in page


def test_page_names_nothing_outside_itself(recall_page, text_page):
    """The view's own script is inside; it and the page's rules keep the page from asking for anything."""
    for page in (recall_page[1], text_page):
        assert set(re.findall(r"https?://[\w./]+", page)) == {"http://www.w3.org/2000/svg"}, "a name, never asked for"
        assert not re.search(r"<iframe\b", page) and page.count("<script") == 2
        assert not re.search(r"(src|href)=\"(?!#|data:)", page)
        assert "default-src 'none'" in page and "connect-src" not in page
        assert "<svg" in page and "prefers-color-scheme: dark" in page


def test_page_carries_the_trace(recall_page, text_page):
    for page, task in ((recall_page[1], "recall"), (text_page, "text")):
        packed = re.search(r'id="es-trace">([\w+/=]+)<', page)[1]
        header, *steps = map(json.loads, gzip.decompress(base64.b64decode(packed)).splitlines())
        assert header["task"] == task and 5 < len(steps) <= 2048
        assert len(page) < 5_000_000
    assert "bits per byte, lower is better" in text_page  # the name of an axis
    assert "fraction of right answers, higher is better" in recall_page[1]
    assert "The task.</b> A colour cue" in recall_page[1]
    assert recall_page[1].index("Birth and expiry") < recall_page[1].index("What gets a long span")


def test_bytes_are_of_one_row_and_say_so(recall_page):
    run, page = recall_page
    result = run.read_result()
    held, full = (show_bytes(result[name] / result["rows"]) for name in ("mean_bytes", "full_bytes"))
    assert f"<b>{held}</b><span>held per row, spare slots included</span>" in page
    assert f"and holds {held} for each sequence instead of {full}." in page, "the headline"
    assert f"<b>{full}</b><span>per row if nothing were forgotten</span>" in page


@pytest.mark.parametrize(
    ("live", "words"),
    [
        (4.8, "ended with 4.8. The span loss shortens spans"),
        (9.5, "ended with 9.5."),
        (15.0, "train longer to come nearer"),
    ],
)
def test_what_became_of_the_budget_is_explained(recall_page, monkeypatch, live, words):
    run, _ = recall_page
    train = replace(run.config.train, budget=BudgetConfig(live=10))
    told = replace(run, config=replace(run.config, train=train))
    monkeypatch.setattr(type(run), "read_result", lambda self: {"live": [live, live]})
    assert "The budget was 10 memories alive" in explain_budget(told) and words in explain_budget(told)
    assert ("The span loss shortens spans" in explain_budget(told)) == (live < 9)
    assert explain_budget(replace(told, config=replace(told.config, train=replace(train, budget=BudgetConfig())))) == ""


def test_page_mentions_the_numbers(recall_page):
    run, page = recall_page
    result = run.read_result()
    assert f"{result['score']:.1%}" in page
    assert f"{result['live_share']:.1%}" in page
    assert f"{sum(result['live']) / 2:.1f}" in page
    assert "2 of 2" in page and ">max_length</th><td>20<" in page
    weights = re.search(r"<b>([\d,]+)</b><span>weights", page)
    assert weights and int(weights[1].replace(",", "")) > 1000


def test_episode_is_marked(recall_page):
    page = recall_page[1]
    assert re.search(r">cue (red|blue|green|yellow)<", page) and ">which?<" in page
    assert "Lifelines in layer" in page


def test_names_and_text_are_escaped(recall_page, text_page):
    assert "corridor&lt;b&gt;" in recall_page[1] and "corridor<b>" not in recall_page[1]
    assert "<script>" not in text_page and "&lt;script&gt;" in text_page


def test_text_page_lists_bytes_and_words(text_page):
    for heading in ("Bytes kept longest", "Bytes kept shortest", "Words kept longest", "Words kept shortest"):
        assert text_page.count(heading) == MODEL.layers


@pytest.mark.parametrize("lines", [0, 1])
def test_unfinished_run_without_a_checkpoint(tmp_path, lines):
    run = RunFolder.create(tmp_path / "young", RECALL, recipe="recall", environment={})
    line = {"step": 1, "split": "train", "loss": 2.5, "score": 0.25, "span_weight": 0.0, "live": [3.0, 4.0]}
    for _ in range(lines):
        run.append_metrics(line)
    page = write_report(run).read_text()
    assert "no checkpoint yet" in page and "<svg" in page
    assert ("<b>3.5</b>" in page) == bool(lines)


def test_missing_data_leaves_a_note(text_run, tmp_path):
    shutil.copytree(text_run.path, tmp_path / "text")
    moved = replace(text_run.config, task=TextTask(path=str(tmp_path / "nowhere.txt")))
    page = write_report(replace(text_run, path=tmp_path / "text", config=moved)).read_text()
    assert "No sample could be read" in page and "<span>weights</span>" in page


def test_report_is_replaced_at_once(recall_page):
    run, page = recall_page
    assert write_report(run).read_text() == page, "the same run gives the same page"
    assert not [p for p in run.path.iterdir() if p.suffix == ".tmp"]


# What it costs, and what was found


def cells_of(page: str, title: str) -> list[list[str]]:
    """Rows of the table after a title, as text."""
    (table,) = re.findall(rf"{re.escape(title)}.*?</table>", page, re.DOTALL)
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", table, re.DOTALL)
    return [[html.unescape(re.sub(r"<[^>]+>", "", x)) for x in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in rows]


def test_a_run_by_itself_has_its_own_row(recall_page):
    run, page = recall_page
    headings, row = cells_of(page, "<h2>What it costs</h2>")
    result, speed = run.read_result(), run.read_speed()
    shown = dict(zip(headings, row))
    assert shown["system"] == "expire_span" and shown["success"] == f"{result['score']:.1%}"
    assert shown["bytes per row"] == show_bytes(result["mean_bytes"] / result["rows"]) and shown["steps"] == "2"
    assert shown["device memory"] == show_bytes(max(line["peak_bytes"] for line in speed))


def test_the_row_of_a_compared_run_is_marked(recall_page, tmp_path, monkeypatch):
    run, _ = recall_page
    rows = [
        Row(name, name, None, 1, 0.5, None, 3.0, 4.0, 1e3, 2e3, 5e6, 7.25, 1e4, 99, 2, 1) for name in ("<gru>", "own")
    ]
    told = {"score": {"name": "success"}, "conditions": "Two steps & no more.", "rows": [asdict(row) for row in rows]}
    (tmp_path / "compare.json").write_text("{}")
    compared = replace(run, path=tmp_path / "own-seed0")
    for table, words in ((told, ""), ({"rows": [{}]}, "cannot be read"), ({"rows": 3}, "cannot be read")):
        (tmp_path / "table.json").write_text(json.dumps(table))
        found = tabulate(compared, None)
        assert (words in found.told and not found.rows) if words else found.own == 1
    (tmp_path / "table.json").write_text(json.dumps(told))
    compared.path.mkdir()
    monkeypatch.setattr("expire_span.view.report.look_inside", lambda run: (None, None, ""))  # costs need no model
    page = write_report(compared).read_text()
    headings, *shown = cells_of(page, "<h2>What it costs</h2>")
    assert [row[0] for row in shown] == ["<gru>", "own"] and shown[0][headings.index("ms/batch")] == "7.2"
    assert "<gru>" not in page and "Two steps &amp; no more." in page and page.count('<tr class="own">') == 1


def test_an_unfinished_run_has_no_costs(tmp_path):
    run = RunFolder.create(tmp_path / "young", RECALL, recipe="recall", environment={})
    assert tabulate(run, 100).rows == [] and read_findings(run).told == ""


def test_bytes_of_short_sequences_are_explained():
    assert explain_spare({}) == explain_spare({"mean_bytes": 10, "full_bytes": 20}) == ""
    assert "spare slots for at least 32 further memories" in explain_spare({"mean_bytes": 21, "full_bytes": 20})


def test_an_agents_bands_are_a_table():
    band = {"first": 11, "last": 20, "episodes": 1574, "success": 0.5, "low": 0.25, "high": 0.75, "mean_steps": 15.81}
    headings, shown, unknown = tabulate_bands(
        [band | {"live": 8.41, "peak_live": 25}, band | dict.fromkeys(("success", "low", "high", "live", "peak_live"))]
    )
    assert shown == ["11 to 20", "1,574", "50.0%", "25.0% to 75.0%", "15.8", "8.4", "25"] and len(headings) == 7
    assert unknown[2:] == ["—", "—", "15.8", "—", "—"] and tabulate_bands([]) == []


def test_what_analyse_wrote_is_shown(text_run, text_page):
    found = json.loads((text_run.path / "analysis.json").read_text())
    layers, cuts = found["layers"], found["cut"]
    _, counts, *rows = cells_of(text_page, "Mean span by class of letter")
    assert counts[0] == "letters seen" and counts[-1] == "50"
    for layer, row in zip(layers, rows):
        means = [*(x["mean"] for x in layer["classes"]), layer["mean"]]
        assert row == [str(layer["layer"]), *(f"{mean:.1f}" for mean in means)]
    _, *rows = cells_of(text_page, "Bits more a letter")
    assert [row[0] for row in rows] == ["8", "2"] and rows[0][-1] == f"{cuts[0]['bits_cut'] - cuts[0]['bits']:+.4f}"
    headings, *_ = cells_of(text_page, "Mean span where “Egypt” stood")
    assert headings == ["layer", "Egypt", "somewhere", "Humpty Dumpty"]
    _, first, *_ = cells_of(text_page, "Letters that live longest")
    assert first[1] == "".join(layers[0]["longest"][0]["around"]).replace("\n", "⏎")
    pictures = re.findall(r'<img src="data:image/png;base64,([^"]+)"', text_page)
    wanted = [text_run.path / f"analysis_{name}.png" for name in ("classes", "replaced", "cut")]
    assert [base64.b64decode(data) for data in pictures] == [path.read_bytes() for path in wanted]


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{", "not valid JSON"), (b'{"format": 7}', "has format 7"), (b'{"format": 1, "layers": []}', "not an analysis")],
    ids=["cut short", "foreign", "empty"],
)
def test_an_analysis_that_cannot_be_read_is_said(text_run, tmp_path, content, words):
    (tmp_path / "analysis.json").write_bytes(content)
    found = read_findings(replace(text_run, path=tmp_path))
    assert words in found.told and "expire-span analyse" in found.told and not found.tables and not found.pictures


# Pictures


def test_count_alive_against_the_definition():
    lifetimes = np.random.default_rng(0).integers(1, 30, 50)
    births, ends = np.arange(50), np.minimum(np.arange(50) + lifetimes, 50)
    slow = [sum(b <= t < b + life for b, life in zip(births, lifetimes)) for t in range(50)]
    assert count_alive(births, ends).tolist() == slow


def test_lifetimes_follow_the_mask():
    """A memory can be read while 1 + (span - age) / ramp > 0."""
    spans = np.array([[0.0, 0.5, 3.0, 7.25]])
    dies = np.arange(4) + lifetime(torch.from_numpy(spans), 4).numpy()
    sample = Sample(np.arange(4), list("abcd"), spans, dies)
    slow = [sum(1 + (span - age) / 4 > 0 for age in range(50)) for span in spans[0]]
    assert sample.lifetimes(0).tolist() == slow


def test_sentences_are_told_apart_by_what_they_are():
    labels = [
        "you are at the mill",
        "when you reach the mill open the box",
        "never mind the mill",
        "Ada saw the box at the mill",
    ]
    sample = Sample(np.zeros(6), [*labels, "cue red", "corridor"], np.zeros((1, 6)), np.zeros((1, 6)))
    assert sample.kinds == ["where it is", "instruction", "change of one", "talk", "cue", "corridor"]


def test_lifelines_show_a_survivor_longer_than_the_rest():
    lifetimes = np.array([40] + [3] * 39)
    figure = draw_lifelines(lifetimes, kinds=["cue"] + ["wall"] * 39, marks={0: "cue red"}, title="t", unit="step")
    assert "var(--card" in to_svg(figure, "x")  # around the words, so that no bar crosses them
    cue, wall = figure.axes[0].collections
    length = lambda bars: [float(x[1, 0] - x[0, 0]) for x in bars.get_segments()]  # noqa: E731
    assert length(cue) == [40.0] and max(length(wall)) == 3.0
    alive = figure.axes[1].lines[0].get_ydata()
    assert alive[20] == 4


@pytest.mark.parametrize("points", [[], [(1, 2.0)], [(1, 0.0), (2, 0.0)], [(1, 1.0), (2, 3.0)]])
@pytest.mark.parametrize("log", [False, True])
def test_curves_of_any_length(points, log):
    svg = to_svg(draw_curves({"train": points, "valid": []}, title="Loss", ylabel="nats", log=log), "x")
    assert svg.startswith("<svg") and "Loss" in svg and "http" not in svg and "currentColor" in svg


def test_span_map_takes_zero_spans():
    svg = to_svg(draw_span_map(np.zeros((1, 3)), title="Spans", marks={}, unit="step"), "x")
    assert "data:image/png;base64" in svg


def test_keepsakes_are_ordered():
    text = b"alpha beta gamma delta\n" * 3
    spans = np.arange(len(text), dtype=float)[None]
    sample = Sample(np.frombuffer(text, np.uint8), [chr(c) for c in text], spans, spans, "bytes")
    (keeps,) = find_keepsakes(sample, count=2)
    assert [k.text for k in keeps.longest_words] == ["delta", "gamma"]
    assert [k.text for k in keeps.shortest_words] == ["alpha", "beta"]
    assert keeps.longest_bytes[0].span >= keeps.longest_bytes[1].span > keeps.shortest_bytes[0].span
    assert keeps.longest_words[0].before.endswith("gamma ") and keeps.longest_words[0].after.startswith("⏎")


def test_small_helpers():
    sizes = {999: "999 B", 1_234_000: "1.23 MB", 999_600: "1.00 MB", 12_345: "12.3 kB", 120_400: "120 kB", 0: "0 B"}
    assert {count: show_bytes(count) for count in sizes} == sizes
    assert show_value([1.0, None, True]) == "1, —, True"
    assert flatten({"seed": 1, "model": {"dim": 2, "mixer": {"ramp": 3}}}) == {
        "Run": {"seed": 1},
        "Model": {"dim": 2},
        "Model · mixer": {"ramp": 3},
    }
    assert (
        series_of([{"step": 1, "split": "train", "loss": None}, {"step": 2, "split": "train"}], "loss", "train") == []
    )


def test_template_is_in_the_package():
    import expire_span.view

    assert (Path(expire_span.view.__file__).parent / "report.html").is_file()


def test_cues_are_named_where_there_is_room():
    """An agent that stands before its cue for a long time sees it again and again."""
    from expire_span.view.sample import Sample, marks_of

    labels = ["cue red"] * 30 + ["corridor"] * 33 + ["which"]
    spans = np.full((1, 64), 40.0)
    spans[0, 7] = 50.0
    found = marks_of(Sample(np.zeros(64), labels, spans, spans))
    assert found[7] == "cue red" and found[63] == "which" and min(np.diff(list(found))) > 4 and len(found) < 8


def test_a_single_long_span_is_seen_in_a_long_heat_map():
    spans = np.ones((2, 1001))
    spans[1, 700] = 500
    pooled = pool_columns(spans)
    assert pooled.shape[1] <= MOST_COLUMNS and (pooled > 1).sum() == 1 and pooled.max() == 500
    assert (pool_columns(spans[:, :MOST_COLUMNS]) == spans[:, :MOST_COLUMNS]).all()


def test_a_number_of_bytes_has_one_format():
    shown = show_values({"full_bytes": 3653630.0, "score": 0.25, "bytes_name": "x"})
    assert shown == {"full_bytes": "3.65 MB", "score": "0.25", "bytes_name": "x"}
