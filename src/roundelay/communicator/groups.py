"""Groups within a group, and memory that all of a group can reach."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from roundelay.arguments import index_of, indices_of, shown, whole
from roundelay.communicator.call_trace import CallTrace
from roundelay.communicator.calls import ArrayCalls
from roundelay.communicator.losses import Losses
from roundelay.communicator.registered import RegisterCalls
from roundelay.engines import Engine
from roundelay.errors import CollectiveMismatch, InvalidArgumentError, NoRoomError

__all__ = ["GroupCalls", "not_over"]

MOST = (1 << 62) - 1
MOST_DIMENSIONS = 32  # numpy before 2.0 has no more


class GroupCalls(ArrayCalls, Losses, RegisterCalls):
    """The part of a communicator that makes others, and arrays in the arena."""

    _parent: Self | None = None  # the one it was made from
    _call_trace: CallTrace | None

    @abstractmethod
    def __init__(self, engine: Engine) -> None:
        """See the communicator."""

    def split(self, color: int | None, key: int | None = None) -> Self | None:
        """Make a group of the ranks with the same color, ordered by key; None leaves you out."""
        mine = [-1, self.rank]
        if color is not None:
            mine[0] = whole("color of split, unless None,", color, 0, MOST)
        if key is not None:
            mine[1] = whole("key of split, unless None,", key, -MOST, MOST)
        table = self._all_gather_for("split", np.array(mine, np.int64)).tolist()
        groups: dict[int, list[tuple[int, int]]] = {}
        for rank, (its_color, its_key) in enumerate(table):
            groups.setdefault(its_color, []).append((its_key, rank))
        members = [rank for _, rank in sorted(groups[mine[0]])]
        return self._make([] if color is None else members)

    def group(self, ranks: Sequence[int]) -> Self | None:
        """Make a group of these ranks, in this order; None for the others. All must call it."""
        numbers = indices_of(ranks)
        if numbers == []:
            raise InvalidArgumentError("group needs at least one rank.")
        if numbers is None or len({*numbers} & {*range(self.size)}) != len(numbers):
            raise InvalidArgumentError(
                f"group takes different ranks from 0 to {self.size - 1}, not {shown(ranks)}."
            )
        self._compare(numbers)
        return self._make(numbers)

    def _compare(self, ranks: list[int]) -> None:
        """Raise, on every rank, who asks for which group, if that is not the same everywhere."""
        # A hash of numbers is the same in all processes.
        told = self._all_gather_for("group", np.array([len(ranks), hash(tuple(ranks))], np.int64))
        if (told == told[0]).all():
            return
        padded = np.full(int(told[:, 0].max()), -1, np.int64)
        padded[: len(ranks)] = ranks
        lists = zip(
            told[:, 0].tolist(), self._all_gather_for("group", padded).tolist(), strict=True
        )
        lines = [f"  rank {rank}: {row[:count]}" for rank, (count, row) in enumerate(lists)]
        raise CollectiveMismatch(
            "\n".join(["group needs the same ranks in the same order on every rank:", *lines])
        )

    def _make(self, ranks: list[int]) -> Self | None:
        engine = self._engine.group(ranks)
        return None if engine is None else self._made(engine, ranks)

    def _made(self, engine: Engine, ranks: Sequence[int]) -> Self:
        group = type(self)(engine)
        group._parent = self
        if self._call_trace is not None:
            engine.start_trace(self._call_trace.trace)
            group._call_trace = self._call_trace.of_group(ranks, engine.rank)
        return group

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float64) -> np.ndarray[Any, Any]:
        """Return an array in the shared arena, where collectives need no copy. All must call it.

        Every rank gets one of its own, of the same size. For torch: `torch.from_numpy`. Engines
        without an arena give ordinary memory.
        """
        kind, lengths = _dtype(dtype), _shape(shape)
        nbytes = math.prod(lengths) * kind.itemsize
        if nbytes * self.size > MOST:
            raise NoRoomError(nbytes * self.size, call="empty")
        array: np.ndarray[Any, Any] = self._engine.memory(nbytes).view(kind).reshape(lengths)
        return array


def _dtype(given: Any) -> np.dtype[Any]:
    """Return a dtype whose elements are bytes and nothing else, so that ranks can share them."""
    try:
        kind: np.dtype[Any] | None = np.dtype(given)
    except (TypeError, ValueError, AttributeError, RuntimeError):
        kind = None
    if kind is None or kind.hasobject or kind.itemsize == 0 or kind.subdtype is not None:
        raise InvalidArgumentError(
            f"empty takes a numpy dtype of plain numbers, such as np.float32 or 'int64', not "
            f"{shown(given)}. For bfloat16 there is that of ml_dtypes."
        )
    return kind


def _shape(given: Any) -> tuple[int, ...]:
    """Return the lengths of an array that numpy can hold."""
    number = index_of(given)
    lengths = indices_of(given) if number is None else [number]
    if lengths is None or min(lengths, default=0) < 0 or len(lengths) > MOST_DIMENSIONS:
        raise InvalidArgumentError(
            f"empty takes a shape: a whole number from 0, or up to {MOST_DIMENSIONS} of them, not "
            f"{shown(given)}."
        )
    if max(lengths, default=0) > MOST or (0 in lengths and math.prod(filter(None, lengths)) > MOST):
        raise InvalidArgumentError(f"empty: no array can have the shape {shown(given)}.")
    return tuple(lengths)


def not_over(action: Callable[[], None]) -> bool:
    """Tell whether there is still something to do before closing, for who can tell by `over()`."""
    over: Callable[[], bool] = getattr(action, "over", bool)
    return not over()
