"""The pages tell the truth: outputs, examples, tables, pictures and links are those of today."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import roundelay
from roundelay import _core, errors
from roundelay.algorithms import algorithms
from roundelay.cli._group import COMMANDS
from roundelay.collectives import collectives
from roundelay.engines import engines
from roundelay.networks import _file, networks
from roundelay.reductions import REDUCTIONS
from roundelay.schedule import serialize, strict_json

ROOT = Path(__file__).parent.parent
FENCED = re.MULTILINE | re.DOTALL


def load_from_docs(*names: str) -> list[ModuleType]:
    """Load what writes the pages; those files stand beside the pages, not in a package."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.pop(0)


ahead, chinese, generate, speed, peers = load_from_docs(
    "ahead", "chinese", "generate", "speed", "peers"
)
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
    pictures = {name_of(path) for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert pictures == {name for name in GENERATED if name.endswith(".svg")}


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
        # Where times are shown, numbers may differ; words may not.
        ("```console times\n$ echo 1.5 ms\n20 µs\n```\n",) * 2,
        (
            "```console times\n$ echo 1 lost\n2 kept\n```\n",
            "```console times\n$ echo 1 lost\n1 lost\n```\n",
        ),
        ("```python\nprint(1, '│')\n```\n\n```text times\n100   │\n```\n",) * 2,
        (
            "```python\nprint('1 s')\n```\n\n```text times\nnever\n```\n",
            "```python\nprint('1 s')\n```\n\n```text times\n1 s\n```\n",
        ),
        # A reader's paths are not those of the machine that wrote the page.
        ("```console\n$ echo $PWD/a.py\n```\n", "```console\n$ echo $PWD/a.py\na.py\n```\n"),
    ],
)
def test_the_checker_sees_an_output_that_is_wrong(block: str, fresh: str) -> None:
    assert generate.refreshed(block) == fresh


def test_the_checker_sees_a_python_block_that_fails() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        generate.refreshed("```python\n1 / 0\n```\n")


RESULTS = {
    "command": "python benchmarks/all_reduce_sizes.py",
    "python": "3.11.7",
    "cores": 2,
    "instruction_set": "avx2",
    "versions": {"mpi": "Some MPI 5"},
    "float32_sum": {
        "2 ranks": [
            {"bytes": 8, "microseconds": {"roundelay": 0.5, "arena": 0.5, "gloo": 9, "mpi": 1.25}},
            {"bytes": 1 << 20, "microseconds": {"roundelay": 1234.5}, "floor_percent_arena": 81.2,
             "floor_percent_roundelay": 40.6},
        ]
    },
}  # fmt: skip


def test_speed_is_read_from_what_was_measured(tmp_path: Path) -> None:
    assert "`make bench`" in speed.two_ranks(tmp_path)
    assert "`make bench`" in speed.all_reduce(tmp_path)
    assert "`make bench`" in speed.two_hosts(tmp_path)
    (tmp_path / "all_reduce_sizes.json").write_text(json.dumps(RESULTS))
    table = speed.two_ranks(tmp_path)
    assert "| 8 B | 0.5 | 0.5 | 9 | 1.25 | 2.5x | 2.5x | - | - |" in table
    assert "| 1 MiB | 1234 | - | - | - | - | - | 41 % | 81 % |" in table
    assert "2 cores (avx2), Python 3.11.7, mpi: Some MPI 5" in table
    assert table.splitlines()[2] in speed.all_reduce(tmp_path)


def cell_of(collective: str, nbytes: int, **took: float) -> dict[str, object]:
    return {"collective": collective, "bytes": nbytes, "microseconds": took}


def test_who_is_ahead_is_told_by_the_best_peer_each_beside_ours_of_its_run(tmp_path: Path) -> None:
    assert "`make bench`" in ahead.ahead(tmp_path)
    measured = {
        "3 ranks": [
            cell_of("all_reduce", 8, roundelay=2, arena=1, registered=1.5, mpi=3),
            cell_of("gather", 12, roundelay=1, mpi=4),
            cell_of("barrier", 0, roundelay=1, mpi=2),
        ],
        "3 ranks, beside intel": [
            cell_of("all_reduce", 8, roundelay=4, arena=4, intel=2),
            cell_of("gather", 12, roundelay=8, intel=8),
            cell_of("gather", 65532, roundelay=1, intel=0.25),
        ],
    }
    (tmp_path / "collectives.json").write_text(json.dumps({**RESULTS, "float32_sum": measured}))
    table = ahead.ahead(tmp_path)
    assert "ahead in 2 of 4 cells, behind in 2; geometric mean 0.71." in table
    assert "| best peer / ours | 8 B | 64 KiB |" in table
    assert "| all_reduce | **0.50** intel |  |" in table
    assert "| all_reduce, arena | **0.50** intel |  |" in table
    assert "| all_reduce, registered | 2.00 |  |" in table
    assert "| gather | 1.00 | **0.25** intel |" in table
    assert "| barrier | 2.00 |  |" in table


def test_beside_its_peers_ours_is_right_as_often_and_never_silently_wrong() -> None:
    rows = peers.rows()
    assert list(rows) == list(peers.STRATEGIES)
    for programs in rows.values():
        theirs, ours = zip(*programs.values(), strict=True)
        assert len(programs) >= 90
        assert set(theirs) <= set(peers.OUTCOMES)
        assert set(ours) <= {"right", "refused"}
        assert ours.count("right") >= theirs.count("right")


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
        ("engines", [f"src/roundelay/engines/{name}" for name in engines.names()]),
        ("commands", [f"roundelay {name}" for name in COMMANDS.names()]),
        ("errors", [f"`{name}`" for name in errors.__all__]),
        ("reductions", [f"`{name}`" for name in REDUCTIONS]),
        ("failures", ["**missing**", "**doubled**", "**stale**", "**overwritten**",
                      "**unexpected contribution**", "**race**", "**deadlock**", "**malformed**"]),
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


def test_the_chinese_readme_goes_step_by_step_with_the_english_one() -> None:
    """Its blocks and generated tables are those of the other; `make docs` takes them over."""
    english, ours = text_of(ROOT / "README.md"), text_of(ROOT / "README.zh.md")
    assert chinese.headings(ours) == chinese.headings(english)
    assert chinese.links(ours) == chinese.links(english)
    assert chinese.SAME.findall(ours) == chinese.SAME.findall(english)
    assert "(README.zh.md)" in english
    assert "(README.md)" in ours
    assert chinese.codes(ours) == chinese.codes(english)
    assert chinese.rows(ours) == chinese.rows(english)
    assert len(re.findall(r"[\u4e00-\u9fff]", chinese.SAME.sub("", ours))) > 1500


@pytest.fixture(scope="module")
def refreshing() -> Iterator[dict[Path, Callable[[], str]]]:
    """All written pages, refreshed several at a time."""
    with generate.refreshing() as pages:
        yield pages


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_a_written_page_shows_what_its_commands_print(
    page: Path, refreshing: dict[Path, Callable[[], str]]
) -> None:
    assert text_of(page) == refreshing[page](), "run `make docs`"


def test_there_is_one_version() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', text_of(ROOT / "pyproject.toml"), re.MULTILINE)
    assert roundelay.__version__ == _core.version == version


@every_page
def test_no_page_tells_another_version(page: Path) -> None:
    if page.name == "CHANGELOG.md":  # which tells all that there were
        return
    told = re.findall(r"(?i)(?:status: |roundelay |version )v?(\d+\.\d+(?:\.\d+)?)", text_of(page))
    assert {*told} <= {roundelay.__version__}
