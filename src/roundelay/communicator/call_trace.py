"""Calls of engines that stand on other libraries, taken down for a trace where they are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from roundelay import _core
from roundelay.engines import COLLECTIVES, CollectiveCall, Engine, MessageCall, Request
from roundelay.records import Trace
from roundelay.records.phases import NUMBERS
from roundelay.reductions import CODES, REDUCTIONS

__all__ = ["CallTrace", "MessageMark"]

UNKNOWN = 0xFF  # an algorithm that another library has chosen, a reduction of the user's own
OPS = {name: number for number, name in enumerate(REDUCTIONS)}


class CallTrace:
    """Takes down the calls of one communicator: from where they are made to where they are over.

    What other libraries do in between they do not tell, so that waiting is not told apart, and a
    call in the background lasts until somebody has waited for it.
    """

    def __init__(self, trace: Trace, serial: int, rank: int, size: int) -> None:
        self.trace, self._serial, self._calls = trace, serial, 0
        self._groups: Counter[tuple[int, ...]] = Counter()  # made so far, by their ranks
        trace.list_group(serial, rank, size)

    def of_group(self, ranks: Sequence[int], rank: int) -> CallTrace:
        """Return what takes down the calls of a group, under a number that its ranks alone share.

        Who is not in a group may know nothing of it, so that groups of other ranks don't count.
        """
        members = tuple(ranks)
        self._groups[members] += 1
        said = f"{self._serial} {members} {self._groups[members]}".encode()
        serial = int.from_bytes(blake2b(said, digest_size=7).digest(), "little")
        return CallTrace(self.trace, serial, rank, len(members))

    def run(self, engine: Engine, call: CollectiveCall, algorithm: str | None) -> None:
        """Run a call, and take it down."""
        number = self._begin(call)
        try:
            engine.run(call, algorithm)
        except BaseException:
            self.trace.end(number, failed=True)
            raise
        self.trace.end(number)

    def begin(self, engine: Engine, call: CollectiveCall, algorithm: str | None) -> Request:
        """Begin a call in the background; it is over when it was waited for."""
        number = self._begin(call)
        return _TracedRequest(self.trace, number, engine.begin(call, algorithm))

    def _begin(self, call: CollectiveCall) -> int:
        self._calls += 1
        return self.trace.begin_call(
            self._serial, self._calls, COLLECTIVES[call.collective], UNKNOWN,
            CODES.get(call.dtype, UNKNOWN), OPS.get(call.op, UNKNOWN), call.count, call.nbytes,
            _site(),
        )  # fmt: skip


class _TracedRequest:
    """A call under way, whose end is taken down."""

    def __init__(self, trace: Trace, number: int, request: Request) -> None:
        self._trace, self._number, self._request = trace, number, request

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self._request.done()

    def wait(self) -> None:
        """Return when the call is done, or raise what went wrong."""
        try:
            self._request.wait()
        except BaseException:
            self._trace.end(self._number, failed=True)
            raise
        self._trace.end(self._number)


class MessageMark:
    """A message in a trace, from where it is posted until somebody has waited for it."""

    def __init__(self, trace: Trace, call: MessageCall) -> None:
        whom = "any rank" if call.other is None else f"rank {call.other}"
        name = trace.string(f"send to {whom}" if call.sends else f"recv from {whom}")
        self._trace = trace
        self._number = trace.begin(NUMBERS["message"], name, 0, call.data.nbytes)

    def __enter__(self) -> None:
        """Wait for it."""

    def __exit__(self, kind: object, *_: object) -> None:
        self._trace.end(self._number, kind is not None)


def _site() -> str:
    """Return the user's line."""
    place = _core.caller()
    if place is None:
        return ""
    code, _, line = place
    return f"{Path(code.co_filename)}:{line}"
