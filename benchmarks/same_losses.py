"""Does a change of the code change what is learned? `python -m benchmarks.same_losses BEFORE AFTER`.

Each side is a commit, checked out into a temporary folder, or a folder (`.` is the working tree). Both train the first 50 steps
of recall, text_tiny, entrances and words on the CPU from the same seed, one comparison of two memory systems for 20 steps, an
agent for 6 updates, and a retrofit of a tiny random model for 8 steps. The losses agree when every metrics.jsonl is the same
byte for byte. The exit code is 0 then, and 1 otherwise. `--only NAME` trains one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

STEPS = 50
SHORT = ["--train.log-every", "1", "--train.test-batches", "1", "--train.eval-batches", "1", "--train.device", "cpu"]
RECIPES = ("recall", "text_tiny", "entrances", "words")
OLD_NAMES = {"text_tiny": "text_small"}
"""What a recipe was called in the commits before it got its name."""


def write_text(path: Path, size: int = 400_000) -> None:
    """Write a text of repeating words, which is always the same."""
    draw = random.Random(7)
    words = [bytes(draw.choices(range(97, 123), k=draw.randint(2, 9))).decode() for _ in range(300)]
    path.write_text(" ".join(draw.choice(words) for _ in range(size // 6)))


def name_in(source: Path, recipe: str) -> str:
    """What a recipe is called in a source tree."""
    places = [*(source / "expire_span").glob("*recipes.py"), *(source / "expire_span" / "recipes").glob("*.py")]
    known = any(f"def {recipe}(" in place.read_text() for place in places)
    return recipe if known else OLD_NAMES.get(recipe, recipe)


def write_model(folder: Path) -> Path:
    """Write a tiny random Llama, whose tokens are bytes, as a folder that Hugging Face's library reads."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    shape = dict(vocab_size=len(letters), hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, head_dim=8))
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.dim() == 2 and "embed" not in name:
                x.mul_(3)  # so that attention matters, as in a trained model
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def list_commands(source: Path, text: Path, runs: Path) -> list[list[str]]:
    """The arguments of every run that is compared."""
    out = []
    for recipe in RECIPES:
        data = ["--task.path", str(text)] if recipe == "text_tiny" else []
        steps = ["--train.steps", str(STEPS), "--train.eval-every", str(STEPS)]
        own = [name_in(source, recipe), "--name", recipe]
        out.append(["train", *own, *steps, *SHORT, *data, "--runs-dir", str(runs)])
    systems = ["--mixers", "gru,expire_span", "--train.steps", "20"]
    out.append(["compare", "recall", *systems, *SHORT, "--runs-dir", str(runs)])
    agent = [
        "--train.steps",
        "6",
        "--train.eval-every",
        "3",
        "--train.eval-episodes",
        "16",
        "--train.test-episodes",
        "16",
    ]
    agent += ["--train.envs", "8", "--train.log-every", "1", "--train.device", "cpu"]
    out.append(["train", "agent_corridor_tiny", *agent, "--runs-dir", str(runs)])
    sizes = ["--context", "128", "--block", "64", "--batch", "2", "--steps", "8", "--max-span", "128", "--ramp", "16"]
    learning = ["--calibrate", "2", "--eval-every", "4", "--eval-contexts", "2", "--log-every", "1", "--device", "cpu"]
    model = text.with_name("model")
    out.append(["retrofit", str(model), "--data", str(text), *sizes, *learning, "--out", str(runs / "retrofit")])
    return out


def run_side(source: Path, text: Path, runs: Path, only: str) -> dict[str, bytes]:
    """Train with the package in `source` everything, or what a command names; returns the metrics files by their path."""
    env = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    for args in list_commands(source, text, runs):
        if only and only not in args:
            continue
        command = [sys.executable, "-m", "expire_span", *args]
        done = subprocess.run(command, cwd=runs.parent, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{source}: {' '.join(args)} ended with code {done.returncode}: {done.stderr.strip()}")
    return {str(path.relative_to(runs)): path.read_bytes() for path in sorted(runs.rglob("metrics.jsonl"))}


def find_difference(before: bytes, after: bytes) -> str | None:
    """The first step and value that differ, in words; None where the bytes are the same."""
    if before == after:
        return None
    pairs = list(zip(before.splitlines(), after.splitlines()))
    for old, new in ((json.loads(a), json.loads(b)) for a, b in pairs):
        for name in {**old, **new}:
            if old.get(name) != new.get(name):
                return f"step {old.get('step')}, {name}: {old.get(name)} before, {new.get(name)} after"
    return f"{len(before.splitlines())} lines before, {len(after.splitlines())} after"


def check_out(side: str, folder: Path) -> Path:
    """The source tree of one side; that of a folder is copied, so that the folder can be edited meanwhile."""
    if Path(side).is_dir():
        shutil.copytree(Path(side) / "expire_span", folder / "expire_span")
        return folder
    subprocess.run(["git", "worktree", "add", "--detach", str(folder), side], check=True, capture_output=True)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--only", default="", help="recall, text_tiny, ..., compare, agent_corridor_tiny or retrofit")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text.txt")
        write_model(folder / "model")
        sides = {"before": args.before, "after": args.after}
        try:
            sources = {side: check_out(commit, folder / f"{side}-source") for side, commit in sides.items()}
            for side in sides:
                (folder / side).mkdir()
            with ThreadPoolExecutor(2) as pool:
                given = {s: (sources[s], folder / "text.txt", folder / s / "runs", args.only) for s in sides}
                jobs = {side: pool.submit(run_side, *parts) for side, parts in given.items()}
                before, after = (jobs[side].result() for side in ("before", "after"))
        finally:
            for side in sides:
                remove = ["git", "worktree", "remove", "--force", str(folder / f"{side}-source")]
                subprocess.run(remove, capture_output=True)
    return show_outcome(before, after)


def show_outcome(before: dict[str, bytes], after: dict[str, bytes]) -> int:
    different = 0
    for path in sorted({**before, **after}):
        fault = find_difference(before.get(path, b""), after.get(path, b""))
        different += fault is not None
        print(f"{path:<50}{'the same' if fault is None else f'DIFFERENT at {fault}'}")
    return 1 if different or not before else 0


if __name__ == "__main__":
    sys.exit(main())
