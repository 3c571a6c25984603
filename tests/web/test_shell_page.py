"""The shell in a real browser: languages, themes, keys, tokens, and words for everything."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from roundelay.web.views import views

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page
    from tests.web.conftest import Served

pytestmark = pytest.mark.browser

WORDS = """async names => {
  const views = await Promise.all(names.map(name => import(`./${name}.js`)));
  const { WORDS } = await import("./words.js");
  const { words } = await import("./shell-words.js");
  return { pictures: WORDS, shell: words,
           ...Object.fromEntries(views.map(({ view }) => [view.name, view.words])) };
}"""
GAP = re.compile(r"\{\w+\}")
CHINESE = re.compile("[\u4e00-\u9fff]")
ENGLISH = re.compile(r"[a-z]{3,}", re.IGNORECASE)
#: Texts that are the same in both languages.
ALIKE = re.compile(r"rank|[A-Z][A-Za-z0-9 ,./+-]*", re.IGNORECASE)


def test_every_word_is_there_in_both_languages(visit_web: Callable[..., Page]) -> None:
    page = visit_web("/collectives")
    for name, words in page.evaluate(WORDS, views.names()).items():
        english, chinese = words["en"], words["zh"]
        assert english.keys() == chinese.keys(), name
        for key, text in english.items():
            assert sorted(GAP.findall(text)) == sorted(GAP.findall(chinese[key])), (name, key)
            plain = GAP.sub("", text).strip()
            if text == chinese[key]:
                assert ALIKE.fullmatch(plain) or not ENGLISH.search(plain), (name, key)
            elif ENGLISH.search(GAP.sub("", chinese[key])):
                assert CHINESE.search(chinese[key]), (name, key)


@pytest.mark.parametrize(
    ("locale", "title"), [("en-US", "Collectives"), ("zh-CN", "集合通信"), ("zh-TW", "集合通信"),
                          ("fr-FR", "Collectives")],
)  # fmt: skip
def test_the_first_language_is_the_readers(
    locale: str, title: str, visit_web: Callable[..., Page]
) -> None:
    page = visit_web("/collectives", locale=locale)
    page.locator("h1", has_text="all_reduce").wait_for()
    assert page.title() == f"{title} · Roundelay"
    assert page.locator("#views a[aria-current]").inner_text() == title


def test_the_language_is_kept_in_the_address(visit_web: Callable[..., Page]) -> None:
    page = visit_web("/collectives?ranks=3")
    page.locator("h1", has_text="3 ranks").wait_for()
    page.get_by_label("中文", exact=True).check(force=True)
    page.locator("h1", has_text="3 个 rank").wait_for()
    assert page.evaluate("location.hash") == "#/collectives?ranks=3&lang=zh"
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    page.reload()
    page.locator("h1", has_text="3 个 rank").wait_for()
    page.get_by_label("English", exact=True).check(force=True)
    page.locator("h1", has_text="3 ranks").wait_for()
    assert "lang=en" in page.evaluate("location.hash")


GROUND = "getComputedStyle(document.body).backgroundColor"


def test_the_theme_is_the_systems_until_one_is_chosen(visit_web: Callable[..., Page]) -> None:
    light, dark = "rgb(250, 249, 246)", "rgb(19, 21, 24)"
    page = visit_web("/collectives", color_scheme="dark")
    seen = []
    for _ in range(4):
        seen.append(page.evaluate(GROUND))
        page.locator("button.theme").click()
    assert seen == [dark, light, dark, dark]  # system, light, dark, system
    page.reload()
    page.locator("h1", has_text="all_reduce").wait_for()
    assert page.evaluate(GROUND) == light  # it was left at light


def test_everything_has_a_name(visit_web: Callable[..., Page]) -> None:
    page = visit_web("/collectives", height=3000)  # so that all of it is seen
    page.locator("#status").wait_for()
    page.locator(".win").first.wait_for()
    nameless = page.evaluate("""() => [...document.querySelectorAll("button, a, input, select, textarea, [role=button], [role=img], [role=region]")]
      .filter(element => element.checkVisibility() && !(element.getAttribute("aria-label") || element.innerText?.trim()
        || element.labels?.[0]?.innerText.trim()))
      .map(element => element.outerHTML)""")  # noqa: E501
    assert nameless == []
    assert page.locator("main").count() == 1
    assert page.locator("h1").count() == 1
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_unknown_views_are_told(visit_web: Callable[..., Page]) -> None:
    page = visit_web("/nowhere")
    page.locator("#trouble", has_text="nowhere").wait_for()
    page.locator("#views a").first.click()
    page.locator("#trouble").wait_for(state="hidden")


def test_without_its_token_the_page_shows_nothing(served: Served, browser: Browser) -> None:
    context = browser.new_context(locale="en-US")
    page = context.new_page()
    page.goto(f"http://127.0.0.1:{served.port}/#/collectives")
    page.locator("#trouble", has_text="token").wait_for()
    assert page.locator("main").inner_text() == ""
    page.goto(f"http://127.0.0.1:{served.port}/#token=wrong")
    page.locator("#trouble", has_text="token").wait_for()
    page.goto(f"{served.link}/collectives?ranks=3")
    page.locator("h1", has_text="3 ranks").wait_for()
    assert served.token not in page.evaluate("location.href + document.cookie")
    context.close()


def test_errors_are_said_and_go_away(visit_web: Callable[..., Page]) -> None:
    page = visit_web("/collectives?collective=all_to_all&ranks=64", refused=True)
    page.locator("#trouble", has_text="too much to draw").wait_for()
    page.get_by_label("Ranks", exact=True).fill("4")
    page.locator("h1", has_text="all_to_all_pairwise on 4 ranks").wait_for()
    page.locator("#trouble").wait_for(state="hidden")
