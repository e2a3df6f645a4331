"""`expire-span evaluate-cache --suite`: suites of questions, resumable, with a page of their results."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from expire_span.disk.files import hash_file
from expire_span.errors import UserError

from .bars import steady_progress
from .parsing import warn

Command = Any
"""The options of evaluate-cache; its module imports this one."""
VERSION = 3
"""Counts changes of the prompts and of how a budget is met: records of another version are refused."""


def run_suite_command(command: Command, methods: list[str], budgets: list[float]) -> int:
    methods = _usable(command, methods)
    _check(command)
    from expire_span.hf import RetrofitConfig, load_adapter, retrofit
    from expire_span.hf.loading import open_model
    from expire_span.hf.texts import check_tokenizer
    from expire_span.lab.caches.evaluate import check_budgets
    from expire_span.lab.suites.page import write_results
    from expire_span.lab.suites.prompts import Frame
    from expire_span.lab.suites.record import Record, answers_path, write_prompts
    from expire_span.lab.suites.run import list_jobs, run_suite

    jobs = list_jobs(methods, budgets)
    model, tokenizer = open_model(command.model, command.dtype, command.device)
    check_length(model, command)
    frame = Frame(tokenizer, plain=command.plain)
    suite, settings = _make_suite(command, model, frame)
    retrofitted = load_adapter(model, command.adapter) if command.adapter else retrofit(model, RetrofitConfig())
    check_tokenizer(retrofitted, tokenizer)
    check_budgets(retrofitted, methods, budgets, suite.context)
    record = Record(answers_path(command.out), settings)
    write_prompts(command.out, suite.samples, settings)
    with steady_progress(command.suite) as tell:
        run_suite(retrofitted, tokenizer, suite, jobs, record, tell)
    paths = write_results(command.out, record, suite.samples)
    print(f"wrote {', '.join(map(str, paths))}")
    return 0


def _usable(command: Command, methods: list[str]) -> list[str]:
    """The methods; those that are asked by default without expire, if there is no adapter."""
    if "expire" not in methods or command.adapter is not None:
        return methods
    if command.methods != type(command).methods:
        raise UserError("method expire needs --adapter, got none; leave it out of --methods or name an adapter folder")
    return [name for name in methods if name != "expire"]


def _names(command: Command) -> list[str]:
    from expire_span.lab.suites.tasks import TASKS

    return list(TASKS) if command.tasks is None else [x.strip() for x in command.tasks.split(",")]


def _check(command: Command) -> None:
    from expire_span.lab.suites.tasks import check_tasks

    if command.suite == "gsm8k" and command.data is None:
        raise UserError("the suite gsm8k needs --data, its .jsonl file of problems, got none")
    if command.suite == "gsm8k" and command.tasks is not None:
        raise UserError(f"the suite gsm8k has one task, got --tasks {command.tasks}; leave --tasks out")
    if command.tasks is not None:
        check_tasks(_names(command))
    if command.suite == "ruler" and command.data is None:
        warn("no --data was given, so facts are hidden in repeated sentences, which is easier; name a folder of books")


def check_length(model: Any, command: Command) -> None:
    """Refuse contexts that are longer than the model was made for."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if command.suite == "ruler" and longest is not None and command.context > longest:
        raise UserError(
            f"--context {command.context} is longer than the {longest} tokens that {command.model} was made for; "
            f"give --context {longest} or less"
        )


def _make_suite(command: Command, model: Any, frame: Any) -> tuple[Any, dict[str, Any]]:
    """The suite and the settings by which its record is recognised."""
    import torch

    from expire_span.lab.suites.gsm8k import make_problems
    from expire_span.lab.suites.haystack import no_books, read_books, read_passages
    from expire_span.lab.suites.run import Suite
    from expire_span.lab.suites.tasks import make_samples

    passages: list[list[int]] = []
    if command.suite == "gsm8k":
        assert command.data is not None
        prompts = make_problems(command.data, command.prompts)
        context = len(frame.to_sample(prompts[0], 2**62).context)
        samples, material = [frame.to_sample(x, context) for x in prompts], prompts[0].context
    else:
        context, haystack = command.context, read_books(command.data) if command.data else no_books()
        samples = make_samples(
            frame, _names(command), haystack, context=context, count=command.prompts, seed=command.seed
        )
        material = "\n".join(haystack.sentences)
        if command.data is not None:
            passages = read_passages(frame.tokenizer, command.data, context, command.documents)
            if not passages:
                warn(
                    f"no file of {command.data} has {context} tokens after its first tenth, so no perplexity is measured"
                )
    device = next(model.parameters()).device
    documents = [torch.tensor(x, device=device) for x in passages]
    suite = Suite(samples, documents, context, command.chunk, command.rows, command.adapter)
    return suite, _settings(command, context, material, frame)


def _settings(command: Command, context: int, material: str, frame: Any) -> dict[str, Any]:
    """What must be the same for answers to belong into one table. Methods, budgets and the number of prompts may grow."""
    tokens = repr(frame.encode_start(frame.around("")[0] + material[:10_000])).encode()
    made = {"version": VERSION, "suite": command.suite, "model": command.model, "dtype": command.dtype}
    made |= {"context": context, "chunk": command.chunk, "seed": command.seed, "chat": frame.chats}
    made |= {"text": hashlib.sha256(material.encode()).hexdigest()[:16], "data": str(command.data)}
    made |= {"tokens": hashlib.sha256(tokens).hexdigest()[:16], "adapter": _hash_folder(command.adapter)}
    return made


def _hash_folder(folder: Path | None) -> str | None:
    """A hash of an adapter's weights; None without an adapter."""
    files = sorted(folder.rglob("*.safetensors")) if folder is not None else []
    return None if folder is None else "-".join(hash_file(x)[:16] for x in files)
