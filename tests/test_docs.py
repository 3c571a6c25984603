"""The pages tell the truth: outputs, examples, tables, pictures and links are those of today."""

from __future__ import annotations

import doctest
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from roundelay import errors
from roundelay.algorithms import algorithms
from roundelay.cli._group import COMMANDS
from roundelay.collectives import collectives
from roundelay.engines import engines
from roundelay.networks import _file, networks
from roundelay.reductions import REDUCTIONS
from roundelay.schedule import from_json, serialize, strict_json

ROOT = Path(__file__).parent.parent
FENCED = re.MULTILINE | re.DOTALL


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("docs/generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generator()
WRITTEN: list[Path] = generate.written()
GENERATED: list[str] = sorted(generate.generated())
PAGES = sorted({*WRITTEN, *(ROOT / name for name in GENERATED if name.endswith(".md"))})


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_file_is_not_stale(name: str) -> None:
    assert text_of(ROOT / name) == generate.generated()[name](), "run `make docs`"


def test_no_picture_is_left_over() -> None:
    pictures = {name_of(path) for path in (ROOT / "docs" / "pictures").iterdir()}
    assert pictures == {name for name in GENERATED if name.endswith(".svg")}


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_a_written_page_shows_what_its_commands_print(page: Path) -> None:
    assert text_of(page) == generate.refreshed(text_of(page)), "run `make docs`"


@pytest.mark.parametrize(
    ("block", "fresh"),
    [
        ("```console\n$ echo 1\n2\n```\n", "```console\n$ echo 1\n1\n```\n"),
        ("```console\n$ echo '1\n> 2'\n```\n", "```console\n$ echo '1\n> 2'\n1\n2\n```\n"),
        ("```console\n$ true\n$ echo b >&2\n```\n", "```console\n$ true\n$ echo b >&2\nb\n```\n"),
        (
            "```python\nprint(1)\n```\n\n```text\n2\n```\n",
            "```python\nprint(1)\n```\n\n```text\n1\n```\n",
        ),
    ],
)
def test_the_checker_sees_an_output_that_is_wrong(block: str, fresh: str) -> None:
    assert generate.refreshed(block) == fresh


def test_the_checker_sees_a_python_block_that_fails() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        generate.refreshed("```python\n1 / 0\n```\n")


@every_page
def test_doctests_of_a_page_hold(page: Path) -> None:
    blocks = "\n".join(re.findall(r"^```python\n(>>>.*?)^```", text_of(page), FENCED))
    test = doctest.DocTestParser().get_doctest(blocks, {}, name_of(page), str(page), 0)
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert "".join(report) == ""


def anchors(page: Path) -> set[str]:
    """Return the places a link can lead to, as code hosts make them of headings."""
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=FENCED)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[str]:
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=FENCED)
    yield from re.findall(r"\]\(([^)\s]+)\)", prose)


@every_page
def test_no_link_is_dead(page: Path) -> None:
    dead = []
    for link in links(page):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    found, queue = set(), [ROOT / "README.md"]
    while queue:
        page = queue.pop()
        if page not in found and page.suffix == ".md":
            found.add(page)
            queue += [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]
    assert found == {page.resolve() for page in PAGES}


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("collectives", [f"\n## {name}\n" for name in collectives.names()]),
        ("algorithms", [f"algorithms/{name}.py" for name in algorithms.names()]),
        ("networks", [f"\n## {name}\n" for name in networks.names()]),
        ("engines", [f"engines/{name}.py" for name in engines.names()]),
        ("commands", [f"roundelay {name}" for name in COMMANDS.names()]),
        ("errors", [f"`{name}`" for name in errors.__all__]),
        ("reductions", [f"`{name}`" for name in REDUCTIONS]),
        ("failures", ["**missing**", "**doubled**", "**stale**", "**overwritten**", "**foreign**",
                      "**race**", "**deadlock**", "**untidy**"]),
    ],
)  # fmt: skip
def test_everything_is_written_about(what: str, names: list[str]) -> None:
    told = "\n".join(map(text_of, PAGES))
    assert names
    assert [name for name in names if name not in told] == [], f"{what} that no page tells of"


