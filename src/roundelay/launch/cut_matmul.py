"""A matrix product that is cut, run by ranks that are threads, beside the whole on one device."""

from __future__ import annotations

import numpy as np

from roundelay.communicator import Communicator
from roundelay.contraction import PRODUCTS, TENSORS, Contraction, Cube
from roundelay.launch.local import run
from roundelay.parallel.mesh import Mesh
from roundelay.reductions import Array
from roundelay.view.cube import CubeRun, ProductRun

#: Around the ring a rank sends 2 (N - 1) / N of what is all-reduced, whatever its size.
ALGORITHM = "ring"

__all__ = ["run_cube"]

Tensors = dict[str, Array]


def run_cube(cube: Cube) -> CubeRun:
    """Compute Y, dX and dW on the ranks of a cube, and compare every piece with the whole."""
    whole = _inputs(cube)
    pieces = run(lambda comm: _on_rank(comm, cube, whole), cube.size, "threads")
    for each in PRODUCTS:
        whole[each.result] = _multiplied(each, whole)
    return CubeRun(
        shapes=[{name: array.shape for name, array in mine.items()} for mine, _ in pieces],
        nbytes=[{name: array.nbytes for name, array in mine.items()} for mine, _ in pieces],
        products={
            each.result: ProductRun(
                sent=[sent[each.result] for _, sent in pieces],
                difference=_difference(cube, each.result, whole, [mine for mine, _ in pieces]),
                first=[f"{value:g}" for value in _first_row(pieces[0][0][each.result])],
            )
            for each in PRODUCTS
        },
    )


def _difference(cube: Cube, name: str, whole: Tensors, pieces: list[Tensors]) -> float:
    """Return by how much any rank's piece of a tensor differs from the whole, at most."""
    return max(
        float(np.abs(mine[name] - whole[name][cube.held(rank, name)]).max())
        for rank, mine in enumerate(pieces)
    )


def _inputs(cube: Cube) -> Tensors:
    """Return X, W and dY, of small whole numbers: their sums are exact in any order."""
    shapes = {name: cube.whole_shape(name) for name in ("X", "W", "dY")}
    return {
        name: np.arange(np.prod(shape), dtype=np.float64).reshape(shape) * (3 + at) % 7 - 3
        for at, (name, shape) in enumerate(shapes.items())
    }


def _multiplied(contraction: Contraction, tensors: Tensors) -> Array:
    left, right, result = contraction.left, contraction.right, contraction.result
    subscripts = f"{TENSORS[left]},{TENSORS[right]}->{TENSORS[result]}"
    product: Array = np.einsum(subscripts, tensors[left], tensors[right])
    return np.ascontiguousarray(product)


def _on_rank(comm: Communicator, cube: Cube, whole: Tensors) -> tuple[Tensors, dict[str, int]]:
    """Return what one rank ends with, and the bytes that it sent for each result."""
    mesh = Mesh(comm=comm, **{cut.dim: cut.ranks for cut in cube.cuts})
    mine = {name: whole[name][cube.held(comm.rank, name)].copy() for name in whole}
    sent = {}
    for each in PRODUCTS:
        mine[each.result] = _multiplied(each, mine)
        axes = tuple(cut.dim for cut in cube.summed(each))
        sent[each.result] = _all_reduced(mesh[axes], mine[each.result]) if axes else 0
    return mine, sent


def _all_reduced(group: Communicator, array: Array) -> int:
    """Add up the partial sums of a group, in place; return how many bytes this rank sent for it."""
    before = group.traffic() or []
    group.all_reduce(array, algorithm=ALGORITHM)
    after = group.traffic() or []
    return after[group.rank].sent - before[group.rank].sent


def _first_row(array: Array) -> list[float]:
    row: list[float] = array.reshape(-1, array.shape[-1])[0].tolist()
    return row
