"""A worker's line to the servers: one question to all of them at once, and their answers."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from roundelay.errors import CommunicationError, InvalidArgumentError
from roundelay.training.strategies.parameter_server._answers import Channels
from roundelay.training.strategies.parameter_server._messages import (
    DATA,
    REPLY,
    REQUEST,
    TEXT,
    Kind,
    ServerReply,
    ServerRequest,
    Status,
    as_error,
    as_text,
)
from roundelay.training.strategies.parameter_server._server import WITH_GRADIENTS, ServerLoop
from roundelay.training.strategies.parameter_server._server_optimizer import Options
from roundelay.training.strategies.parameter_server._shutdown import Shutdown
from roundelay.training.strategies.parameter_server.share import Share
from roundelay.training.strategy import Volume


class ServerClient:
    """What one worker needs to talk to all servers, one of which may be on its own rank."""

    def __init__(
        self,
        channels: Channels,
        servers: Sequence[int],
        workers: int,
        grads: Sequence[Share],
        values: Sequence[Share] | None,
        known: Options | None,
    ) -> None:
        self._channels, self.servers = channels, list(servers)
        self._counts = [len(share.indexes) for share in grads]
        self.out = [share.make() for share in grads]
        self.grads_in = [share.make() for share in grads] if values is None else []
        self.values_in = [] if values is None else [share.make() for share in values]
        #: The numbers in the optimizer's options, where servers step it.
        self.known = known
        options = 0 if known is None else known.count
        #: Numbers in a request and in an answer.
        self._rooms = [(ServerRequest.room(count, options), ServerReply.room(count, workers))
                       for count in self._counts]  # fmt: skip
        self._asked = [np.zeros(asked) for asked, _ in self._rooms]
        self._told = [np.zeros(told) for _, told in self._rooms]
        self.grads, self.values = list(grads), list(values or grads)
        self._under_way: list[Any] = []  # letters, which need their memory until they are done
        self._data: list[int] = []  # how many buffers each answer brings
        self._others = workers - 1
        self._moved = [0, 0]  # bytes to and from other ranks
        self._own: tuple[ServerLoop, threading.Thread] | None = None
        #: Lets the servers go when nobody has this worker's model any more.
        self.shutdown = Shutdown(channels, self.servers, self._rooms)
        weakref.finalize(self, self.shutdown.say).atexit = False  # a rank that ends closes

    def serve_here(self, server: ServerLoop) -> None:
        """Let a server work beside this worker, in a thread."""
        thread = threading.Thread(
            target=_serve, args=(server,), name="roundelay-server", daemon=True
        )
        self._own = server, thread
        self.shutdown.thread = thread
        thread.start()

    # ---- questions

    def begin(self, requests: ServerRequest | Sequence[ServerRequest], takes: str = "") -> None:
        """Ask every server; `takes` says what its answer brings: "", "grads" or "values".

        Places for all answers are made ready first: no server need wait for another one's answer
        to be taken.
        """
        listed = [requests] * len(self.servers) if isinstance(requests, ServerRequest) else requests
        into = self._into(takes)
        asks, answers = self._channels.asks, self._channels.answers
        self._under_way = []
        for place, server in enumerate(self.servers):
            self._under_way.append(answers.start.recv(self._told[place], server, REPLY))
            for number, buffer in enumerate(into[place]):
                self._under_way.append(answers.start.recv(buffer, server, DATA + number))
        for place, (server, request) in enumerate(zip(self.servers, listed, strict=True)):
            request.write(self._asked[place], self._counts[place])
            self._under_way.append(asks.start.send(self._asked[place], server, REQUEST))
            if request.kind in WITH_GRADIENTS:
                for number, buffer in enumerate(self.out[place]):
                    self._under_way.append(asks.start.send(buffer, server, DATA + number))
        self._data = [len(buffers) for buffers in into]
        for place, (server, request) in enumerate(zip(self.servers, listed, strict=True)):
            if server != asks.rank:
                out = self.out[place] if request.kind in WITH_GRADIENTS else []
                self._moved[0] += self._asked[place].nbytes + sum(one.nbytes for one in out)
                self._moved[1] += self._told[place].nbytes + sum(one.nbytes for one in into[place])

    def _into(self, takes: str) -> list[list[torch.Tensor]]:
        nothing: list[list[torch.Tensor]] = [[] for _ in self.servers]
        return {"": nothing, "grads": self.grads_in, "values": self.values_in}[takes]

    def finish(self) -> list[ServerReply]:
        """Wait for the answers of all servers; raise what any of them has to tell."""
        replies = []
        letters = iter(self._under_way)
        for place, server in enumerate(self.servers):
            next(letters).wait()
            reply = ServerReply.read(self._told[place])
            if reply.status == Status.FAILED:
                self._raise(server, reply.length)
            for _ in range(self._data[place]):
                next(letters).wait()
            replies.append(reply)
        for letter in letters:
            letter.wait()
        return replies

    def ask(
        self, requests: ServerRequest | Sequence[ServerRequest], takes: str = ""
    ) -> list[ServerReply]:
        """Ask every server and wait for all answers."""
        self.begin(requests, takes)
        return self.finish()

    def meet(self) -> Sequence[float]:
        """Wait for all workers that are still here; return of each whether it is one of these.

        The first server decides. It is no part of a step, and counts for nothing.
        """
        moved = list(self._moved)
        told = self.ask(ServerRequest(Kind.MEET))[0].values
        self._moved = moved
        return told

    def _raise(self, server: int, length: int) -> None:
        text = np.empty(length, np.uint8)
        self._channels.answers.recv(text, server, TEXT)
        if self._own is not None and self._channels.asks.rank == server:
            own = self._own[0].error
            if own is not None:
                raise own
        raise as_error(text, server)

    # ---- checkpoints

    def fetch(self, place: int) -> list[Any]:
        """Take all parameters of one server, with their state."""
        self._ask_one(place, Kind.FETCH)
        server = self.servers[place]
        return [
            self._channels.answers.recv_object(server, TEXT) for _ in range(self._counts[place])
        ]

    def bring(self, place: int, kind: Kind, messages: Sequence[Any]) -> None:
        """Bring one server all its parameters back, or what the user has written into some."""
        self._ask_one(place, kind, number=len(messages))
        for message in messages:
            self._channels.asks.send_object(message, self.servers[place], TEXT)

    def _ask_one(self, place: int, kind: Kind, *, number: int = 0) -> None:
        server, word = self.servers[place], self._asked[place]
        letter = self._channels.answers.start.recv(self._told[place], server, REPLY)
        ServerRequest(kind, number).write(word, self._counts[place])
        self._channels.asks.send(word, server, REQUEST)
        letter.wait()
        reply = ServerReply.read(self._told[place])
        if reply.status == Status.FAILED:
            self._raise(server, reply.length)

    # ---- endings

    def tell_failure(self, error: Exception) -> None:
        """Have all other workers raise the same error when they next ask a server."""
        text = as_text(error)
        for place, server in enumerate(self.servers):
            request = ServerRequest(Kind.FAIL, length=len(text))
            request.write(self._asked[place], self._counts[place])
            self._channels.asks.send(self._asked[place], server, REQUEST)
            self._channels.asks.send(text, server, TEXT)

    # ---- what it holds and exchanges

    def held(self) -> list[torch.Tensor]:
        """Return all buffers, those of a server on this rank too."""
        mine = [*self.out, *self.grads_in, *self.values_in]
        if self._own is not None:
            grads = self._own[0].gradients
            mine += [*grads.inboxes, grads.aggregates]
        return [buffer for buffers in mine for buffer in buffers]

    def volume(self, *, pushes: bool, takes: str) -> Volume:
        """Return what one question costs this rank, as a worker and as a server."""
        sent = received = calls = 0
        nothing: list[int] = []
        for place, server in enumerate(self.servers):
            there = self.grads[place].lengths if pushes else nothing
            back = {"": nothing, "grads": self.grads[place].lengths,
                    "values": self.values[place].lengths}[takes]  # fmt: skip
            asked = self._asked[place].nbytes + sum(there)
            told = self._told[place].nbytes + sum(back)
            messages = 2 + len(there) + len(back)
            if server == self._channels.asks.rank:
                sent, received = sent + self._others * told, received + self._others * asked
                calls += self._others * messages
            else:
                sent, received = sent + asked, received + told
                calls += messages
        return Volume(sent, received, {"message": calls})

    def moved(self) -> tuple[int, int]:
        """Return the bytes that this rank has sent and received, as a worker and as a server."""
        server = (0, 0) if self._own is None else self._own[0].answers.moved
        return self._moved[0] + server[0], self._moved[1] + server[1]

    @property
    def own_place(self) -> int | None:
        """Which of the servers is on this rank."""
        rank = self._channels.asks.rank
        return self.servers.index(rank) if self._own is not None else None

    @property
    def server(self) -> ServerLoop | None:
        """The server on this rank."""
        return None if self._own is None else self._own[0]


def _serve(server: ServerLoop) -> None:
    # If the ranks have lost one another, or one has closed, each finds that out in its own calls.
    with contextlib.suppress(CommunicationError, InvalidArgumentError):
        server.serve()
