"""What strangers send: foreign hosts and origins, no token, paths, methods, bodies; all refused."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.cookies import SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from roundelay.errors import InvalidArgumentError
from roundelay.web import app, serve
from roundelay.web.assets import assets

if TYPE_CHECKING:
    from tests.web.conftest import Answer, Served

API = "/api/collectives/prices"
PROOF = "/api/collectives/proof"
JSON = {"Content-Type": "application/json"}
STAR = b'{"roundelay": 1, "collective": "broadcast", "size": 2, "transfers": [{"step": 0, "src": 0, "dst": 1, "chunk": 0}]}'  # noqa: E501
#: On every answer, whatever it says.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


def refused(answer: Answer, *statuses: int) -> None:
    """Hold a refusal: one of these statuses, a sentence, the headers, and nothing of the data."""
    assert answer.status in statuses, answer.body
    assert HEADERS.items() <= answer.headers.items()
    assert "server" not in answer.headers
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert "set-cookie" not in answer.headers
    if answer.body:
        assert answer.document.keys() == {"error"}


@pytest.mark.parametrize("path", [*assets(), "/api/views", API])
def test_every_answer_has_its_headers(path: str, served: Served) -> None:
    answer = served.get(path)
    assert answer.status == 200
    assert HEADERS.items() <= answer.headers.items()
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert "unsafe" not in answer.headers["content-security-policy"]


HOSTS = [
    "evil.example", "127.0.0.1", "localhost", "127.0.0.1:1", "127.0.0.1.evil.example:{port}",
    "localhost.evil.example:{port}", "evil.example:{port}", "127.0.0.2:{port}", "0.0.0.0:{port}",
    "[::ffff:127.0.0.1]:{port}", "2130706433:{port}", "localhost:{port}.evil.example",
    "user@127.0.0.1:{port}", "127.0.0.1:{port}/", "127.0.0.1:{port},evil.example",
]  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("path", ["/", "/main.js", API, "/session"])
def test_foreign_hosts_are_refused(host: str, path: str, served: Served) -> None:
    head = {"Host": host.format(port=served.port), "Authorization": f"Bearer {served.token}"}
    refused(served.get(path, head), 403)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_own_hosts_are_not(host: str, served: Served) -> None:
    assert served.get(API, {"Host": f"{host}:{served.port}"}).status == 200


def test_two_hosts_or_none_are_refused(served: Served) -> None:
    own = f"Host: 127.0.0.1:{served.port}\r\n"
    for lines in ("", own + "Host: evil.example\r\n", "Host: evil.example\r\n" + own):
        with socket.create_connection(("127.0.0.1", served.port), 10) as raw:
            raw.sendall(f"GET / HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode())
            first = raw.makefile("rb").readline()
        assert first.split()[1] in (b"400", b"403"), lines


ORIGINS = [
    "http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1",
    "http://127.0.0.1:1", "http://localhost:{port}", "http://127.0.0.1:{port}.evil.example", "",
]  # fmt: skip


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("path", ["/", API, "/session"])
def test_foreign_origins_are_refused(origin: str, path: str, served: Served) -> None:
    refused(served.get(path, {"Origin": origin.format(port=served.port)}), 403)


def test_a_foreign_page_can_post_nothing(served: Served) -> None:
    for head in (
        {"Origin": "http://evil.example", **JSON},
        {"Sec-Fetch-Site": "cross-site", **JSON},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", **JSON},
    ):
        refused(served.ask("POST", PROOF, head, STAR), 403)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        refused(served.ask("POST", PROOF, {"Content-Type": kind}, STAR), 415)


@pytest.mark.parametrize("site", ["cross-site", "same-site", "anything"])
def test_other_sites_fetch_nothing(site: str, served: Served) -> None:
    for path in ("/", "/main.js", API, "/session"):
        for mode in ("cors", "no-cors", "same-origin"):
            head = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": "empty"}
            refused(served.get(path, head), 403)
    framed = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
    refused(served.get("/", framed), 403)
    link = {**framed, "Sec-Fetch-Dest": "document"}
    refused(served.get(API, link), 403)
    assert served.get("/", link).status == 200  # a link to the page, which holds no data


def test_data_needs_the_token(served: Served) -> None:
    refused(served.get(API, known=False), 401)
    refused(served.get("/api/views", known=False), 401)
    refused(served.ask("POST", PROOF, JSON, STAR, known=False), 401)
    name, _, value = served.cookie.partition("=")
    for cookie in (
        f"{name}=", f"{name}={value[:-1]}", f"{name}={value}x", f"{name}={served.token}",
        f"roundelay={value}", f"{name}_={value}", f'{name}="{value[:-1]}', "=;=;", "a" * 4000,
    ):  # fmt: skip
        refused(served.get(API, {"Cookie": cookie}, known=False), 401)


@pytest.mark.parametrize(
    "shown", ["", "Bearer", "Bearer ", "Bearer wrong", "Basic {token}", "{token}",
              "Bearer {token}x", "Bearer  {token}", "Bearer \u00e9"],
)  # fmt: skip
def test_only_the_token_opens(shown: str, served: Served) -> None:
    refused(
        served.get("/session", {"Authorization": shown.format(token=served.token)}, known=False),
        401,
    )


def test_the_cookie_is_kept_from_scripts_and_other_sites(served: Served) -> None:
    opened = served.get("/session", {"Authorization": f"Bearer {served.token}"}, known=False)
    ((name, cookie),) = SimpleCookie(opened.headers["set-cookie"]).items()
    assert name == f"roundelay_{served.port}"  # cookies do not know ports
    assert cookie["httponly"]
    assert cookie["samesite"].lower() == "strict"
    assert served.token not in cookie.value
    assert len(cookie.value) >= 32


PATHS = [
    "/../../../../etc/passwd", "/..%2f..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/etc/passwd",
    "//etc/passwd", "/etc/passwd", "/%2fetc%2fpasswd", "/..\\..\\etc\\passwd", "/main.js/../app.py",
    "/main.js/", "/main.js%00", "/MAIN.JS", "/./main.js", "//main.js", "/app.py", "/views/",
    "/views/collectives.py", "/page/main.js", "/index.html", "/page.html", "/favicon.ico", "/.git",
    "/api", "/api/", "/api/collectives", "/api/collectives/", "/api/collectives/../../main.js",
    "/api/collectives/__class__", "/api/_base/x", "/api/collectives/choices/more", "/api//choices",
    "/api/..%2fcli/web", "/session/", "/session/x",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_no_path_leads_anywhere_else(path: str, served: Served) -> None:
    answer = served.get(path)
    refused(answer, 404)
    assert b"root:" not in answer.body


METHODS = ["HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "POST", "PROPFIND"]


@pytest.mark.parametrize("method", METHODS)
def test_pages_are_got_and_nothing_else(method: str, served: Served) -> None:
    for path in ("/", "/main.js", API, "/session", "/api/views"):
        refused(served.ask(method, path, JSON), 405)
    if method != "POST":
        refused(served.ask(method, PROOF, JSON), 405)


def test_a_preflight_is_told_nothing(served: Served) -> None:
    head = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Private-Network": "true"}  # fmt: skip
    refused(served.ask("OPTIONS", PROOF, head), 403)


def test_nothing_becomes_a_websocket(served: Served) -> None:
    head = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}  # fmt: skip
    assert served.get(API, head).status == 200  # an ordinary answer to an ordinary question


QUERIES = [
    "ranks=0", "ranks=65", "ranks=-1", "ranks=4.0", "ranks=", "ranks=1e1", "ranks=NaN", "ranks=٤",
    "ranks=99999999999999999999999", "ranks=4&ranks=4", "nonsense=1", "lang=xx", "lang=en&lang=zh",
    "network=nowhere", "network=../../etc/passwd", "network=/etc/passwd", "bytes=0",
    "collective=__init__", "collective=<script>alert(1)</script>", "bytes=99999999999999999999",
    "&".join(f"a{n}=1" for n in range(40)), "values=" + "1" * 9000,
]  # fmt: skip


@pytest.mark.parametrize("query", QUERIES, ids=range(len(QUERIES)))
def test_bad_questions_are_told_so(query: str, served: Served) -> None:
    answer = served.get(f"{API}?{quote(query, safe='=&')}")
    refused(answer, 400)
    assert len(answer.document["error"]) < 1000


@pytest.mark.parametrize("query", ["foo=1", "lang=xx", "lang=en&lang=en", "values=" + "1" * 9000])
def test_the_list_of_views_tells_so_too(query: str, served: Served) -> None:
    refused(served.get(f"/api/views?{query}"), 400)


@pytest.mark.parametrize("nbytes", [17_000, 100_000])
def test_long_heads_are_refused(nbytes: int, served: Served) -> None:
    refused(served.get("/", {"X-Long": "x" * nbytes}), 431)
    refused(served.get(f"/?{'x' * nbytes}"), 431)
    assert served.get("/", {"X-Long": "x" * 15_000}).status == 200


BODIES = {
    "empty": b"",
    "no JSON": b"import os",
    "no UTF-8": b"\xff\xfe{}",
    "another value": b"[]",
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep transfers": b'{"roundelay":1,"collective":"broadcast","size":2,"transfers":' + b"[" * 9 + b"]" * 9 + b"}",  # noqa: E501
    "a long number": STAR.replace(b'"size": 2', b'"size": ' + b"9" * 5000),
    "no number": STAR.replace(b'"size": 2', b'"size": NaN'),
    "twice": STAR.replace(b'"size": 2', b'"size": 2, "size": 3'),
    "unknown field": STAR.replace(b'"size": 2', b'"size": 2, "run": "os.system"'),
    "unknown collective": STAR.replace(b"broadcast", b"__init__"),
    "a path": STAR.replace(b"broadcast", b"../../etc/passwd"),
    "too many ranks": STAR.replace(b'"size": 2', b'"size": 65'),
    "too many parts": STAR.replace(b'"size": 2', b'"size": 2, "parts": 60000'),
    "out of range": STAR.replace(b'"dst": 1', b'"dst": 2'),
    "control characters": STAR.replace(b'"size": 2', b'"size": 2, "name": "\\u001b[2J"'),
    "too many steps": json.dumps({
        "roundelay": 1, "collective": "broadcast", "size": 2,
        "transfers": [{"step": n, "src": 0, "dst": 1, "chunk": 0} for n in range(600)],
    }).encode(),
}  # fmt: skip


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_bad_schedules_are_told_where(body: bytes, served: Served) -> None:
    answer = served.ask("POST", PROOF, JSON, body)
    refused(answer, 400)
    assert answer.document["error"].startswith("schedule")


def test_large_bodies_are_refused(served: Served) -> None:
    refused(served.ask("POST", PROOF, JSON, b" " * (2 << 20)), 413)
    assert served.ask("POST", PROOF, JSON, STAR + b" " * 1000).document["proved"] is True


def test_an_endless_body_is_cut_off(served: Served) -> None:
    head = "".join(f"{name}: {value}\r\n" for name, value in (
        ("Host", f"127.0.0.1:{served.port}"), ("Cookie", served.cookie),
        ("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")))  # fmt: skip
    with socket.create_connection(("127.0.0.1", served.port), 20) as raw:
        raw.sendall(f"POST {PROOF} HTTP/1.1\r\n{head}\r\n".encode())
        sent = 0
        try:
            while sent < 64 << 20:
                sent += raw.send(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        except OSError:  # it no longer listens
            pass
    assert sent < 64 << 20
    assert served.get(API).status == 200


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[serve.PageServer]:
    """Serve with short times, in a thread."""
    monkeypatch.setattr(serve, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(app, "ARRIVAL", 0.3)
    page = serve.page_server()
    runner = page.runner()
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [page.listener]})
    thread.start()
    yield page
    runner.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def test_slow_heads_and_slow_bodies_are_not_waited_for(impatient: serve.PageServer) -> None:
    port, door = impatient.door.port, impatient.door
    head = (
        f"POST {PROOF} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: {door.cookie}={door.session}"
        f"\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    )
    for sent, expected in ((b"", b""), (b"GET / HT", b""), (head.encode() + b"{", b"408")):
        with socket.create_connection(("127.0.0.1", port), 20) as raw:
            raw.sendall(sent)
            assert expected in raw.makefile("rb").readline()  # it ends by itself


def test_many_connections_that_say_nothing_go_away(impatient: serve.PageServer) -> None:
    port = impatient.door.port
    silent = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(100)]
    deadline = time.monotonic() + 20
    answered = False
    while not answered and time.monotonic() < deadline:
        asking = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        asking.request("GET", "/")
        answered = asking.getresponse().status == 200
        asking.close()
    for each in silent:
        each.close()
    assert answered


@pytest.mark.parametrize(
    "host", ["", "0.0.0.0", "::", "*", "0", "00.0.0.0", "0x0", "::ffff:0.0.0.0", "0:0::0"]
)
def test_it_never_listens_everywhere(host: str) -> None:
    with pytest.raises(InvalidArgumentError, match="everywhere"):
        serve.page_server(host)


SLOW = """
import time
from roundelay.web.serve import page_server
from roundelay.web.views import views

