"""`expire-span evaluate-cache`: compares caches of one model at equal bytes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from expire_span.checks import Count, between
from expire_span.disk.files import write_picture
from expire_span.errors import UserError

from .parsing import PROGRAM, parse
from .retrofit import check_text

Questions = Annotated[int, between(0, 100_000)]
"""Number of questions of each kind: all of them are held in memory."""


@dataclass(frozen=True)
class EvaluateCache:
    """Compare caches of a model: perplexity of long documents, retrieval, time per token."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder, .gguf file or hub name of a causal language model."""
    data: Path | None = None
    """Text to read: a file, or a folder of .txt files. It should not be the text on which the adapter was trained. The suite
    ruler hides its facts in it, or in repeated sentences if there is none; the suite gsm8k needs its .jsonl file here."""
    suite: Literal["text", "ruler", "gsm8k"] = "text"
    """text: perplexity, two kinds of questions and time. ruler: RULER's synthetic tasks, passkey, pairs and conduct (rules of a
    system prompt), and perplexity if there is --data. gsm8k: word problems, with memories that expire while answering."""
    adapter: Path | None = None
    """Adapter folder, for the method expire."""
    methods: str = "none,window,sinks,knorm,snap,expire"
    """The caches to compare, separated by commas."""
    budgets: str = "0.5,0.25,0.125"
    """Bytes as shares of the full cache, separated by commas: peak bytes in the suite text, in the others those that are
    kept of a context."""
    context: Count = 4096
    """Number of tokens of each document."""
    documents: Count = 16
    """Largest number of documents to read."""
    questions: Questions = 8
    """Number of retrieval questions of each kind (passkey, pairs)."""
    prompts: Count = 50
    """Number of prompts of each task of a suite."""
    tasks: str | None = None
    """The tasks of the suite ruler, separated by commas; all of them if None."""
    seed: int = 0
    """Seed of a suite's prompts."""
    rows: Count = 8
    """Largest number of a suite's contexts that are read side by side."""
    plain: bool = False
    """Ask a suite's prompts without the model's chat template."""
    chunk: Count = 128
    """Tokens per forward pass."""
    out: Path = Path("evaluate_cache")
    """Name of the output files without their ending: .json and .png, and of a suite .json, .html, and .jsonl with every answer.
    A suite that was interrupted goes on where it was when the same command is given again."""
    dtype: Literal["fp32", "bf16", "fp16", "int8", "nf4"] = "fp32"
    """Precision of the model; int8 and nf4 need bitsandbytes."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N, or spread: layers on all GPUs, and the rest in the memory beside them."""


def run_evaluate_cache(args: list[str]) -> int:
    command = parse(EvaluateCache, args, f"{PROGRAM} evaluate-cache")
    methods = [x.strip() for x in command.methods.split(",")]
    budgets = [_share(x) for x in command.budgets.split(",")]
    if command.suite != "text":
        from .suites import run_suite_command

        return run_suite_command(command, methods, budgets)
    if command.data is None:
        raise UserError(
            "evaluate-cache needs --data, text to read, got none; name a text file or a folder of .txt files"
        )
    if "expire" in methods and command.adapter is None:
        raise UserError("method expire needs --adapter, got none; leave it out of --methods or name an adapter folder")
    check_text(command.data)
    from expire_span.disk.files import to_json, write_atomic
    from expire_span.hf import RetrofitConfig, load_adapter, retrofit
    from expire_span.hf.loading import check_context, open_model
    from expire_span.lab.caches.evaluate import check_methods, evaluate
    from expire_span.train.progress import Heartbeat

    check_methods(methods)
    with Heartbeat("evaluate-cache") as beat:
        beat.note("loading the model")
        model, tokenizer = open_model(command.model, command.dtype, command.device)
        check_context(model, command.context)
        retrofitted = load_adapter(model, command.adapter) if command.adapter else retrofit(model, RetrofitConfig())
        documents, questions = _material(command, retrofitted, tokenizer)
        how: Any = {"chunk": command.chunk, "progress": _print_row, "note": beat.note, "adapter": command.adapter}
        rows = evaluate(retrofitted, documents, questions, methods, budgets, **how)
    compare_with_expire(rows)
    command.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {"model": command.model, "context": command.context, "chunk": command.chunk, "dtype": command.dtype}
    write_atomic(command.out.with_suffix(".json"), to_json({"settings": settings, "rows": rows}))
    draw(rows, command.out.with_suffix(".png"))
    print(f"wrote {command.out.with_suffix('.json')} and {command.out.with_suffix('.png')}")
    return 0


