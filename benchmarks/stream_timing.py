"""The measurements of `benchmarks.decode`: streams, plain decoders, points far into a stream, prompts, and decoding on a
CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expire_span.checkpoint import load_decoder
from expire_span.models.decoder import Decoder
from expire_span.settings.run import DecoderConfig
from expire_span.stream import Sampling, Stream
from expire_span.stream.interface import Prefilled
from expire_span.stream.prompts import read_blocks

from .plain_decoder import PlainDecoder
from .timing import Deadline, spread, synchronize

CPU_GOAL = 1.3


REACHES = (700.0, 500.0, *(2.0**n for n in range(3, 9)))
"""Mean spans of the heads of a layer with random weights, in steps."""
SHARES = (0.7, 0.14, 0.06, 0.04, 0.02, 0.02, 0.01, 0.01)
"""How the live memories of a trained layer are distributed over its heads, about."""


def build(config: DecoderConfig, device: torch.device, live: Sequence[float] = ()) -> Decoder:
    """A decoder with random weights whose spans differ between tokens and, if there is a span per head, between heads.

    live: mean live memories per head of each layer, distributed over its heads about as training does; none: the same in all.
    """
    torch.manual_seed(0)
    decoder = Decoder(config).to(device).eval()
    if device.type == "cuda":
        decoder = decoder.to(torch.bfloat16)
    for layer, block in enumerate(decoder.layers()):
        predictor: Any = block.mixer.span_predictor
        predictor.float()  # bfloat16 is too coarse for spans
        scale = config.mixer.temperature / config.dim**0.5
        torch.nn.init.normal_(predictor.weight, std=1.5 * scale)
        if not config.mixer.reach.learned:
            torch.nn.init.constant_(predictor.bias, -1.3)
            continue
        heads = len(predictor.reach)
        reaches = REACHES[:heads]
        if live:
            reaches = tuple(share * live[layer] * heads - config.mixer.ramp for share in SHARES[:heads])
        with torch.no_grad():
            for n, steps in enumerate(reaches):
                low = predictor.min_span if n < predictor.out_features else predictor.shortest_shared
                predictor.reach[n] = predictor._scale(max(steps - low, 0.0))
    return decoder


def trained(run: Path, device: torch.device) -> Decoder:
    """The decoder of a run folder, in the precision used for serving."""
    decoder = load_decoder(run).to(device).eval()
    return decoder.to(torch.bfloat16) if device.type == "cuda" else decoder


class Source:
    """The tokens that streams read: bytes of a file, for a trained model, or random ones."""

    def __init__(self, path: str | None = None) -> None:
        self.text = None if path is None else torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)

    def rows(self, count: int, length: int, begin: int = 0) -> Tensor:
        """[count, length]: pieces of the file at equal distances, from `begin` on."""
        if self.text is None:
            return torch.randint(256, (count, length), generator=torch.Generator().manual_seed(1 + begin))
        last = len(self.text) - length
        starts = (begin + torch.arange(count) * max(1, last // count)) % (last + 1)
        return torch.stack([self.text[n : n + length] for n in starts.tolist()]).long()


def wall_ms(step: Callable[[], object], count: int, repeats: int = 5) -> dict[str, float]:
    """Wall time per step over `count` steps, after which the host waits for the device."""
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step()
        synchronize()
        times.append(1e3 * (time.perf_counter() - start) / count)
    return spread(times)


# Ours


def filled_stream(decoder: Decoder, source: Source, rows: int, tokens: int) -> Stream:
    """A stream that has already read `tokens` tokens."""
    stream = Stream(decoder, rows)
    stream.read(list(source.rows(rows, tokens)))
    return stream


def time_ours(decoder: Decoder, source: Source, rows: int, *, fill: int, steps: int) -> dict[str, Any]:
    stream = filled_stream(decoder, source, rows, fill)
    steady = stream.generate(Sampling(seed=3))
    for _ in range(200):  # warm-up: the slots grow, graphs are recorded, and compactions happen
        next(steady)
    row = {"system": "ours", "batch": rows, "live": stream.live.mean().item()}
    row |= {"ms": wall_ms(lambda: next(steady), steps)}
    row |= {"bytes_held": stream.bytes_held, "launches": count_kernels(lambda: next(steady))}
    return finish(row)


def count_kernels(step: Callable[[], object]) -> dict[str, float] | None:
    """Kernels of one step and their time on the GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(4):
                step()
            synchronize()
        kernels = [e for e in found.events() or [] if e.device_type == DeviceType.CUDA]
        return {"kernels": len(kernels) / 4, "device_us": sum(e.device_time for e in kernels) / 4}
    except Exception as error:  # a failing profiler must not stop the benchmark
        print(f"kernels not counted: {error}")
        return None


