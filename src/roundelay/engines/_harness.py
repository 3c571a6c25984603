"""An engine from outside: it starts ranks, joins those that a launcher started, runs schedules.

This is what every folder of `engines/` exports. What each rank then has is an `Engine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from roundelay.engines._base import Buffer, Engine, Select
from roundelay.engines._inputs import outgoing, prepare
from roundelay.errors import InvalidArgumentError
from roundelay.reductions import Array, Op
from roundelay.rendezvous.store import OpenStore, no_store
from roundelay.schedule import Schedule

if TYPE_CHECKING:  # which need a native core, as schedules do not
    from roundelay.rendezvous.place import Place

__all__ = ["Harness", "Part"]


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank brings to a schedule, and what it must know of the others."""

    array: Array | None
    dtype: np.dtype[Any]  # of all ranks, also of those that bring nothing
    op: str
    counts: tuple[int, ...]


class Harness(ABC):
    """An engine, by its name: each folder has one, called after it."""

    in_processes = True  # else ranks share objects, and give back what they return as it is

    @classmethod
    def start(
        cls, size: int, body: Callable[[Engine], Any], *, select: Select, timeout: float
    ) -> list[Any]:
        """Run `body` on so many new ranks of this host; return what each gave, in rank order.

        What ranks in processes give is bytes. The first error of a rank is raised when all ended.
        """
        del size, body, select, timeout
        raise InvalidArgumentError(f"The engine {cls.__name__.lower()} starts no ranks.")

    @classmethod
    def join(
        cls, place: Place, store: OpenStore = no_store, *, select: Select, timeout: float
    ) -> Engine:
        """Return the engine of this rank, once all that a launcher started are there."""
        del place, store, select, timeout
        raise InvalidArgumentError(f"The engine {cls.__name__.lower()} joins no processes.")

    @classmethod
    def can(cls, what: Literal["start", "join"]) -> bool:
        """Tell whether this engine starts ranks, or joins them."""
        return getattr(cls, what).__func__ is not getattr(Harness, what).__func__

    def run(
        self,
        schedule: Schedule,
        inputs: Sequence[Buffer | None],
        *,
        op: str | Op = "sum",
        counts: Sequence[int] | None = None,
    ) -> list[Buffer | None]:
        """Run a schedule on all its ranks; return each rank's output, flat.

        `inputs[rank]` holds the blocks that the contract gives that rank, one after the other.
        `counts` gives the elements of every block; by default a rank's blocks are equally long.
        The output is None where the contract leaves a rank nothing.
        """
        reduction, arrays, layout = prepare(schedule, inputs, op=op, counts=counts)
        dtype = next((array.dtype for array in arrays if array is not None), np.dtype(np.uint8))
        parts = [Part(array, dtype, reduction.name, layout.counts) for array in arrays]
        outputs = self.outputs(schedule, parts, op if isinstance(op, Op) else None)
        return [None if output is None else outgoing(output) for output in outputs]

    @abstractmethod
    def outputs(
        self, schedule: Schedule, parts: Sequence[Part], op: Op | None
    ) -> Sequence[Array | None]:
        """Return the output of every rank for its part; `op` is a reduction of the user's own."""

    def close(self) -> None:  # noqa: B027 - most keep something
        """End what is kept for the next run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
