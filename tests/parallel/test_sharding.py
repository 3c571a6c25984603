"""What ranks hold of a tensor, put together, is the tensor: any dim, uneven, in several pieces."""

from __future__ import annotations

from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

from roundelay.parallel.sharding import Sharding, shard_parameter, sharding_of  # noqa: E402

PIECES = {
    "even": (((0, 3),), ((3, 6),)),
    "uneven": (((0, 1),), ((1, 6),)),
    "fused": (((0, 1), (2, 3), (4, 5)), ((1, 2), (3, 4), (5, 6))),
}


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("name", PIECES)
def test_parts_make_the_whole(name: str, dim: int) -> None:
    def body(comm: rd.Communicator) -> None:
        sharding = Sharding("tp", comm, dim, PIECES[name])
        whole = torch.arange(6.0 * 24).view(6, 4, 6) if dim != 1 else torch.rand(4, 6, 3)
        if dim == 1:
            comm.broadcast(whole)
        parameter = torch.nn.Parameter(whole.clone())
        parameter.grad = 2 * whole
        assert sharding_of(parameter) is None
        shard_parameter(parameter, sharding)
        assert parameter.size(dim) == sharding.counts[comm.rank]
        assert sharding.whole_shape(parameter.shape) == whole.shape
        assert sharding_of(parameter) == sharding
        assert torch.equal(sharding.whole(parameter), whole)
        assert torch.equal(sharding.whole(parameter.grad), 2 * whole)

    rd.run(body, 2, "threads")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kept", ["nothing", "an output", "a loss"])
def test_a_graph_from_before_does_not_matter(kept: str, dtype: Any) -> None:
    """Torch notes with it which shape a gradient has."""

    def body(comm: rd.Communicator) -> None:
        layers = torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)
        model, rows = torch.nn.Sequential(*layers).to(dtype), torch.ones(2, 4, dtype=dtype)
        before: Any = None if kept == "nothing" else model(rows)
        if kept == "a loss":
            before = before.sum()
            before.backward()
            model.zero_grad()
        rd.apply_plan(model, {"0": "column", "1": "row"}, rd.Mesh(tp=2, comm=comm))
        model(rows).sum().backward()
        assert all(one.grad.shape == one.shape and one.dtype is dtype for one in model.parameters())

    rd.run(body, 2, "threads")