def finish(row: dict[str, Any]) -> dict[str, Any]:
    row["tokens_per_s"] = 1e3 * row["batch"] / row["ms"]["median"]
    print(line(row), flush=True)
    return row


def line(row: dict[str, Any]) -> str:
    name = row["system"] + (f" {row['slots']}" if "slots" in row else f", {row['live']:.0f} live")
    more = row.get("launches") or {}
    more = f", {more['kernels']:.0f} kernels, GPU {more['device_us']:.0f} us" if more else ""
    held = row["bytes_held"] / 2**20
    return (
        f"batch {row['batch']:>3} {name:28} {row['ms']['median']:8.4f} ms a token, {row['tokens_per_s']:>10,.0f} tokens/s, "
        f"holds {held:9.1f} MiB{more}"
    )


# Plain decoders


def recorded(step: Callable[[], object]) -> Callable[[], None]:
    """A step as a CUDA graph, which is replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def time_plain(
    config: DecoderConfig, rows: int, slots: int, mode: str, device: torch.device, steps: int
) -> dict[str, Any]:
    """A plain decoder with `slots` tokens in its cache; mode eager, graph or compiled (and recorded)."""
    decoder = PlainDecoder(config, rows, slots).to(device).eval()
    if device.type == "cuda":
        rates = decoder.rates
        decoder = decoder.to(torch.bfloat16)
        decoder.rates = rates
    tokens = torch.zeros(rows, dtype=torch.int64, device=device)
    if mode == "compiled":
        for layer in decoder.layers:
            layer.compile()

    def step() -> None:
        """The next token is the likeliest: the cheapest way to choose one."""
        tokens.copy_(decoder(tokens).argmax(-1))

    run = step if mode == "eager" else recorded(step)
    for _ in range(3):
        run()
    row = {"system": f"ring, {mode}" if slots < 1024 else f"full, {mode}", "batch": rows, "slots": slots}
    row |= {"ms": wall_ms(run, steps), "bytes_held": decoder.bytes_held}
    row["launches"] = count_kernels(run)
    return finish(row)


# Far into a stream


def time_marks(
    decoder: Decoder, source: Source, marks: tuple[int, ...], steps: int, deadline: Deadline
) -> list[dict[str, Any]]:
    """Read up to each mark (a number of tokens) in blocks, then time single tokens there."""
    rows, state, position = [], None, 0
    for mark in marks:
        logits: Tensor | None = None
        start = time.perf_counter()
        while position < mark:
            block = source.rows(1, min(65_536, mark - position), position)
            *_, (_, logits, state, _) = read_blocks(decoder, block, state)
            position += block.shape[1]
            if deadline.left <= 0:
                return rows
        synchronize()
        read = time.perf_counter() - start
        stream = Stream(decoder, 1)
        engine: Any = stream._engine
        engine.clock.set(mark // 64 * 64, 0)
        assert logits is not None and state is not None
        stream.join(Prefilled(logits[:, -1].float(), state), row=0)
        steady = stream.generate(Sampling(seed=4))
        for _ in range(200):
            next(steady)
        row = {"system": f"ours at {mark:,}", "mark": mark, "batch": 1, "live": stream.live.mean().item()}
        row |= {"ms": wall_ms(lambda g=steady: next(g), steps // 5), "bytes_held": stream.bytes_held, "read_s": read}
        rows.append(finish(row))
    return rows


def time_prompt(decoder: Decoder, source: Source, tokens: int, block: int) -> dict[str, Any]:
    """Tokens per second of reading one long prompt, and of a forward pass of training on independent windows."""
    device = decoder.embed.weight.device
    text = source.rows(1, tokens)
    stream = Stream(decoder, 1)
    stream.read([text[0, : min(tokens, 4 * block)]])
    synchronize()
    start = time.perf_counter()
    stream.read([text[0]])
    synchronize()
    prompt = tokens / (time.perf_counter() - start)
    windows = text[:, : tokens // block * block].view(-1, block)[:8].to(device)
    decoder(windows, keep="nothing")
    ms = wall_ms(lambda: decoder(windows, keep="nothing"), 2, 3)["median"]
    forward = 1e3 * windows.numel() / ms
    row = {"tokens": tokens, "tokens_per_s": prompt, "forward_tokens_per_s": forward, "share": prompt / forward}
    print(f"prompt of {tokens:,}: {prompt:,.0f} tokens/s, forward pass {forward:,.0f}: {row['share']:.2f}", flush=True)
    return row


# CPU


def compare_on_cpu(config: DecoderConfig, fill: int, rounds: int) -> dict[str, Any]:
    """Time per token of our stream and of an eager ring, measured alternately: process time with one thread, which other
    programs disturb less, and wall time with several threads."""
    threads = torch.get_num_threads()
    clock = time.process_time if threads == 1 else time.perf_counter
    decoder = build(config, torch.device("cpu"))
    stream = filled_stream(decoder, Source(), 1, fill)
    steady = stream.generate(Sampling(seed=3))
    ring = -(-int(stream.live.mean().item() + 1) // 64) * 64
    plain, tokens = PlainDecoder(config, 1, ring).eval(), torch.zeros(1, dtype=torch.int64)

    def ours() -> None:
        next(steady)

    def eager() -> None:
        tokens.copy_(plain(tokens).argmax(-1))

    times: dict[str, list[float]] = {"ours": [], "ring, eager": []}
    for step in (ours, eager):
        for _ in range(70):
            step()
    for _ in range(rounds):
        for name, step in (("ours", ours), ("ring, eager", eager)):
            start = clock()
            for _ in range(64):  # as many steps as there are fresh slots, so that one compaction is included
                step()
            times[name].append(1e3 * (clock() - start) / 64)
    found = {name: spread(values) for name, values in times.items()}
    ratio = found["ours"]["median"] / found["ring, eager"]["median"]
    print(
        f"CPU, one row: ours {found['ours']['median']:.3f} ms ({stream.live.mean():.0f} live), "
        f"eager ring of {ring} {found['ring, eager']['median']:.3f} ms a token on {threads} threads: "
        f"{ratio:.3f}x, goal {CPU_GOAL}x"
    )
    return {
        "threads": threads,
        "ring": ring,
        "live": stream.live.mean().item(),
        "ms": found,
        "ratio": ratio,
        "bytes_held": stream.bytes_held,
    }


SLOT_TILES: tuple[dict[str, Any], ...] = (
    {},
    *(dict(programs=programs) for programs in (1056, 1584, 4224)),
    *(dict(slots=16, programs=programs) for programs in (2112, 4224)),
    *(dict(slots=64, programs=programs) for programs in (1056, 2112)),
    dict(warps=2),
    dict(skip_dead=False),
)
PRODUCT_TILES = {
    1: ((16, 16, 256, 4, 2), (16, 16, 512, 4, 1), (16, 16, 128, 4, 4), (16, 32, 128, 4, 4), (16, 16, 256, 8, 2)),
    256: ((64, 64, 128, 4, 3), (64, 32, 128, 4, 3), (32, 32, 128, 4, 4), (64, 64, 128, 8, 3)),
}


def where_time_goes(stream: Stream, steps: int = 64) -> dict[str, float]:
    """Microseconds per step of each kernel and of all kernels together; for the rest of a step's time the device is idle."""
    steady = stream.generate(Sampling(seed=3))
    for _ in range(5):
        next(steady)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            next(steady)
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda e: -e.device_time_total)
    found = {f"{row.key[:60]} x{row.count / steps:.1f}": row.device_time_total / steps for row in rows[:14]}
    found["all"] = sum(row.device_time_total for row in rows) / steps
    for name, us in found.items():
        print(f"{us:9.1f} us  {name}", flush=True)
    return found


