"""Steps per second of the grid worlds: python -m benchmarks.gridworlds [--device cuda] [--envs 256] [--seconds 1].

Actions are uniformly random and drawn before the clock starts; when an episode ends, its row begins the next one. Every step
computes the whole observation. `with_info` also computes the expert's facts, as the Gymnasium environments do. On the CPU,
process time is measured, so that other programs do not count; the process should have one core (taskset).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch

from expire_span.tasks.gridworlds.engine import WorldEngine
from expire_span.tasks.gridworlds.levels import LEVELS, build_engine

from .record import save

GOALS = {"cpu": 200_000, "cuda": 5_000_000}
"""Goals in steps per second: in batches of 256 on the CPU, of 32,768 on a GPU."""
WORLDS = ("Corridor", "Portal", "Instruction")
AHEAD = 64
"""Number of steps whose actions are drawn beforehand; they are used again and again."""


def measure(engine: WorldEngine, seconds: float, *, info: bool) -> float:
    """Environment steps per second, measured after a warm-up in which the rows' episodes get out of phase."""
    on_gpu = engine.arrays.device != "cpu"
    clock = time.perf_counter if on_gpu else time.process_time
    draw = np.random.default_rng(0)
    actions = [engine.arrays.integers(draw.integers(0, engine.num_actions, engine.num_envs)) for _ in range(AHEAD)]
    done, start = -AHEAD, 0.0
    while True:
        if done >= 0 and done % AHEAD == 0:
            if on_gpu:
                torch.cuda.synchronize()
            if done == 0:
                start = clock()
            elif clock() - start >= seconds:
                return done * engine.num_envs / (clock() - start)
        engine.step(actions[done % AHEAD])
        engine.begin_ended()
        if info:
            engine.info()
        done += 1


def measure_all(device: str, envs: int, seconds: float) -> list[dict[str, Any]]:
    rows, backend = [], "numpy" if device == "cpu" else "torch"
    for world in WORLDS:
        for level, config in LEVELS[world].items():
            engine = build_engine(config, envs, backend=backend, device=device)
            plain, told = (measure(engine, seconds, info=info) for info in (False, True))
            rows.append({"world": world, "level": level, "steps_per_second": plain, "with_info": told})
            print(f"{world}-{level}: {plain:,.0f} steps/s, {told:,.0f} with info", flush=True)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--envs", type=int, default=None, help="rows of a batch; default 256, on a GPU 32,768")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each world and difficulty")
    parser.add_argument("--out", default="benchmarks/out")
    args = parser.parse_args(argv)
    envs = args.envs or (256 if args.device == "cpu" else 32_768)
    rows = measure_all(args.device, envs, args.seconds)
    missed = [f"{r['world']}-{r['level']}" for r in rows if r["steps_per_second"] < GOALS[args.device]]
    print(f"goal {GOALS[args.device]:,} steps/s: " + (f"missed by {', '.join(missed)}" if missed else "won by all"))
    result = {"goal": GOALS[args.device], "envs": envs, "device": args.device, "rows": rows}
    print(save(f"gridworlds-{args.device}", result, args.out))


if __name__ == "__main__":
    main()
