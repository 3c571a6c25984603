"""`load_state_dict` of a divided model takes whole tensors, and parts as `state_dict` has them."""

from __future__ import annotations

import copy
from math import prod
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

nn = torch.nn
PLAN = {"0": "embedding", "1": "column:2", "2": "row:2", "3": "replicate", "3.*": "replicate",
        "4": "column gather"}  # fmt: skip


def mixture(comm: rd.Communicator | None) -> Any:
    return rd.MoE([nn.Linear(6, 6) for _ in range(4)], rd.Router(6, 4), comm)


def built(seed: int, comm: rd.Communicator | None = None) -> Any:
    """A model whose weights depend on the seed alone, also where threads draw at once."""
    model = nn.Sequential(
        nn.Embedding(9, 6), nn.Linear(6, 10), nn.Linear(10, 6), mixture(comm),
        nn.Linear(6, 9, bias=False),
    )  # fmt: skip
    model[4].weight = model[0].weight
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(seed + at)
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}, {"dp": 2, "ep": 2}],
                         ids=str)  # fmt: skip
def test_whole_tensors_and_parts(axes: dict[str, int], strategy: str) -> None:
    whole = built(50).state_dict()

    def body(comm: rd.Communicator) -> None:
        mesh = rd.Mesh(comm=comm, **axes)
        model = built(7, mesh["ep"] if "ep" in axes else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = PLAN if "tp" in axes else None
        model, _ = rd.prepare(model, optimizer, mesh=mesh, plan=plan, strategy=strategy)
        given = copy.deepcopy(whole)
        model.load_state_dict(given)
        assert all(given[name].shape == one.shape for name, one in whole.items())
        for _ in range(2):
            for name, found in rd.full_state_dict(model).items():
                assert torch.equal(found, whole[name]), name
            model.load_state_dict(model.state_dict())

    rd.run(body, prod(axes.values()), "threads")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("axes", [{"pp": 2}, {"pp": 3}, {"dp": 2, "pp": 2}], ids=str)
def test_stages_take_theirs_of_the_whole_model(axes: dict[str, int], strategy: str) -> None:
    whole = built(50).state_dict()

    def body(comm: rd.Communicator) -> None:
        mesh = rd.Mesh(comm=comm, **axes)
        pipe = rd.Pipeline(built(7), comm=mesh["pp"], micro_batches=2)
        pipe, _ = rd.prepare(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1), mesh=mesh,
                             strategy=strategy)  # fmt: skip
        given = copy.deepcopy(whole)
        for _ in range(2):
            pipe.load_state_dict(given)
            assert given.keys() == whole.keys()
            for name, found in rd.full_state_dict(pipe).items():
                assert torch.equal(found, whole[name]), name
            given = pipe.state_dict()
            whole_again = {**given, "no.such": torch.zeros(1)}
            with pytest.raises(RuntimeError, match=r"Unexpected key.*no\.such"):
                pipe.load_state_dict(whole_again)
            given.pop(next(iter(given)))
            with pytest.raises(RuntimeError, match="Missing key"):
                pipe.load_state_dict(given)
            given = copy.deepcopy(whole)

    rd.run(body, prod(axes.values()), "threads")
