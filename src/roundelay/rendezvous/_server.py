"""Rank 0's part of a meeting: hear who is there, hand out the memory, and leave no trace."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Self

from roundelay import _core
from roundelay.errors import LimitError, RendezvousError, ranks_text
from roundelay.processes.limits import limit_hit, no_files_left
from roundelay.rendezvous import _messages as messages
from roundelay.rendezvous.directory import RendezvousDirectory
from roundelay.signals import before_ending

HELLO_S = 5.0  # for a caller to say who it is
TICK_S = 0.25
TELL_S = 5.0  # between two lines about who is missing
MOST_SILENT = 64  # callers that have not said who they are


@dataclass(slots=True)
class _Caller:
    connection: socket.socket
    pid: int
    since: float
    rank: int | None = None
    taken: list[int] = field(default_factory=list)

    def close(self) -> None:
        self.connection.close()
        while self.taken:
            os.close(self.taken.pop())


class RendezvousServer:
    """Serves the socket of a job until all ranks have come; use as a context manager."""

    def __init__(
        self, place: RendezvousDirectory, size: int, deadline: float, timeout: float
    ) -> None:
        self.place, self.size = place, size
        self.deadline, self.timeout = deadline, timeout
        self._callers: dict[int, _Caller] = {}  # by descriptor
        self._refused: list[str] = []
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as cleanup:
            # While the socket has a name, a signal that ends the process removes it first.
            cleanup.enter_context(before_ending(self._end_by_signal))
            cleanup.callback(self.place.remove)
            self._listening = cleanup.enter_context(self.place.take())
            self._cleanup = cleanup.pop_all()
        self._listening.settimeout(0)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            known = isinstance(error, (LimitError, RendezvousError))
            self._refuse_all(str(error) if known else f"rank 0 ended: {type(error).__name__}.")
        self._cleanup.close()
        for caller in self._callers.values():
            caller.close()

    def _end_by_signal(self) -> None:
        self.place.remove()
        self._refuse_all("rank 0 ended by a signal.")

    def _refuse_all(self, text: str) -> None:
        for caller in self._callers.values():
            with contextlib.suppress(OSError):
                messages.send(caller.connection, messages.REFUSED, text.encode())

    def gather(self, world: _core.World, own: int) -> list[int]:
        """Wait for all ranks, hand each the world and the others' pipes; return those of rank 0."""
        ranks = self._wait_for_all()
        pipes = [own, *(ranks[rank].taken[0] for rank in range(1, self.size))]
        world.enter(0)
        for rank in range(1, self.size):
            self._hand_over(ranks[rank], world, pipes[:rank] + pipes[rank + 1 :])
        for rank in range(1, self.size):
            with contextlib.suppress(OSError):  # its pipe tells everybody
                messages.send(ranks[rank].connection, messages.GO)
        return [ranks[rank].taken.pop(0) for rank in range(1, self.size)]

    def _wait_for_all(self) -> dict[int, _Caller]:
        last_told, next_warning = "", time.monotonic() + TELL_S
        with selectors.PollSelector() as selector:
            selector.register(self._listening, selectors.EVENT_READ)
            while missing := self._missing():
                now = time.monotonic()
                if now > self.deadline:
                    raise RendezvousError(self._too_late(missing))
                if now > next_warning:
                    next_warning = now + TELL_S
                    logging.getLogger("roundelay").warning(
                        "waiting for %s of %d (%.0f s left)",
                        ranks_text(missing), self.size, self.deadline - now,
                    )  # fmt: skip
                for key, _ in selector.select(min(TICK_S, self.deadline - now)):
                    if key.fileobj is self._listening:
                        self._accept(selector)
                    else:
                        self._hear(selector, self._callers[key.fd])
                self._drop_silent(selector)
                if (text := ranks_text(self._missing())) != last_told:
                    last_told = text
                    self._tell(text)
        return {caller.rank: caller for caller in self._callers.values() if caller.rank is not None}

    def _missing(self) -> list[int]:
        here = {caller.rank for caller in self._callers.values()}
        return [rank for rank in range(1, self.size) if rank not in here]

    def _too_late(self, missing: list[int]) -> str:
        refused = f" Refused: {'; '.join(self._refused[:3])}." if self._refused else ""
        verb = "have" if len(missing) > 1 else "has"
        return (
            f"{ranks_text(missing)} of {self.size} {verb} not come within {self.timeout:g} s to "
            f"{self.place.path}.{refused} See whether they started, with the same MASTER_ADDR and "
            f"MASTER_PORT, or allow more time with timeout."
        )

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError as error:  # gone again
            _tell_limit(error)
            return
        pid, uid = messages.peer(connection)
        silent = sum(caller.rank is None for caller in self._callers.values())
        if uid != os.geteuid() or silent >= MOST_SILENT:
            connection.close()
            return
        self._callers[connection.fileno()] = _Caller(connection, pid, time.monotonic())
        selector.register(connection, selectors.EVENT_READ)

    def _hear(self, selector: selectors.BaseSelector, caller: _Caller) -> None:
        try:
            kind, body = messages.receive(
                caller.connection, time.monotonic() + TICK_S, caller.taken
            )
            hello = messages.Hello.unpack(body)
            problem = self._problem(caller, kind, hello)
        except (EOFError, OSError, struct.error, RendezvousError) as error:
            _tell_limit(error)
            if caller.rank is not None:
                missing = self._missing()
                still = f"; {ranks_text(missing)} of {self.size} had not come" if missing else ""
                raise RendezvousError(
                    f"rank {caller.rank} (process {caller.pid}) went away during the "
                    f"rendezvous{still}."
                ) from None
            problem = f"process {caller.pid} is no rank: {error}"
            hello = None
        if problem:
            self._refused.append(problem)
            with contextlib.suppress(OSError):
                messages.send(caller.connection, messages.REFUSED, problem.encode())
            self._drop(selector, caller)
        elif hello is not None:
            caller.rank = hello.rank

    def _problem(self, caller: _Caller, kind: int, hello: messages.Hello) -> str:
        """Say why a caller can't take part; nothing if it can."""
        who = f"process {caller.pid} says it is rank {hello.rank} of {hello.size}"
        if kind != messages.HELLO or caller.rank is not None or len(caller.taken) != 1:
            return f"process {caller.pid} does not keep to the protocol"
        if hello.core != _core.version:
            return f"{who} with roundelay {hello.core}, but rank 0 has roundelay {_core.version}"
        if hello.size != self.size:
            return f"{who}, but rank 0 was told WORLD_SIZE={self.size}"
        if not 1 <= hello.rank < self.size:
            return f"{who}, but ranks go from 0 to {self.size - 1}"
        for other in self._callers.values():
            if other.rank == hello.rank:
                return (
                    f"{who}, but process {other.pid} is that already: two processes have "
                    f"RANK={hello.rank}, or two jobs have the same MASTER_ADDR and MASTER_PORT"
                )
        return ""

    def _tell(self, missing: str) -> None:
        for caller in self._callers.values():
            if caller.rank is not None:
                with contextlib.suppress(OSError):
                    messages.send(caller.connection, messages.WAITING, missing.encode())

    def _drop_silent(self, selector: selectors.BaseSelector) -> None:
        late = time.monotonic() - HELLO_S
        for caller in list(self._callers.values()):
            if caller.rank is None and caller.since < late:
                self._drop(selector, caller)

    def _drop(self, selector: selectors.BaseSelector, caller: _Caller) -> None:
        selector.unregister(caller.connection)
        del self._callers[caller.connection.fileno()]
        caller.close()

    def _hand_over(self, caller: _Caller, world: _core.World, pipes: list[int]) -> None:
        """Give one rank the memory and the pipes, and wait until it is in."""
        descriptors = [world.fd, *pipes]
        try:
            while len(descriptors) > messages.MOST_DESCRIPTORS:
                part = descriptors[: messages.MOST_DESCRIPTORS]
                messages.send(caller.connection, messages.PART, b"", part)
                descriptors = descriptors[messages.MOST_DESCRIPTORS :]
            messages.send(caller.connection, messages.WORLD, world.token, descriptors)
            kind, _ = messages.receive(caller.connection, self.deadline, caller.taken)
            if kind != messages.ENTERED:
                raise RendezvousError(f"process {caller.pid} does not keep to the protocol")
        except TimeoutError:
            raise RendezvousError(
                f"rank {caller.rank} (process {caller.pid}) came, but did not enter within "
                f"{self.timeout:g} s; it may be stopped."
            ) from None
        except (EOFError, OSError):
            raise RendezvousError(
                f"rank {caller.rank} (process {caller.pid}) went away during the rendezvous."
            ) from None


def _tell_limit(error: Exception) -> None:
    """Raise what is no other's fault: rank 0 may open no more files."""
    if isinstance(error, OSError) and no_files_left(error):
        hit = limit_hit("rank 0, to which the others come", error)
        raise hit or error from None
