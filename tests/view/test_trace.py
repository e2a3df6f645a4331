"""The trace: every memory's life follows the definition and agrees with the store; files that are no traces are refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from expire_span.cli import main
from expire_span.generate import Sampling
from expire_span.models.decoder import Decoder
from expire_span.models.systems.expire_span import HeadReach
from expire_span.models.systems.full import FullConfig
from expire_span.models.systems.recurrent import GRUConfig
from expire_span.models.systems.sliding_window import SlidingWindowConfig
from expire_span.runs import UserError
from expire_span.settings.run import DecoderConfig, ExpireSpanConfig
from expire_span.tasks.text import BYTES
from expire_span.train.supervised import train
from expire_span.view.limit import Cut, limit_spans, mean_live, trace_cut
from expire_span.view.source import Reader
from expire_span.view.trace import Trace, check_lines, encode, read_lines
from expire_span.view.tracer import Tracer
from tests.tiny import tiny_config, write_text

SHARED = ExpireSpanConfig(max_span=40, ramp=5, initial_span=0.3)
BY_HEAD = replace(SHARED, span_per="kv_head", reach=HeadReach(spread=4.0), min_span=-4.0)
LENGTH = 333
ROUNDED = 0.5e-4 + 64 * torch.finfo(torch.float32).eps
"""A trace has four decimals of numbers below 64, which are float32 before. The models of these tests compute in float64, whose
own rounding is far below."""


def decoder_of(mixer, **fields) -> Decoder:
    """An untrained decoder whose spans differ from token to token."""
    torch.manual_seed(3)
    decoder = Decoder(DecoderConfig.modern(dim=16, layers=2, heads=2, ff_dim=16, mixer=mixer, **fields)).eval().double()
    for name, weight in decoder.named_parameters():
        if "span_predictor" in name and weight.dim() > 1:
            torch.nn.init.normal_(weight)
    return decoder


def tokens_of(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(5))


def trace_of(decoder: Decoder, tokens: torch.Tensor, pieces: int | None = None) -> Trace:
    tracer = Tracer(decoder, name="tiny", task="text", codec=BYTES)
    parts = [tokens] if pieces is None else tokens.split(pieces)
    return Trace.of([tracer.header(), *(step for part in parts for step in tracer.read(part))])


def deaths_of(trace: Trace) -> dict[tuple[int, int, int], int]:
    named = [((layer, head, birth), step["i"]) for step in trace.steps for layer, head, birth in step["deaths"]]
    assert len(named) == len(dict(named)), "a memory dies once"
    return dict(named)


@pytest.mark.parametrize("mixer", [SHARED, BY_HEAD], ids=["layer", "kv_head"])
def test_births_and_deaths_follow_the_definition(mixer):
    decoder, tokens = decoder_of(mixer), tokens_of()
    with torch.inference_mode():
        logits, _, aux = decoder(tokens[None], None)
    trace = trace_of(decoder, tokens)
    spans = torch.stack([x.span.reshape(-1, LENGTH) for x in aux.layers])  # [layers, heads, T]
    assert spans.std() > 1, "all the same would prove little"
    torch.testing.assert_close(torch.tensor(trace.spans, dtype=torch.float64), spans, atol=ROUNDED, rtol=0)
    age = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)  # [query, memory]
    alive = (spans[..., None, :] + mixer.ramp - age > 0) & (age >= 0)
    dead = (~alive & (age >= 0)).numpy()  # [layers, heads, query, memory]
    first = dead.argmax(2)
    expected = {
        place: int(first[place]) for place in np.ndindex(*spans.shape) if dead[:, :, :, place[2]][place[:2]].any()
    }
    assert deaths_of(trace) == expected
    live = alive.sum(-1).float().mean(1).T  # [T, layers]
    assert [step["live"] for step in trace.steps] == live.tolist()
    each = trace.header["memory_bytes"]
    assert [sum(step["bytes"]) for step in trace.steps] == (alive.sum((0, 1, 3)) * each).tolist()
    cost = -logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1) / math.log(2)
    assert math.isnan(trace.bits[0])
    np.testing.assert_allclose(trace.bits[1:], cost.numpy(), rtol=0, atol=ROUNDED)


def test_agrees_with_the_store():
    """The store's own count of what lives for the next query."""
    decoder, tokens = decoder_of(SHARED), tokens_of()
    tracer = Tracer(decoder, name="", task="text", codec=BYTES)
    list(tracer.read(tokens))
    lives = [int(part["memory"].live(LENGTH)[0]) for part in tracer.state]
    (step,) = tracer.read(tokens[:1])
    assert step["live"] == [count + 1 for count in lives] and min(lives) > 5


