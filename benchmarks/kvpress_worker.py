"""The part of benchmarks.kvpress_rivals that runs in the environment of kvpress: presses answer prompts greedily.

Of this package it imports only what needs neither torch nor transformers: the scoring and the lines of a record.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import kvpress  # pyright: ignore[reportMissingImports]
import torch
import transformers

from expire_span.disk.files import seal_line
from expire_span.lab.suites.scoring import RULES, is_settled

OF_ANOTHER = {"AdaKV": "ExpectedAttention", "CriticalKV": "SnapKV", "CriticalAdaKV": "ExpectedAttention"}
"""Presses that distribute or correct the scores of another one."""


def main(job: dict[str, Any]) -> None:
    ends = time.monotonic() + job["seconds"]
    device = "cuda" if job["device"] == "auto" and torch.cuda.is_available() else job["device"].replace("auto", "cpu")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[job["dtype"]]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
    model = model.to(device).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
    versions = f"kvpress {_version()}, transformers {transformers.__version__}, torch {torch.__version__}"
    questions = choose(job, read_lines(Path(job["prompts"])), read_lines(Path(job["rivals"])))
    tag = f"worker {job['worker']}: " if job["workers"] > 1 else ""
    print(f"{tag}{versions}: {len(questions)} answers to give", flush=True)
    told = 0.0
    with open(job["rivals"], "ab") as file:
        for n, (prompt, name, budget) in enumerate(questions):
            if time.monotonic() > ends:
                print(f"{tag}the time is over after {n} of {len(questions)} answers", flush=True)
                break
            if time.monotonic() - told > 10:
                told = time.monotonic()
                print(f"{tag}{n} of {len(questions)} answers, now {name} at {budget:g}", flush=True)
            key = {"method": f"kvpress {name}", "budget": budget, "task": prompt["task"], "index": prompt["index"]}
            try:
                found = ask(model, tokenizer, make_press(name, budget), prompt)
            except (
                ValueError
            ) as error:  # a press that cannot go on with this prompt; the answer is missing in the table
                where = f"{prompt['task']} {prompt['index']}"
                print(f"{tag}{key['method']} at {budget:g} failed on {where}: {error}", flush=True)
                continue
            # One write call a line, appended: lines of several processes do not mix.
            file.write(seal_line(json.dumps({**key, **found, "versions": versions}).encode()))
            file.flush()


def choose(job: dict[str, Any], prompts: Iterable[dict], given: Iterable[dict]) -> list[tuple[dict, str, float]]:
    """What this worker has still to answer: (prompt, press, budget). The first prompt of every task comes first, for all
    presses and budgets, so that a run that is cut short has asked all of them the same."""
    known = {(x["method"], x["budget"], x["task"], x["index"]) for x in given}
    asked = [x for x in prompts if "context_tokens" in x and x["index"] < job["each"]]
    asked = sorted((x for x in asked if x["task"] in (job["tasks"] or [x["task"]])), key=lambda x: x["index"])
    pairs = [(name, budget) for name in job["presses"] for budget in job["budgets"]]
    return [
        (prompt, name, budget)
        for prompt in asked[job["worker"] :: job["workers"]]
        for name, budget in pairs
        if (f"kvpress {name}", budget, prompt["task"], prompt["index"]) not in known
    ]


def _version() -> str:
    from importlib.metadata import version

    return version("kvpress")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a record."""
    data = path.read_bytes() if path.exists() else b""
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        yield json.loads(line)


def make_press(name: str, budget: float) -> Any:
    press = getattr(kvpress, f"{name}Press", None)
    if press is None:
        known = sorted(x.removesuffix("Press") for x in dir(kvpress) if x.endswith("Press"))
        raise SystemExit(f"kvpress has no press {name}; it has {', '.join(known)}")
    ratio = 1 - budget
    if name in OF_ANOTHER:
        return press(getattr(kvpress, f"{OF_ANOTHER[name]}Press")(compression_ratio=ratio))
    return press(compression_ratio=ratio)


@torch.no_grad()
def ask(model: Any, tokenizer: Any, press: Any, prompt: dict[str, Any]) -> dict[str, Any]:
    """One answer, as kvpress' own pipeline gives it: the press is active while the context is read, not afterwards."""
    context = torch.tensor([prompt["context_tokens"]], device=model.device)
    cache: Any = transformers.DynamicCache()
    with press(model):
        model.model(input_ids=context, past_key_values=cache)
    count = context.shape[1]
    one = 2 * cache.layers[0].keys.shape[-1] * cache.layers[0].keys.element_size()
    held = sum(
        x.keys.numel() * x.keys.element_size() + x.values.numel() * x.values.element_size() for x in cache.layers
    )
    kept = sum(x.keys.shape[1] * x.keys.shape[2] for x in cache.layers) - count_masked(model)
    full = sum(x.keys.shape[1] for x in cache.layers) * count
    text, tokens, live = write_answer(model, tokenizer, cache, prompt, count, kept / full)
    score = RULES[prompt["rule"]](text, prompt["answers"])
    bytes_ = {"kept_bytes": kept * one, "peak_bytes": full * one, "held_bytes": held}
    return {"answer": text, "score": score, **bytes_, "live": live, "tokens": tokens}


def count_masked(model: Any) -> int:
    """Entries that a press of single heads has masked without freeing them."""
    found = [getattr(layer.self_attn, "masked_key_indices", None) for layer in model.model.layers]
    return sum(len(x[0]) for x in found if x is not None)


def write_answer(
    model: Any, tokenizer: Any, cache: Any, prompt: dict[str, Any], seen: int, share: float
) -> tuple[str, int, float]:
    """The answer, its number of tokens, and the mean share of living memories: what is read after the context is all kept."""
    ends = model.generation_config.eos_token_id
    ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id}
    kept, start, lives = share * seen, seen, []
    new, written, text = prompt["question_tokens"], [], ""
    while len(written) < prompt["most_tokens"] and not is_settled(prompt["rule"], text, prompt["answers"]):
        places = torch.arange(seen, seen + len(new), device=model.device)[None]
        given = torch.tensor([new], device=model.device)
        logits = model(given, past_key_values=cache, position_ids=places, logits_to_keep=1).logits
        seen += len(new)
        lives.append((kept + seen - start) / seen)
        token = int(logits[0, -1].argmax())
        if token in ends:
            break
        new = [token]
        written.append(token)
        text = tokenizer.decode(written, skip_special_tokens=True)
    return text, len(written), sum(lives) / len(lives)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
