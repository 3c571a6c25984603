"""Who may ask: this user's browser, from this page. Everything else is turned away, and told why.

A page of a stranger in the same browser can send requests here (CSRF), or make its own name stand
for this address (DNS rebinding). So a request must name this server as its host, must not come
from another origin, and for data must carry a secret that only this user was shown.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["LOOPBACK", "MOST_HEAD", "Door", "Guard", "refusal"]

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
#: On every answer, whatever it says.
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
SESSION = "/session"
MOST_HEAD = 16 * 1024  # bytes
REFUSED = 400  # and above, of status codes
OURS = ("same-origin", "none")


@dataclass(frozen=True)
class Door:
    """What a request must show: by which names this server is known, and its secrets."""

    token: str
    port: int
    hosts: tuple[str, ...] = LOOPBACK
    #: What the browser keeps in place of the token.
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    @property
    def names(self) -> frozenset[str]:
        """The values of `Host` that mean this server."""
        return frozenset(f"{host}:{self.port}" for host in self.hosts)

    @property
    def cookie(self) -> str:
        """The cookie's name; cookies do not know ports, so the name does."""
        return f"roundelay_{self.port}"

    def opens(self, token: str) -> bool:
        """Tell whether this is the token."""
        return hmac.compare_digest(token.encode(), self.token.encode())

    def knows(self, cookies: str) -> bool:
        """Tell whether a browser has shown the token before."""
        try:
            found = SimpleCookie(cookies).get(self.cookie)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(
            found.value.encode(), self.session.encode()
        )


class Guard:
    """Stands before the app: checks each request, and puts the headers on each answer."""

    def __init__(self, app: ASGIApp, door: Door, posts: frozenset[str]) -> None:
        self.app, self.door, self.posts = app, door, posts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        api = scope["path"].startswith("/api/")

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = "no-store" if api or scope["path"] == SESSION else "no-cache"
                headers = {**HEADERS, "cache-control": kept}
                if message["status"] >= REFUSED:
                    headers["connection"] = "close"  # what is still coming is not read
                message["headers"] = [
                    *message["headers"],
                    *((name.encode(), value.encode()) for name, value in headers.items()),
                ]
            await send(message)

        problem = self._problem(scope, api=api)
        if problem is not None:
            return await refuse(headed, *problem)
        return await self.app(scope, receive, headed)

    def _problem(self, scope: Scope, *, api: bool) -> tuple[int, str] | None:
        """Return the status and the words of a refusal, or None."""
        # What reads requests counts only what waits for its rest; one that comes at once is whole.
        if _head_bytes(scope) > MOST_HEAD:
            return 431, f"The head of a request has at most {MOST_HEAD:,} bytes."
        if self._from_elsewhere(scope):
            return 403, "This page answers its own address only, and no other site."
        posted = scope["path"] in self.posts
        if scope["method"] != ("POST" if posted else "GET"):
            return 405, f"{scope['path'][:80]} takes {'POST' if posted else 'GET'} only."
        headers = _headers(scope)
        if api and not self.door.knows(headers.get("cookie", "")):
            return 401, "Open the address that `roundelay web` has printed; it has the token."
        if posted and headers.get("content-type", "").partition(";")[0] != "application/json":
            return 415, "A pasted schedule comes as application/json."
        return None

    def _from_elsewhere(self, scope: Scope) -> bool:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        origins = [value for name, value in scope["headers"] if name == b"origin"]
        headers = _headers(scope)
        if len(hosts) != 1 or headers.get("host") not in self.door.names:
            return True
        if origins and headers["origin"] != f"http://{headers['host']}":
            return True
        site = headers.get("sec-fetch-site", "none")
        # A link from elsewhere may lead to the page, which holds no data; it may fetch nothing.
        led = scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"
        framed = headers.get("sec-fetch-dest", "document") != "document"
        return site not in OURS and not (led and not framed)


def _head_bytes(scope: Scope) -> int:
    """Return how long a head was: the first line, then `name: value` and an end for each field."""
    first = len(scope["method"]) + len(scope["raw_path"]) + len(scope["query_string"]) + 13
    return first + sum(len(name) + len(value) + 4 for name, value in scope["headers"])


def _headers(scope: Scope) -> Mapping[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def refusal(words: str) -> bytes:
    """Return the document of an error: the sentence, and nothing else."""
    return json.dumps({"error": words}).encode()


async def refuse(send: Send, status: int, words: str) -> None:
    """Answer with an error."""
    body = refusal(words)
    headers = [(b"content-type", b"application/json"),
               (b"content-length", str(len(body)).encode())]  # fmt: skip
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