@pytest.mark.parametrize("mixer", [SHARED, BY_HEAD, FullConfig(), GRUConfig()], ids=lambda m: m.kind)
def test_pieces_give_the_same_trace(mixer):
    decoder, tokens = decoder_of(mixer), tokens_of(70)
    whole, pieces = trace_of(decoder, tokens), trace_of(decoder, tokens, pieces=1)
    assert [s["deaths"] for s in whole.steps] == [s["deaths"] for s in pieces.steps]
    assert [s["text"] for s in whole.steps] == [s["text"] for s in pieces.steps]
    np.testing.assert_allclose(whole.bits, pieces.bits, rtol=0, atol=2 * ROUNDED)


def test_a_cap_ends_memories_early():
    decoder, tokens = decoder_of(replace(SHARED, cap=6)), tokens_of(60)
    trace, free = trace_of(decoder, tokens), trace_of(decoder_of(SHARED), tokens)
    assert max(max(step["live"]) for step in trace.steps) <= 7, "six in the store, and the newest"
    assert max(max(step["live"]) for step in free.steps) > 7
    early, due = deaths_of(trace), deaths_of(free)
    assert any(early[key] < due.get(key, 60) for key in early)


def test_systems_without_spans():
    trace = trace_of(decoder_of(SlidingWindowConfig(window=8)), tokens_of(64))
    assert not trace.has_spans and trace.header["max_span"] is None
    assert trace.steps[-1]["live"] == [8.0, 8.0] and all(x > 0 for x in trace.steps[-1]["bytes"])
    with pytest.raises(ValueError, match="sliding_window gives tokens no spans"):
        trace.spans  # noqa: B018
    full = trace_of(decoder_of(FullConfig()), tokens_of(64))
    assert full.steps[-1]["live"][0] > 40, "the mean over the last block"


def test_a_task_that_asks_has_answers_instead_of_bits():
    decoder, tokens = decoder_of(SHARED), tokens_of(5)
    steps = list(Tracer(decoder, name="", task="recall").read(tokens, {4: 7}))
    logits, _, _ = decoder(tokens[None], None)
    cost = -float(logits[0, 4].detach().log_softmax(-1)[7]) / math.log(2)
    assert [step["bits"] for step in steps] == [None] * 5 and steps[4]["answer"]["text"] == "7"
    assert abs(steps[4]["answer"]["bits"] - cost) < ROUNDED and "answer" not in steps[3]


def test_recurrent_states_are_shown():
    decoder, tokens = decoder_of(GRUConfig()), tokens_of(5)
    trace = trace_of(decoder, tokens)
    _, state, _ = decoder(tokens[None], None)
    for layer, part in enumerate(state):
        hidden = part["h"][0].detach().numpy()  # a trace has three decimals of it
        np.testing.assert_allclose(trace.steps[-1]["hidden"][layer], hidden, rtol=0, atol=10 * ROUNDED)


def test_generation_goes_on_from_what_was_read():
    tracer = Tracer(decoder_of(SHARED), name="", task="text", codec=BYTES)
    with pytest.raises(ValueError, match="read a prompt first"):
        next(tracer.generate(Sampling(), 1))
    read = list(tracer.read(tokens_of(9)))
    written = list(tracer.generate(Sampling(temperature=0), 4))
    assert [step["i"] for step in read + written] == list(range(13))
    assert [step["text"] for step in written] == [step["top"][0][0] for step in [read[-1], *written[:-1]]]


