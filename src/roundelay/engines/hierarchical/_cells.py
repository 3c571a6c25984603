"""Where the chunks of a call over hosts lie, for one rank: in its input, its output or between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from roundelay.engines._call import CollectiveCall
from roundelay.engines._narrow import NARROW, narrow, widen
from roundelay.reductions import Array
from roundelay.schedule import NestedSchedule, split

#: Returns memory for so many elements, by a name under which it is kept.
Scratch = Callable[[str, int], Array]


class HostCells:
    """One rank's chunks while it walks a nested schedule; what lies in its place is not moved.

    Of a call that is wide, the caller's buffers are float32, and what lies between is bfloat16.
    """

    def __init__(
        self, nested: NestedSchedule, rank: int, call: CollectiveCall, scratch: Scratch
    ) -> None:
        size, root, collective = nested.size, nested.root, nested.collective
        counts = call.counts or [call.count] * collective.blocks(size)
        if nested.parts == 1:
            self._lengths: Sequence[int] = counts
        else:
            self._lengths = [_length(run) for n in counts for run in split(n, nested.parts)]
        self._scratch, self._wide = scratch, call.wide
        self._at: dict[int, tuple[Array, int]] = {}  # the memory, and where a chunk begins there
        self._due: dict[int, int] = {}  # where chunks belong in the output
        self._input: Array | None = None
        if call.input is not None:
            self._input = call.input.reshape(-1)
            starts = self._starts(collective.before(size, root, rank), nested.parts)
            self._at = {chunk: (self._input, start) for chunk, start in starts.items()}
        if call.output is not None:
            self._output = call.output.reshape(-1)
            self._due = self._starts(sorted(collective.after(size, root, rank)), nested.parts)

    def _starts(self, blocks: Iterable[int], parts: int) -> dict[int, int]:
        found, start = {}, 0
        for block in blocks:
            for chunk in range(block * parts, (block + 1) * parts):
                found[chunk] = start
                start += self._lengths[chunk]
        return found

    def length(self, chunks: Iterable[int]) -> int:
        """Return how many elements these chunks have."""
        return sum(self._lengths[chunk] for chunk in chunks)

    def packed(self, chunks: Sequence[int], name: str, *, rounded: bool) -> Array:
        """Return these chunks one after the other: as they lie, or copied; or as they travel."""
        runs: list[tuple[Array, int, int]] = []
        for chunk in chunks:
            memory, start = self._at[chunk]
            end = start + self._lengths[chunk]
            if runs and runs[-1][0] is memory and runs[-1][2] == start:
                runs[-1] = memory, runs[-1][1], end
            elif start < end:
                runs.append((memory, start, end))
        if len(runs) == 1 and not (rounded and self._is_wide(runs[0][0])):
            memory, start, end = runs[0]
            return memory[start:end]
        packed, at = self._scratch(name, self.length(chunks)), 0
        for memory, start, end in runs:
            place = packed[at : at + end - start]
            if self._is_wide(memory):
                narrow(memory[start:end], place)
            else:
                place[:] = memory[start:end]
            at += end - start
        return packed

    def _is_wide(self, memory: Array) -> bool:
        return self._wide and memory.dtype != NARROW

    def room(self, chunks: Sequence[int], name: str, *, rounded: bool) -> Array:
        """Return where these chunks may come: their place in the output if that is one piece."""
        start = self._due.get(chunks[0]) if chunks and not (rounded and self._wide) else None
        if start is None or any(chunk not in self._due for chunk in chunks):
            return self._scratch(name, self.length(chunks))
        end = start
        for chunk in chunks:
            if self._due[chunk] != end:
                return self._scratch(name, self.length(chunks))
            end += self._lengths[chunk]
        return self._output[start:end]

    def came(self, chunks: Sequence[int], memory: Array) -> None:
        """Note that these chunks now lie there."""
        at = 0
        for chunk in chunks:
            self._at[chunk] = memory, at
            at += self._lengths[chunk]

    def deliver(self) -> None:
        """Copy to the output what does not lie there."""
        bases: dict[int, int] = {}  # addresses, by memory: to ask for one takes its time
        for chunk, start in self._due.items():
            memory, at = self._at[chunk]
            if self._wide and (memory.dtype == NARROW or memory is self._input):
                self._deliver_rounded(chunk, start)
                continue
            here, there = (
                bases.get(id(each)) or bases.setdefault(id(each), each.ctypes.data)
                for each in (memory, self._output)
            )
            if here - there != (start - at) * memory.itemsize:
                length = self._lengths[chunk]
                self._output[start : start + length] = memory[at : at + length]

    def _deliver_rounded(self, chunk: int, start: int) -> None:
        memory, at = self._at[chunk]
        length = self._lengths[chunk]
        piece = memory[at : at + length]
        if memory.dtype != NARROW:  # nobody has sent it, and it is rounded all the same
            piece = narrow(piece, self._scratch("own", length))
        widen(piece, self._output[start : start + length])


def same(one: Array, other: Array) -> bool:
    """Tell whether two flat arrays are the same elements in memory."""
    return (one.ctypes.data, one.size) == (other.ctypes.data, other.size)


def _length(run: slice) -> int:
    length: int = run.stop - run.start
    return length
