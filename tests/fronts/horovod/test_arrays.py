"""Operations on numpy arrays, beside whole numbers of Python's, which never wrap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.errors import InvalidArgumentError
from roundelay.fronts.horovod import arrays, basics, session
from roundelay.fronts.horovod.basics import Average

WHOLE = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")
COUNT = 41


def given(dtype: str, rank: int) -> Any:
    """Return numbers of all sizes, the largest and the least among them."""
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    drawn = np.random.default_rng(rank).integers(low, high, COUNT, dtype, endpoint=True)
    drawn[:4] = low, high, low + rank, high - rank
    return drawn


def averages(comm: rd.Communicator) -> list[Any]:
    """Return means of all dtypes, whole and as a share of the rows; and what is refused."""
    session.adopt(comm)
    basics.start(arrays.stand_in)
    try:
        mine = [given(dtype, comm.rank) for dtype in WHOLE]
        found = arrays.allreduce(mine, Average)
        shares = arrays.reducescatter(mine, Average)
        refused = []
        for dtype in ("bool", "uint64"):
            try:
                arrays.allreduce([np.ones(2, dtype)], Average)
            except InvalidArgumentError as error:
                refused.append(str(error))
        return [found, shares, refused]
    finally:
        session.end()
        session.adopt(None)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_averages_of_whole_numbers_are_exact_and_rounded_towards_zero(ranks: int) -> None:
    found = rd.run(averages, ranks=ranks, allow_pickle=True)
    for place, dtype in enumerate(WHOLE):
        columns = zip(*(given(dtype, rank).tolist() for rank in range(ranks)), strict=True)
        sums = [sum(column) for column in columns]
        want = [abs(one) // ranks * (1 if one > 0 else -1) for one in sums]
        assert all(means[place].tolist() == want for means, _, _ in found)
        assert np.concatenate([shares[place] for _, shares, _ in found]).tolist() == want
        assert all(means[place].dtype == dtype for means, _, _ in found)
    assert all("takes no bool" in said[0] and "takes no uint64" in said[1] for *_, said in found)
