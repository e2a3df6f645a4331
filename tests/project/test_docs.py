"""The documents keep their word: snippets run, links lead somewhere, commands and options exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from expire_span.cli import VERBS
from expire_span.models.systems import SYSTEMS
from expire_span.recipes import RECIPES
from expire_span.recipes.facts import FACTS

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCS]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_readme_is_short_and_its_snippet_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 150
    (snippet,) = blocks(text, "python")
    exec(compile(snippet, "README.md", "exec"), {"__name__": "__main__"})


def words_outside_code(text: str) -> int:
    """Number of words that a reader reads, without code, comments and the lines of tables."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return len(re.sub(r"<!--.*?-->|[|]|-{3,}", " ", text).split())


def test_readme_is_one_screen_for_three_people():
    """Lines and cells are short enough for a screen; the first thing is what this is and how to install it."""
    text = (ROOT / "README.md").read_text()
    assert words_outside_code(text) <= 800
    for line in text.splitlines():
        cells = line.split("|") if line.startswith("|") else []
        assert len(line) <= 160 or cells, f"a line of {len(line)} characters: {line[:60]}"
        assert all(len(cell) <= 200 for cell in cells), f"a cell of more than 200 characters: {line[:60]}"
    first = text.index("learned KV-cache eviction"), text.index("pip install"), text.index("## Three doors")
    assert first == tuple(sorted(first)) and text[: first[1]].count("\n") < 10
    doors = text[first[2] : text.index("## See it forget")]
    for door in ("Cut the cache of your model", "Put it into your model", "Study memory"):
        part = doors[doors.index(door) :].split("\n**")[0]
        assert part.count("```") == 2 and re.search(r"\d+(\.\d+)?[x%]", part), (
            f"{door}: one command and a measured number"
        )


def test_readme_explains_its_words_before_it_uses_them():
    """Each word's first place after the title line is where it is explained."""
    text = (ROOT / "README.md").read_text()
    text = text[text.index("A *memory* is") :]
    for word in ("memory", "span", "ramp"):
        assert text.index(f"*{word}*") <= text.replace(f"*{word}*", "#" * (len(word) + 2)).lower().find(word), word
    assert "The demo's task: a colour is shown" in text


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    path = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if link.startswith("http"):
            continue
        file, _, part = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{name} links to {link}"
        headings = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE) if part else []
        assert not part or part in map(anchor, headings), f"{name} links to {link}"


@pytest.mark.parametrize("name", NAMES)
def test_commands_exist(name):
    text = (ROOT / name).read_text()
    makefile = (ROOT / "Makefile").read_text()
    for verb, recipe in re.findall(r"(?:expire-span|-m expire_span) ([a-z]+(?:-[a-z]+)*)(?: ([a-z]\w*))?", text):
        assert verb in VERBS, f"{name} names the command {verb}"
        assert verb != "train" or not recipe or recipe in RECIPES, f"{name} names the recipe {recipe}"
    for target in re.findall(r"`?make ([a-z-]+)`?(?: |$|\n)", "\n".join(blocks(text, "bash"))):
        assert f"\n{target}:" in makefile, f"{name} names make {target}"
    for module in re.findall(r"python -m (benchmarks\.\w+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), f"{name} names {module}"
    for file in re.findall(r"`((?:tests|examples|benchmarks)/\w+\.py)`", text):
        assert (ROOT / file).exists(), f"{name} names {file}"


@pytest.mark.parametrize("name", NAMES)
def test_options_exist(name):
    """Every --train.x, --task.x, --model.x is a field."""
    text = (ROOT / name).read_text()
    configs = [make() for make in RECIPES.values()]
    for option in re.findall(r"--((?:train|task|model)\.[\w.-]+)", text):
        path = option.rstrip(".").replace("-", "_").split(".")
        assert any(has_field(config, path) for config in configs), f"{name} names --{option}"


def has_field(value: object, path: list[str]) -> bool:
    return not path or (hasattr(value, path[0]) and has_field(getattr(value, path[0]), path[1:]))


def test_the_page_on_comparisons_says_for_every_system_how_its_memory_is_set():
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", (ROOT / "docs/compare.md").read_text(), flags=re.MULTILINE)
    told = {kind: words for kinds, words in rows for kind in re.findall(r"`(\w+)`", kinds)}
    assert set(told) == set(SYSTEMS)
    for kind, words in told.items():
        assert words.startswith("nothing") == (SYSTEMS[kind].budget.settings is None), kind


def measured(path: Path) -> list[str]:
    """Figures with a decimal point in the tables of a document, without columns of published figures and of commands."""
    found, header = [], []
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        header = [] if not cells else header or cells
        for title, cell in zip(header, cells, strict=False):
            if not re.search("published|command", title):
                cell = re.sub(r"\(?published [\d./ %]+|`[^`]*`|\]\([^)]*\)", "", cell)
                found += re.findall(r"(?<![\w.])\d[\d,]*\.\d+", cell)
    return found


def test_figures_agree_with_the_results():
    """Every measured figure of README.md, docs/paper.md and `expire-span recipes` stands in docs/results.md, or is one of its
    figures in fewer digits."""
    results = (ROOT / "docs/results.md").read_text()
    known = re.findall(r"\d+\.\d{3,}", results)
    facts = [x for fact in FACTS.values() for x in re.findall(r"\d+\.\d+", fact.score)]
    prose = re.sub(r"^```.*?^```|^\|.*?$", "", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    readme = measured(ROOT / "README.md") + re.findall(r"(?<![\w.])\d[\d,]*\.\d+", prose)
    figures = {"README.md": readme, "docs/paper.md": measured(ROOT / "docs/paper.md")}
    for name, numbers in {**figures, "recipe_facts.py": facts}.items():
        assert len(numbers) > 15, f"{name} has only {len(numbers)} figures: are its tables still read?"
        for x in numbers:
            places, value = len(x.split(".")[1]), float(x.replace(",", ""))
            near = places > 1 and any(abs(float(r) - value) < 0.5001 * 10**-places for r in known)
            assert re.search(rf"(?<![\d.]){re.escape(x)}(?!\d)", results) or near, f"{x} of {name} is not in results.md"