def tune(decoder: Decoder, source: Source, fill: int) -> dict[str, Any]:
    """Time of a step with other tiles of the kernels, at every batch."""
    from expire_span.ops.triton import products, slot_tiles

    found: dict[str, Any] = {}
    for rows in (1, 16, 256):
        stream = filled_stream(decoder, source, rows, fill)

        def measure(name: str, rows: int = rows, stream: Stream = stream) -> None:
            engine: Any = stream._engine
            engine._forget_graphs()
            steady = stream.generate(Sampling(seed=3))
            for _ in range(5):
                next(steady)
            found[f"batch {rows}, {name}"] = ms = wall_ms(lambda: next(steady), 30, 3)["min"]
            print(f"batch {rows}, {name}: {ms:.4f} ms", flush=True)

        found[f"batch {rows}, kernels"] = where_time_goes(stream)
        for tiles in SLOT_TILES:
            slot_tiles.override(slot_tiles.SlotTiles(**tiles))
            measure("slots " + " ".join(f"{name}={value}" for name, value in tiles.items()))
        slot_tiles.override(slot_tiles.SlotTiles())
        for tiles in PRODUCT_TILES.get(rows, ()):
            products.override(products.ProductTiles(*tiles))
            measure(f"products {tiles}")
        products.override(None)
    return found
