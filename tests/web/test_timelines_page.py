"""The view Timelines: recorded runs by ids of a list, and the job that runs now."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from roundelay import _core
from roundelay.errors import UnknownNameError
from roundelay.records import read_run
from roundelay.records.events import KINDS
from roundelay.view.languages import LANGUAGES, Language
from roundelay.view.run_lanes import windows
from roundelay.view.run_page import run_rows
from roundelay.view.run_svg import run_svg
from roundelay.view.run_words import RUN_WORDS
from roundelay.web.app import AT_ONCE
from roundelay.web.run_index import RunIndex
from roundelay.web.svg_tree import svg_tree

if TYPE_CHECKING:
    from playwright.sync_api import Page

HOSTILE = "<img src=x onerror=alert(1)>"
PAGE = Path(__file__).parents[2] / "src" / "roundelay" / "web" / "page"


def record(folder: Path, *, name: str = "bucket a", steps: int = 3) -> None:
    """Write a run of two ranks: passes and steps, and a call in each step."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        trace = _core.Trace(str(folder / f"rank-{rank}.rdtrace"), rank, 2, bytes(16))
        trace.describe("host", f"/home/me/{name}.py")
        trace.set_table("collective", ["all_gather", "all_reduce"])
        trace.list_group(0, rank, 2)
        trace.align()
        for step in range(steps):
            for kind in ("forward", "backward"):
                began = trace.begin(KINDS.index(kind), 0, step)
                time.sleep(0.001)
                trace.end(began)
            trace.name_next(trace.string(name))
            call = trace.begin_call(0, step + 1, 1, 255, 255, 255, 10, 40, "train.py:1")
            trace.end(call)
            trace.end(trace.begin(KINDS.index("step"), 0, step))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three runs, one of them by a stranger, and what is none."""
    where = tmp_path_factory.mktemp("runs")
    record(where / "first")
    record(where / "deep" / "second", steps=2)
    record(where / HOSTILE, name=HOSTILE)
    (where / "empty").mkdir()
    (where / "note.txt").write_text("nothing")
    return where


@pytest.fixture(scope="module")
def server(runs: Path, serve_web: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    """Serve the page with these runs."""
    with serve_web("--runs", str(runs)) as started:
        yield started


def test_runs_are_listed_and_links_are_not_followed(runs: Path, tmp_path: Path) -> None:
    record(tmp_path / "inside")
    (tmp_path / "outside").symlink_to(runs / "first")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "rank-0.rdtrace").symlink_to(runs / "first" / "rank-0.rdtrace")
    assert [one.name for one in RunIndex(tmp_path).runs()] == ["inside"]
    (linked / "rank-1.rdtrace").write_bytes((runs / "first" / "rank-1.rdtrace").read_bytes())
    index = RunIndex(tmp_path)
    [half] = [one for one in index.runs() if one.name == "linked"]
    assert [one.rank for one in index.run(half.id).ranks] == [1]
    index = RunIndex(runs)
    assert {one.name for one in index.runs()} == {"first", "deep/second", HOSTILE}
    assert len({one.id for one in index.runs()}) == 3
    record(runs / "later" / "third")  # found when it is asked for again
    assert "later/third" in {one.name for one in index.runs()}
    assert {one.files for one in index.runs()} == {2}


def test_a_folder_may_be_a_run_itself(runs: Path) -> None:
    [one] = RunIndex(runs / "first").runs()
    assert one.name == "."
    assert len(RunIndex(runs / "first").run(one.id).ranks) == 2


@pytest.mark.parametrize("wanted", ["../first", "first", "/etc/passwd", "..", "\x00", "a" * 24])
def test_only_ids_of_the_list_are_read(runs: Path, wanted: str) -> None:
    with pytest.raises(UnknownNameError):
        RunIndex(runs).run(wanted)


def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, serve_web: Callable[..., AbstractContextManager[Any]]
) -> None:
    os.mkfifo(tmp_path / "rank-0.rdtrace")
    with serve_web("--runs", str(tmp_path)) as server:
        for _ in range(AT_ONCE + 1):  # more than threads
            answer = server.get("/api/timelines/run")
            assert answer.status == 400
            assert "not an ordinary file" in answer.document["error"]


def test_words_are_in_both_languages() -> None:
    for key, (english, chinese) in RUN_WORDS.items():
        assert holes(english) == holes(chinese), key
        assert chinese != english or key in ("rank", "column rank")


def holes(text: str) -> list[str]:
    return sorted(part.partition("}")[0] for part in text.split("{")[1:])


def test_every_part_of_a_drawing_has_its_style(runs: Path) -> None:
    style = (PAGE / "timelines.css").read_text()
    run = read_run(runs / "first")

    def classes(tree: list[Any]) -> Iterator[str]:
        yield from tree[1].get("class", "").split()
        for child in tree[2:]:
            if isinstance(child, list):
                yield from classes(child)

    found = set(classes(svg_tree(run_svg(run, windows(run)[-1]))))
    assert {"bar", "forward", "call", "lane"} <= found
    for name in found - {"ink"}:  # which is the page's own
        assert f".{name}" in style, name


@pytest.mark.parametrize("wanted", ["..%2Ffirst", "first", "%00", "x" * 30])
def test_the_server_reads_no_path(wanted: str, server: Any) -> None:
    answer = server.get(f"/api/timelines/run?run={wanted}")
    assert answer.status == 400
    assert "error" in answer.document


@pytest.mark.browser
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_run_is_walked(
    runs: Path, language: Language, visit_web: Callable[..., Page], server: Any
) -> None:
    run = read_run(runs / "first")
    found = next(one.id for one in RunIndex(runs).runs() if one.name == "first")
    names = [one.name for one in windows(run, language=language)]
    page = visit_web(f"/timelines?run={found}&lang={language}", on=server)
    for number in (2, 1, 0):
        page.locator(f".timeline[data-step=step-{number + 1}] svg").wait_for()
        page.locator("#status", has_text=names[number]).wait_for()
        _, *rows = run_rows(run, windows(run)[number], language)
        shown = page.locator("table.plain tbody tr").all()
        assert [one.locator("td").all_text_contents() for one in shown] == rows
        page.keyboard.press("ArrowLeft")
    assert "step=step-1" in page.evaluate("location.hash")
    assert page.locator(".timeline rect.forward").count() >= 2 + 1  # and in the legend


@pytest.mark.browser
def test_it_recovers_from_a_run_that_is_not_there(
    visit_web: Callable[..., Page], server: Any
) -> None:
    page = visit_web("/timelines?run=foo&step=nowhere", on=server, refused=True)
    page.locator("#trouble", has_text="runs has no 'foo'").wait_for()
    assert not page.locator(".timeline").is_visible()
    page.get_by_label("Run", exact=True).select_option(index=0)
    page.locator(".timeline svg").wait_for()
    page.locator("#trouble").wait_for(state="hidden")
    page.keyboard.press("Home")
    page.locator(".timeline[data-step=step-1]").wait_for()
    page.evaluate("location.hash = location.hash.replace(/step=[^&]*/, 'step=nowhere')")
    page.wait_for_function("!location.hash.includes('step=')")  # the last of them
    page.locator(".timeline:not([data-step=step-1])").wait_for()


@pytest.mark.browser
def test_strangers_names_are_text(runs: Path, visit_web: Callable[..., Page], server: Any) -> None:
    found = next(one.id for one in RunIndex(runs).runs() if one.name == HOSTILE)
    page = visit_web(f"/timelines?run={found}", width=400, on=server)
    page.locator(".timeline svg").wait_for()
    assert HOSTILE in page.locator("h2").inner_text()
    assert HOSTILE in (page.locator(".timeline svg > title").text_content() or "")
    assert page.locator("main img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.browser
def test_without_a_folder_it_says_how(visit_web: Callable[..., Page]) -> None:
    page = visit_web("/timelines")
    page.locator("pre", has_text="roundelay web --runs").wait_for()


JOB = """
import sys, time
import numpy as np
import roundelay as rd
comm = rd.init(timeout=120)
comm.at_step(6)
comm.all_reduce(np.ones(1000))
print("ready", flush=True)
if comm.rank == 1:
    time.sleep(100)
