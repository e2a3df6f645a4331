"""Measures the page in a real browser: `python -m benchmarks.page [RUN] [--out FILE]`. Needs Chromium and playwright.

- frames: frames per second with 100,000 memories at 1280x720, drawn by the CPU, while zooming, panning and scrubbing at once
- first picture: time until the first picture, and until the picture of all 2,048 tokens of the run's sample (by default of the
  model that ships), from opening the page and from the request
- live: time from the moment at which the model has drawn a token to the frame that shows it, for every token
- report: bytes of a page of 2,048 tokens

Other programs slow the wall clock down but change CPU time little, so both are recorded, with the load average.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.record import save
from expire_span.shipped import SHIPPED
from tests.browser import Watched, made_trace, open_browser, wait_until, write_page

TOKENS = 2048
SCRUB = """async (frames) => {
  const view = document.getElementById("es-view"), { timeline } = view, end = timeline.end, modes = new Set();
  const scrub = document.getElementById("es-scrub"), began = performance.now();
  for (let n = 0; n < frames; n++) {
    const wide = end * Math.pow(0.93, n % 60), from = end * (n % 17) / 20;
    timeline.move(from, from + wide);
    scrub.value = Math.floor(from + wide / 2);
    scrub.dispatchEvent(new Event("input"));
    await new Promise(requestAnimationFrame);
    modes.add(timeline.mode);
  }
  return { frames_per_second: 1000 * frames / (performance.now() - began), modes: [...modes].sort() };
}"""
"""Zooms, pans and scrubs at once, as fast as frames come."""


def processor_seconds() -> dict[int, float]:
    """CPU seconds of each process that this one has started, directly or not, by process id."""
    out = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            out[child.pid] = times.user + times.system
    return out


def busy_since(before: dict[int, float]) -> list[float]:
    """CPU seconds of each process since `before` was taken, busiest first."""
    return sorted((now - before.get(pid, 0) for pid, now in processor_seconds().items()), reverse=True)


def measure_frames(browser: Any, folder: Path, count: int, frames: int, quads: int = 6_000) -> dict[str, Any]:
    tab = Watched(browser)
    tab.open(write_page(folder, made_trace(count)))
    tab.view(f"view.timeline.mostQuads = {quads}")
    before = processor_seconds()
    result = tab.page.evaluate(SCRUB, frames)
    busy = busy_since(before)
    tab.close("file:")
    result["busy_milliseconds"] = 1000 * busy[0] / frames  # the busiest process; the others work beside it
    result["all_processes_milliseconds"] = 1000 * sum(busy) / frames
    return result


@contextlib.contextmanager
def running(run: str) -> Iterator[tuple[str, psutil.Process]]:
    """Address and process of `expire-span view`, with two threads, once it has loaded its model and answers."""
    command = [sys.executable, "-m", "expire_span", "view", run, "--no-browser", "--port", "8960"]
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if " at http" in line)
        found = re.search(r"http\S+", line)
        assert found is not None
        urllib.request.urlopen(found[0] + "api/info", timeout=120).close()  # it listens before it answers
        yield found[0], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(20)


def measure_first_picture(browser: Any, address: str, server: psutil.Process, rounds: int) -> dict[str, Any]:
    """Times of opening the page, then of reading the sample `rounds` times."""
    tab = Watched(browser)
    tab.open(address)
    opened, rows = int(tab.view("view.dataset.opened")), []
    for _ in range(rounds):
        before, own = processor_seconds(), _seconds(server)
        tab.page.evaluate("delete document.getElementById('es-view').dataset.read")
        tab.page.click("#es-sample")
        tab.wait("view.dataset.read")
        size = int(tab.view("view.dataset.read"))
        wall, first = int(tab.view("view.dataset.milliseconds")), int(tab.view("view.dataset.first"))
        served = _seconds(server) - own
        drawn = max(x for pid, x in _since(before).items() if pid != server.pid)
        rows.append({"tokens": size, "first_ms": first, "whole_ms": wall, "server_cpu_s": served, "page_cpu_s": drawn})
        tab.rest()
    tab.close(address)
    wholes = sorted(row["whole_ms"] for row in rows)
    return {"opened_ms": opened, "rounds": rows, "best_whole_ms": wholes[0], "median_whole_ms": wholes[len(rows) // 2]}


def _since(before: dict[int, float]) -> dict[int, float]:
    return {pid: now - before.get(pid, 0) for pid, now in processor_seconds().items()}


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def measure_live(browser: Any, address: str, tokens: int) -> dict[str, Any]:
    """Milliseconds from the moment a token is drawn by the model to the frame that shows it, over all tokens."""
    tab = Watched(browser)
    tab.open(address)
    tab.page.fill("#es-text", "The old king went down to the river, and ")
    tab.page.click("#es-write")
    began = time.monotonic()
    tab.wait(f"Number(view.dataset.written) >= {tokens}")
    seconds = time.monotonic() - began
    delays = sorted(tab.view("view.delays"))
    tab.page.click("#es-stop")
    wait_until(lambda: tab.page.is_disabled("#es-stop"))
    tab.close(address)
    at = lambda share: round(delays[min(int(share * len(delays)), len(delays) - 1)], 1)  # noqa: E731
    out = {"tokens": len(delays), "median_ms": at(0.5), "p95_ms": at(0.95), "worst_ms": at(1.0)}
    return out | {"tokens_per_second": round(tokens / seconds, 1)}


def measure_report(run: str) -> dict[str, Any]:
    from expire_span.runs import find_run
    from expire_span.view.assets import render_page
    from expire_span.view.source import open_reader
    from expire_span.view.trace import Trace

    trace = Trace.of(open_reader(find_run(run, Path("runs"))).trace_sample(TOKENS))
    return {"tokens": len(trace), "page_bytes": len(render_page(trace).encode())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default=SHIPPED.name)
    parser.add_argument("--memories", type=int, default=100_000)
    parser.add_argument("--frames", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=400, help="tokens written live")
    options = parser.parse_args()
    result: dict[str, Any] = {"load_average": os.getloadavg(), "cores": os.cpu_count(), "run": options.run}
    with open_browser() as browser, tempfile.TemporaryDirectory() as folder:
        result["frames"] = measure_frames(browser, Path(folder), options.memories, options.frames)
        with running(options.run) as (address, server):
            result["first_picture"] = measure_first_picture(browser, address, server, options.rounds)
            result["live"] = measure_live(browser, address, options.tokens)
    result["report"] = measure_report(options.run)
    result["load_average_after"] = os.getloadavg()
    print(json.dumps(result, indent=1))
    print(save("page", result))


if __name__ == "__main__":
    main()
