"""The static site: every link leads somewhere, it asks nobody, and it opens from disk."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[2]
CHAPTERS = 8


def from_docs(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


site, site_bundle, site_states = map(from_docs, ("site_build", "site_bundle", "site_states"))


class Reader(HTMLParser):
    """Collects where a page leads to, what it loads, and the places in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given["id"]} if "id" in given else set()
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        loaded = given.get("src") or (given.get("href") if tag == "link" else None)
        if loaded:
            self.loads.append(loaded)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("site") / "site"
    site.build(out, few=True)
    return out


def test_every_link_and_asset_is_there(built: Path) -> None:
    pages = {page: Reader(page.read_text(encoding="utf-8")) for page in built.rglob("*.html")}
    assert len(pages) > 40
    lost = []
    for page, read in pages.items():
        for link in [*read.links, *read.loads]:
            if link.startswith("https://") and link in read.links:
                continue  # a reader may go there; the page does not
            file, _, place = unquote(link).partition("#")
            target = (page.parent / file).resolve() if file else page
            inside = target.is_relative_to(built.resolve()) and target.is_file()
            if place.startswith("/") or (page.name == "index.html" and place == "main"):
                place = ""  # of the page's own addresses
            if not inside or (place and place not in pages[target].places):
                lost.append((str(page.relative_to(built)), link))
    assert lost == []


def test_no_page_loads_from_elsewhere(built: Path) -> None:
    for page in built.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not [each for each in Reader(text).loads if re.match(r"[a-z]+:|//", each)], page
        assert "default-src 'none'" in text, page
    for file in built.rglob("*.css"):
        assert not re.search(r"url\(|@import", file.read_text(encoding="utf-8")), file


def test_every_page_of_the_documentation_is_rendered(built: Path) -> None:
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "README.zh.md"]:
        text = (built / page.relative_to(ROOT)).with_suffix(".html").read_text(encoding="utf-8")
        assert "<h1" in text
        assert "&lt;!--" not in text  # remarks of the source stay hidden
    assert "<table>" in (built / "README.zh.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text",
    ['import x from "./a.js";\n', "export default 1;\n", 'const a = import("./b.js");\n'],
)  # fmt: skip
def test_a_module_in_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="another form"):
        site_bundle.bundle({"main.js": text}, "main.js", [])


def test_modules_keep_to_their_own_scope() -> None:
    modules = {
        "a.js": 'import { b as c } from "./b.js";\nconst own = 1;\nexport const view = own + c;\n',
        "b.js": "const own = 2;\nconst b = own;\nexport { b };\n",
        "main.js": 'import * as a from "./a.js";\nwindow.found = a.view;\n',
    }
    script = site_bundle.bundle(modules, "main.js", ["a"])
    assert script.index('modules["b.js"]') < script.index('modules["a.js"] =')
    assert "const { b: c } = modules" in script
    with pytest.raises(ValueError, match="circle"):
        site_bundle.bundle({"main.js": 'import { a } from "./main.js";\n'}, "main.js", [])


@pytest.fixture
def open_site(browser: Browser, built: Path) -> Iterator[Callable[..., Page]]:
    """Open the site from disk, with no network; it may ask for files of its own alone."""
    asked: list[str] = []
    problems: list[str] = []
    contexts = []

    def opened(address: str, **more: Any) -> Page:
        context = browser.new_context(offline=True, reduced_motion="reduce", **more)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{(built / 'index.html').as_uri()}#{address}")
        page.locator("#views a").first.wait_for()
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []
    assert {url for url in asked if not url.startswith((built.as_uri(), "data:"))} == set()


@pytest.mark.browser
@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_tour_is_whole_from_disk(language: str, open_site: Callable[..., Page]) -> None:
    page = open_site(f"/?lang={language}")
    for number in range(1, CHAPTERS + 1):
        page.locator(f'.chapters [aria-current="step"] >> text="{number}"').wait_for()
        page.locator(".picture :is(.stage, table.prices, .drawing svg, .zero-row)").first.wait_for()
        assert not page.locator("#trouble").is_visible()
        page.keyboard.press("n")
    page.locator('[data-strategy="zero3"]', has_text="44.3 GB").wait_for()
    assert page.locator(f'.site-note [lang="{language}"]').first.is_visible()
    assert page.locator(".site-note p:visible").count() == 2


@pytest.mark.browser
def test_views_answer_what_was_computed_and_say_so_elsewhere(
    open_site: Callable[..., Page],
) -> None:
    page = open_site("/collectives?ranks=5&lang=en")
    page.locator("h1", has_text="all_reduce_ring on 5 ranks").wait_for()
    page = open_site("/axes?show=pipeline&schedule=gpipe&lang=zh")
    page.locator("h2", has_text="gpipe：4 个 rank").wait_for()
    page = open_site("/planner?gpus=8&lang=en")
    page.locator(".command", has_text="--gpus 8 ").wait_for()
    page = open_site("/training?ranks=7&lang=en")
    page.locator("#trouble", has_text="roundelay web").wait_for()
    page.get_by_label("Ranks").fill("4")
    page.locator(".strategy h2", has_text="DDP").wait_for()
    assert page.locator("#trouble").is_hidden()
    page = open_site("/planner?gpus=9&lang=zh")
    page.locator("#trouble", has_text="roundelay web").wait_for()
    page.locator(".site-note a:visible").first.click()
    page.locator("h2", has_text="安装").wait_for()
    page.locator("nav a", has_text="Documentation").click()
    page.locator("a", has_text="Plan: what fits").click()
    page.locator("h1", has_text="Plan: what fits").wait_for()


def test_what_is_usual_is_known(built: Path) -> None:
    """A question with what is usual spelled out is the same question."""
    found = site_states.answered(("collectives/pictures", {"ranks": "5", "lang": "en"}))
    assert found.usual["network"] == "switch"
    assert found.usual["ranks"] in ("0", "4")
    text = (built / "answers" / "site.js").read_text(encoding="utf-8")
    assert '"planner/plan"' in text
