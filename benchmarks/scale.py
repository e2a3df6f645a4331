"""A measured cost model of one layer: time and bytes by tokens, living memories and width, and predictions from it.

    python -m benchmarks.scale [--device cuda] [--rounds 2]

One block (mixer and feed-forward, forward + backward, from an empty memory) is timed over a grid of widths, lengths and live
shares. Three terms are fitted to the relative error:

    seconds = a * matrix work + b * pair work + c * chunks

matrix work = 6 * tokens * weights and pair work = 14 * pairs in play * dim are floating point operations, so that 1/a and 1/b
are speeds. A pair of query and memory is in play if the memory is in the live list of the query's chunk. On the CPU, the CPU
time of one thread is measured, which other programs disturb little. Bytes are counted: what autograd stores, and what the
store holds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from expire_span.models.decoder import Block
from expire_span.settings.run import DecoderConfig, ExpireSpanConfig

from .record import save

HEAD_DIM, RAMP, CHUNK = 64, 32, 128
FOREVER = 1e6
WORKLOADS = {"all": (1.0, 0.0), "10%": (0.1, 32.0), "5%": (0.05, 32.0), "2%": (0.02, 32.0)}
FITTED = ("all", "10%", "2%")
"""Shares of memories that live for ever, in the blocks to which the model is fitted."""
GRID = {
    "cpu": [(128, 1024), (128, 4096), (256, 1024), (256, 4096), (512, 1024), (512, 2048)],
    "cuda": [(512, 8192), (512, 32768), (1024, 8192), (1024, 32768), (2048, 8192), (2048, 16384)],
}
"""(dim, tokens) of the timed blocks."""
HELD_OUT = {"cpu": (384, 3072, "5%"), "cuda": (768, 24576, "5%")}
"""(dim, tokens, share) of a block that is not part of the fit, to test the model's prediction."""
DECODE_LIVE = (64, 1024, 4096)


class SpansFromInput(nn.Module):
    """Replaces the span predictor: the span of a memory is the first channel of its hidden state, which the input sets."""

    out_features = 1

    def forward(self, h: Tensor) -> Tensor:
        return h[..., 0].float().unsqueeze(1)


