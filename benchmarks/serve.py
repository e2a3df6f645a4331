"""Tokens per second of the server's scheduler against the number of requests at a time: `python -m benchmarks.serve`.

Beside it, the longest time between two tokens of a running answer while a long prompt is read, for several sizes of the chunks
in which it is read, and the time to the first token of the turns of a chat, with sessions and without.

The model has the shape of a small Llama (--layers, --dim) and random weights and spans, since time does not depend on what was
learned; the requests differ in the length of their prompts. `one by one` is the same number of requests with one row, so that
each waits for the one before.

    python -m benchmarks.serve --model FOLDER --adapter DIR --prompt-tokens 4096 --beside --text docs/*.md --requests 1,8,64,256

takes a model of transformers and prompts of equal length, cut from text. Without --adapter every memory lives for an eighth of
the prompt's tokens. --beside also gives the same requests to transformers' continuous batching (`generate_batch`) with the
full cache, and to a bare `Stream`, with their prompts (bare stream) and its decode steps alone (bare steps). `steady` is
tokens per second from the moment at which all requests had their first token until the first of them ended; `first` includes
the waiting for others. Times of tokens are those at which they were delivered, in both.
"""

from __future__ import annotations

import argparse
import queue
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from expire_span.hf import RetrofitConfig, load_adapter, retrofit
from expire_span.hf.decoding import SMALL_CHUNK
from expire_span.sampling import Sampling
from expire_span.serve.pace import Pace
from expire_span.serve.requests import Request
from expire_span.serve.scheduler import Scheduler
from expire_span.serve.sessions import Sessions
from expire_span.serve.text import TextModel
from expire_span.serve.turns import Prompt, read_chat
from expire_span.stream import Stream

from .hf_decode import KINDS
from .record import save
from .serve_load import spread

VOCAB = 32_000


