"""Serves the page on one address: a socket that is bound before anything is printed, and limits."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from roundelay.errors import InvalidArgumentError
from roundelay.web.app import page_app
from roundelay.web.run_index import RunIndex
from roundelay.web.safety import LOOPBACK, MOST_HEAD, Door

__all__ = ["PageServer", "page_server"]

#: The fewest characters of a token that a user chooses.
LEAST_TOKEN = 16
#: Seconds for the head of a request to arrive, and for which an idle connection is kept.
HEAD_SECONDS, IDLE_SECONDS = 10.0, 5
MOST_CONNECTIONS = 64


class _Timed(H11Protocol):
    """Closes connections on which the head of a request does not arrive: uvicorn waits for ever."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        waiting = self.conn.their_state is h11.IDLE
        if self._deadline is not None and not waiting:
            self._deadline.cancel()
            self._deadline = None
        elif self._deadline is None and waiting:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)


@dataclass(frozen=True)
class PageServer:
    """A page whose socket is bound; `serve` answers until it is told to stop."""

    door: Door
    listener: socket.socket
    host: str
    runs: RunIndex | None = None

    @property
    def address(self) -> str:
        """Where the page is, without the token."""
        return f"http://{_in_address(self.host)}:{self.door.port}/"

    @property
    def link(self) -> str:
        """The address to open. The token is in its fragment, which no browser sends anywhere."""
        return f"{self.address}#token={self.door.token}"

    def serve(self, ready: Callable[[], object] = lambda: None) -> None:
        """Answer until Ctrl-C; `ready` is called once the first request would be answered."""
        ready()  # the socket listens: whoever comes now waits in its queue
        self.runner().run(sockets=[self.listener])

    def runner(self) -> uvicorn.Server:
        """Return what answers, with its limits."""
        config = uvicorn.Config(
            page_app(self.door, self.runs),
            http=_Timed,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=MOST_HEAD,
        )
        return uvicorn.Server(config)


def page_server(
    host: str = "127.0.0.1", port: int = 0, token: str = "", *, runs: Path | None = None
) -> PageServer:
    """Bind an address, of this host alone unless another is named; port 0 takes a free one."""
    if token and (len(token) < LEAST_TOKEN or not token.isascii() or not token.isalnum()):
        raise InvalidArgumentError(
            f"A token has at least {LEAST_TOKEN} letters and digits. Leave it out, and a random "
            f"one is made."
        )
    try:
        listener = _bound(host, port)
    except (OSError, UnicodeError) as error:
        raise InvalidArgumentError(
            f"Nothing can listen at {host}, port {port}: {getattr(error, 'strerror', '') or error}."
            f" Name another with --host or --port; --port 0 takes a free one."
        ) from error
    bound = listener.getsockname()[1]
    own = _in_address(host.lower())
    names = LOOPBACK if own in LOOPBACK else (own,)
    door = Door(token or secrets.token_hex(16), bound, names)
    return PageServer(door, listener, host, None if runs is None else RunIndex(runs))


def _bound(host: str, port: int) -> socket.socket:
    found = [] if host in ("", "*") else socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if not found or _means_everywhere(str(found[0][4][0])):
        raise InvalidArgumentError(
            f"--host {host or repr(host)} would listen everywhere. Name the one address at which "
            f"others reach this machine."
        )
    family, kind, protocol, _, where = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(MOST_CONNECTIONS)
    except OSError:
        listener.close()
        raise
    return listener


def _means_everywhere(address: str) -> bool:
    """Tell whether a socket at this address takes what comes to any: it has many spellings.

    >>> [_means_everywhere(each) for each in ("0.0.0.0", "::ffff:0.0.0.0", "::", "::1")]
    [True, True, True, False]
    """
    found = ipaddress.ip_address(address.partition("%")[0])  # without an interface
    inner = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (inner or found).is_unspecified


def _in_address(host: str) -> str:
    return f"[{host}]" if ":" in host else host
