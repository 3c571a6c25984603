from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from roundelay.algorithms import algorithms
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

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")


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


@pytest.fixture(params=HOSTILE, ids=range(len(HOSTILE)))
def hostile(request: pytest.FixtureRequest) -> str:
    """Return a title that a stranger might give."""
    return str(request.param)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start the system's Chromium, once for all tests."""
    found = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if found is None:
        pytest.skip(f"no Chromium on the path; install one of {', '.join(CHROMIUMS)}")
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - only these tests need it

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=list(QUIET))
        yield chromium
        chromium.close()


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