class _Numbers:
    """A tokenizer whose text is the tokens' numbers: decoding of text is not what is measured."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"{token}," for token in tokens)


def build_plain(layers: int, dim: int, device: str) -> Any:
    """A random model of the shape of a small Llama."""
    torch.manual_seed(0)
    shape = dict(num_hidden_layers=layers, hidden_size=dim, intermediate_size=dim * 8 // 3, vocab_size=VOCAB)
    heads = dict(num_attention_heads=dim // 64, num_key_value_heads=max(1, dim // 192))
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape, **heads))
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()


def build(layers: int, dim: int, device: str) -> Any:
    """The same with spans of up to 1,024 tokens, of which most are much shorter."""
    retrofitted = retrofit(build_plain(layers, dim, device), RetrofitConfig(max_span=1024, ramp=32))
    with torch.no_grad():
        for predictor in retrofitted.predictors.values():
            predictor.weight.normal_()
            predictor.bias.fill_(-2.0)
    return retrofitted


def load(args: argparse.Namespace) -> Any:
    if args.model is None:
        return build_plain(args.layers, args.dim, args.device)
    kind = torch.bfloat16 if args.device == "cuda" else torch.float32
    return AutoModelForCausalLM.from_pretrained(args.model, dtype=kind).to(args.device).eval()


def open_folder(args: argparse.Namespace) -> Any:
    """A retrofitted model of a folder; without an adapter, every memory lives for an eighth of the prompt."""
    if args.adapter is not None:
        return load_adapter(load(args), args.adapter)
    retrofitted = retrofit(load(args), RetrofitConfig(max_span=args.prompt_tokens // 4, ramp=32, keep_first=4))
    with torch.no_grad():
        for predictor in retrofitted.predictors.values():
            predictor.weight.zero_()
            predictor.bias.zero_()  # half of the longest span
    return retrofitted


def make_prompts(args: argparse.Namespace, requests: int, vocab: int) -> list[list[int]]:
    """So many prompts: equal parts of a text, which begins again where it ends, or random tokens of unequal number."""
    draws = [torch.Generator().manual_seed(n) for n in range(requests)]
    size = args.prompt_tokens
    if not args.text:
        return [torch.randint(3, vocab, (size or 32 + 7 * n % 64,), generator=g).tolist() for n, g in enumerate(draws)]
    tokens = AutoTokenizer.from_pretrained(args.model).encode("\n".join(x.read_text() for x in args.text))
    tokens *= 2 + size // len(tokens)
    step = min(size, max(1, (len(tokens) // 2) // requests))  # parts overlap where the text is too short for all
    return [tokens[n * step : n * step + size] for n in range(requests)]


def measure(
    retrofitted: Any, prompts: list[list[int]], rows: int, tokens: int, temperature: float, chunk: int | None = None
) -> dict[str, Any]:
    """How long it takes until all requests are answered, after one round that warms up and records. chunk: tokens of prompts
    in a call beside running answers, where the scheduler shall not choose them. `processor` is the process's processor time."""
    scheduler = Scheduler(TextModel(retrofitted, _Numbers()), rows=rows)
    if chunk is not None:
        scheduler.pace = Pace(max(SMALL_CHUNK, chunk), chunk)
    answer(scheduler, prompts[: max(32, len(prompts) // 8)], min(80, tokens), temperature)
    used = time.process_time()
    result = {"rows": rows, **answer(scheduler, prompts, tokens, temperature)}
    result["processor"] = time.process_time() - used
    scheduler.close()
    return result


def answer(scheduler: Scheduler, prompts: list[list[int]], tokens: int, temperature: float) -> dict[str, Any]:
    """All requests at once, until all are answered."""
    begin, done, times = time.perf_counter(), queue.Queue(), [[] for _ in prompts]

    def take(n: int, piece: Any) -> None:
        if isinstance(piece, str):
            times[n].append(time.perf_counter())
        else:
            done.put(piece)

    for n, prompt in enumerate(prompts):
        scheduler.submit(Request(prompt, tokens, Sampling(temperature=temperature, seed=n), (), partial(take, n)))
    for _ in prompts:
        ended = done.get(timeout=600)
        if ended is not None:
            raise ended
    return summary(begin, times)


def measure_generate_batch(model: Any, prompts: list[list[int]], tokens: int, cache: dict[str, Any]) -> dict[str, Any]:
    """The same requests by transformers' continuous batching, whose set-up and warm-up are not counted. cache: sizes of its
    cache, where it shall not take all memory."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    how = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = ContinuousBatchingConfig(**cache) if cache else None
    for part, count in ((prompts[:2], 8), (prompts, tokens)):
        how.max_new_tokens = count
        done = model.generate_batch(
            inputs=part, generation_config=how, continuous_batching_config=sizes, record_timestamps=True
        ).values()
    whole = len(done) == len(prompts) and all(x.error is None and len(x.generated_tokens) == tokens for x in done)
    assert whole, "a request failed"
    return summary(min(x.created_time for x in done), [x.timestamps for x in done])


def measure_bare(retrofitted: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Decode steps of a `Stream` with as many rows, with nothing around it."""
    line = KINDS["expire, slots"](retrofitted, torch.tensor(prompts, device=retrofitted.model.device), 4096)
    return {"requests": len(prompts), "tokens_per_second": len(prompts) / line["seconds"], **line}


def measure_bare_whole(retrofitted: Any, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """The same requests by a `Stream` alone: all prompts are read together, then all answers are written. The second of two
    rounds counts; the first warms up and records."""
    asked = torch.tensor(prompts, device=retrofitted.model.device)
    for _ in range(2):
        begin = time.perf_counter()
        stream = Stream(retrofitted, len(asked), static_shapes=True)
        stream.read(list(asked))
        times = [time.perf_counter() for _ in stream.generate(max_tokens=tokens)]
    return summary(begin, [times] * len(asked))


def summary(begin: float, times: list[list[float]]) -> dict[str, Any]:
    """begin: when the requests were asked; times: when each token of each answer came."""
    seconds, written = max(x[-1] for x in times) - begin, sum(map(len, times))
    gaps = [b - a for own in times for a, b in pairwise(own)]
    all_run, one_ends = max(x[0] for x in times), min(x[-1] for x in times)
    inside = sum(all_run < x <= one_ends for own in times for x in own)
    steady = inside / (one_ends - all_run) if inside > len(times) else None
    counts = {"requests": len(times), "seconds": seconds, "tokens_per_second": written / seconds, "steady": steady}
    return {**counts, "first": spread([x[0] - begin for x in times]), "between": spread(gaps)}


def measure_pause(retrofitted: Any, prompt: int, chunk: int) -> dict[str, Any]:
    """The longest time between two tokens of an answer while a prompt of so many tokens is read beside it."""
    scheduler, arrived, joined = Scheduler(TextModel(retrofitted, _Numbers()), rows=2), [], queue.Queue()
    scheduler.pace = Pace(chunk, chunk)
    running = Request([5] * 40, 10**9, Sampling(), (), lambda piece: arrived.append(time.perf_counter()))
    scheduler.submit(running)
    while len(arrived) < 60:
        time.sleep(0.01)
    draws = torch.Generator().manual_seed(0)
    begin, alone = time.perf_counter(), len(arrived)
    vocab = min(VOCAB, retrofitted.model.config.vocab_size)
    long = Request(torch.randint(3, vocab, (prompt,), generator=draws).tolist(), 1, Sampling(), (), joined.put)
    scheduler.submit(long)
    joined.get(timeout=600)
    end = time.perf_counter()
    running.cancelled = True
    scheduler.close()
    gaps = [b - a for a, b in pairwise(arrived)]
    usual = sorted(gaps[20 : alone - 1])[len(gaps[20 : alone - 1]) // 2]
    longest = max(gap for gap, at in zip(gaps, arrived) if begin <= at + gap and at <= end)
    return {"prompt": prompt, "chunk": chunk, "usual_gap": usual, "longest_gap": longest, "first_token": end - begin}


class _TokenTurns:
    """A chat of random tokens."""

    def __init__(self, retrofitted: Any) -> None:
        self.text, self.tokens, self.draws = TextModel(retrofitted, _Numbers()), [], torch.Generator().manual_seed(0)

    def ask(self) -> None:
        self.tokens += torch.randint(3, VOCAB, (40,), generator=self.draws).tolist()

    def prompt(self) -> Prompt:
        return Prompt(list(self.tokens))

    def answer(self, text: str) -> None:
        self.tokens += [int(x) for x in text.split(",")[:-1]]


class _Messages:
    """A chat of messages with the words of this page."""

    def __init__(self, args: argparse.Namespace, retrofitted: Any) -> None:
        self.text = TextModel.of_retrofit(retrofitted, AutoTokenizer.from_pretrained(args.model))
        object.__setattr__(self.text, "ends", set())  # every answer has 8 tokens
        self.words, self.messages = (__doc__ or "").split(), [{"role": "system", "content": "You are a clerk."}]

    def ask(self) -> None:
        at = 7 * len(self.messages) % 100
        self.messages.append({"role": "user", "content": " ".join(self.words[at : at + 24])})

    def prompt(self) -> Prompt:
        return read_chat(self.text, self.messages)

    def answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})


def measure_chat(args: argparse.Namespace, retrofitted: Any, turns: int, sessions: bool) -> dict[str, Any]:
    """Seconds to the first token of every turn of a chat, by the clock and of processor time, which other programs on the
    machine do not lengthen; each turn has about 40 new tokens and an answer of 8. With --model the turns are messages, which
    its template writes and its tokenizer encodes; that is part of the time."""
    pool = Sessions(retrofitted, 2 * 10**9) if sessions else None
    said = _Messages(args, retrofitted) if args.model else _TokenTurns(retrofitted)
    scheduler, seconds, processor = Scheduler(said.text, rows=1, sessions=pool), [], []
    for _ in range(turns):
        said.ask()
        pieces: queue.Queue[Any] = queue.Queue()
        begin, used = time.perf_counter(), time.process_time()
        prompt = said.prompt()
        request = Request(prompt.tokens, 8, Sampling(temperature=0), (), pieces.put, chat=prompt)
        scheduler.submit(request)
        text, piece = "", pieces.get(timeout=600)
        seconds.append(time.perf_counter() - begin)
        processor.append(time.process_time() - used)
        while piece is not None:
            if isinstance(piece, Exception):
                raise piece
            text, piece = text + piece, pieces.get(timeout=600)
        said.answer(text)
    scheduler.close()
    return {
        "sessions": sessions,
        "turns": turns,
        "tokens": len(prompt.tokens),
        "seconds": seconds,
        "processor": processor,
        "held": 0 if pool is None else pool.bytes_held()[0],
    }


def measure_all(args: argparse.Namespace, retrofitted: Any, requests: int, lines: list[dict[str, Any]]) -> None:
    """So many requests in every way; each line is added and printed as soon as it is known."""
    prompts = make_prompts(args, requests, min(VOCAB, retrofitted.model.config.vocab_size))
    ways: dict[str, Any] = {
        name: partial(measure, retrofitted, prompts, rows, args.tokens, args.temperature, args.shared_chunk)
        for name, rows in {"one by one": 1, "together": requests}.items()
        if name in args.ways.split(",") and not (args.beside and name == "one by one")
    }
    if args.beside:
        sizes: dict[str, Any] = dict(
            zip(("num_blocks", "max_batch_tokens"), map(int, filter(None, args.beside_cache.split(","))))
        )
        ways["bare steps"] = partial(measure_bare, retrofitted, prompts)
        ways["bare stream"] = partial(measure_bare_whole, retrofitted, prompts, args.tokens)
        ways["generate_batch"] = partial(
            measure_generate_batch, load(args), prompts, args.beside_tokens or args.tokens, sizes
        )
    for name, way in ways.items():
        try:
            lines.append({"how": name, **way()})
        except (RuntimeError, ValueError, AssertionError) as error:  # the others are still measured
            lines.append({"how": name, "requests": requests, "error": f"{type(error).__name__}: {error}"[:300]})
        print(_show(lines[-1]), flush=True)
        save("serve", {"settings": vars(args), "lines": lines}, args.out)


def _show(line: dict[str, Any]) -> str:
    head = f"{line['requests']:4d} requests {line['how']:14s}"
    if "error" in line:
        return f"{head} {line['error']}"
    told = f"{head} {line['tokens_per_second']:10.0f} tokens/s"
    if "first" in line:
        first, between = line["first"], line["between"]
        told += f", steady {line['steady'] or 0:.0f}, first token {first['median']:.2f} s (99th {first['p99']:.2f})"
        told += f", between {1000 * between['median']:.1f} ms (99th {1000 * between['p99']:.1f})"
    if "processor" in line:
        told += f", processor {line['processor']:.1f} s"
    return told


def _show_chat(line: dict[str, Any]) -> str:
    """The median time to the first token of the turns around the tenth and of the last ones."""
    kind, told = "with sessions" if line["sessions"] else "without", []
    for name in ("seconds", "processor"):
        early, late = (sorted(part)[len(part) // 2] for part in (line[name][5:15], line[name][-10:]))
        told.append(f"{name} {early:.3f} around turn 10, {late:.3f} at the end")
    return f"chat of {line['turns']} turns {kind:13s} first token: {'; '.join(told)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--dim", type=int, default=576)
    parser.add_argument("--model", type=Path, help="folder of a model, in place of a random one")
    parser.add_argument("--adapter", type=Path, help="adapter of that model")
    parser.add_argument("--text", type=Path, nargs="+", help="files that prompts of --prompt-tokens are cut from")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="tokens of a prompt; 0 takes 32 to 95")
    parser.add_argument("--ways", default="one by one,together", help="how the requests run")
    parser.add_argument("--beside", action="store_true", help="also measure generate_batch, and a bare stream")
    parser.add_argument("--beside-tokens", type=int, help="tokens of an answer of generate_batch, where it is slow")
    parser.add_argument("--beside-cache", default="", help="blocks and tokens in a batch of generate_batch, as 64,256")
    parser.add_argument(
        "--shared-chunk",
        type=int,
        help="tokens of prompts in a call beside running answers; by default the scheduler chooses",
    )
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--requests", default="1,8,32", help="numbers of requests at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--chunks", default="64,256", help="sizes of chunks while answers run; empty measures none")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt that joins")
    parser.add_argument("--turns", type=int, default=0, help="turns of a chat; 0 measures none")
    parser.add_argument("--out", default="benchmarks/out")
    args = parser.parse_args()
    retrofitted = open_folder(args) if args.model else build(args.layers, args.dim, args.device)
    lines: list[dict[str, Any]] = []
    for chunk in map(int, filter(None, args.chunks.split(","))):
        lines.append({"how": "joining", **measure_pause(retrofitted, args.prompt, chunk)})
        print(", ".join(f"{name} {x:.4g}" for name, x in lines[-1].items() if name != "how"), flush=True)
    for requests in map(int, filter(None, args.requests.split(","))):
        measure_all(args, retrofitted, requests, lines)
    for sessions in (True, False) if args.turns else ():
        lines.append(
            {
                "how": "chat",
                **measure_chat(args, retrofitted, args.turns if sessions else min(args.turns, 30), sessions),
            }
        )
        print(_show_chat(lines[-1]), flush=True)
    print(save("serve", {"settings": vars(args), "lines": lines}, args.out))


if __name__ == "__main__":
    main()