def test_cutting_spans_lasts_no_longer_than_it_should():
    decoder, tokens = decoder_of(SHARED), tokens_of(80)
    before = trace_of(decoder, tokens)
    with limit_spans(decoder, 2.0):
        cut = trace_of(decoder, tokens)
    assert before.spans.max() > 10 and cut.spans.max() == 2.0
    assert (cut.bits[1:] != before.bits[1:]).any()
    with pytest.raises(RuntimeError, match="stop"), limit_spans(decoder, 2.0):
        raise RuntimeError("stop")
    assert trace_of(decoder, tokens) == before
    for limit, words in ((-1.0, "0 or more and finite, got -1"), (math.nan, "got nan")):
        with pytest.raises(ValueError, match=words), limit_spans(decoder, limit):
            pass
    with (
        pytest.raises(ValueError, match="sliding_window gives tokens no spans"),
        limit_spans(decoder_of(SlidingWindowConfig(window=8)), 2.0),
    ):
        pass


def test_a_budget_is_met_by_one_share_of_all_lives():
    decoder, tokens = decoder_of(SHARED), tokens_of(200)
    before = trace_of(decoder, tokens)
    live = mean_live(before) / 2

    def read():
        return list(trace_of(decoder, tokens).lines())

    header, *steps = trace_cut(decoder, Cut(live=live), read)
    after = Trace(header, steps)
    assert header["budget"] == live and mean_live(after) <= live * 1.02
    assert mean_live(after) > 0.8 * live, "no more is cut than the budget asks for"
    ramp = before.header["ramp"]
    shares = (after.spans[0] + ramp) / (before.spans[0] + ramp)  # the first layer reads the same tokens
    assert shares.max() - shares.min() < 1e-3 and shares.max() < 0.7, "all lives shrink alike"
    assert trace_cut(decoder, Cut(live=1e6), read)[1:] == before.steps, "a wide budget changes nothing"
    assert trace_of(decoder, tokens) == before
    with pytest.raises(ValueError, match=r"at least 1 living memory and finite, got 0\.5"):
        Cut(live=0.5)


# The file


def test_file_round_trip_and_streaming(tmp_path):
    trace = trace_of(decoder_of(SHARED), tokens_of(20))
    trace.save(tmp_path / "a.jsonl")
    assert Trace.load(tmp_path / "a.jsonl") == trace
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 21 and all(json.loads(line) for line in lines)
    assert next(check_lines(iter(lines[:1]), "x"))["version"] == 2, "a header alone is a beginning"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"\xff\xfe", "line 1 is not JSON"),
        (b"[1]\n", "line 1 should be a header"),
        (b"{}\n", "line 1 should be a header"),
        (b'{"kind":"header","version":7}\n', "has version 7, this version of expire-span reads version 2"),
        (b"[" * 100_000, "line 1 is not JSON"),
    ],
    ids=["empty", "bytes", "list", "nothing", "version", "deep"],
)
def test_foreign_files_are_refused_in_a_sentence(tmp_path, content, words):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words):
        list(read_lines(path))


def test_a_broken_step_is_named(tmp_path):
    trace = trace_of(decoder_of(SHARED), tokens_of(3))
    lines = [encode(line) for line in trace.lines()]
    with pytest.raises(UserError, match="line 3 should be a step"):
        list(check_lines([*lines[:2], b'{"kind":"step"}\n'], "x"))
    header, first, second = trace.header, *trace.steps[:2]
    for parts, words in (
        ([header | {"layers": "x"}], "line 1: layers must be a whole number of 1 or more, got 'x'"),
        ([header | {"layers": 10**9}], "layers x heads must be at most 65,536, got 1,000,000,000 x 1"),
        ([header | {"ramp": float("inf")}], "line 1: ramp must be a number of 0 or more, got inf"),
        ([header, second], "line 2: i must be 0, since steps are numbered in order, got 1"),
        ([header, first | {"live": [1.0]}], r"live must be a list of 2 numbers, one for each layer, got \[1.0\]"),
        ([header, first | {"spans": [[1.0]]}], "spans must be 2 x 1 numbers"),
        ([header, first | {"spans": None}], "spans must be there if the header's memory_bytes is, got None"),
        ([header, first | {"dies": None}], "dies must be there if the header's memory_bytes is, got None"),
        ([header, first, second | {"dies": [[0], [0]]}], "dies must be 2 x 1 steps, none before 1, one for"),
        ([header, first, second | {"deaths": [[0, 0, 2]]}], "deaths must be a list of .* and births up to 1"),
        ([header, first | {"top": [["a"]]}], "top must be a list of .text, probability., got"),
    ):
        with pytest.raises(UserError, match=words):
            list(check_lines([json.dumps(part).encode() for part in parts], "x"))
    with pytest.raises(UserError, match="cannot read the trace"):
        list(read_lines(tmp_path / "missing"))


