"""How a job of several ranks ended: which rank was the first to fail, and what followed from it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from roundelay.errors import ranks_text
from roundelay.processes.death import CONSEQUENCES, killed_by

__all__ = ["Ending", "RankEnd"]

SIGNALLED = 128


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    code: int  # minus the signal that killed it
    error: str = ""  # the exception it ended by
    traceback: bytes = b""
    told: bool = False  # it ended after we had asked it to
    passes: bool = False  # if it failed, the job did not

    @property
    def how(self) -> str:
        """Say it in a few words."""
        if self.code < 0:
            return f"was killed by {killed_by(-self.code)}"
        return f"raised {self.error}" if self.error else f"ended with exit code {self.code}"


@dataclass(frozen=True, slots=True)
class Ending:
    """How all ranks ended, in the order of time, and the signal that ended them, if one did."""

    ends: Sequence[RankEnd]
    signal: int | None = None
    blamed: int | None = None  # the rank whose failure came first, as ranks say who raised

    @property
    def first(self) -> RankEnd | None:
        """The rank that failed by itself, before all others; None if none did."""
        failed = [end for end in self.ends if end.code and not end.passes]
        by_itself = [end for end in failed if not end.told and end.error not in CONSEQUENCES]
        told = [end for end in by_itself if end.rank == self.blamed]
        return next(iter(told or by_itself or failed), None)

    @property
    def lost(self) -> list[RankEnd]:
        """The ranks without which the job went on, and well."""
        return [end for end in self.ends if end.code and end.passes]

    @property
    def code(self) -> int:
        """The exit code for all: of the first that failed, 128 and more for a signal."""
        if self.signal is not None:
            return SIGNALLED + self.signal
        if self.first is None:
            return 0
        return self.first.code if self.first.code > 0 else SIGNALLED - self.first.code

    def summary(self) -> str:
        """Say in a line or two what happened; nothing if all is well.

        >>> ends = [RankEnd(1, 1, "PeerLost"), RankEnd(2, -9), RankEnd(0, 1, "PeerLost")]
        >>> print(Ending(ends).summary())
        rank 2 was killed by SIGKILL. After that, ranks 0, 1 raised PeerLost.
        """
        if self.signal == signal.SIGPIPE:
            return ""  # whoever read the output has had enough; that is no news to him
        if self.signal is not None:
            return f"ended by {signal.Signals(self.signal).name}."
        first = self.first
        if first is None:
            told = [f"rank {end.rank} {end.how}; the job went on without it." for end in self.lost]
            return " ".join(told)
        others: dict[str, list[int]] = {}
        for end in self.ends:
            if end is not first and end.code:
                how = "had to be ended" if end.told and end.code < 0 else end.how
                others.setdefault(how, []).append(end.rank)
        then = "; ".join(f"{ranks_text(sorted(ranks))} {how}" for how, ranks in others.items())
        return f"rank {first.rank} {first.how}." + (f" After that, {then}." if then else "")