def test_the_limits_are_those_of_the_code() -> None:
    told = text_of(ROOT / "docs" / "schedule-format.md").partition("## Limits")[2]
    shown = [int(number.replace(",", "")) for number in re.findall(r"\| ([\d,]+) \|", told)]
    assert shown == [
        strict_json.MAX_BYTES, strict_json.MAX_TOKENS, strict_json.MAX_DIGITS, strict_json.MAX_NAME,
        serialize.MAX_RANKS, serialize.MAX_TRANSFERS, serialize.MAX_PARTS, serialize.MAX_CELLS,
        _file.MAX_LINKS,
    ]  # fmt: skip


def test_the_readme_begins_with_a_sentence_and_a_picture_and_is_short_with_its_example() -> None:
    text = text_of(ROOT / "README.md")
    title, sentence, picture = text.split("\n\n")[:3]
    assert title == "# Roundelay"
    assert re.fullmatch(r"[^.]+\.", sentence)
    assert picture.startswith("![")
    example = re.findall(r"^```python\n(.*?)^```", text, FENCED)[0]
    assert len([line for line in example.splitlines() if line]) <= 8
    assert "make test " in text


# What a newcomer copies out of CONTRIBUTING. It is put beside the package, not into it, so that a
# test that is killed leaves nothing behind.


def newcomers() -> dict[str, str]:
    """Return the files that CONTRIBUTING shows, by their path in the package."""
    text = text_of(ROOT / "CONTRIBUTING.md")
    block = r"^```python\n(# src/roundelay/(\S+)\n.*?)^```"
    return {path: code for code, path in re.findall(block, text, FENCED)}


BESIDE = """
import importlib, sys
for family in ("algorithms", "collectives", "networks"):
    importlib.import_module("roundelay." + family).__path__.append(sys.argv[1] + "/" + family)
"""


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """Return a folder with a newcomer's files, laid out like the package."""
    for family in ("algorithms", "collectives", "networks"):
        (tmp_path / family).mkdir()
    for path, code in newcomers().items():
        (tmp_path / path).write_text(code, encoding="utf-8")
    return tmp_path


def run_beside(folder: Path, program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", BESIDE + program, str(folder), *arguments],
        env={name: value for name, value in os.environ.items() if name != "COLUMNS"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def roundelay(folder: Path, *arguments: str) -> str:
    program = "del sys.argv[1]\nfrom roundelay.cli import main\nmain()"
    return run_beside(folder, program, *arguments)


def test_the_first_newcomer_has_ten_lines_of_code_and_two_sentences() -> None:
    assert list(newcomers()) == [
        "algorithms/all_reduce_line.py", "collectives/rotate.py", "networks/line.py"
    ]  # fmt: skip
    lines = newcomers()["algorithms/all_reduce_line.py"].splitlines()[1:]
    assert len([line for line in lines if line and '"""' not in line]) == 10
    assert len([line for line in lines if '"""' in line]) == 2


def test_a_newcomers_algorithm_is_listed_proved_priced_and_drawn(beside: Path) -> None:
    assert re.search(r"all_reduce +│ line +│ +14 ", roundelay(beside, "list"))
    proved = roundelay(beside, "prove", "all_reduce_line")
    assert re.search(r"✓ │ all_reduce_line │ all_reduce │ +16 │ rank_order", proved)
    for network in ("switch", "line"):
        drawn = roundelay(beside, "explain", "all_reduce", "-a", "line", "--network", network)
        assert "a0+a1+a2+a3✓" in drawn
        assert f"µs on {network}" in drawn
    files = [beside / f"line.{ending}" for ending in ("html", "svg", "json")]
    outs = [argument for file in files for argument in ("--out", str(file))]
    roundelay(beside, "explain", "all_reduce_line", "-n", "5", *outs)
    page, drawing, schedule = map(text_of, files)
    assert page.startswith("<!doctype html>")
    assert drawing.startswith("<svg")
    assert "all_reduce_line" in page
    assert "all_reduce_line" in drawing
    assert len(from_json(schedule).steps) == 8


def test_the_grids_of_the_tests_cover_a_newcomer(beside: Path) -> None:
    folders = ["algorithms", "collectives", "networks", "schedule", "engines"]
    program = """
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""
    tests = [str(ROOT / "tests" / folder) for folder in folders]
    wanted = "line or rotate"
    out = run_beside(beside, program, "-k", wanted, "--rootdir", str(ROOT), *tests)
    passed = re.search(r"(\d+) passed", out)
    assert passed is not None
    assert int(passed[1]) > len(folders)
