"""The command line. Each verb imports what it needs inside: help and bad input answer without loading torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from expire_span import __version__
from expire_span.errors import UserError, explain
from expire_span.models.systems import load_plugins

from .parsing import PROGRAM, nearest


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors of the user are one sentence on stderr, never a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(argv)
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except (Exception, KeyboardInterrupt) as error:
        told = explain(error)
        if told is None:  # a bug of this package: show the traceback, which a bug report needs
            raise
        return _fail(*told)


def _fail(message: str, code: int) -> int:
    text = f"{PROGRAM}: {' '.join(message.split())}"
    print(text.encode(errors="backslashreplace").decode(), file=sys.stderr)
    return code


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"{PROGRAM} {__version__}")
        return 0
    if sys.platform == "win32":
        raise UserError(
            "the command line does not run on Windows, which cannot lock and sync folders as run folders need it; "
            "use it inside WSL 2, or the operator and the layers as a library"
        )
    verb, rest = argv[0], argv[1:]
    if verb not in VERBS:
        raise UserError(f"unknown command {verb!r}; {nearest(verb, list(VERBS))}")
    load_plugins()
    return find_verb(verb)(rest)


def find_verb(verb: str) -> Callable[[list[str]], int]:
    """The function of a verb. Only its own module is loaded, so that one command need not wait for all others' options."""
    module, name = VERBS[verb][1].split(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def _overview() -> str:
    verbs = "\n".join(f"  {name:<16}{text}" for name, (text, _) in VERBS.items())
    return (
        f"usage: {PROGRAM} COMMAND [OPTIONS]\n\n"
        "Exact, learned KV-cache eviction: attention whose memories learn when to expire.\n\n"
        f"commands:\n{verbs}\n\n"
        f"{PROGRAM} COMMAND --help explains a command; {PROGRAM} train RECIPE --help-all lists every field of a recipe.\n"
        f"Several processes or machines: accelerate launch -m expire_span train RECIPE ..."
    )


VERBS: dict[str, tuple[str, str]] = {
    "train": ("train a recipe: expire-span train RECIPE [--FIELD VALUE ...]", "runs.run_train"),
    "resume": ("go on with an interrupted run", "runs.run_resume"),
    "eval": ("score a run's newest checkpoint", "runs.run_eval"),
    "generate": ("write text with a run or a retrofitted model: expire-span generate [RUN]", "generate.run_generate"),
    "verify": ("show that deletion changes nothing: expire-span verify [RUN|ADAPTER]", "verify.run_verify"),
    "report": ("write a run's report.html", "runs.run_report"),
    "trace": (
        "write what a run remembers while it reads: expire-span trace [RUN|ADAPTER] --text FILE",
        "trace.run_trace",
    ),
    "view": ("show on a page what a run remembers: expire-span view [RUN|ADAPTER|TRACE]", "view.run_view"),
    "figure": (
        "write a figure for a paper: expire-span figure spans|timeline|words|growth|.. [RUN]",
        "figure.run_figure",
    ),
    "analyse": (
        "what a run of text keeps, why, and what shorter memory costs: expire-span analyse [RUN]",
        "analyse.run_analyse",
    ),
    "compare": ("memory systems side by side: expire-span compare RECIPE --mixers a,b,c", "compare.run_compare"),
    "demo": ("train the recall recipe and show what it remembers", "runs.run_demo"),
    "data": ("fetch or make a data set: expire-span data enwik8|books|collision", "data.run_data"),
    "play": ("play a grid world yourself: expire-span play corridor|portal|instruction|tmaze", "play.run_play"),
    "import": ("make a run of a checkpoint that the paper's released code wrote", "importing.run_import"),
    "ship": ("make a small folder of a run of text, to give away: expire-span ship RUN --out FOLDER", "ship.run_ship"),
    "recipes": ("list the recipes", "lists.run_recipes"),
    "memories": ("list the memory systems", "lists.run_memories"),
    "retrofit": (
        "teach a Hugging Face model what to forget: expire-span retrofit MODEL --data TEXT",
        "retrofit.run_retrofit",
    ),
    "evaluate-cache": ("forgetting methods of a Hugging Face model side by side", "evaluate_cache.run_evaluate_cache"),
    "measure-slots": ("measure how many slots an adapter needs in vLLM", "measure_slots.run_measure_slots"),
    "chat": (
        "chat with a retrofitted model in bounded memory: expire-span chat MODEL --adapter FOLDER",
        "chat.run_chat",
    ),
    "serve": ("serve a run or a retrofitted model as OpenAI's API does: expire-span serve [MODEL]", "serve.run_serve"),
    "study": ("run a study of memory and write its page: entrances, word-rnn, questions", "study.run_study"),
}
