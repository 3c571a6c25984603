"""Ranks without which a job goes on: who was lost, and groups of those that are left.

A rank is needed, unless it says otherwise: if it is lost, the job ends. One that has said so by
`spare` is missed only by who needs it: a message to or from it raises `PeerLost`, and nothing else
happens; a collective that it should be part of raises `PeerLost` on all ranks, and ends the job.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from roundelay.communicator.point_to_point import Message
from roundelay.engines import Engine

__all__ = ["Losses"]


class Losses(ABC):
    """The part of a communicator that knows of losses."""

    _engine: Engine

    @abstractmethod
    def _made(self, engine: Engine, ranks: Sequence[int]) -> Self:
        """See the communicator."""

    def spare(self, loss: str) -> None:
        """Let the job go on without this rank: one of `LOSSES` says what its loss does to it.

        Only ranks of one host that share memory, as processes or threads, can be spared.
        """
        self._engine.spare(loss)

    @property
    def losses(self) -> int:
        """How many ranks of the job were lost so far without which it goes on."""
        return self._engine.losses

    def lost(self) -> dict[int, str]:
        """Return the ranks of this group that were lost while the job goes on, and what is known.

        >>> import roundelay as rd
        >>> rd.run(lambda comm: comm.lost(), 2, "threads")
        [{}, {}]
        """
        return self._engine.lost()

    def at_step(self, number: int) -> None:
        """Show the others in which step of training this rank is: if it is lost, they tell."""
        self._engine.at_step(number)

    def wait_unless_lost(self, message: Message, known: int) -> bool:
        """Wait for a message until `losses` is more than `known`; tell whether it has come."""
        if not self._engine.wait_unless_lost(message.request, known):
            return False
        message.wait()
        return True

    def regroup(self, ranks: Sequence[int]) -> Self | None:
        """Make a group of these ranks, which alone call it; None where the engine can't."""
        engine = self._engine.regroup(ranks)
        return None if engine is None else self._made(engine, ranks)
