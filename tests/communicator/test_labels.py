"""Calls with a label are calls like others, but for ranks whose labels differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from roundelay.errors import CollectiveMismatch

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "all_gather": lambda c, x: c.all_gather(x),
    "all_gather axis": lambda c, x: c.all_gather(x, axis=0),
    "all_reduce": lambda c, x: c.all_reduce(x),
    "all_to_all": lambda c, x: c.all_to_all(x),
    "barrier": lambda c, _: c.barrier(),
    "broadcast": lambda c, x: c.broadcast(x, 1),
    "exscan": lambda c, x: c.exscan(x),
    "gather": lambda c, x: c.gather(x, 1, axis=0),
    "reduce": lambda c, x: c.reduce(x, root=1),
    "reduce_scatter": lambda c, x: c.reduce_scatter(x),
    "scan": lambda c, x: c.scan(x),
    "scatter": lambda c, x: c.scatter(x, 1, out=np.empty(x.shape[1:])),
}


def rows(comm: Any) -> Any:
    return np.arange(comm.size * 3.0).reshape(comm.size, 3) + comm.rank


@pytest.mark.parametrize("name", CALLS)
def test_the_result_is_the_same(name: str, ranks: Any) -> None:
    """The first call of a kind is built, those after it go straight to the native core."""

    def work(comm: Any) -> list[Any]:
        label = comm.labelled(7)
        found = [CALLS[name](each, rows(comm)) for each in (label, label, comm, comm, label)]
        return [None if each is None else each.tolist() for each in found]

    for found in ranks(2, work):
        assert all(each == found[0] for each in found)


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("name", CALLS)
def test_another_label_is_told(name: str, before: int, ranks: Any) -> None:
    def work(comm: Any) -> None:
        for _ in range(before):
            CALLS[name](comm.labelled(5), rows(comm))
        CALLS[name](comm.labelled(5 + comm.rank), rows(comm))
        comm.barrier()  # a rank that needs nothing of the others is told here

    for one in ranks.outcomes(2, work):
        assert one.error == CollectiveMismatch.__name__, one.trace
        assert all(f"label={label} " in one.trace for label in (5, 6))


@pytest.mark.parametrize("name", CALLS)
def test_no_label_is_another_one(name: str, ranks: Any) -> None:
    def work(comm: Any) -> None:
        for each in (comm, comm.labelled(9)):
            CALLS[name](each, rows(comm))
        CALLS[name](comm.labelled(9) if comm.rank else comm, rows(comm))
        comm.barrier()

    for one in ranks.outcomes(2, work):
        assert one.error == CollectiveMismatch.__name__, one.trace
