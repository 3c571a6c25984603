"""A mesh's communicators are the ranks that differ on its axes alone, in any order of axes."""

from __future__ import annotations

import math
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

import roundelay as rd
from roundelay.errors import CollectiveMismatch, InvalidArgumentError, UnknownNameError
from roundelay.parallel.mesh import Mesh, draw

MESHES: list[dict[str, int]] = [
    {"dp": 1}, {"dp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}, {"tp": 2, "dp": 3}, {"dp": 1, "cp": 4},
    {"dp": 2, "cp": 2, "tp": 2}, {"pp": 2, "x": 1, "tp": 2},
]  # fmt: skip


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_axes_are_communicators(axes: dict[str, int]) -> None:
    size = math.prod(axes.values())
    places = list(product(*map(range, axes.values())))

    def rank_of(comm: rd.Communicator) -> None:
        mesh = Mesh(comm=comm, **axes)
        here = places[comm.rank]
        assert tuple(mesh.place.values()) == here
        for count in range(1, len(axes) + 1):
            for names in combinations(axes, count):
                group = mesh[names] if count > 1 else mesh[names[0]]
                fixed = [at for at, name in enumerate(axes) if name not in names]
                expected = [r for r in range(size) if all(places[r][a] == here[a] for a in fixed)]
                every = group.all_gather(np.array([comm.rank]))
                assert every.ravel().tolist() == expected == mesh.ranks(*names)
                assert mesh.size(*names) == group.size
                assert mesh[tuple(reversed(names))] is group

    rd.run(rank_of, size, "threads")


def test_a_mesh_is_drawn() -> None:
    drawn = draw({"pp": 2, "dp": 2, "tp": 3}, here=7)
    assert [int(word.strip("[]")) for line in drawn.splitlines()[1:]
            for word in line.split()[2:] if line.startswith("dp")] == list(range(12))  # fmt: skip
    assert "[7]" in drawn
    assert draw({"dp": 1}).startswith("dp=1: 1 rank")


def refused(body: Any, size: int) -> list[BaseException]:
    """Return what each rank raises."""

    def rank_of(comm: rd.Communicator) -> BaseException:
        with pytest.raises(rd.RoundelayError) as caught:
            body(comm)
        return caught.value

    return rd.run(rank_of, size, "threads")


@pytest.mark.parametrize("axes", [{}, {"dp": 3}, {"dp": 0}, {"dp": 2.0}, {"dp": True}, {"dp": -4}])
def test_axes_that_do_not_fit_are_refused(axes: dict[str, Any]) -> None:
    for error in refused(lambda comm: Mesh(comm=comm, **axes), 4):
        assert isinstance(error, InvalidArgumentError)
    assert "dp=2" in str(refused(lambda comm: Mesh(comm=comm, dp=3, tp=2), 4)[0])


def test_other_meshes_on_other_ranks_are_refused() -> None:
    def body(comm: rd.Communicator) -> None:
        Mesh(comm=comm, **({"dp": 2, "tp": 1} if comm.rank else {"tp": 2}))

    assert all(isinstance(error, CollectiveMismatch) for error in refused(body, 2))

    def wrong(comm: rd.Communicator) -> None:
        Mesh(comm=comm, dp=2 if comm.rank else 5)

    kinds = [type(error) for error in refused(wrong, 2)]
    assert kinds == [InvalidArgumentError, CollectiveMismatch]


def test_no_communicator_and_no_such_axis() -> None:
    with pytest.raises(InvalidArgumentError, match="comm="):
        Mesh(comm=None, dp=1)  # type: ignore[arg-type]

    def body(comm: rd.Communicator) -> None:
        with pytest.raises(UnknownNameError, match="tp"):
            Mesh(comm=comm, tp=2)["dp"]

    rd.run(body, 2, "threads")
