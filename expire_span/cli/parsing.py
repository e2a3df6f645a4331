"""Parsing of options into a dataclass, with an error of one sentence, for all verbs."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from expire_span.checks import out_of_bounds
from expire_span.errors import UserError
from expire_span.field_docs import without_fields

from .short_help import show_usual

PROGRAM = "expire-span"
_PLAIN_WORDS = (
    (r"(--\S+): invalid literal for int\(\) with base 10: (.*)", r"\1 must be a whole number, got \2"),
    (r"(--\S+): could not convert string to float: (.*)", r"\1 must be a number, got \2"),
    (
        r"(--\S+): no type matching \{None\}\|INT could be .* from \[(.*?)\]\..*",
        r"\1 must be a whole number or None, got \2",
    ),
    (
        r"(--\S+): no type matching \{None\}\|FLOAT could be .* from \[(.*?)\]\..*",
        r"\1 must be a number or None, got \2",
    ),
    (r"invalid choice (.*) for argument '(--\S+)'\. Expected one of \((.*?),?\)", r"\2 must be one of \3, got \1"),
    (r"Missing value for argument '(--\S+)'\. Expected .*", r"\1 needs a value"),
)
"""Messages of tyro about a wrong value, and what we say instead: the option, what it must be, and what was given."""


def parse(kind: Any, args: list[str], prog: str, default: Any = None, usual: Sequence[str] = ()) -> Any:
    """Parse options into a dataclass; tyro's messages about wrong options become one sentence.

    Args:
        usual: options that --help shows; --help-all then shows all. If it is empty, both show all.
    """
    import tyro  # here, since --help and --version must work without it, in an installation of the core alone

    if usual and default is not None and ("-h" in args or "--help" in args):
        print(show_usual(prog, default, usual))
        raise SystemExit(0)
    args = ["--help" if word == "--help-all" else word for word in as_switches(args, kind, default)]
    said = io.StringIO()
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(said), without_fields():
            found, unknown = tyro.cli(
                kind, args=args, prog=prog, config=(tyro.conf.AvoidSubcommands,), return_unknown_args=True, **options
            )
        if unknown:
            raise UserError(tell_unknown(unknown[0], kind if default is None else default, prog))
        check_widths(found)
        check_bounds(found)
        return found
    except SystemExit as stop:
        if not stop.code:
            raise
    raise UserError(tell_missing(said.getvalue(), kind, prog) or tell_wrong_value(said.getvalue(), prog))


def as_switches(args: list[str], kind: Any, default: Any = None) -> list[str]:
    """Switches with a value, such as --greedy True, as plain ones: --greedy, or --no-greedy for False."""
    known, out, rest = find_switches(kind if default is None else default), [], list(args)
    while rest:
        word, equals, value = rest.pop(0).partition("=")
        if word.replace("_", "-") not in known or not (equals or (rest and rest[0] in ("True", "False"))):
            out.append(word + equals + value)
            continue
        value = value if equals else rest.pop(0)
        if value not in ("True", "False"):
            raise UserError(f"{word} must be one of True, False, got {value!r}")
        *path, last = word[2:].split(".")
        out.append(word if value == "True" else "--" + ".".join([*path, f"no-{last}"]))
    return out


def find_switches(command: Any) -> set[str]:
    """The options of a command (a dataclass, or one with values) that are switches, those of settings inside it included."""
    return {name for name, value in find_options(command) if isinstance(value, bool)}


def find_options(command: Any, prefix: str = "--") -> Iterator[tuple[str, Any]]:
    """Names and values of a command's options, those of settings inside it included; a class gives its defaults."""
    hints = get_type_hints(command if isinstance(command, type) else type(command), include_extras=True)
    for field in dataclasses.fields(command):
        made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value, name = made if isinstance(command, type) else getattr(command, field.name), field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            yield from find_options(value, prefix if prefix == "--" and name in UNNAMED else f"{prefix}{name}.")
        elif _positional(hints[field.name]) is None:
            yield prefix + name, value


