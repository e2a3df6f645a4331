"""What a long sequence costs on many devices: bytes sent, time and memory of context parallelism, from measured spans.

    python -m benchmarks.devices [--picture docs/img/scale_devices.png]

The lifetimes are those that the shipped model gives to a stretch of text. A memory is sent once to each rank that can still see
it, so that what a rank sends follows from lifetimes alone (`count_sends`, exact; tests/project/test_scale.py compares it with
what two and four processes send). Beside it stands a ring that passes keys and values of each shard to every later rank.
The time of attention is fitted to what `benchmarks.attention` measured on a GPU and checked with rows that took no part in the
fit; the speed of matrix products and of the network are assumptions, and options.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expire_span import SHIPPED, load_decoder
from expire_span.ops.rule import lifetime

from .record import save
from .scale import CHUNK, solve

SIZES = [10**6, 10**7, 10**8]
DEVICES = [8, 16, 32, 64, 128, 256, 512, 1024]
KEPT_PER_CHANNEL = 85
"""Bytes that autograd stores for a token and channel of one layer, in float32 (docs/scale.md, measured by benchmarks.scale)."""


# What is sent: exact counts


def count_sends(life: Tensor, size: int) -> Tensor:
    """Number of memories that each of `size` ranks sends, for lifetimes [.., T] in steps of a sequence of T tokens."""
    count = life.shape[-1]
    shard, pos = count // size, torch.arange(count)
    last = (pos + life - 1).clamp(max=count - 1)
    sends = (last // shard - pos // shard).clamp_min(0)
    return sends.unflatten(-1, (size, shard)).sum(-1).reshape(-1, size).sum(0)


def bytes_of_memory(heads: int, dim: int, element: int, spans: int = 1, span_element: int = 4) -> tuple[int, int]:
    """Bytes of one memory on its way, and of its gradient on the way back: keys, values and spans, and there a position."""
    pair = 2 * heads * dim * element + spans * span_element
    return pair + 8, pair


def count_headers(rows: int, batch: int, size: int) -> int:
    """Bytes a rank sends in one call beside the memories: what all must agree on, positions of queries, numbers of memories."""
    from expire_span.ops.context.group import _FACTS

    return (8 * (1 + len(_FACTS)) + 8 * 2 * batch + 8 * rows) * (size - 1)


# The time of attention on a GPU


@dataclass(frozen=True)
class Measured:
    """One timed workload of `benchmarks.attention`, forward + backward."""

    name: str
    channels: float
    """Queries times width."""
    pair_flop: float
    """14 operations for each channel of a pair of query and memory that is in play."""
    seconds: float


def read_attention(path: Path, part: str, system: str = "ours") -> list[Measured]:
    """The workloads of one part of the record; seconds are those of the device alone where they were measured."""
    found = []
    for row in json.loads(path.read_text())[part]:
        if row["system"] != system or "both" not in row:
            continue
        batch, heads, tokens, dim = (int(x) for x in row["workload"].split()[0].split(","))
        channels, live = float(batch * tokens * heads * dim), row["alive"] * (tokens + 1) / 2
        played = live + CHUNK if system == "ours" else live
        seconds = row.get("graph", row["both"])["median"] / 1e3
        found.append(Measured(row["workload"], channels, 14 * channels * played, seconds))
    return found


@dataclass(frozen=True)
class Attention:
    """Costs of attention, forward + backward: seconds = query_seconds * queries * width + pair_flop / pair_flops."""

    query_seconds: float = 2.9e-11
    pair_flops: float = 3.3e14
    dense_flops: float = 4.4e14
    """Speed of full attention, for the ring."""

    def seconds(self, channels: float, pair_flop: float) -> float:
        return self.query_seconds * channels + pair_flop / self.pair_flops

    def error(self, row: Measured) -> float:
        """Predicted divided by measured seconds, minus one."""
        return self.seconds(row.channels, row.pair_flop) / row.seconds - 1


def read_anchors(path: Path, system: str = "ours") -> list[Measured]:
    """The anchors with heads of 64 numbers."""
    return [row for row in read_attention(path, "anchors", system) if row.name.split()[0].endswith(",64")]


def fit_attention(path: Path) -> Attention:
    """Fitted to the anchors by the relative error; full attention has the best speed of cuDNN among them."""
    rows = read_anchors(path)
    terms = np.array([[row.channels, row.pair_flop] for row in rows])
    query, pair = solve(terms, np.array([row.seconds for row in rows]))
    return Attention(query, 1 / pair, max(row.pair_flop / row.seconds for row in read_anchors(path, "cudnn")))


# Predictions


@dataclass(frozen=True)
class Network:
    """A model and a device, as far as the cost depends on them."""

    layers: int = 24
    dim: int = 1024
    kv_heads: int = 16
    element: int = 2
    """Bytes of a number in attention; 2 is bfloat16."""
    matrix_flops: float = 4e14
    bytes_per_second: float = 5e10
    attention: Attention = Attention()

    @property
    def weights(self) -> int:
        """Weights of a layer."""
        return 12 * self.dim**2


def predict(net: Network, live: float, tokens: int, devices: int) -> dict[str, Any]:
    """Costs of one forward and backward pass of one row, for each device.

    live: mean number of living memories a query. It is also the mean number of memories that a rank sends in each layer,
    whatever the length of its shard: of fewer memories, more outlive a shorter shard. Only the last rank sends none.
    """
    shard, head_dim = tokens / devices, net.dim // net.kv_heads
    forward, back = bytes_of_memory(net.kv_heads, head_dim, net.element)
    sent = net.layers * live * (forward + back) * (devices - 1) / devices
    headers = net.layers * count_headers(1, 1, devices)
    ring = net.layers * shard * 2 * (2 * net.kv_heads * head_dim * net.element) * (devices - 1) / 2
    matrices, channels, cost = 6 * shard * net.weights / net.matrix_flops, shard * net.dim, net.attention
    compute = net.layers * (matrices + cost.seconds(channels, 14 * channels * (live + CHUNK)))
    dense = net.layers * (matrices + 14 * channels * tokens / 2 / cost.dense_flops)
    found: dict[str, Any] = {"tokens": tokens, "devices": devices, "shard": shard, "live": live}
    found |= {"sent_mb": (sent + headers) / 1e6, "headers_mb": headers / 1e6, "ring_mb": ring / 1e6}
    found |= {"seconds": compute, "sending": (sent + headers) / net.bytes_per_second}
    found |= {"ring_seconds": dense, "ring_sending": ring / net.bytes_per_second}
    kept = net.layers * (shard * KEPT_PER_CHANNEL / 2 + live * 18 / 2) * net.dim
    return found | {"kept_gb": kept / 1e9}


@torch.no_grad()
def measure_lives(tokens: int = 16384) -> list[Tensor]:
    """Lifetimes [rows, T] of each layer of the shipped model, on the text that ships with it, repeated to this length."""
    decoder = load_decoder()
    text = (SHIPPED / "sample.txt").read_bytes()
    x = torch.tensor(list((text * (tokens // len(text) + 1))[:tokens])).view(1, -1)
    _, _, aux = decoder(x, keep="nothing")
    ramps = [block.mixer.span_predictor.ramp for block in decoder.layers()]
    spans = [layer.span for layer in aux.layers]
    return [lifetime(span, ramp).reshape(-1, tokens) for span, ramp in zip(spans, ramps) if span is not None]


def mean_live(lives: list[Tensor]) -> float:
    """Mean number of living memories a row and layer: the mean lifetime, since one memory is born in every step."""
    return float(torch.stack([life.double().mean() for life in lives]).mean())


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bytes that a device sends in a pass, by the number of devices."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for tokens, shade in zip(SIZES, ("0.7", "0.45", "0.1")):
        line = [row for row in rows if row["tokens"] == tokens]
        axes.plot(DEVICES, [row["ring_mb"] for row in line], "--", color=shade, label=f"ring, {tokens / 1e6:g}M tokens")
    line = [row for row in rows if row["tokens"] == SIZES[0]]
    axes.plot(DEVICES, [row["sent_mb"] for row in line], "o-", color="C0", label="expiring, any number of tokens")
    axes.set(xscale="log", yscale="log", xlabel="devices that share a row", ylabel="MB that a device sends in a pass")
    axes.set_xticks(DEVICES, [str(n) for n in DEVICES])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def show(row: dict[str, Any]) -> str:
    sizes = f"{row['tokens'] / 1e6:6g}M tokens, {row['devices']:5} devices, kept {row['kept_gb']:8.1f} GB"
    ours = f"sends {row['sent_mb']:6.1f} MB in {1e3 * row['sending']:4.1f} ms, computes {row['seconds']:6.2f} s"
    ring = f"ring {row['ring_mb']:11,.0f} MB in {row['ring_sending']:6.2f} s, computes {row['ring_seconds']:9.1f} s"
    return f"{sizes}: {ours}; {ring}"


def show_check(cost: Attention, record: Path) -> None:
    """Print the fitted costs, and how far they are off where they were fitted and where they were not."""
    errors = sorted(abs(cost.error(row)) for row in read_anchors(record))
    speeds = f"{cost.pair_flops / 1e12:.0f} TFLOP/s for pairs in play, {1e12 * cost.query_seconds:.0f} ps a query and channel"
    print(f"attention: {speeds}, full attention {cost.dense_flops / 1e12:.0f} TFLOP/s")
    print(f"relative error of {len(errors)} fitted rows: median {errors[len(errors) // 2]:.1%}, most {errors[-1]:.1%}")
    for row in read_attention(record, "linear")[-1:]:
        print(f"not fitted: {row.name}: measured {1e3 * row.seconds:.0f} ms, predicted {cost.error(row):+.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    net = Network()
    for name in ("layers", "dim", "kv_heads"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(net, name))
    for name in ("matrix_flops", "bytes_per_second"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(net, name))
    parser.add_argument("--attention", type=Path, default=Path("docs/data/attention-h200.json"))
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    args = vars(parser.parse_args())
    picture, out, record = args.pop("picture"), args.pop("out"), args.pop("attention")
    net = replace(net, **args, attention=fit_attention(record))
    show_check(net.attention, record)
    lives = measure_lives()
    live, border = mean_live(lives), [int(count_sends(life, 8)[:-1].sum()) / 7 / len(life) for life in lives]
    print(f"alive, by layer: {', '.join(f'{float(x.double().mean()):.0f}' for x in lives)}; mean {live:.0f}")
    print(f"memories sent over a border of 8 shards, a row and layer: {', '.join(f'{x:.0f}' for x in border)}")
    rows = [predict(net, live, tokens, devices) for tokens in SIZES for devices in DEVICES]
    for row in rows:
        print(show(row))
    print("written to", save("devices", {"network": asdict(net), "live": live, "border": border, "rows": rows}, out))
    if picture is not None:
        draw(rows, picture)


if __name__ == "__main__":
    main()
