"""Load on a server of OpenAI's /v1/completions on this machine: `python -m benchmarks.serve_load --url http://127.0.0.1:8000`.

So many clients ask at the same time, each one streamed request after the other: prompts cut from a text, greedy answers. It
measures tokens per second over all of them, the time to the first token, and the time between two tokens. The same prompts go
to every server, so that ours, vLLM, and vLLM with the plugin can be set side by side. With --pid it also measures the
processor time of the server and its children, which other programs on a busy machine do not lengthen.

    python -m benchmarks.serve_load --text BOOK --start "ours=expire-span serve MODEL --adapter DIR --port 8000" \\
      "vllm=PYTHON -m vllm.entrypoints.openai.api_server --model MODEL --dtype float32 --port 8000"

starts one server after the other, and measures each, its processor time too.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .record import save


def ask(place: str, model: str, prompt: str, tokens: int) -> dict[str, Any]:
    """One streamed request: when it began, when each piece of text came, how many tokens were read and written."""
    connection = http.client.HTTPConnection(place, timeout=3600)
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    begin, times, usage = time.perf_counter(), [], {}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"status {answer.status}: {answer.read(500)!r}")
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        told = json.loads(line[6:])
        if "error" in told:
            raise SystemExit(f"the server ended an answer: {told['error']}")
        usage = told.get("usage") or usage
        if any(choice["text"] for choice in told["choices"]):
            times.append(time.perf_counter())
    connection.close()
    return {"begin": begin, "times": times, "read": usage["prompt_tokens"], "written": usage["completion_tokens"]}


def load(place: str, model: str, prompts: list[str], clients: int, tokens: int) -> dict[str, Any]:
    """All prompts, by so many clients at once."""
    waiting, done, begin = list(reversed(prompts)), [], time.perf_counter()

    def work() -> None:
        while waiting:
            done.append(ask(place, model, waiting.pop(), tokens))

    crowd = [threading.Thread(target=work) for _ in range(clients)]
    for each in crowd:
        each.start()
    for each in crowd:
        each.join()
    assert len(done) == len(prompts), "a request failed"
    seconds = time.perf_counter() - begin
    first = [x["times"][0] - x["begin"] for x in done if x["times"]]
    gaps = [b - a for x in done for a, b in pairwise(x["times"])]
    read, written = (sum(x[name] for x in done) for name in ("read", "written"))
    counts = {"clients": clients, "requests": len(prompts), "read": read, "written": written, "seconds": seconds}
    return {**counts, "tokens_per_second": written / seconds, "first": spread(first), "between": spread(gaps)}


def processor_seconds(pid: int) -> float:
    """Processor time of a process and its children so far."""
    ticks, waiting = 0, [pid]
    while waiting:
        place = Path(f"/proc/{waiting.pop()}")
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
        for thread in (place / "task").iterdir():
            waiting += map(int, (thread / "children").read_text().split())
    return ticks / os.sysconf("SC_CLK_TCK")


def spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"median": ordered[len(ordered) // 2], "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]}


@contextlib.contextmanager
def started(command: str, place: str, log: Path, most: float = 600) -> Iterator[int]:
    """The process of a server that was started and answers."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(shlex.split(command), stdout=out, stderr=out)
    try:
        until = time.monotonic() + most
        while not _answers(place):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the server does not answer, see {log}")
            time.sleep(0.5)
        yield process.pid
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()


def _answers(place: str) -> bool:
    connection = http.client.HTTPConnection(place, timeout=5)
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--start", nargs="+", default=[], help="servers to start at --url, as NAME=COMMAND")
    parser.add_argument("--text", type=Path, required=True, help="text file that the prompts are cut from")
    parser.add_argument("--name", default="server", help="what is measured, for the record")
    parser.add_argument("--clients", default="1,8", help="numbers of clients at a time")
    parser.add_argument("--requests", type=int, default=2, help="requests of each client")
    parser.add_argument("--characters", type=int, default=1000, help="length of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="largest number of tokens of an answer")
    parser.add_argument("--pid", type=int, help="process of the server, on Linux")
    parser.add_argument("--out", default="benchmarks/out")
    args = parser.parse_args()
    place = urlsplit(args.url).netloc
    for each in args.start:
        args.name, _, command = each.partition("=")
        with started(command, place, Path(args.out) / f"{args.name}.log") as args.pid:
            measure(args, place)
    if not args.start:
        measure(args, place)


def measure(args: argparse.Namespace, place: str) -> None:
    """All numbers of clients at one server."""
    connection = http.client.HTTPConnection(place, timeout=60)
    connection.request("GET", "/v1/models")
    model = json.loads(connection.getresponse().read())["data"][0]["id"]
    text, size, lines = args.text.read_text(encoding="utf-8"), args.characters, []
    load(place, model, [text[:size]], 1, args.tokens)  # warms up; no request below begins like it
    at = size
    for clients in map(int, args.clients.split(",")):
        count = clients * args.requests
        prompts = [text[at + n * size : at + (n + 1) * size] for n in range(count)]
        assert all(len(x) == size for x in prompts), "the text is too short"
        at += count * size
        before = processor_seconds(args.pid) if args.pid else 0.0
        line = load(place, model, prompts, clients, args.tokens)
        if args.pid:
            line["processor"] = processor_seconds(args.pid) - before
        lines.append(line)
        first, between = line["first"], line["between"]
        print(
            f"{args.name}: {clients:3d} clients {line['tokens_per_second']:8.1f} tokens/s, first token {first['median']:.2f} s "
            f"(99th {first['p99']:.2f}), between {1000 * between['median']:.0f} ms (99th {1000 * between['p99']:.0f})"
            + (f", processor {1000 * line['processor'] / max(line['written'], 1):.1f} ms a token" if args.pid else ""),
            flush=True,
        )
    print(
        save(
            f"serve-load-{args.name}",
            {"settings": {**vars(args), "text": args.text.name, "start": None}, "lines": lines},
            args.out,
        )
    )


if __name__ == "__main__":
    main()
