"""Schedules out of schedules. Everything here takes and gives transfers, so pieces nest freely."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from roundelay.schedule.schedule import Transfer

__all__ = ["nest", "parallel", "pipeline", "refine", "relabel", "sequence", "shift"]


def sequence(*phases: Iterable[Transfer]) -> Iterator[Transfer]:
    """Run phases one after the other: each begins at the step after the last of the one before.

    >>> from roundelay.schedule import Transfer
    >>> hop = [Transfer(0, src=0, dst=1, chunk=0)]
    >>> [transfer.step for transfer in sequence(hop, [], hop)]
    [0, 1]
    """
    start = 0
    for phase in phases:
        end = start
        for step, src, dst, chunk, op in phase:
            now = step + start
            if now >= end:
                end = now + 1
            yield Transfer(now, src, dst, chunk, op)
        start = end


def parallel(*phases: Iterable[Transfer]) -> Iterator[Transfer]:
    """Run phases side by side, all beginning at step 0; they should touch different chunks."""
    for phase in phases:
        yield from phase


def shift(size: int, *, by: int = 1, chunks: Iterable[int] = (0,)) -> Iterator[Transfer]:
    """Hand every rank's data to the rank `by` above it, in one step; the top ranks' data ends.

    An exclusive scan is a shift, then a scan over the ranks that received something.
    """
    for chunk in chunks:
        for rank in range(size - by):
            yield Transfer(0, src=rank, dst=rank + by, chunk=chunk)


def relabel(
    transfers: Iterable[Transfer],
    *,
    ranks: Sequence[int] | Mapping[int, int] | None = None,
    chunks: Callable[[int], int] | None = None,
) -> Iterator[Transfer]:
    """Give ranks and chunks other numbers: rank r becomes `ranks[r]`, chunk c `chunks(c)`."""
    for step, src, dst, chunk, op in transfers:
        yield Transfer(
            step,
            src if ranks is None else ranks[src],
            dst if ranks is None else ranks[dst],
            chunk if chunks is None else chunks(chunk),
            op,
        )


def nest(
    groups: Iterable[Sequence[int]],
    inner: Callable[[int], Iterable[Transfer]],
    *,
    chunks: Callable[[int, int], int] | None = None,
) -> Iterator[Transfer]:
    """Run `inner` in every group of ranks at the same time: the step from flat to hierarchical.

    `inner` gets a group's size; `chunks(group, chunk)` says where the group's chunks lie in the
    whole.

    >>> from roundelay.schedule import Transfer
    >>> swap = lambda size: [Transfer(0, src=0, dst=1, chunk=0)]
    >>> [(t.src, t.dst) for t in nest([[0, 1], [2, 3]], swap)]
    [(0, 1), (2, 3)]
    """
    for index, group in enumerate(groups):
        place = None if chunks is None else (lambda chunk, index=index: chunks(index, chunk))
        yield from relabel(inner(len(group)), ranks=group, chunks=place)


def pipeline(transfers: Iterable[Transfer], segments: int) -> Iterator[Transfer]:
    """Cut every chunk into `segments` that follow each other one step apart.

    Multiplies the parts: segment s of chunk c becomes chunk `c * segments + s`, `s` steps later.

    >>> from roundelay.schedule import Transfer
    >>> [tuple(t)[:4] for t in pipeline([Transfer(0, src=0, dst=1, chunk=0)], 2)]
    [(0, 0, 1, 0), (1, 0, 1, 1)]
    """
    for step, src, dst, chunk, op in transfers:
        for segment in range(segments):
            yield Transfer(step + segment, src, dst, chunk * segments + segment, op)


def refine(transfers: Iterable[Transfer], parts: int) -> Iterator[Transfer]:
    """Cut every chunk into `parts` that still travel together, so that a finer phase can follow.

    Multiplies the parts: part p of chunk c becomes chunk `c * parts + p`.
    """
    for step, src, dst, chunk, op in transfers:
        for part in range(parts):
            yield Transfer(step, src, dst, chunk * parts + part, op)
