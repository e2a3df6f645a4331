"""Help shows where to start and switches as switches, and every option that a message names exists in its command."""

from __future__ import annotations

import ast
import contextlib
import re
from functools import cache
from pathlib import Path

import pytest
import tyro

from expire_span.cli import VERBS, main
from expire_span.cli.lists import START_HERE
from expire_span.cli.parsing import as_switches
from expire_span.cli.runs import Eval
from expire_span.errors import UserError
from expire_span.recipes import GROUPS, RECIPES

PACKAGE = Path(__file__).resolve().parent.parent.parent / "expire_span"
NAMES = {
    "train": ["text_tiny", "collision_tiny", "agent"],
    "compare": ["text_tiny", "agent"],
    "play": ["corridor"],
    "study": ["entrances", "word-rnn", "questions"],
    "data": ["enwik8", "books", "collision", "shipped"],
    "figure": ["spans"],
}
"""What a verb needs before its options, one for each set of options that it has."""
OPTION = re.compile(r"(?<![\w-])(?<!var\()--([a-z][\w.-]*\w)")
OF_OTHERS = {"help", "help-all", "version", "init-from", "num-processes"}
"""Options that are not read as fields, or belong to other programs."""


class Stop(BaseException):
    """Ends a command once its options are read."""


@cache
def options_of(verb: str) -> frozenset[str]:
    """Every option of a verb, without dashes, over all its kinds of settings."""
    found: set[str] = set()

    def note(kind, *, args, prog, config, default=None, **_):
        given = {} if default is None else {"default": default}
        parser = tyro.extras.get_parser(kind, config=config, **given)
        found.update(OPTION.findall(parser.format_help()))
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tyro, "cli", note)
        for name in NAMES.get(verb, [""]):
            with contextlib.suppress(Stop):
                main([verb, *([name] if name else []), "--help-all"])
    return frozenset(found)


@cache
def strings_of(path: Path) -> list[str]:
    """All string constants of a file, those inside f-strings too, without the strings that document something."""
    tree = ast.parse(path.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [node.value for node in found if id(node) not in docs]


def told(path: Path) -> set[str]:
    return {name.rstrip(".") for text in strings_of(path) for name in OPTION.findall(text)} - OF_OTHERS


def test_help_begins_with_where_to_start_and_groups_the_recipes(capsys):
    for verb, usual in (("train", "--train.steps"), ("compare", "--mixers")):
        assert main([verb, "--help"]) == 0
        shown = capsys.readouterr().out
        order = [
            shown.index(words) for words in ("usual options:", usual, "start here:", *(f"\nto {t}:" for t in GROUPS))
        ]
        assert order == sorted(order) and "\nothers:" not in shown
        assert all(re.search(rf"^  {name} ", shown, re.MULTILINE) for name in RECIPES)
    assert set(START_HERE) <= set(RECIPES)


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_answers_help(verb, capsys):
    with contextlib.suppress(SystemExit):
        assert main([verb, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: expire-span {verb}")


def test_switches_are_shown_as_switches_everywhere(capsys):
    for verb in ("eval", "view", "resume", "recipes", "memories"):
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        shown = capsys.readouterr().out
        assert "{True,False}" not in shown and "--no-" in shown, verb


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("RUN --greedy", "RUN --greedy"),
        ("--greedy RUN", "--greedy RUN"),
        ("RUN --greedy True --batch 3", "RUN --greedy --batch 3"),
        ("RUN --greedy=False", "RUN --no-greedy"),
        ("RUN --path True", "RUN --path True"),
    ],
)
def test_switches_take_a_value_or_none(given, meant):
    assert as_switches(given.split(), Eval) == meant.split()


def test_switches_of_settings_inside_a_run_take_a_value_too():
    from expire_span.cli.runs import Train

    config = Train(RECIPES["recall"]())
    assert as_switches(["--train.carry", "False"], Train, config) == ["--train.no-carry"]
    with pytest.raises(UserError, match=r"--train\.graphs must be one of True, False, got 'maybe'"):
        as_switches(["--train.graphs=maybe"], Train, config)


@pytest.mark.parametrize("module", sorted({module.split(".")[0] for _, module in VERBS.values()}))
def test_messages_of_a_command_name_its_own_options(module):
    verbs = [verb for verb, (_, place) in VERBS.items() if place.split(".")[0] == module]
    verbs += ["verify", "chat", "generate"] if module == "retrofit" else []  # what to type next
    known = frozenset().union(*map(options_of, verbs))
    assert told(PACKAGE / "cli" / f"{module}.py") <= known, f"known are {sorted(known)}"


def test_messages_of_the_library_name_options_that_a_command_has():
    known = frozenset().union(*map(options_of, VERBS))
    for path in PACKAGE.rglob("*.py"):
        assert told(path) <= known, f"{path.relative_to(PACKAGE)} names {told(path) - known}"


def test_messages_that_name_a_command_give_it_options_that_it_has():
    for path in PACKAGE.rglob("*.py"):
        for text in strings_of(path):
            for verb, rest in re.findall(r"expire-span ([a-z-]+)((?: [^,;.`]*)?)", text):
                wrong = set(OPTION.findall(rest)) - OF_OTHERS - (options_of(verb) if verb in VERBS else set())
                assert verb not in VERBS or not wrong, f"{path.name}: {verb} has no --{wrong}"


def test_a_folder_that_exists_is_refused_with_the_option_of_the_command(tmp_path, capsys):
    (tmp_path / "text").write_text("x")
    (tmp_path / "there").mkdir()
    assert main(["retrofit", "M", "--data", str(tmp_path / "text"), "--out", str(tmp_path / "there")]) == 2
    assert "give another --out" in capsys.readouterr().err


def test_ship_says_where_to_give_data_that_has_moved(tmp_path, capsys, monkeypatch):
    from expire_span.shipped import SHIPPED

    monkeypatch.chdir(tmp_path)
    assert main(["ship", str(SHIPPED), "--out", "a", "--data", "books"]) == 2
    said = capsys.readouterr().err
    assert "--path" in said and "--task.path" not in said


def test_verify_help_has_the_option_of_adapters(capsys):
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    assert "--model" in capsys.readouterr().out
