"""Does a change of the code change what is learned? `python -m benchmarks.same_losses BEFORE AFTER`.

Each side is a commit or a folder (`.` is the working tree), whose package is copied into a temporary folder. Both train the
first 50 steps of recall, text_tiny, entrances and words on the CPU from the same seed, one comparison of two memory systems for
20 steps, an agent for 6 updates, and a retrofit of a tiny random model for 8 steps; each outcome is printed as soon as it is
known. Two runs agree when every number that both record in metrics.jsonl is the same to the last digit; fields that only one of
them records are named. A run that fails is reported with its last line, and the next one begins. The exit code is 0 when all
agree, and 1 otherwise. `--only NAME` trains one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

STEPS = 50
SHORT = ["--train.log-every", "1", "--train.test-batches", "1", "--train.eval-batches", "1", "--train.device", "cpu"]
RECIPES = ("recall", "text_tiny", "entrances", "words")
RUNS = (*RECIPES, "compare", "agent_corridor_tiny", "retrofit")
CHECKSUM = "checksum"
"""The field of a line with the checksum of the others, which follows them and is not compared."""
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


def list_commands(source: Path, text: Path, runs: Path) -> dict[str, list[str]]:
    """The arguments of every run that is compared, by its name."""
    out = {recipe: _supervised(source, recipe, text) for recipe in RECIPES}
    systems = ["--mixers", "gru,expire_span", "--train.steps", "20"]
    out["compare"] = ["compare", "recall", *systems, *SHORT]
    episodes = ["--train.eval-every", "3", "--train.eval-episodes", "16", "--train.test-episodes", "16"]
    playing = ["--train.steps", "6", *episodes, "--train.envs", "8", "--train.log-every", "1", "--train.device", "cpu"]
    out["agent_corridor_tiny"] = ["train", "agent_corridor_tiny", *playing]
    out = {name: [*args, "--runs-dir", str(runs)] for name, args in out.items()}
    # The ramp and the first tokens, 8 and 4, are the least that lives; they must fit the budget, an eighth of 128.
    sizes = ["--context", "128", "--block", "64", "--batch", "2", "--steps", "8", "--max-span", "128", "--ramp", "8"]
    learning = ["--calibrate", "2", "--eval-every", "4", "--eval-contexts", "2", "--log-every", "1", "--device", "cpu"]
    place = [str(text.with_name("model")), "--data", str(text), "--out", str(runs / "retrofit")]
    return {**out, "retrofit": ["retrofit", *place, *sizes, *learning]}


def _supervised(source: Path, recipe: str, text: Path) -> list[str]:
    data = ["--task.path", str(text)] if recipe == "text_tiny" else []
    steps = ["--train.steps", str(STEPS), "--train.eval-every", str(STEPS)]
    return ["train", name_in(source, recipe), "--name", recipe, *steps, *SHORT, *data]


@dataclass
class Side:
    """One of the two source trees, and the folder in which it trains."""

    name: str
    source: Path
    home: Path

    def start(self, run: str, text: Path) -> subprocess.Popen[str]:
        runs = self.home / run
        self.home.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "expire_span", *list_commands(self.source, text, runs)[run]]
        env = {**os.environ, "PYTHONPATH": str(self.source), "OMP_NUM_THREADS": "1"}
        with (self.home / f"{run}.txt").open("w") as words:
            return subprocess.Popen(command, cwd=self.home, env=env, stdout=words, stderr=words, text=True)

    def fault(self, run: str, code: int) -> str:
        """Why a run failed: the last line that it wrote; empty where it did not fail."""
        lines = (self.home / f"{run}.txt").read_text().strip().splitlines()
        return f"{self.name} ended with code {code}: {lines[-1] if lines else 'without a word'}" if code else ""

    def metrics(self, run: str) -> dict[str, bytes]:
        """The metrics files of a run by their path."""
        runs = self.home / run
        return {str(path.relative_to(runs)): path.read_bytes() for path in sorted(runs.rglob("metrics.jsonl"))}


def read_lines(metrics: bytes) -> list[dict[str, Any]]:
    """The lines of a metrics file; numbers stay the digits that were written, so that NaN equals NaN."""
    digits: Any = dict(parse_float=str, parse_int=str, parse_constant=str)
    return [json.loads(line, **digits) for line in metrics.splitlines()]


def find_difference(before: bytes, after: bytes) -> str | None:
    """The first step and value that differ, in words; None where all values that both have are the same."""
    old_lines, new_lines = read_lines(before), read_lines(after)
    if len(old_lines) != len(new_lines):
        return f"{len(old_lines)} lines before, {len(new_lines)} after"
    for old, new in zip(old_lines, new_lines):
        for name in old.keys() & new.keys() - {CHECKSUM}:
            if old[name] != new[name]:
                return _first_difference(old, new)
        if not {*old} & {*new} - {CHECKSUM, "step"}:
            return f"step {old.get('step')}: no value is in both"
    return None if old_lines else "no line on either side"


def _first_difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    name = next(name for name in old if name in new and old[name] != new[name])
    return f"step {old.get('step')}, {name}: {old[name]} before, {new[name]} after"


def find_fields(before: bytes, after: bytes) -> str:
    """The fields that only one side has, in words."""
    old, new = ({name for line in read_lines(x) for name in line} for x in (before, after))
    parts = [(old - new, "before"), (new - old, "after")]
    return "".join(f"; only {side}: {', '.join(sorted(names))}" for names, side in parts if names)


def compare_metrics(before: dict[str, bytes], after: dict[str, bytes]) -> tuple[bool, list[str]]:
    """Whether two runs agree, and a sentence for each of their metrics files."""
    if not before and not after:
        return False, ["DIFFERENT: neither side has metrics"]
    out, same = [], True
    for path in sorted({**before, **after}):
        old, new = before.get(path, b""), after.get(path, b"")
        fault = find_difference(old, new)
        same = same and fault is None
        out.append(f"{path}: {'the same' if fault is None else f'DIFFERENT at {fault}'}{find_fields(old, new)}")
    return same, out


def compare_run(run: str, sides: list[Side], text: Path) -> bool:
    """Train one run on both sides at once and print the outcome; whether they agree."""
    started: list[subprocess.Popen[str]] = []
    try:
        for side in sides:
            started.append(side.start(run, text))
        faults = [side.fault(run, process.wait()) for side, process in zip(sides, started)]
    finally:
        for process in started:
            process.kill()  # does nothing to one that has ended
            process.wait()
    if any(faults):
        same, lines = False, ["FAILED " + fault for fault in faults if fault]
    else:
        same, lines = compare_metrics(*(side.metrics(run) for side in sides))
    for line in lines:
        print(f"{run:<20} {line}", flush=True)
    return same


def check_out(side: str, folder: Path) -> Path:
    """The package of one side, copied, so that the folder can be edited meanwhile and git has nothing to forget."""
    folder.mkdir()
    if Path(side).is_dir():
        shutil.copytree(Path(side) / "expire_span", folder / "expire_span")
        return folder
    packed = folder / "package.tar"
    top = subprocess.run(["git", "rev-parse", "--show-toplevel"], check=True, capture_output=True, text=True)
    pack = ["git", "-C", top.stdout.strip(), "archive", "--output", str(packed), side, "expire_span"]
    done = subprocess.run(pack, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{side} is neither a folder nor a commit: {done.stderr.strip()}")
    shutil.unpack_archive(packed, folder)
    return folder


def _end(*_: object) -> NoReturn:
    raise SystemExit("interrupted; what is printed above is known")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--only", choices=RUNS, help="train this one alone")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text.txt")
        given = {"before": args.before, "after": args.after}
        sides = [Side(s, check_out(x, folder / f"{s}-source"), folder / s) for s, x in given.items()]
        runs = [args.only] if args.only else RUNS
        if "retrofit" in runs:
            write_model(folder / "model")
        agree = [compare_run(run, sides, folder / "text.txt") for run in runs]
    return 0 if all(agree) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)  # so that the folder is removed and both trainings end
    sys.exit(main())
