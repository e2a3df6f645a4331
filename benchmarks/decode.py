"""Tokens a second of endless streams beside plain decoders of the same size: `python -m benchmarks.decode`.

On a GPU the model is the enwik8 recipe's (12 layers of 512, bfloat16, learned reach), with spans set so that heads differ as
those of trained models do; on a CPU 6 layers of 256. In one run, at each batch size:

- ours: `Stream`, a recorded step a token, the host reading tokens one step late;
- ring: a plain decoder that holds as many tokens as our mean live count, rounded up to 64: eager, recorded, compiled too;
- full: the same with 1k, 8k and 64k tokens of context, recorded.

Before anything is timed, small models of every kind are streamed and compared with the computation in which nothing is
deleted. Far into a stream, time and bytes a token are compared with those at its beginning.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expire_span.config import DecoderConfig, ExpireSpanConfig
from expire_span.models.decoder import Decoder
from expire_span.recipes import enwik8
from expire_span.stream import Sampling, Stream
from expire_span.stream.prompts import read_blocks

from .exact_streams import largest_differences
from .plain_decoder import PlainDecoder
from .record import save
from .timing import Deadline, guarded, spread, synchronize

BATCHES = (1, 16, 256)
CONTEXTS = (1024, 8192, 65_536)
MARKS = (10_000, 100_000, 1_000_000, 10_000_000)
GOALS = {
    "ring": 1.3,
    "tokens_per_s_256": 400_000,
    "full_64k_16": 10.0,
    "bytes_64k_16": 0.01,
    "flat": 1.05,
    "prompt": 0.6,
}
CPU_GOAL = 1.3


def gpu_config() -> DecoderConfig:
    return replace(enwik8().model, dropout=0.0)


def cpu_config() -> DecoderConfig:
    return DecoderConfig.modern(dim=256, layers=6, heads=4, ff_dim=1024, mixer=ExpireSpanConfig(max_span=900, ramp=64))


def smoke_config() -> DecoderConfig:
    return DecoderConfig.modern(dim=16, layers=1, heads=2, ff_dim=16, mixer=ExpireSpanConfig(max_span=24, ramp=4))


def build(config: DecoderConfig, device: torch.device) -> Decoder:
    """A decoder with random weights, whose spans differ: between tokens, and between heads where they can."""
    torch.manual_seed(0)
    decoder = Decoder(config).to(device).eval()
    if device.type == "cuda":
        decoder = decoder.to(torch.bfloat16)
    for block in decoder.layers():
        predictor: Any = block.mixer.span_predictor
        predictor.float()  # a span needs more digits than bfloat16 has
        scale = config.mixer.temperature / config.dim**0.5
        torch.nn.init.normal_(predictor.weight, std=1.5 * scale)
        if not config.mixer.reach.learned:
            torch.nn.init.constant_(predictor.bias, -1.3)
            continue
        reaches = [700.0, 500.0, *(2.0**n for n in range(3, 3 + len(predictor.reach) - 2))]
        with torch.no_grad():
            for n, steps in enumerate(reaches):
                low = predictor.min_span if n < predictor.out_features else predictor.shortest_shared
                predictor.reach[n] = predictor._scale(max(steps - low, 0.0))
    return decoder


def wall_ms(step: Callable[[], object], count: int, repeats: int = 5) -> dict[str, float]:
    """Wall time of one step among `count`, which end with a wait for the device."""
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


def filled_stream(decoder: Decoder, rows: int, tokens: int) -> Stream:
    """A stream in the middle of random bytes."""
    stream = Stream(decoder, rows)
    stream.read(list(torch.randint(256, (rows, tokens), generator=torch.Generator().manual_seed(1))))
    return stream


def time_ours(decoder: Decoder, rows: int, *, fill: int, steps: int) -> dict[str, Any]:
    stream = filled_stream(decoder, rows, fill)
    steady = stream.generate(Sampling(seed=3))
    for _ in range(200):  # grows what must grow, records, compacts
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
    except Exception as error:  # a profiler that fails must not cost the figures
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


def time_marks(decoder: Decoder, marks: tuple[int, ...], steps: int, deadline: Deadline) -> list[dict[str, Any]]:
    """Read on to each mark in blocks, then time single tokens there."""
    rows, state, position = [], None, 0
    draw = torch.Generator().manual_seed(1)
    for mark in marks:
        logits: Tensor | None = None
        start = time.perf_counter()
        while position < mark:
            block = torch.randint(256, (1, min(65_536, mark - position)), generator=draw)
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
        engine.load([0], state, logits[:, -1])
        stream._active = [True]
        steady = stream.generate(Sampling(seed=4))
        for _ in range(200):
            next(steady)
        row = {"system": f"ours at {mark:,}", "mark": mark, "batch": 1, "live": stream.live.mean().item()}
        row |= {"ms": wall_ms(lambda g=steady: next(g), steps // 5), "bytes_held": stream.bytes_held, "read_s": read}
        rows.append(finish(row))
    return rows


def time_prompt(decoder: Decoder, tokens: int, block: int) -> dict[str, Any]:
    """Tokens a second of one long prompt, against those of a forward pass of training (windows that stand alone)."""
    device = decoder.embed.weight.device
    text = torch.randint(256, (1, tokens), generator=torch.Generator().manual_seed(1))
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
    """Process time a token, ours and an eager ring's, turn by turn, on one thread: a shared machine disturbs both alike."""
    decoder = build(config, torch.device("cpu"))
    stream = filled_stream(decoder, 1, fill)
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
            start = time.process_time()
            for _ in range(64):  # one whole round of the fresh slots, its compaction included
                step()
            times[name].append(1e3 * (time.process_time() - start) / 64)
    found = {name: spread(values) for name, values in times.items()}
    ratio = found["ours"]["median"] / found["ring, eager"]["median"]
    print(
        f"CPU, one row: ours {found['ours']['median']:.3f} ms ({stream.live.mean():.0f} live), "
        f"eager ring of {ring} {found['ring, eager']['median']:.3f} ms of process time a token: {ratio:.3f}x, goal {CPU_GOAL}x"
    )
    return {
        "ring": ring,
        "live": stream.live.mean().item(),
        "ms": found,
        "ratio": ratio,
        "bytes_held": stream.bytes_held,
    }


