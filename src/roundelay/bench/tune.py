"""Find the fastest algorithm for every number of bytes, among those that keep every bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from roundelay.algorithms import algorithms
from roundelay.bench.messages import Case, CaseResult, Spec
from roundelay.errors import UnsupportedSizeError
from roundelay.tuning import DEFAULT, Choice, Tuning, keeps_every_bit

__all__ = ["candidates", "specs", "tuned"]

#: A default is left only for something clearly faster: noise must not write tables.
CLEARLY = 0.9


def candidates(collective: str, size: int) -> list[str]:
    """Return the algorithms to choose from on `size` ranks.

    >>> candidates("reduce_scatter", 4)
    ['reduce_scatter_direct']
    """
    names = []
    for algorithm in algorithms:
        if algorithm.collective.name != collective:
            continue
        try:
            algorithm.schedule(size)
            if keeps_every_bit(algorithm.name, size):
                names.append(algorithm.name)
        except UnsupportedSizeError:
            continue
    return names


def specs(
    collectives: Sequence[str], size: int, sizes: Sequence[int], *, engine: str
) -> Iterator[Spec]:
    """Yield one run for each collective where there is something to choose."""
    for collective in collectives:
        names = candidates(collective, size)
        if len(names) > 1:
            cases = [0] if collective == "barrier" else sizes
            yield Spec(
                size=size,
                cases=tuple(Case(collective, nbytes) for nbytes in cases),
                contenders=tuple(names),
                engine=engine,
                floor=False,
            )


def tuned(rows: Sequence[CaseResult], base: Tuning = DEFAULT) -> Tuning:
    """Return a table with the winner of every row; `base` keeps what was not measured."""
    by_collective: dict[str, list[CaseResult]] = {}
    for row in rows:
        by_collective.setdefault(row.collective, []).append(row)
    own = {name: _choices(name, found) for name, found in by_collective.items()}
    return Tuning({**base.table, **own})


def _choices(collective: str, rows: Sequence[CaseResult]) -> tuple[Choice, ...]:
    """Take the winners as far as was measured, and the defaults beyond."""
    measured = [(row.nbytes, _winner(collective, row)) for row in rows]
    most = max(nbytes for nbytes, _ in measured)
    if most == 0:  # a barrier: there is no beyond
        return (Choice(math.inf, measured[0][1]),)
    beyond = [each for each in DEFAULT.table[collective] if each.up_to > most]
    choices: list[Choice] = []
    for choice in (*(Choice(*each) for each in sorted(measured)), *beyond):
        if choices and choices[-1].algorithm == choice.algorithm:
            choices.pop()
        choices.append(choice)
    return tuple(choices)


def _winner(collective: str, row: CaseResult) -> str:
    seconds = {name: timing.seconds for name, timing in row.timings.items() if not timing.wrong}
    usual = DEFAULT.choose(collective, row.nbytes)
    best = min(seconds, key=lambda name: seconds[name], default=usual)
    if usual in seconds and seconds[best] > CLEARLY * seconds[usual]:
        return usual
    return best
