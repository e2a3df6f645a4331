"""A million tokens on one device, with the gradients of the whole sequence: `python -m benchmarks.million [--smoke]`.

One training step of the 12 x 512 model reads 1,048,576 tokens in pieces (`backward_in_pieces`). Beside it, the same model with
full attention by torch's fused kernels recomputes each block in the backward pass, at lengths that double while they fit into
the time. What such gradients teach, `benchmarks.far_cue` shows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from expire_span.models.decoder import Decoder
from expire_span.models.systems.full import FullConfig
from expire_span.ops.context import backward_in_pieces
from expire_span.settings.run import DecoderConfig, ExpireSpanConfig, TrainConfig
from expire_span.train.optimizers import build_optimizers
from expire_span.train.scorer import Scorer
from expire_span.train.step import Pass, TrainStep

from .far_cue import MILLION
from .record import save
from .timing import GIB, Deadline, guarded, synchronize


@dataclass(frozen=True)
class Spans:
    """Lifetimes of an untrained model: its predictor's weights are random, so that lifetimes have a long tail."""

    name: str
    typical: float
    """Median span, in tokens."""
    tail: float
    """Standard deviation of the spans' logits."""


SPANS = [Spans("hundreds alive", 64.0, 2.0), Spans("thousands alive", 256.0, 2.5)]


@dataclass(frozen=True)
class Size:
    """How large all parts of the benchmark are."""

    model: dict[str, Any] = field(default_factory=lambda: dict(dim=512, ff_dim=2048, layers=12, heads=8))
    tokens: int = MILLION
    pieces: tuple[int, int] = (16, 64)
    full_from: int = MILLION // 16
    precision: str = "bf16"


SMOKE = Size(dict(dim=16, ff_dim=16, layers=2, heads=2), 2048, (4, 8), 256, "fp32")


# The step


def build_expiring(size: Size, spans: Spans, device: torch.device) -> Decoder:
    torch.manual_seed(0)
    share = spans.typical / size.tokens
    mixer = ExpireSpanConfig(max_span=size.tokens, ramp=64, initial_span=share)
    decoder = Decoder(DecoderConfig.modern(**size.model, mixer=mixer)).to(device)
    for block in decoder.layers():  # inputs are normalised: each channel has the variance 1
        nn.init.normal_(block.mixer.span_predictor.weight, std=spans.tail / size.model["dim"] ** 0.5)  # type: ignore[union-attr]
    return decoder


