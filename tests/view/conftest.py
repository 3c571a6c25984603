from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from roundelay.algorithms import algorithms
from roundelay.records import Event, RankRecord, RunRecord
from roundelay.schedule import Schedule, price
from roundelay.view import Picture, picture

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from roundelay.schedule import Network

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "]]></title><!-- & \" ' `",
    "$data ${script} $policy $$",
    "line\u2028and\u2029paragraph",
    "half \ud800 and \x00 and \x1b[2J",
    "a" * 5000,
    "\u202eright to left",
)

MS = 1_000_000  # nanoseconds


@pytest.fixture(scope="session")
def drawn() -> Callable[..., Picture]:
    """Draw an algorithm, priced without a network unless one is given."""

    def draw(name: str, size: int, *, network: Network | None = None, **options: Any) -> Picture:
        schedule = algorithms.load(name).schedule(size)
        return picture(schedule, price=price(schedule, network=network), **options)

    return draw


@pytest.fixture(scope="session")
def broken() -> Picture:
    """Draw a ring in which one transfer of step 2 is missing."""
    ring = algorithms.load("all_reduce_ring").schedule(4)
    kept = [transfer for index, transfer in enumerate(ring.transfers) if index != 9]
    return picture(Schedule(ring.collective, 4, kept, parts=4, name="a ring with a hole"))


class Runs:
    """Makes up records of runs."""

    @staticmethod
    def event(number: int, kind: str, began: float, ended: float | None, **more: object) -> Event:
        """Make an event; times are milliseconds."""
        plain = {
            "name": "", "site": "", "waited": 0, "waits_for": -1, "call": 0, "group": 0,
            "nbytes": 0, "elements": 0, "collective": "", "algorithm": "", "dtype": "", "op": "",
            "thread": 100,
            "failed": False, "asked": int(began * MS),
        }  # fmt: skip
        end = None if ended is None else int(ended * MS)
        fields = {**plain, **more}
        return Event(number=number, kind=kind, began=int(began * MS), ended=end, **fields)  # type: ignore[arg-type]

    @staticmethod
    def call(number: int, began: float, ended: float | None, **more: object) -> Event:
        """Make a call of an all_reduce."""
        plain = {"collective": "all_reduce", "algorithm": "ring", "dtype": "float32", "op": "sum",
                 "nbytes": 4096, "elements": 1024, "site": "/home/me/train.py:12"}  # fmt: skip
        return Runs.event(number, "call", began, ended, **{**plain, **more})

    @staticmethod
    def made(size: int, *, name: str = "bucket a", site: str = "/home/me/train.py:12") -> RunRecord:
        """Make a run of two steps, in which the last rank comes late to every bucket."""
        ranks = []
        for rank in range(size):
            late = 3.0 * (rank == size - 1)
            events = []
            for step in range(2):
                at, number = 20.0 * step, 10 * step + 10 * 2 * rank
                ends = at + 12
                waited = 0 if late else 3 * MS
                whom = -1 if late else size - 1
                events += [
                    Runs.event(number + 1, "forward", at, at + 4 + late, call=step),
                    Runs.event(number + 2, "backward", at + 4 + late, at + 8 + late, call=step),
                    Runs.call(number + 3, at + 7 + late, ends, call=step + 1, thread=101, name=name,
                         asked=int((at + 6 + late) * MS), waited=waited, waits_for=whom, site=site),
                    Runs.event(number + 4, "exchange", at + 8 + late, at + 13, call=step),
                    Runs.call(number + 5, at + 12, at + 12.5, call=step + 1, group=1),
                    Runs.event(number + 6, "step", at + 13, at + 15, call=step),
                ]  # fmt: skip
            groups = {0: (rank, size), 1: (rank, size)}
            ranks.append(
                RankRecord(
                    rank, size, 100, f"h{rank}", f"/x/{name}", b"", "boot", 0, 0, 20, groups, events
                )
            )
        return RunRecord(ranks, size, 10**18, 35 * MS)


@pytest.fixture(scope="session")
def runs() -> type[Runs]:
    """Make up records of runs."""
    return Runs


@pytest.fixture(params=HOSTILE, ids=range(len(HOSTILE)))
def hostile(request: pytest.FixtureRequest) -> str:
    """Return a title that a stranger might give."""
    return str(request.param)


@pytest.fixture
def visit(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Open a page from disk, with no network; any error it reports fails the test."""
    problems: list[str] = []
    contexts = []

    def open_page(text: str, *, width: int = 1280, height: int = 800, **options: Any) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": height}, offline=True, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        requests: list[str] = []
        file = tmp_path / "picture.html"
        file.write_text(text, encoding="utf-8")
        page.goto(file.as_uri())
        assert requests == [file.as_uri()]
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
