"""A collective algorithm as data: who sends which chunk to whom, in which step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from roundelay.arguments import index_of, indices_of, shown
from roundelay.collectives import Collective, letter
from roundelay.errors import ScheduleError

__all__ = ["Action", "Cell", "Schedule", "Transfer"]

Action = Literal["copy", "reduce"]
ACTIONS: tuple[Action, ...] = get_args(Action)


class Cell(NamedTuple):
    """The place of one chunk at one rank."""

    rank: int
    chunk: int


class Transfer(NamedTuple):
    """One chunk goes from `src` to `dst` in `step`, to replace (`copy`) or to be folded (`reduce`).

    Within a step every source is read as it was before the step, so a swap is two transfers. In
    one step a cell takes one copy or any number of reduces; a reduce folds what comes in with what
    `dst` holds, ordered by lowest contributing rank.
    """

    step: int
    src: int
    dst: int
    chunk: int
    op: Action = "copy"


@dataclass(frozen=True, eq=False)
class Schedule:
    """All transfers of one collective on `size` ranks: proved, priced, drawn, compiled and run.

    Every block of the contract is cut into `parts`; chunk = block * parts + part. Construction
    checks the form (ranks, chunks and steps in range); `prove` checks the meaning.

    >>> from roundelay.collectives.broadcast import broadcast
    >>> pair = Schedule(broadcast, size=2, transfers=[Transfer(0, src=0, dst=1, chunk=0)])
    >>> len(pair.steps), pair.chunks
    (1, 1)
    """

    collective: Collective
    size: int
    transfers: tuple[Transfer, ...]
    root: int = 0
    parts: int = 1
    name: str = "schedule"

    def __init__(
        self,
        collective: Collective,
        size: int,
        transfers: Iterable[Transfer],
        *,
        root: int = 0,
        parts: int = 1,
        name: str = "schedule",
    ) -> None:
        size, root = collective.check(size, root)
        pieces = index_of(parts)
        if pieces is None or pieces < 1:
            raise ScheduleError(
                f"{name}: parts", f"must be a whole number from 1, not {shown(parts)}"
            )
        values = {
            "collective": collective,
            "size": size,
            "root": root,
            "parts": pieces,
            "name": name,
            "transfers": tuple(sorted(_checked(name, transfers), key=_step_of)),
        }
        for field, value in values.items():
            object.__setattr__(self, field, value)
        self._check_transfers()

    @property
    def chunks(self) -> int:
        """Count the chunks: the blocks of the contract, each cut into parts."""
        return self.collective.blocks(self.size) * self.parts

    def chunk_name(self, chunk: int) -> str:
        """Name a chunk by a letter; where blocks have names of their own, by its block and part."""
        if self.collective.named is None:
            return letter(chunk)
        block, part = divmod(chunk, self.parts)
        name = self.collective.block_name(self.size, block)
        return name if self.parts == 1 else f"{name}.{part}"

    @cached_property
    def steps(self) -> tuple[tuple[Transfer, ...], ...]:
        """The transfers, step by step."""
        steps: list[list[Transfer]] = []
        for transfer in self.transfers:
            if transfer.step == len(steps):
                steps.append([])
            steps[-1].append(transfer)
        return tuple(map(tuple, steps))

    def held_before(self) -> Iterator[Cell]:
        """Yield the cells that hold their rank's own contribution when the collective begins."""
        for rank in range(self.size):
            for block in self.collective.before(self.size, self.root, rank):
                for chunk in self.chunks_of(block):
                    yield Cell(rank, chunk)

    def due_after(self) -> Iterator[tuple[Cell, frozenset[int]]]:
        """Yield the cells the contract names at the end, with the ranks that must be in them."""
        for rank in range(self.size):
            for block, sources in self.collective.after(self.size, self.root, rank).items():
                due = frozenset(sources)
                for chunk in self.chunks_of(block):
                    yield Cell(rank, chunk), due

    def chunks_of(self, block: int) -> range:
        """Return the chunks that a block is cut into."""
        return range(block * self.parts, (block + 1) * self.parts)

    def _check_transfers(self) -> None:
        size, chunks, last = self.size, self.chunks, -1
        for index, (step, src, dst, chunk, op) in enumerate(self.transfers):
            if (
                0 <= src < size
                and 0 <= dst < size
                and src != dst
                and 0 <= chunk < chunks
                and last <= step <= last + 1
                and step >= 0
                and op in ACTIONS
            ):
                last = step
                continue
            raise ScheduleError(
                f"{self.name}: transfers[{index}]", self._what_is_wrong(index, last)
            )

    def _what_is_wrong(self, index: int, last: int) -> str:
        step, src, dst, chunk, op = self.transfers[index]
        for word, rank in (("src", src), ("dst", dst)):
            if not 0 <= rank < self.size:
                return f"{word} {rank} is not one of the {self.size} ranks"
        if src == dst:
            return f"rank {src} sends to itself"
        if not 0 <= chunk < self.chunks:
            return f"chunk {chunk} is not one of the {self.chunks} chunks"
        if op not in ACTIONS:
            return f"op {op!r} is neither 'copy' nor 'reduce'"
        return f"step {step} follows step {last}: steps count from 0 and none may be empty"


def _checked(name: str, transfers: Iterable[Transfer]) -> Iterator[Transfer]:
    for index, transfer in enumerate(transfers):
        if not isinstance(transfer, Transfer):
            problem = f"is a {type(transfer).__name__}, not a Transfer"
            raise ScheduleError(f"{name}: transfers[{index}]", problem)
        step, src, dst, chunk, op = transfer
        if type(step) is type(src) is type(dst) is type(chunk) is int:
            yield transfer
            continue
        numbers = indices_of(transfer[:4])
        if numbers is None:
            problem = f"{shown(transfer)} needs whole numbers as step, src, dst and chunk"
            raise ScheduleError(f"{name}: transfers[{index}]", problem)
        yield Transfer(numbers[0], numbers[1], numbers[2], numbers[3], op)


def _step_of(transfer: Transfer) -> int:
    return transfer.step