def slow(query):
    print("begun", flush=True)
    time.sleep(100)

views.load("tour").answers["zero"] = slow
page = page_server()
page.serve(lambda: print(page.door.port, page.door.cookie, page.door.session, flush=True))
"""


def test_it_ends_while_an_answer_is_computed() -> None:
    words = [sys.executable, "-c", SLOW]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            port, name, session = process.stdout.readline().split()
            with socket.create_connection(("127.0.0.1", int(port)), 20) as raw:
                head = f"Host: 127.0.0.1:{port}\r\nCookie: {name}={session}"
                raw.sendall(f"GET /api/tour/zero HTTP/1.1\r\n{head}\r\n\r\n".encode())
                assert process.stdout.readline() == "begun\n"
                process.send_signal(signal.SIGINT)
                assert b"503" in raw.recv(100)
            process.wait(20)
            assert "Exception in" not in process.stderr.read()  # of what was given up
        finally:
            process.kill()


def test_another_address_has_its_own_names_and_a_token() -> None:
    page = serve.page_server("127.0.0.2")  # of this host, but not the one that names mean
    page.listener.close()
    assert page.door.names == {f"127.0.0.2:{page.door.port}"}
    assert len(page.door.token) == 32


@pytest.mark.parametrize("token", ["short", "x" * 15, "with space and more", "a;b" * 8, "é" * 20])
def test_weak_tokens_are_refused(token: str) -> None:
    with pytest.raises(InvalidArgumentError, match="at least 16"):
        serve.page_server(token=token)


def test_a_taken_port_is_named() -> None:
    page = serve.page_server()
    with page.listener, pytest.raises(InvalidArgumentError, match=f"port {page.door.port}"):
        serve.page_server(port=page.door.port)
