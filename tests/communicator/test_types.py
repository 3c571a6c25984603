"""Types that a checker sees: the kind of buffer that goes in comes out, now or of a handle.

mypy reads this file with the rest. What it says is held by `assert_type`, which at run time is
nothing, so that nobody calls the functions that use it.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, assert_type

import numpy as np
import numpy.typing as npt
import pytest

import roundelay as rd
from roundelay.collectives import collectives
from roundelay.communicator.fast_method import FUNCTIONS
from roundelay.communicator.point_to_point import Message
from roundelay.communicator.start import Handle, Start
from roundelay.reductions import Located

if TYPE_CHECKING:
    import torch

Doubles = npt.NDArray[np.float64]


def of_numpy(comm: rd.Communicator, x: Doubles) -> None:
    assert_type(comm.all_reduce(x), Doubles)
    assert_type(comm.all_reduce(x, "maxloc"), Located)
    assert_type(comm.reduce(x, root=1), Doubles | None)
    assert_type(comm.broadcast(x), Doubles)
    assert_type(comm.scan(x, "max"), Doubles)
    assert_type(comm.all_gather(x), npt.NDArray[Any])
    assert_type(comm.gather(x, axis=0), npt.NDArray[Any] | None)
    assert_type(comm.scatter(x if comm.rank == 0 else None), npt.NDArray[Any])
    assert_type(comm.reduce_scatter(x, "max"), npt.NDArray[Any])
    assert_type(comm.all_to_all(x), npt.NDArray[Any])
    assert_type(comm.recv(x, rd.ANY), Doubles)
    assert_type(comm.start.all_reduce(x), Handle[Doubles])
    assert_type(comm.start.all_reduce(x, "minloc").wait(), Located)
    assert_type(comm.start.gather(x, 1).wait(), npt.NDArray[Any] | None)
    assert_type(comm.start.barrier(), Handle[None])
    assert_type(comm.start.recv(x, 0), Message[Doubles])


def of_torch(comm: rd.Communicator, x: torch.Tensor) -> None:
    import torch  # noqa: PLC0415 - optional

    assert_type(comm.all_reduce(x, "avg"), torch.Tensor)
    assert_type(comm.exscan(x), torch.Tensor)
    assert_type(comm.reduce(x), torch.Tensor | None)
    assert_type(comm.all_gather(x, axis=0, counts=[1, 2]), torch.Tensor)
    assert_type(comm.start.broadcast(x, 1).wait(), torch.Tensor)
    assert_type(comm.start.all_gather(x, label=3), Handle[torch.Tensor])
    assert_type(comm.start.send(x, 0).wait(), torch.Tensor)


def refused(comm: rd.Communicator, x: Doubles) -> None:
    """What the checker must refuse: it says so if one of these is ignored for nothing."""
    comm.all_reduce(3)  # type: ignore[call-overload]
    comm.start.all_reduce(x, root=1)  # type: ignore[call-overload]
    comm.start.broadcast(x).result()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", collectives.names())
def test_a_call_in_the_background_is_the_call_at_once(name: str) -> None:
    at_once, begun = getattr(rd.Communicator, name), getattr(Start, name)
    assert begun is FUNCTIONS[name]
    assert inspect.getdoc(begun) == inspect.getdoc(at_once)
