"""The buffers of one rank for one collective, what must come out, and what it costs at least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from roundelay.collectives import collectives
from roundelay.errors import InvalidArgumentError
from roundelay.reductions import REDUCTIONS, Array, fold

__all__ = ["Buffers", "Call", "Workload", "bus_factor", "check_reduction", "least_traffic"]

Call = Callable[[], object]  # of one collective, on buffers that it knows

PERIOD = 7  # of the pattern; a prime, so that shifted blocks differ


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a rank passes in, and where its result comes; one array for both when in place."""

    input: Array
    output: Array


@dataclass(frozen=True, slots=True)
class Workload:
    """One collective on `count` elements (of the largest buffer), as one rank sees it."""

    collective: str
    rank: int
    size: int
    count: int
    dtype: str
    op: str
    root: int

    @classmethod
    def of(
        cls, collective: str, nbytes: int, *, rank: int, size: int, dtype: str, op: str, root: int
    ) -> Workload:
        """Take as many elements as fit, equally many for every block, and at least one each."""
        blocks = collectives.load(collective).per_rank(size, root)
        count = max(1, nbytes // np.dtype(dtype).itemsize // blocks) * blocks
        return cls(collective, rank, size, 0 if collective == "barrier" else count, dtype, op, root)

    @property
    def nbytes(self) -> int:
        """Bytes of the largest buffer of any rank."""
        return self.count * np.dtype(self.dtype).itemsize

    def lengths(self) -> tuple[int, int]:
        """Return how many elements this rank passes in and gets back."""
        contract = collectives.load(self.collective)
        unit = self.count // contract.per_rank(self.size, self.root)
        before = len(list(contract.before(self.size, self.root, self.rank)))
        after = len(contract.after(self.size, self.root, self.rank))
        return before * unit, after * unit

    @property
    def in_place(self) -> bool:
        """Tell whether input and output are one array."""
        return self.collective in ("all_reduce", "reduce", "broadcast", "scan", "exscan")

    def make(self, empty: Callable[[int, str], Array] = np.empty) -> Buffers:
        """Return new buffers, filled; all ranks ask `empty` for the same, as the arena needs it."""
        before, after = self.lengths()
        given = empty(self.count, self.dtype)
        if self.in_place:
            buffers = Buffers(given, given)
        else:
            buffers = Buffers(given[:before], empty(self.count, self.dtype)[:after])
        buffers.output.fill(0)
        _tile(buffers.input, self._pattern(self.rank))
        return buffers

    def count_wrong(self, buffers: Buffers) -> int:
        """Count the elements of the output that are not as they should be."""
        due = self._due()
        if due is None:
            return 0
        whole = np.empty(buffers.output.size, self.dtype)
        for start, length, values in due:
            _tile(whole[start : start + length], values)
        return int(np.count_nonzero(buffers.output != whole))

    def _due(self) -> list[tuple[int, int, Array]] | None:
        """Return the runs of the right output, each with the values that repeat in it."""
        rank, name = self.rank, self.collective
        if name == "barrier" or (name in ("reduce", "gather") and rank != self.root):
            return None
        unit = self.count // self.size
        if name in ("all_gather", "gather"):
            return [(src * unit, unit, self._pattern(src)) for src in range(self.size)]
        if name == "all_to_all":
            mine = [self._share(self._pattern(src), unit) for src in range(self.size)]
            return [(src * unit, unit, mine[src]) for src in range(self.size)]
        if name in ("broadcast", "scatter"):
            values = self._pattern(self.root)
        elif name in ("scan", "exscan"):
            below = range(rank + (name == "scan"))
            values = self._folded(below) if below else self._pattern(rank)
        else:
            values = self._folded(range(self.size))
        if name in ("scatter", "reduce_scatter"):
            return [(0, unit, self._share(values, unit))]
        return [(0, self.count, values)]

    def _share(self, pattern: Array, unit: int) -> Array:
        """Return the pattern as it goes on where this rank's block begins."""
        return np.roll(pattern, -(self.rank * unit) % PERIOD)

    def _pattern(self, rank: int) -> Array:
        # Small whole numbers: every order of addition gives the same, in every dtype.
        return ((np.arange(PERIOD) + rank) % 3 + 1).astype(self.dtype)

    def _folded(self, ranks: range) -> Array:
        divide_by = self.size if self.op == "avg" else None
        operands = [self._pattern(rank) for rank in ranks]
        return fold(REDUCTIONS[self.op], operands, divide_by=divide_by)


def bus_factor(collective: str, size: int) -> float:
    """Return what makes bandwidths of different sizes comparable, as nccl-tests define it.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    share = (size - 1) / size
    if collective == "all_reduce":
        return 2 * share
    blocky = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
    return share if collective in blocky else 1.0


def least_traffic(collective: str, size: int, root: int, nbytes: int) -> int:
    """Count the bytes that must be read and written by all ranks: every input, every output.

    >>> least_traffic("all_reduce", 2, 0, 1000), least_traffic("broadcast", 4, 0, 1000)
    (4000, 4000)
    """
    contract = collectives.load(collective)
    unit = nbytes / contract.per_rank(size, root)
    blocks = 0
    for rank in range(size):
        after = contract.after(size, root, rank)
        # What a rank merely keeps, as the root of a broadcast does, costs nothing.
        moved = [block for block, sources in after.items() if list(sources) != [rank]]
        blocks += len(moved) + len(list(contract.before(size, root, rank)))
    return int(blocks * unit)


def check_reduction(collective: str, op: str, dtype: str) -> None:
    """Refuse a reduction that has no meaning here, or none that can be measured."""
    if op not in REDUCTIONS or op in ("maxloc", "minloc"):
        known = [name for name in REDUCTIONS if name not in ("maxloc", "minloc")]
        raise InvalidArgumentError(f"--op {op}: take one of {', '.join(known)}.")
    if op == "avg" and collective in ("scan", "exscan"):
        raise InvalidArgumentError(f"--op avg: {collective} has none. Take sum.")
    REDUCTIONS[op].check(dtype)


def _tile(target: Array, values: Array) -> None:
    """Repeat the values over the whole target."""
    if target.size:
        whole = target.size // PERIOD * PERIOD
        target[:whole].reshape(-1, PERIOD)[:] = values
        target[whole:] = values[: target.size - whole]