comm.barrier()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    """Run a job whose rank 1 lets rank 0 wait."""
    script = tmp_path / "late-script.py"
    script.write_text(JOB)
    command = [sys.executable, "-m", "roundelay", "run", "-n", "2", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert "ready" in process.stdout.readline()
        yield script
        process.terminate()


@pytest.mark.browser
@pytest.mark.parametrize(
    ("language", "waits", "hangs"),
    [("en", "waits for rank 1", "Rank 0 waits for rank 1 in barrier #2"),
     ("zh", "等 rank 1", "rank 0 在等 rank 1（barrier #2）")],
)  # fmt: skip
def test_the_live_job_names_who_is_late(
    job: Path, language: str, waits: str, hangs: str, visit_web: Callable[..., Page]
) -> None:
    page = visit_web(f"/timelines?show=live&lang={language}")
    mine = page.locator(".card-section", has_text=job.name)
    mine.locator("tr[data-state=waits]", has_text=waits).wait_for()
    mine.locator(".verdict", has_text=hangs).wait_for()  # after two seconds, on a later look
    late = mine.locator("tr.late")
    assert late.locator("th").inner_text().startswith("1")
    assert "6" in mine.locator("tbody tr").first.locator("td").first.inner_text()
    page.locator("#views a").first.click()
    page.locator(".view-timelines").wait_for(state="detached")
