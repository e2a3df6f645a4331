"""`expire-span retrofit`: trains an adapter."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from expire_span.checks import Seed
from expire_span.disk.files import read_json
from expire_span.errors import UserError
from expire_span.runs import RunFolder, check_name, check_new
from expire_span.settings.retrofit import DistillConfig, RetrofitConfig, RetrofitTask

from .parsing import PROGRAM, parse


@dataclass(frozen=True)
class RetrofitCommand:
    """Teach a frozen Hugging Face model what it can forget; writes an adapter folder."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder, .gguf file or hub name of a causal language model."""
    data: Path
    """Text to learn from: a file, or a folder of .txt files."""
    out: Path = Path("runs/retrofit")
    """Run folder; the adapter is its subfolder adapter. An interrupted run goes on with expire-span resume."""
    expiry: Annotated[RetrofitConfig, tyro.conf.arg(name="")] = field(
        default_factory=lambda: RetrofitConfig(keep_first=4)
    )
    learning: Annotated[DistillConfig, tyro.conf.arg(name="")] = field(
        default_factory=lambda: DistillConfig(budget=0.125, calibrate=8, mixture="auto")
    )
    dtype: Literal["fp32", "bf16", "fp16", "int8", "nf4"] = "fp32"
    """Precision of the model; int8 and nf4 need bitsandbytes. The predictors are always float32."""
    seed: Seed = 0
    """Seed of the choice of contexts."""


def run_retrofit(args: list[str]) -> int:
    args = _one_budget(args)
    command = parse(RetrofitCommand, args, f"{PROGRAM} retrofit")
    check_name(command.out.name)
    check_new(command.out, "--out")
    check_text(command.data)
    expiry = command.expiry
    command.learning.check_budget(expiry.ramp, expiry.keep_first, expiry.max_span)
    from expire_span.train.distill import begin, check_extras

    check_extras(command.learning)
    task = RetrofitTask(model=command.model, data=str(command.data), dtype=command.dtype)
    run = begin(task, command.expiry, command.learning, command.out, seed=command.seed)
    print(tell(run, run.read_result() or {}))
    print(tell_next(run, command.model))
    return 0


def check_text(path: Path) -> None:
    """Refuse a place without text, before a model is loaded."""
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise UserError(f"no text at {path}: give a text file, or a folder of .txt files")
    if not any(x.is_dir() or x.stat().st_size for x in files):
        raise UserError(f"the text at {path} is empty (.txt files: {len(files)}); give files with text in them")


def tell(run: RunFolder, result: dict[str, Any]) -> str:
    """The result of a finished run in a sentence."""
    return (
        f"{run.path / 'adapter'}: {result['live_at_end']:.0f} living memories per head at {result['context']} tokens "
        f"(budget {result['target']:.0f}), KL to the base model {result['score']:.4f} nats a token"
    )


def tell_next(run: RunFolder, model: str) -> str:
    """What to type now: a chat where the model's contexts begin with a user's turn, else a text to go on from."""
    begins = read_json(run.path / "adapter" / "adapter.json").get("begins_with") or {}
    adapter, model = shlex.quote(str(run.path / "adapter")), shlex.quote(model)
    talk, end = ("chat", "") if begins.get("context") != begins.get("text") else ("generate", " --prompt 'The old'")
    return (
        f"next: {PROGRAM} verify {adapter}\n"
        f"      {PROGRAM} view {adapter}\n"
        f"      {PROGRAM} {talk} {model} --adapter {adapter}{end}"
    )


def _one_budget(args: list[str]) -> list[str]:
    """A budget in tokens or bytes replaces the default fraction."""
    words = {word.split("=")[0].replace("_", "-") for word in args}
    if words & {"--budget-tokens", "--budget-bytes"} and "--budget" not in words:
        return [*args, "--budget", "None"]
    return args
