"""What is measured beside us: the floor does what it claims, and peers that clash are refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from roundelay.bench import Case, CaseResult, Spec, measure
from roundelay.bench.peer_mpi import MPIS
from roundelay.bench.rounds import buffers_for, memory_pass
from roundelay.errors import InvalidArgumentError


@pytest.mark.parametrize("nbytes", [8, 64, 1000, 1 << 16, (1 << 20) + 3])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_floor_reads_and_writes_every_byte(size: int, nbytes: int) -> None:
    floor = memory_pass(size, nbytes)
    assert len(floor.buffers) == len(floor.calls) == buffers_for(nbytes)
    parts = max(2, size)
    whole = nbytes // parts * parts
    for buffers, call in zip(floor.buffers, floor.calls, strict=True):
        assert buffers.input is buffers.output
        # One bit for each part: only a pass that reads all and writes all leaves all bits in all.
        buffers.input[:whole] = np.repeat(1 << np.arange(parts), nbytes // parts)
        call()
        assert np.all(buffers.output[:whole] == (1 << parts) - 1)


@pytest.mark.parametrize("engine", ["shared_memory", "threads"])
def test_the_floor_is_measured_with_the_rest_and_is_no_contender(engine: str) -> None:
    cases = tuple(
        Case(name, nbytes)
        for name in ("all_reduce", "broadcast", "scatter")
        for nbytes in (8, 1 << 16)
    )
    spec = Spec(size=2, cases=cases, contenders=("roundelay",), engine=engine, iterations=2)
    rows = [message for message in measure(spec) if isinstance(message, CaseResult)]
    assert len(rows) == len(cases)
    for row in rows:
        assert set(row.timings) == {"roundelay"}
        assert (row.floor is not None) == (row.nbytes >= 1 << 16)
        assert row.floor is None or row.floor > 0


@pytest.mark.parametrize("two", list(itertools.combinations(MPIS, 2)), ids="-".join)
def test_two_mpis_in_one_run_are_refused(two: tuple[str, str]) -> None:
    spec = Spec(size=2, cases=(Case("all_reduce", 8),), contenders=("roundelay", *two))
    with pytest.raises(InvalidArgumentError, match=f"{two[0]} and {two[1]}: .* one MPI only"):
        next(measure(spec))