# All of it


def verdicts(
    rows: list[dict[str, Any]], marks: list[dict[str, Any]], prompt: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """Each figure beside its goal."""

    def find(start: str, batch: int, slots: int | None = None) -> dict[str, Any] | None:
        wanted = (r for r in rows if r["system"].startswith(start) and r["batch"] == batch)
        return next((r for r in wanted if slots is None or r.get("slots") == slots), None)

    found = []

    def judge(name: str, value: float, goal: float, most: bool) -> None:
        found.append({"figure": name, "value": value, "goal": goal, "won": value <= goal if most else value >= goal})

    for batch in BATCHES:
        ours, ring = find("ours", batch), find("ring, compiled", batch) or find("ring, graph", batch)
        if ours and ring:
            judge(
                f"batch {batch}: time over {ring['system']}",
                ours["ms"]["median"] / ring["ms"]["median"],
                GOALS["ring"],
                True,
            )
    if ours := find("ours", 256):
        judge("batch 256: tokens/s", ours["tokens_per_s"], GOALS["tokens_per_s_256"], False)
    ours, full = find("ours", 16), find("full", 16, 65_536)
    if ours and full:
        judge(
            "batch 16, 64k: full over ours, time",
            full["ms"]["median"] / ours["ms"]["median"],
            GOALS["full_64k_16"],
            False,
        )
        judge(
            "batch 16, 64k: ours over full, bytes", ours["bytes_held"] / full["bytes_held"], GOALS["bytes_64k_16"], True
        )
    if len(marks) > 1:
        first, last = marks[0], marks[-1]
        where = f"{last['mark']:,} over {first['mark']:,} tokens"
        judge(f"{where}: time", last["ms"]["median"] / first["ms"]["median"], GOALS["flat"], True)
        judge(f"{where}: bytes", last["bytes_held"] / first["bytes_held"], GOALS["flat"], True)
    if prompt:
        judge("prompt over forward pass, tokens/s", prompt["share"], GOALS["prompt"], False)
    return found


def tune(decoder: Decoder, fill: int) -> dict[str, Any]:
    """Time of a step with other tiles of the kernel, at the smallest and the largest batch; the best are used from here on."""
    from expire_span.ops.triton import slots

    found: dict[str, Any] = {}
    for rows in (1, 256):
        stream = filled_stream(decoder, rows, fill)
        engine: Any = stream._engine
        for tiles in (slots.Tiles(), slots.Tiles(128, 4), slots.Tiles(128, 8), slots.Tiles(64, 2), slots.Tiles(32, 2)):
            slots.override(tiles)
            engine._forget_graphs()
            steady = stream.generate(Sampling(seed=3))
            for _ in range(5):
                next(steady)
            ms = wall_ms(lambda g=steady: next(g), 30, 3)["min"]
            found[f"batch {rows}, {tiles.slots} slots, {tiles.warps} warps"] = ms
            print(f"tiles of {tiles.slots} slots, {tiles.warps} warps, batch {rows}: {ms:.4f} ms", flush=True)
    return found


def best_tiles(found: dict[str, float]) -> tuple[int, int]:
    """The tiles with the smallest product of times over batches."""
    products: dict[tuple[int, int], float] = {}
    for name, ms in found.items():
        words = name.split()
        key = int(words[2]), int(words[4])
        products[key] = products.get(key, 1.0) * ms
    return min(products, key=lambda key: products[key])


def run_gpu(result: dict[str, Any], whole: Deadline, quick: bool, out: Path) -> None:
    config, device, errors = gpu_config(), torch.device("cuda"), result["errors"]
    steps, fill = (200 if quick else 1000), 4096
    decoder = build(config, device)

    def attempt(name: str, call: Callable[[], Any], into: str = "rows") -> Any:
        found = guarded(errors, name, call, whole)
        if name in errors:
            print(f"{name}: {errors[name][:300]}", flush=True)
        if found is not None:
            result[into] += found if isinstance(found, list) else [found]
        save("decode", result, out)
        return found

    def plain(batch: int, slots: int, mode: str, count: int = steps) -> None:
        attempt(f"plain {batch} {slots} {mode}", lambda: time_plain(config, batch, slots, mode, device, count))

    found = attempt("tiles", lambda: tune(decoder, 1024), "tiles")
    if found:
        from expire_span.ops.triton import slots

        result["best_tiles"] = best_tiles(found)
        slots.override(slots.Tiles(*result["best_tiles"]))
        print(f"tiles used: {result['best_tiles']}", flush=True)
    rings = {}
    for batch in BATCHES:
        ours = attempt(f"ours {batch}", lambda b=batch: time_ours(decoder, b, fill=fill, steps=steps))
        rings[batch] = -(-int(ours["live"] + 1) // 64) * 64 if ours else 256
        plain(batch, rings[batch], "graph")
    plain(16, 65_536, "graph", 20)
    plain(1, rings[1], "compiled")
    marks = (10_000, 1_000_000) if quick else MARKS
    attempt("marks", lambda: time_marks(decoder, marks, steps if quick else 5000, whole), "marks")
    attempt("prompt", lambda: time_prompt(decoder, 262_144 if quick else 1_000_000, 8192), "prompts")
    for batch in BATCHES[1:]:
        plain(batch, rings[batch], "compiled")
    if quick:
        return
    for batch in BATCHES:
        plain(batch, rings[batch], "eager", 50)
        for context in CONTEXTS:
            if (batch, context) != (16, 65_536) and (batch < 256 or context <= 8192):
                plain(batch, context, "graph", 50)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    parser.add_argument("--seconds", type=float, default=None, help="no further figure is begun after this")
    parser.add_argument("--quick", action="store_true", help="the main figures only, in less than 150 seconds on a GPU")
    parser.add_argument("--smoke", action="store_true", help="tiny models, on any machine: tests the benchmark itself")
    args = parser.parse_args(argv)
    whole = Deadline(args.seconds or (130.0 if args.quick else 900.0))
    gpu = torch.cuda.is_available() and not args.smoke
    device = torch.device("cuda" if gpu else "cpu")
    result: dict[str, Any] = {"smoke": args.smoke, "rows": [], "marks": [], "prompts": [], "tiles": [], "errors": {}}
    result["exact"] = guarded(result["errors"], "exact", lambda: largest_differences(device, short=args.smoke), whole)
    try:
        with torch.inference_mode():
            if gpu:
                run_gpu(result, whole, args.quick, args.out)
            else:
                config, fill, rounds = (smoke_config(), 40, 2) if args.smoke else (cpu_config(), 1200, 12)
                torch.set_num_threads(1)
                result["cpu"] = guarded(result["errors"], "cpu", lambda: compare_on_cpu(config, fill, rounds), whole)
    finally:
        prompt = result["prompts"][0] if result["prompts"] else None
        result["verdicts"] = verdicts(result["rows"], result["marks"], prompt)
        for found in result["verdicts"]:
            print(
                f"{found['figure']:50} {found['value']:12,.4g}  goal {found['goal']:g}: {'won' if found['won'] else 'missed'}"
            )
        for name, error in result["errors"].items():
            print(f"{name}: {error[:300]}")
        print("written to", save("decode", result, args.out))


if __name__ == "__main__":
    main()