def _positional(hint: Any) -> str | None:
    """What the usage calls a field that is given by its place; None where it is an option."""
    import tyro

    told = getattr(hint, "__metadata__", ())
    return next((x.metavar for x in told if getattr(x, "metavar", None)), "") if tyro.conf.Positional in told else None


def tell_unknown(word: str, command: Any, prog: str) -> str:
    """The sentence about a word that is no option of a command, with the option that is nearest to it."""
    options = [name for name, _ in find_options(command)] if word.startswith("--") else []
    near = difflib.get_close_matches(word.split("=")[0].replace("_", "-"), options, n=1)
    return f"unknown option {word}; " + (f"did you mean {near[0]}?" if near else f"see {prog} --help")


def tell_missing(said: str, kind: Any, prog: str) -> str | None:
    """The sentence about what a command needs and was not given, by the fields that have no default; None if it has all."""
    if "Missing from" not in said:
        return None
    hints = get_type_hints(kind, include_extras=True)
    needed = [x.name for x in dataclasses.fields(kind) if x.default is x.default_factory is dataclasses.MISSING]
    names = [_positional(hints[name]) or f"--{name.replace('_', '-')}" for name in needed]
    missing = [name for name in names if re.search(rf"^\W*{re.escape(name)}( |$)", plain(said), re.MULTILINE)]
    return f"{prog.removeprefix(PROGRAM).lstrip()} needs {' and '.join(missing or names)}, got none; see {prog} --help"


def tell_wrong_value(said: str, prog: str) -> str:
    """The first paragraph in tyro's frame (drawn, or in ASCII under a title), in our words where we have some."""
    lines = [line.strip("│ ") for line in plain(said).splitlines() if not line.startswith(("╭", "╰"))]
    paragraphs = re.split(r"\n[─-]{4,}\n", "\n".join(lines))
    message = " ".join(paragraphs[0 if "╭" in said else 1].split()).replace("Error parsing --", "--")
    message = re.sub(r"^Error parsing [\w.]*: ", "", message).removesuffix(".")
    for theirs, ours in _PLAIN_WORDS:
        message = re.sub(f"^{theirs}$", ours, message)
    return f"{message}; see {prog} --help"


def plain(said: str) -> str:
    """A terminal's text without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", said)


def nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are: {', '.join(known)}"


def warn(message: str) -> None:
    print(f"{PROGRAM}: {message}", file=sys.stderr)


def check_bounds(command: Any) -> None:
    """Refuse options that break a limit of their type."""
    for name, bound, value in out_of_bounds(command):
        raise UserError(f"--{name.replace('_', '-')} must {bound.must}, got {value}")


UNNAMED = ("config", "expiry", "learning")
"""Settings whose fields are options of the command itself."""


def check_widths(command: Any, prefix: str = "") -> None:
    """Refuse whole numbers that no library can count with, in options and in the settings inside them."""
    for field in dataclasses.fields(command):
        value, name = getattr(command, field.name), prefix + field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            check_widths(value, "" if not prefix and name in UNNAMED else f"{name}.")
        for number in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(number, int) and not -(2**63) <= number < 2**63:
                raise UserError(f"--{name} must be less than 2**63 in size, got {number}")


def read_text_option(path: Path) -> bytes:
    """The bytes of the file that --text names."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read --text {path}: {error.strerror}") from error


def is_first_process() -> bool:
    """Whether this is the first of the processes that a launcher has started for one run; only that one prints."""
    return os.environ.get("RANK", "0") == "0"


def take_name(
    args: list[str], verb: str, what: str, known: Iterable[str], usage: Callable[[], str]
) -> tuple[str, list[str]] | None:
    """The name that a verb needs before its options, and the options; None if --help was given, after printing the usage."""
    if args and not args[0].startswith("-"):
        return args[0], args[1:]
    if args and args[0] in ("-h", "--help"):
        print(usage())
        return None
    raise UserError(f"{verb} needs a {what} before its options; known are: {', '.join(known)}")
