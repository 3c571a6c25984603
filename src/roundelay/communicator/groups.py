"""Groups within a group, and memory that all of a group can reach."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from roundelay import _core
from roundelay.communicator.plans import Plans
from roundelay.communicator.trouble import explain
from roundelay.errors import CommunicationError, InvalidArgumentError, NoRoomError

__all__ = ["Groups"]


class Groups(ABC):
    """The part of a communicator that makes others, and arrays in the arena."""

    rank: int
    size: int
    timeout: float
    _ranks: list[int]
    _world: _core.World
    _group: _core.Group | None
    _mailbox: _core.Mailbox
    _plans: Plans
    _told: CommunicationError | None

    @abstractmethod
    def __init__(self, world: _core.World, rank: int, **options: Any) -> None:
        """See the communicator."""

    @abstractmethod
    def all_gather(self, x: Any) -> Any:
        """See the communicator."""

    @abstractmethod
    def broadcast(self, x: Any, root: int = 0) -> Any:
        """See the communicator."""

    def split(self, color: int | None, key: int | None = None) -> Self | None:
        """Make a group of the ranks with the same color, ordered by key; None leaves you out."""
        mine = [-1 if color is None else int(color), self.rank if key is None else int(key)]
        if color is not None and color < 0:
            raise InvalidArgumentError(f"split takes colors from 0, or None, not {color}.")
        table = self.all_gather(np.array(mine, np.int64)).tolist()
        groups: dict[int, list[tuple[int, int]]] = {}
        for rank, (its_color, its_key) in enumerate(table):
            groups.setdefault(its_color, []).append((its_key, rank))
        members = [rank for _, rank in sorted(groups[mine[0]])]
        return self._make([] if color is None else members)

    def group(self, ranks: Sequence[int]) -> Self | None:
        """Make a group of these ranks, in this order; None for the others. All must call it."""
        if len(set(ranks)) != len(ranks) or any(not 0 <= rank < self.size for rank in ranks):
            raise InvalidArgumentError(
                f"group takes different ranks from 0 to {self.size - 1}, not {list(ranks)}."
            )
        if not ranks:
            raise InvalidArgumentError("group needs at least one rank.")
        return self._make(list(ranks))

    def _make(self, ranks: list[int]) -> Self | None:
        """Let the first rank of every new group find room for it, and tell the others where."""
        told = np.zeros(2, np.uint64)  # where it lies, and the number of its mail
        nbytes = _core.Group.bytes_for(max(1, len(ranks)))
        if ranks and ranks[0] == self.rank:
            told[:] = self._room(nbytes, len(ranks)), self._world.next_serial()
        every = self.all_gather(told)
        if self.rank not in ranks:
            return None
        place, serial = map(int, every[ranks[0]])
        if place == 0:
            raise NoRoomError(nbytes)
        return type(self)(
            self._world,
            ranks.index(self.rank),
            tuning=self._plans.tuning,
            timeout=self.timeout,
            _ranks=[self._ranks[rank] for rank in ranks],
            _block=_core.Block(self._world, place, nbytes),
            _parent=self,
            _mail_group=serial,
        )

    def _room(self, nbytes: int, ranks: int) -> int:
        """Find room in the arena for a block that so many ranks hold; 0 when there is none."""
        try:
            return self._world.make_block(nbytes, ranks)
        except _core.OutOfMemory:
            return 0  # told to all ranks, so that all of them raise
        except _core.Broken:
            raise explain(self) from None

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float64) -> np.ndarray[Any, Any]:
        """Return an array in the shared arena, where collectives need no copy. All must call it.

        Every rank gets one of its own, of the same size. For torch: `torch.from_numpy`.
        """
        kind = np.dtype(dtype)
        array_shape = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = int(np.prod(array_shape, dtype=np.int64)) * kind.itemsize
        stride = -(-max(nbytes, 1) // 4096) * 4096
        at = np.zeros(2, np.uint64)
        if self.rank == 0:
            at[:] = [self._room(stride * self.size, self.size), nbytes]
        self.broadcast(at)
        if int(at[0]) == 0:
            raise NoRoomError(stride * self.size)
        block = _core.Block(self._world, int(at[0]), stride * self.size)
        if int(at[1]) != nbytes:
            raise InvalidArgumentError(
                f"empty needs one size on every rank: rank 0 asks for {int(at[1])} bytes, rank "
                f"{self.rank} for {nbytes}."
            )
        memory = block.bytes(self.rank * stride, nbytes)
        array: np.ndarray[Any, Any] = memory.view(kind).reshape(array_shape)
        return array
