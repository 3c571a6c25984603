"""The server's app: the files of the page, the answers of its views, and the one pasted text."""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from roundelay.errors import InvalidArgumentError, RoundelayError
from roundelay.web.assets import Asset, assets
from roundelay.web.pasted import MOST_BYTES, PastedError, run_pasted
from roundelay.web.query import Query
from roundelay.web.run_index import RunIndex
from roundelay.web.safety import SESSION, Door, Guard, refusal
from roundelay.web.view import Document, View
from roundelay.web.views import views
from roundelay.web.workers import Workers

__all__ = ["page_app", "view_list"]

#: In which the page offers its views; those that are not here come last.
ORDER = ("tour", "collectives", "training", "axes", "planner", "timelines")
#: Answers are computed in threads, so many at once.
AT_ONCE = 4
#: Seconds for a pasted text to arrive.
ARRIVAL = 10.0
MOST_PARAMETERS = 32
MOST_QUERY = 8000  # characters


def view_list() -> Document:
    """Return what the page needs to find its views: their names, and which have a style."""
    there = assets()
    names = sorted(views.names(), key=lambda name: (*(name != each for each in ORDER), name))
    return {"views": [{"name": name, "style": f"/{name}.css" in there} for name in names]}


def page_app(door: Door, runs: RunIndex | None = None) -> Guard:
    """Return the app, with its guard before it; `runs` are the recorded runs that it shows."""
    served = _Server(door, runs)
    routes = [
        Route("/api/views", _told(served.list), methods=["GET"]),
        Route("/api/{view}/{question}", _told(served.answer), methods=["GET", "POST"]),
        Route(SESSION, served.session, methods=["GET"]),
        Route("/{path:path}", served.file, methods=["GET"]),
    ]
    posts = frozenset(f"/api/{view.name}/{question}" for view in views for question in view.takes)
    return Guard(Starlette(routes=routes), door, posts)


class _Server:
    def __init__(self, door: Door, runs: RunIndex | None) -> None:
        self.door, self.runs = door, runs
        self.files: Mapping[str, Asset] = assets()
        self.views: Mapping[str, View] = {name: views.load(name) for name in views.names()}
        self.workers = Workers(AT_ONCE)

    async def file(self, request: Request) -> Response:
        """Hand out a file of the page."""
        asset = self.files.get(request.scope["path"])
        if asset is None:
            return _error(404, "There is no such page. Begin at /.")
        return Response(asset.body, media_type=asset.kind)

    async def list(self, request: Request) -> Response:
        """Say which views there are."""
        _query(request).finish()
        return _json(view_list())

    async def session(self, request: Request) -> Response:
        """Take the token once, and let the browser keep a cookie in its place."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not self.door.opens(token):
            return _error(401, "This is not the token that `roundelay web` has printed.")
        answer = _json({"open": True})
        answer.set_cookie(
            self.door.cookie, self.door.session, httponly=True, samesite="strict", path="/"
        )
        return answer

    async def answer(self, request: Request) -> Response:
        """Answer a question of a view."""
        view = self.views.get(request.path_params["view"])
        question = request.path_params["question"]
        if view is None or question not in {*view.answers, *view.takes}:
            return _error(404, "No view answers that.")
        if question in view.takes:
            return await self._pasted(view.takes[question], request)
        return await self._computed(view, question, request)

    async def _computed(self, view: View, question: str, request: Request) -> Response:
        query = _query(request, self.runs)

        def compute() -> bytes:
            document = view.answers[question](query)
            query.finish()
            return _encoded(document)

        return Response(await self.workers.run(compute), media_type="application/json")

    async def _pasted(self, module: str, request: Request) -> Response:
        query = _query(request)
        language = query.language
        query.finish()
        received = bytearray()
        with anyio.move_on_after(ARRIVAL) as clock:
            async for part in request.stream():
                received += part
                if len(received) > MOST_BYTES:
                    return _error(413, f"At most {MOST_BYTES:,} bytes are read.")
        if clock.cancelled_caught:
            return _error(408, f"The text did not arrive within {ARRIVAL:.0f} seconds.")
        body = await run_pasted(module, bytes(received), language)
        return Response(body, media_type="application/json")


def _told(answer: Callable[[Request], Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """Say what is wrong with a question, whichever it is, as a sentence with its status."""

    async def told(request: Request) -> Response:
        try:
            return await answer(request)
        except PastedError as error:
            return _error(error.status, str(error))
        except RoundelayError as error:
            return _error(400 if isinstance(error, InvalidArgumentError) else 422, str(error))
        except asyncio.CancelledError:  # after Ctrl-C, of what was not done soon
            return _error(503, "The server has ended.")
        except Exception:  # noqa: BLE001 - the page is told nothing of it, the terminal all
            traceback.print_exc(file=sys.stderr)
            return _error(500, "The server has failed here; its terminal says how.")

    return told


def _query(request: Request, runs: RunIndex | None = None) -> Query:
    if len(request.url.query) > MOST_QUERY:
        raise InvalidArgumentError(f"A question has at most {MOST_QUERY} characters.")
    parameters = request.query_params.multi_items()
    if len(parameters) > MOST_PARAMETERS:
        raise InvalidArgumentError(f"A question has at most {MOST_PARAMETERS} parameters.")
    return Query(parameters, runs=runs)


def _encoded(document: Document) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _json(document: Document) -> Response:
    return Response(_encoded(document), media_type="application/json")


def _error(status: int, words: str) -> Response:
    return Response(refusal(words), status_code=status, media_type="application/json")
