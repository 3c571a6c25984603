"""What `hvd.init` begins and `hvd.shutdown` ends: this process's place among the ranks."""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from roundelay import _core
from roundelay.arguments import shown
from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.fronts.horovod.errors import NotInitializedError, UnsupportedOperationError
from roundelay.fronts.horovod.negotiation import Negotiation
from roundelay.fronts.horovod.operation import Operation, Place, Terms
from roundelay.launch import init as rd_init

__all__ = ["Session", "adopt", "begin", "current", "end", "started"]

OURS = str(Path(__file__).parents[2]) + os.sep
BETWEEN = os.path.join("torch", "autograd", "function.py")  # noqa: PTH118 - compared as text


class Session:
    """One rank between `hvd.init` and `hvd.shutdown`."""

    def __init__(self, comm: Communicator, stand_in: Callable[[Terms], Operation]) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        hosts: list[tuple[str, str]] = comm.all_gather_object(_host())
        nodes = [*dict.fromkeys(hosts)]
        local = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
        self.local_rank, self.local_size = local[self.rank], hosts.count(hosts[self.rank])
        same = [hosts[rank] for rank in range(self.size) if local[rank] == self.local_rank]
        self.cross_rank, self.cross_size = same.index(hosts[self.rank]), len(same)
        self.homogeneous = len({hosts.count(node) for node in nodes}) == 1
        self.negotiation = Negotiation(comm, stand_in)
        self._unnamed: dict[tuple[str, int, int], itertools.count[int]] = {}

    def submit(
        self,
        kind: str,
        name: str | None,
        process_set: int,
        terms: Terms,
        run: Callable[[Communicator], Any],
    ) -> Operation:
        """Submit an operation; one without a name gets the next number of its kind."""
        if name is not None and not isinstance(name, str):
            raise InvalidArgumentError(f"hvd.{kind} takes name= as a word, not {shown(name)}.")
        if name is None:
            key = kind, process_set, self.negotiation.epoch
            numbers = self._unnamed.get(key) or self._unnamed.setdefault(key, itertools.count())
            name = f"noname.{key[2]}.{next(numbers)}"
        operation = Operation(kind, name, process_set, terms, run)
        operation.place = _called_from()
        return self.negotiation.submit(operation)

    def members(self, process_set: Any) -> tuple[int, ...]:  # Any: it is looked at here
        """Return the ranks of a process set, of which this must be one."""
        number = self.known(process_set)
        ranks = self.negotiation.members.get(-1 if number is None else number)
        if ranks is None:
            raise InvalidArgumentError(
                "This process set is not known to hvd: pass it to hvd.init(process_sets=…) or "
                "hvd.add_process_set first; one that was removed is gone."
            )
        if self.rank not in ranks:
            raise InvalidArgumentError(
                f"Rank {self.rank} is not in process set {number}, which has ranks "
                f"{list(ranks)}. Call this only where process_set.included()."
            )
        return ranks

    @staticmethod
    def known(process_set: Any) -> int | None:
        """Return the number of a process set; refuse what is none."""
        number: int | str | None = getattr(process_set, "process_set_id", "none")
        if isinstance(number, str):
            raise InvalidArgumentError(
                f"process_set= takes an hvd.ProcessSet that hvd.add_process_set knows, or "
                f"hvd.global_process_set, not {shown(process_set)}."
            )
        return number

    def close(self) -> None:
        """End it; other ranks need not wait for this one any more."""
        self.negotiation.leave()


def _called_from() -> Place | None:
    """Return the user's line: torch's own function stands before it where there are gradients."""
    place: Place | None = _core.caller()
    if place is None or not place[0].co_filename.endswith(BETWEEN):
        return place
    frame = sys._getframe()  # noqa: SLF001 - there is no other name
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
        while frame.f_back is not None and frame.f_code.co_filename.endswith(BETWEEN):
            frame = frame.f_back
    return frame.f_code, frame.f_lasti, frame.f_lineno


def _host() -> tuple[str, str]:
    """Say on which host this is; launchers that play several on one number them."""
    return socket.gethostname(), os.environ.get("GROUP_RANK", "")


_session: Session | None = None  # a process has one launcher, and Horovod's functions no argument
_adopted: Communicator | None = None  # of `hvd.run`, in the place of a launcher's


def adopt(comm: Communicator | None) -> None:
    """Let the next `hvd.init` take this communicator, not that of a launcher."""
    global _adopted  # noqa: PLW0603 - see above
    _adopted = comm


def begin(stand_in: Callable[[Terms], Operation], ranks: Sequence[int] | None) -> Session:
    """Return the session of this process; begin it if there is none."""
    global _session  # noqa: PLW0603 - see above
    if _session is None:
        comm = _adopted or rd_init()
        if ranks is not None and sorted(ranks) != list(range(comm.size)):
            raise UnsupportedOperationError(
                f"hvd.init(comm={list(ranks)}) names some ranks of {comm.size}: start only those, "
                f"or call hvd.init() and pass a process set to what concerns them."
            )
        _session = Session(comm, stand_in)
        comm.before_close(end)
    return _session


def started() -> bool:
    """Tell whether there is a session."""
    return _session is not None


def current(call: str) -> Session:
    """Return the session, which `call` needs."""
    if _session is None:
        raise NotInitializedError(call)
    return _session


def end() -> None:
    """End the session, if there is one."""
    global _session
    ending, _session = _session, None
    if ending is not None:
        ending.close()
