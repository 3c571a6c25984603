"""Groups within a group, and memory that all of a group can reach."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from roundelay.engines._end import End
from roundelay.errors import InvalidArgumentError

__all__ = ["Groups"]


class Groups(ABC):
    """The part of a communicator that makes others, and arrays in the arena."""

    rank: int
    size: int
    _end: End
    _parent: Self | None = None  # the one it was made from

    @abstractmethod
    def __init__(self, end: End) -> None:
        """See the communicator."""

    @abstractmethod
    def all_gather(self, x: Any) -> Any:
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
        end = self._end.group(ranks)
        if end is None:
            return None
        made = type(self)(end)
        made._parent = self
        return made

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float64) -> np.ndarray[Any, Any]:
        """Return an array in the shared arena, where collectives need no copy. All must call it.

        Every rank gets one of its own, of the same size. For torch: `torch.from_numpy`. Engines
        without an arena give ordinary memory.
        """
        kind = np.dtype(dtype)
        array_shape = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = int(np.prod(array_shape, dtype=np.int64)) * kind.itemsize
        array: np.ndarray[Any, Any] = self._end.memory(nbytes).view(kind).reshape(array_shape)
        return array