def draw_text(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (1, count + 1), device=device, generator=torch.Generator(device).manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def timed_step(decoder: Decoder, step: Callable[[], Any], precision: Any, repeat: int) -> tuple[dict[str, Any], Any]:
    """Seconds of whole training steps, optimizer and clipping included, and what `step` returned last."""
    optimizers = build_optimizers(decoder, TrainConfig(lr=1e-5, precision=precision))
    cuda, seconds, found = next(decoder.parameters()).is_cuda, [], None
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeat):
        synchronize()
        start = time.perf_counter()
        found = step()
        nn.utils.clip_grad_norm_(decoder.parameters(), 0.3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / GIB if cuda else None
    return {"seconds": min(seconds), "all_seconds": seconds, "peak_gib": peak}, found


def expiring_step(size: Size, spans: Spans, pieces: int, tokens: int, device: torch.device) -> dict[str, Any]:
    """The second of two steps: the first compiles kernels."""
    decoder = build_expiring(size, spans, device)
    scorer = Scorer(decoder, size.precision).train()  # type: ignore[arg-type]
    step, (x, y) = TrainStep(scorer, Tensor.backward, graphs=False, pieces=pieces), draw_text(tokens, device)
    scale, weight = torch.tensor(1 / tokens, device=device), torch.tensor(1e-6, device=device)
    given = Pass(x, y, torch.ones_like(y, dtype=torch.bool), None, None, scale, weight, False)
    row, (sums, _, _) = timed_step(decoder, lambda: step(given), size.precision, 2)
    loss, live = float(sums["nll"]) / tokens, sums["live"]
    return {"spans": spans.name, "tokens": tokens, "pieces": pieces, **row, "loss": loss, "live": live.tolist()}


def check_gradients(size: Size, device: torch.device, tokens: int = 256) -> float:
    """The largest difference of a gradient read in pieces from that of the whole, as a share of the largest gradient. A spare
    row of memories lives across all pieces."""
    worst, (x, y) = 0.0, draw_text(tokens, device)
    decoder = build_expiring(size, SPANS[1], device)

    def loss_of(n: int, of: int) -> Tensor:
        logits, _, aux = decoder(x.chunk(of, 1)[n], keep="nothing")
        return F.cross_entropy(logits.flatten(0, 1), y.chunk(of, 1)[n].flatten()) / of + 1e-4 / of * aux.loss

    found: list[list[Tensor]] = []
    for pieces in (1, 8):
        backward_in_pieces(lambda n, of=pieces: loss_of(n, of), pieces)
        found.append([p.grad for p in decoder.parameters() if p.grad is not None])
        decoder.zero_grad()
    for a, b in zip(*found, strict=True):
        worst = max(worst, float((a - b).abs().max() / a.abs().max()))
    return worst


def full_step(size: Size, tokens: int, device: torch.device) -> dict[str, Any]:
    """Full attention: each block is recomputed from its input in the backward pass."""
    torch.manual_seed(0)
    decoder = Decoder(DecoderConfig.modern(**size.model, mixer=FullConfig())).to(device)
    x, y = draw_text(tokens, device)

    def step() -> None:
        bf16 = size.precision == "bf16"
        with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
            h = decoder.embed(x)
            for block in decoder.layers():
                h = checkpoint(lambda h, b=block: b(h, None, keep="nothing")[0], h, use_reentrant=False)
            logits = decoder.head(decoder.backbone.norm(h))
        F.cross_entropy(logits.float().flatten(0, 1), y.flatten()).backward()

    row, _ = timed_step(decoder, step, size.precision, 2 if tokens == size.full_from else 1)
    return {"tokens": tokens, **row}


def cudnn_alone(size: Size, device: torch.device) -> Any:
    """Full attention by cuDNN's kernels on a GPU that has them."""
    if device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


def full_steps(size: Size, device: torch.device, seconds: float, note: Callable[[dict[str, Any]], None]) -> None:
    """Lengths that double, up to a million tokens, while the next one is expected to fit into the time."""
    tokens, deadline = size.full_from, Deadline(seconds)
    while tokens <= size.tokens:
        with cudnn_alone(size, device):
            row = full_step(size, tokens, device)
        note(row)
        tokens *= 2
        if 4.2 * row["seconds"] > deadline.left:
            break


def full_seconds(full: list[dict[str, Any]], tokens: int) -> float:
    """Seconds of full attention, with a linear and a square term from the last two lengths, which differ by a factor of two."""
    last = full[-1]
    if len(full) < 2 or last["tokens"] >= tokens:
        return last["seconds"] * (tokens / last["tokens"]) ** 2
    square = max(last["seconds"] / 2 - full[-2]["seconds"], 0.0)
    times = tokens / full[-2]["tokens"]
    return (full[-2]["seconds"] - square) * times + square * times**2


def compare(rows: list[dict[str, Any]], full: list[dict[str, Any]], tokens: int) -> list[str]:
    """How much faster each of our steps is than full attention at the same length, measured or extrapolated."""
    if not full:
        return []
    last, whole = full[-1], full_seconds(full, tokens)
    how = "measured" if last["tokens"] == tokens else f"extrapolated from {last['tokens']:,} tokens"
    said = []
    for row in rows:
        if row["tokens"] == last["tokens"] != tokens:
            ratio = last["seconds"] / row["seconds"]
            said.append(f"{row['spans']}, {row['tokens']:,} tokens: {ratio:.1f} x full attention (measured)")
        if row["tokens"] == tokens:
            said.append(
                f"{row['spans']}, {row['pieces']} pieces: {whole / row['seconds']:.1f} x full attention ({how})"
            )
    return said


# The whole


def tasks_of(size: Size) -> list[tuple[Spans, int, int]]:
    """What to time, the most important first: spans, pieces and tokens."""
    pieces, more = size.pieces
    found = [(spans, pieces, size.tokens) for spans in SPANS] + [(spans, pieces, size.tokens // 2) for spans in SPANS]
    return found + [(spans, more, size.tokens) for spans in SPANS]


def run(size: Size, device: torch.device, seconds: float, folder: Path, parts: set[str]) -> Path:
    result: dict[str, Any] = {"steps": [], "full": [], "errors": {}}
    errors, whole = result["errors"], Deadline(seconds)

    def note(name: str, row: dict[str, Any]) -> None:
        result[name].append(row)
        print(name, {k: v for k, v in row.items() if k != "live"}, _mean(row.get("live")), flush=True)
        save("million", result, folder)

    if "steps" in parts:
        small = replace(size, tokens=4096, model=size.model | {"layers": 2}, precision="fp32")
        torch.set_float32_matmul_precision("highest")
        result["gradient_difference"] = guarded(errors, "gradients", lambda: check_gradients(small, device))
        torch.set_float32_matmul_precision("high")
        print("gradients in pieces differ from those of the whole by", result["gradient_difference"], flush=True)
        for spans, pieces, tokens in tasks_of(size):
            task = (spans, pieces, tokens)
            row = guarded(errors, str(task), lambda t=task: expiring_step(size, *t, device), whole.part(0.35))
            if row is not None:
                note("steps", row)
    if "full" in parts:
        guarded(errors, "full", lambda: full_steps(size, device, 0.32 * seconds, lambda row: note("full", row)), whole)
    result["said"] = compare(result["steps"], result["full"], size.tokens)
    print(*result["said"], *(f"{name}: {error}" for name, error in errors.items()), sep="\n")
    return save("million", result, folder)


def _mean(live: list[float] | None) -> str:
    return "" if not live else f"{sum(live) / len(live):.0f} alive a layer on average"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    parser.add_argument("--seconds", type=float, default=170.0)
    parser.add_argument("--parts", nargs="+", default=["steps", "full"])
    parser.add_argument("--smoke", action="store_true", help="tiny, on any machine: tests the benchmark itself")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() and not args.smoke:
        raise SystemExit("benchmarks.million needs a CUDA GPU and found none; --smoke runs tiny sizes anywhere")
    device = torch.device("cuda" if torch.cuda.is_available() and not args.smoke else "cpu")
    torch.set_float32_matmul_precision("high")
    size = SMOKE if args.smoke else Size()
    print("written to", run(size, device, args.seconds, args.out, set(args.parts)))


if __name__ == "__main__":
    main()