# The command


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    return train(tiny_config(write_text(folder, 1200), steps=2), folder / "runs" / "a", shown=False)


def test_command_writes_a_trace(run, tmp_path, capsys):
    (tmp_path / "t.txt").write_bytes("héllo <script> \U0001f600 ".encode() + b"\xff\x00")
    name = str(run.path)
    assert main(["trace", name, "--text", str(tmp_path / "t.txt"), "--out", str(tmp_path / "a.jsonl")]) == 0
    trace = Trace.load(tmp_path / "a.jsonl")
    assert bytes(step["token"] for step in trace.steps) == (tmp_path / "t.txt").read_bytes()
    capsys.readouterr()
    assert main(["trace", name, "--tokens", "7", "--max-span", "3"]) == 0
    header, *steps = map(json.loads, capsys.readouterr().out.splitlines())
    assert header["max_span"] == 3.0 and len(steps) == 7
    assert max(x for step in steps for layer in step["spans"] for x in layer) <= 3


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--text", "missing.txt"], "cannot read --text missing.txt"),
        (["--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--max-span", "-3"], "must be 0 or more and finite, got -3"),
    ],
)
def test_command_refuses(run, capsys, args, words):
    assert main(["trace", str(run.path), *args]) == 2
    assert words in capsys.readouterr().err


def test_empty_text_is_refused(run):
    with pytest.raises(UserError, match="the text is empty"):
        list(Reader.open(run).trace_text(b""))


def test_a_reader_probes_its_model_once(run):
    reader, calls = Reader.open(run), []
    reader.model.register_forward_hook(lambda *_: calls.append(1))
    first, second = (list(reader.trace_text(b"abc")) for _ in range(2))
    assert first == second and len(calls) == 3, "one token to see which spans there are, and each text in one call"


def test_single_tokens_are_written_by_one_thread(run):
    reader, seen, usual = Reader.open(run), [], torch.get_num_threads()
    reader.model.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    torch.set_num_threads(3)
    try:
        steps = list(reader.generate(b"abc", Sampling(), 2))[1:]
        assert seen[-3:] == [3, 1, 1] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(usual)
    assert ["at" in step for step in steps] == [False] * 3 + [True] * 2 and steps[3]["at"] <= steps[4]["at"]


# Figures