def _share(word: str) -> float:
    try:
        share = float(word)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(f"--budgets are shares in (0, 1], got {word}")
    return share


def _material(command: EvaluateCache, retrofitted: Any, tokenizer: Any) -> tuple[list, list]:
    """Documents, which begin as the adapter's contexts did, and questions about them."""
    from expire_span.hf.loading import read_contexts
    from expire_span.hf.texts import check_tokenizer, check_vocabulary, describe_beginning, find_beginning
    from expire_span.lab.caches.questions import make_questions

    assert command.data is not None
    check_tokenizer(retrofitted, tokenizer)
    beginning = retrofitted.beginning or find_beginning(tokenizer)
    cut = read_contexts(tokenizer, command.data, command.context, beginning)
    check_vocabulary(retrofitted.model, cut)
    device = next(retrofitted.model.parameters()).device
    chosen = [x.to(device) for x in cut[:: max(1, len(cut) // command.documents)][: command.documents]]
    with retrofitted.paused() as base:
        texts = [x[len(beginning.context) :] for x in chosen]
        print(describe_beginning(base, tokenizer, texts, beginning), file=sys.stderr, flush=True)
    questions = []
    for kind in ("passkey", "pairs"):
        questions += make_questions(tokenizer, chosen, command.questions, kind, begins=beginning)
    return chosen, questions


def _print_row(row: dict[str, Any]) -> None:
    accuracy = "     -" if row["accuracy"] is None else f"{row['accuracy']:6.1%}"
    peak = f"{row['peak_bytes'] / 2**20:9.2f} MiB"
    dial = f"  spans x {row['dial']:.2f}" if row["dial"] < 1 else ""
    print(
        f"{row['method']:<8}{row['budget']:<7g} perplexity {row['perplexity']:9.3f}  retrieval {accuracy}  peak {peak}  "
        f"{row['seconds_per_token'] * 1000:7.2f} ms a token{dial}",
        flush=True,
    )


def compare_with_expire(rows: list[dict[str, Any]]) -> None:
    """Add to each rival's row by how much expire is better on the same documents, with a paired bootstrap."""
    from expire_span.lab.caches.evaluate import bootstrap

    ours = {row["budget"]: row for row in rows if row["method"] == "expire"}
    for row in rows:
        if row["method"] not in ("none", "expire") and row["budget"] in ours:
            mean, low, high = bootstrap(ours[row["budget"]]["losses"], row["losses"])
            row["expire_minus_this"] = {"mean": mean, "low": low, "high": high}
            told = f"{mean:+.4f} nats a token (95% interval {low:+.4f} to {high:+.4f})"
            print(f"expire - {row['method']} at {row['budget']:g}: {told}")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Perplexity over the budget, a line for each method; plain numbers on both axes, the legend beside them."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["method"] for row in rows):
        points = sorted((row["budget"], row["perplexity"]) for row in rows if row["method"] == name)
        if name == "none":
            axes.axhline(points[0][1], color="black", linestyle=":", label="full cache")
        else:
            axes.plot(*zip(*points), marker="o", label=name)
    axes.set(
        xlabel="peak bytes, % of the full cache", ylabel="perplexity (lower is better)", xscale="log", yscale="log"
    )
    axes.xaxis.set_major_locator(FixedLocator(sorted({row["budget"] for row in rows})))
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.set_title("Perplexity of each cache at equal peak bytes", loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    write_picture(path, figure, dpi=150)