def build_block(dim: int, device: str) -> Block:
    """A block of the modern decoder, but post-norm, so that the mixer gets the spans in the input unchanged."""
    mixer = ExpireSpanConfig(max_span=int(FOREVER), ramp=RAMP)
    config = DecoderConfig.modern(dim=dim, heads=dim // HEAD_DIM, ff_dim=4 * dim, norm="post", mixer=mixer)
    torch.manual_seed(0)
    block = Block(config, 0, None).to(device)
    block.mixer.span_predictor = SpansFromInput()
    return block


def build_input(dim: int, tokens: int, workload: str, device: str) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(1, tokens, dim, generator=draw)
    share, rest = WORKLOADS[workload]
    x[..., 0] = torch.where(torch.rand(1, tokens, generator=draw) < share, FOREVER, rest)
    return x.to(device).requires_grad_()


def count_weights(block: Block) -> int:
    """Number of weights in the matrix products."""
    return sum(p.numel() for p in block.parameters() if p.dim() == 2)


def pairs_in_play(span: Tensor) -> tuple[float, float]:
    """Pairs that the chunks' live lists hold, and pairs that are alive, for a sequence with these spans [T]."""
    born = torch.arange(len(span))
    last = (born + torch.ceil(span + RAMP).long() - 1).clamp_max(len(span) - 1)
    visited = (last // CHUNK - born // CHUNK + 1).sum() * CHUNK
    return float(visited), float((last - born + 1).sum())


# Time


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def best_of(run: Callable[[], Any], device: str, rounds: int) -> float:
    """The shortest time of `rounds` rounds, after a warm-up round that loads and compiles."""
    run()
    seconds = []
    for _ in range(rounds):
        start = clock(device)
        run()
        seconds.append(clock(device) - start)
    return min(seconds)


def step_of(block: Block, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda):
            h, _, aux = block(x, None)
        assert aux.loss is not None
        (h.float().sum() + aux.loss.sum()).backward()

    return step


def check_gradient(device: str) -> None:
    """Check, before timing, that spans given through the input change the attention and get a gradient."""
    block, x = build_block(128, device), build_input(128, 300, "2%", device)
    step_of(block, x)()
    if x.grad is None or not bool(x.grad.isfinite().all()) or not bool((x.grad[..., 0] != 0).any()):
        raise SystemExit("the block gives no finite gradient to its spans; nothing was timed")


def measure_step(dim: int, tokens: int, workload: str, device: str, rounds: int) -> dict[str, Any]:
    block, x = build_block(dim, device), build_input(dim, tokens, workload, device)
    visited, alive = pairs_in_play(x[0, :, 0].detach().cpu())
    row: dict[str, Any] = {"dim": dim, "tokens": tokens, "workload": workload, "live": alive / tokens}
    row |= {"matrix_flop": 6.0 * tokens * count_weights(block), "pair_flop": 14.0 * visited * dim}
    row |= {"chunks": -(-tokens // CHUNK), "seconds": best_of(step_of(block, x), device, rounds)}
    head = f"dim {dim:5} tokens {tokens:6} live for ever {workload:>4}, {row['live']:7.0f} alive"
    print(f"{head} {1e3 * row['seconds']:9.1f} ms", flush=True)
    return row


@dataclass(frozen=True)
class Model:
    """The fitted costs of one layer, forward + backward."""

    matrix_flops: float
    """Speed of the projections and the feed-forward part, in operations per second."""
    pair_flops: float
    """Speed of the attention over pairs in play, in operations per second."""
    chunk_seconds: float

    def seconds(self, tokens: float, weights: float, live: float, dim: float) -> dict[str, float]:
        """The parts of the time of one layer; a chunk's live list holds the living memories and the chunk itself."""
        pairs = tokens * (live + CHUNK)
        return {
            "matrices": 6 * tokens * weights / self.matrix_flops,
            "pairs": 14 * pairs * dim / self.pair_flops,
            "chunks": tokens / CHUNK * self.chunk_seconds,
        }


def fit(rows: list[dict[str, Any]]) -> Model:
    """Least squares of the relative error; a negative chunk cost, which is too small to measure, is set to zero."""
    terms, seconds = terms_of(rows), np.array([r["seconds"] for r in rows])
    costs = solve(terms, seconds)
    if costs[2] < 0:
        costs = [*solve(terms[:, :2], seconds), 0.0]
    return Model(1 / costs[0], 1 / costs[1], costs[2])


def solve(terms: np.ndarray, seconds: np.ndarray) -> list[float]:
    scale = terms.max(0)
    found, *_ = np.linalg.lstsq(terms / scale / seconds[:, None], np.ones(len(seconds)), rcond=None)
    return (found / scale).tolist()


def residuals_of(model: Model, rows: list[dict[str, Any]]) -> list[float]:
    """Predicted divided by measured seconds, minus one."""
    costs = np.array([1 / model.matrix_flops, 1 / model.pair_flops, model.chunk_seconds])
    return (terms_of(rows) @ costs / np.array([r["seconds"] for r in rows]) - 1).tolist()


def terms_of(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.array([[r["matrix_flop"], r["pair_flop"], r["chunks"]] for r in rows])


# Bytes


def saved_bytes(block: Block, x: Tensor, state: Any = None) -> int:
    """Bytes that autograd stores between forward and backward, without weights."""
    own = {p.data_ptr() for p in block.parameters()}
    kept: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = block(x, state)
    del out
    return sum(kept.values())


def measure_bytes(device: str) -> list[dict[str, Any]]:
    """Bytes stored for the backward pass, per token and per carried memory, and held by the two stores, per living memory."""
    rows = []
    for dim in sorted({dim for dim, _ in GRID[device]}):
        block, tokens = build_block(dim, device), 512
        fresh = saved_bytes(block, build_input(dim, tokens, "all", device))
        _, state, _ = block(build_input(dim, 4 * tokens, "all", device), None)
        carried = saved_bytes(block, build_input(dim, tokens, "all", device), state)
        row: dict[str, Any] = {"dim": dim, "kept_per_token": fresh / tokens}
        row |= {"kept_per_memory": (carried - fresh) / (4 * tokens)}
        row |= {"hidden": held(block, dim, device), "kv": held(block.eval(), dim, device)}
        rows.append(row)
        print(
            f"dim {dim:5} kept for backward: {row['kept_per_token']:.0f} B a token, {row['kept_per_memory']:.0f} B a memory"
        )
        for cache in ("hidden", "kv"):
            now = row[cache]
            print(
                f"          {cache:6} store: {now['live']:.0f} live, {now['bytes']:.0f} B, {now['per_live']:.0f} B each"
            )
    return rows


@torch.no_grad()
def held(block: Block, dim: int, device: str) -> dict[str, float]:
    """Peak bytes of the store per living memory, in the steady state, while blocks of 64 tokens stream through a layer."""
    state, live, most = None, 0, 0
    for part in build_input(dim, 4096, "2%", device).split(64, 1):
        part[..., 0].clamp_(max=1024)  # finite spans, so that the number of living memories becomes steady
        _, state, aux = block(part, state)
        alive = int(state["memory"].live().sum())
        live, most = (alive, aux.bytes_held) if aux.bytes_held >= most else (live, most)
    return {"live": live, "bytes": most, "per_live": most / live}


@torch.inference_mode()
def measure_decode(device: str, rounds: int, steps: int = 20) -> list[dict[str, Any]]:
    """Seconds per token and layer, one token at a time, by the number of living memories."""
    rows, dim = [], 512
    block = build_block(dim, device).eval()
    for live in DECODE_LIVE:
        _, state, _ = block(build_input(dim, live, "all", device), None)
        token = build_input(dim, 1, "all", device)

        def run(start: Any = state, token: Tensor = token) -> None:
            now = start
            for _ in range(steps):
                _, now, _ = block(token, now)

        rows.append({"dim": dim, "live": live, "seconds": best_of(run, device, rounds) / steps})
        print(f"decode: dim {dim}, {live:5} live {1e6 * rows[-1]['seconds']:8.0f} us a token and layer")
    return rows


# Predictions


@dataclass(frozen=True)
class Scenario:
    """A model to be trained on long streams."""

    name: str
    layers: int
    dim: int
    live: int = 512
    """Mean living memories per layer."""
    processes: int = 8
    block: int = 4096
    """Tokens of a training block; memory is carried from block to block."""

    @property
    def weights(self) -> int:
        """Weights of one layer: four projections and a feed-forward part of four times the width."""
        return 12 * self.dim**2


SCENARIOS = [Scenario("38M", 12, 512), Scenario("300M", 24, 1024), Scenario("6.4B", 32, 4096, processes=64)]


@dataclass(frozen=True)
class Room:
    """Bytes of memories and tokens per channel of width, from `measure_bytes`."""

    kept_per_token: float
    """Bytes that autograd stores for a token of the block, in float32."""
    kept_per_memory: float
    """The same for a carried memory."""
    slack: float
    """Bytes that a store holds divided by those of the living memories."""

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> Room:
        widest = rows[-1]
        # The 12 bytes are a position (8) and a span (4).
        slack = max(row["hidden"]["per_live"] / (4 * row["dim"] + 12) for row in rows)
        return cls(widest["kept_per_token"] / widest["dim"], widest["kept_per_memory"] / widest["dim"], slack)


def predict(scenario: Scenario, model: Model, room: Room, tokens: int = 1_000_000) -> dict[str, Any]:
    """Predict bytes and traffic by counting, and time by the fitted model. Training in bf16 stores hidden states in float32,
    and inference stores keys and values in bf16: both are 4 bytes per channel."""
    parts = model.seconds(tokens, scenario.weights, scenario.live, scenario.dim)
    dense = model.seconds(tokens, scenario.weights, tokens / 2, scenario.dim)
    total, share = scenario.layers * scenario.weights, (scenario.processes - 1) / scenario.processes
    return {
        "model": scenario.name,
        "weights": total,
        "live": scenario.live,
        "store_mb": 4 * scenario.dim * scenario.live * room.slack / 1e6,
        "store_mb_never_forgetting": 4 * scenario.dim * tokens / 1e6,
        "kept_mb": scenario.dim * (room.kept_per_token * scenario.block + room.kept_per_memory * scenario.live) / 1e6,
        "kept_mb_parallel": scenario.dim * room.kept_per_token * tokens / 1e6,
        "seconds": sum(parts.values()),
        "share": {name: x / sum(parts.values()) for name, x in parts.items()},
        "never_forgetting": sum(dense.values()) / sum(parts.values()),
        "processes": scenario.processes,
        "ddp_gb": 2 * share * total * 4 / 1e9,
        "fsdp_gb": 3 * share * total * 4 / 1e9,
    }


def show(p: dict[str, Any]) -> str:
    where = ", ".join(f"{name} {x:.0%}" for name, x in p["share"].items())
    return (
        f"{p['model']:>5}, one layer, 1M tokens: store {p['store_mb']:.1f} MB (never forgetting "
        f"{p['store_mb_never_forgetting']:,.0f} MB), kept for backward {p['kept_mb']:,.0f} MB a block (parallel "
        f"{p['kept_mb_parallel']:,.0f} MB), {p['seconds']:,.1f} s ({where}; never forgetting {p['never_forgetting']:,.0f}x); "
        f"traffic of all layers a step: DDP {p['ddp_gb']:.2f} GB, FSDP {p['fsdp_gb']:.2f} GB, {p['processes']} processes"
    )


def show_fit(model: Model, residuals: list[float], held_out: float) -> str:
    spread = sorted(abs(r) for r in residuals)
    return (
        f"fit: matrices {model.matrix_flops / 1e9:,.1f} GFLOP/s, pairs {model.pair_flops / 1e9:,.1f} GFLOP/s, "
        f"{1e3 * model.chunk_seconds:.2f} ms a chunk\nrelative residual: median {spread[len(spread) // 2]:.1%}, "
        f"most {spread[-1]:.1%}; of a block that was not fitted {held_out:+.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(GRID), default="cpu")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    args = parser.parse_args()
    device, rounds = args.device, args.rounds
    if device == "cpu":
        torch.set_num_threads(1)
    check_gradient(device)
    steps = [measure_step(*size, workload, device, rounds) for size in GRID[device] for workload in FITTED]
    model = fit(steps)
    other = measure_step(*HELD_OUT[device], device, rounds)
    residuals, (held_out,) = residuals_of(model, steps), residuals_of(model, [other])
    print(show_fit(model, residuals, held_out))
    result = {"steps": steps, "fit": model.__dict__, "residuals": residuals, "held_out": other | {"residual": held_out}}
    result |= {"bytes": measure_bytes(device), "decode": measure_decode(device, rounds)}
    room = Room.of(result["bytes"])
    result |= {"room": room.__dict__, "predictions": [predict(scenario, model, room) for scenario in SCENARIOS]}
    for prediction in result["predictions"]:
        print(show(prediction))
    print("written to", save(f"scale_{device}", result, args.out))


if __name__ == "__main__":
    main()
