"""One server, as users start it, for all tests of the page."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Response

#: Fields of the head of a request that this page's own script would send.
Head = Mapping[str, str]


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


@dataclass
class Served:
    """A running `roundelay web`, and ways to ask it."""

    port: int
    token: str
    cookie: str = field(default="")

    @property
    def link(self) -> str:
        return f"http://127.0.0.1:{self.port}/#token={self.token}"

    def get(self, path: str, head: Head | None = None, *, known: bool = True) -> Answer:
        return self.ask("GET", path, head, known=known)

    def ask(
        self,
        method: str,
        path: str,
        head: Head | None = None,
        body: bytes | None = None,
        *,
        known: bool = True,
    ) -> Answer:
        """Send a request, with the session's cookie if `known`, and with more headers if given."""
        headers = {"Cookie": self.cookie} if known else {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, {**headers, **(head or {})})
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())
        finally:
            connection.close()


@contextmanager
def serving(*options: str) -> Iterator[Served]:
    """Start the page's server, with more options if given."""
    words = [sys.executable, "-m", "roundelay", "web", "--no-open", "--json", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            link = json.loads(process.stdout.readline())["link"]
            address, _, token = link.partition("/#token=")
            server = Served(int(address.rpartition(":")[2]), token)
            opened = server.get("/session", {"Authorization": f"Bearer {token}"}, known=False)
            server.cookie = opened.headers["set-cookie"].partition(";")[0]
            yield server
        finally:
            process.terminate()
            process.wait(10)


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """Start the page's server, once."""
    with serving() as server:
        yield server


@pytest.fixture(scope="session")
def serve_web() -> Callable[..., AbstractContextManager[Served]]:
    """Start a server of one's own, with options."""
    return serving


@pytest.fixture
def visit_web(browser: Browser, served: Served) -> Iterator[Callable[..., Page]]:
    """Open the page at an address (`/collectives?ranks=5`); any error it reports fails the test.

    With `refused`, the browser may remark that the server has refused something.
    """
    problems: list[str] = []
    contexts = []

    def open_page(
        address: str = "/",
        *,
        width: int = 1280,
        height: int = 900,
        refused: bool = False,
        on: Served = served,
        **more: Any,
    ) -> Page:
        options = {"reduced_motion": "reduce", "locale": "en-US", **more}
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(100_000)  # machines may be busy
        page.on("console", lambda message: heard(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        asked: list[str] = []

        def heard(text: str) -> None:
            if not (refused and text.startswith("Failed to load resource")):
                problems.append(text)

        def answered(response: Response) -> None:
            if not refused and response.status >= HTTPStatus.BAD_REQUEST:
                sent = response.request.post_data
                problems.append(f"{response.status} of {response.url}, sent {sent!r:.80}")

        page.on("response", answered)
        page.goto(f"{on.link}{address}")
        page.locator("#views a").first.wait_for()
        assert all(url.startswith(f"http://127.0.0.1:{on.port}/") for url in asked)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