def test_figures_of_every_name(run, tmp_path, monkeypatch, capsys):
    from expire_span.cli.figure import NAMES, PAIRED
    from expire_span.lab.figures.traces import FIGURES

    assert {*FIGURES, *PAIRED, "patterns"} == set(NAMES)  # patterns is a figure of the memory systems, not of a run
    monkeypatch.chdir(tmp_path)
    trace_of(decoder_of(BY_HEAD), tokens_of(90)).save(tmp_path / "a.jsonl")
    (tmp_path / "empty.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)[0])
    begins = {"pdf": b"%PDF", "png": b"\x89PNG", "svg": b"<?xml"}
    for name, kind in zip(FIGURES, ("png", "png", "svg", "pdf", "png", "pdf"), strict=True):
        assert main(["figure", name, "a.jsonl", "--out", f"{name}.{kind}"]) == 0
        data = (tmp_path / f"{name}.{kind}").read_bytes()
        assert data.startswith(begins[kind]) and len(data) > 2000
    assert main(["figure", "growth", str(run.path)]) == 0 and (tmp_path / "growth.pdf").exists()
    capsys.readouterr()
    for args, words in (
        (["spam", "a.jsonl"], "unknown figure 'spam'"),
        (["spans", "nothing"], "'nothing'"),
        (["spans", "a.jsonl", "--out", "x.gif"], "pdf, png, svg, got x.gif"),
        (["ages", "a.jsonl", "--needed", "-1"], "--needed must lie between 0 and 1,099,511,627,776, got -1"),
        (["growth", "empty.jsonl"], "has a header but no steps"),
        (["words", "a.jsonl"], "compares what a model does; give a run, got the trace a.jsonl"),
        (["words", str(run.path), "--word", "Troy"], "does not hold the word 'Troy'"),
    ):
        assert main(["figure", *args]) == 2
        assert words in capsys.readouterr().err


def test_the_timeline_shows_memories_that_end():
    """However long they live, as far as the trace goes; its lines can still be told apart."""
    from expire_span.lab.figures.traces import draw_timeline

    for count, span, shown in ((90, 700, 90), (3000, 20, 500), (3000, 400, 1212), (3000, 5000, 2000)):
        header = {"ramp": 4.0, "layers": 1, "heads": 1, "system": "expire_span"}
        steps = [{"i": i, "spans": [[float(span)]], "dies": [[i + span + 4]]} for i in range(count)]
        assert draw_timeline(Trace(header, steps)).axes[1].get_xlim() == (0, shown)


def test_ages_at_which_memories_die():
    """The figure counts what the trace says, and shows the age that was needed."""
    from expire_span.lab.figures.traces import draw_ages

    header = {"layers": 2, "heads": 1, "ramp": 2, "system": "expire_span"}
    deaths = {4: [[0, 0, 0]], 5: [[0, 0, 1], [1, 0, 3]], 6: [[0, 0, 3]]}  # last read at age 3, 3 and 2; and at age 1
    steps = [{"i": i, "spans": [[1.0], [1.0]], "deaths": deaths.get(i, [])} for i in range(8)]
    axes = draw_ages(Trace(header, steps), needed=3).axes[0]
    shares = [list(patch.get_data().values) for patch in axes.patches]
    assert shares == [[0, 0, 1 / 3, 2 / 3], [0, 1, 0, 0]]
    assert [text.get_text() for text in axes.get_legend().get_texts()][1:] == ["layer 2, 1 deleted", "needed: 3"]
    with pytest.raises(ValueError, match="gru gives tokens no spans"):
        draw_ages(Trace(header | {"system": "gru"}, [step | {"spans": None} for step in steps]))
    with pytest.raises(ValueError, match="no memory was deleted within the 4 steps that were read; take a run that"):
        draw_ages(Trace(header, steps[:4]))


def test_figures_that_compare(run, tmp_path, monkeypatch):
    from expire_span.lab.figures.pairs import draw_cut, draw_words

    monkeypatch.chdir(tmp_path)
    assert main(["figure", "words", str(run.path), "--out", "words.png"]) == 0
    assert main(["figure", "cut", str(run.path), "--max-span", "2", "--out", "cut.svg"]) == 0
    assert main(["figure", "cut", str(run.path), "--live", "5"]) == 0
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("words.png", "cut.svg", "cut.pdf"))
    reader = Reader.open(run)
    traces = [Trace.of(reader.trace_text(b"one " + word + b" two one")) for word in (b"memory", b"fades")]
    figure = draw_words(traces, [(4, 10), (4, 9)])
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    longest = [trace.spans.max(1).mean(0)[4:end].max() for trace, end in zip(traces, (10, 9))]
    assert titles == [f"{w}: kept up to {x:.0f} steps" for w, x in zip(("memory", "fades"), longest)]
    after = Trace.of(reader.trace_text(b"one memory two one", Cut(max_span=1.0)))
    more = np.nan_to_num(after.bits - traces[0].bits)
    (title,) = [axes.get_title(loc="left") for axes in draw_cut(traces[0], after).axes]
    assert title.startswith(f"with spans of at most 1: {more.mean():+.3f} bits")
