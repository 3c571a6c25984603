"""Backward passes that ranks run in different orders are told, whatever goes over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import roundelay as rd
from roundelay.errors import CollectiveMismatch

torch = pytest.importorskip("torch")

from roundelay.parallel import functions  # noqa: E402 - only with torch
from roundelay.parallel.tensor.norm import summed  # noqa: E402

nn = torch.nn
Layer = Callable[[Any], Any]  # of [2, 6, 4, 6]


def of_attention(method: str) -> Callable[[rd.Communicator], Layer]:
    return lambda comm: lambda x: rd.attention(x, x, x, comm=comm, method=method)


torch.manual_seed(2)
EXPERTS, ROUTER = [nn.Linear(6, 6) for _ in range(6)], rd.Router(6, 6, top_k=6)
START = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6), nn.Identity())


def of_experts(comm: rd.Communicator) -> Layer:
    return rd.MoE(copy.deepcopy(EXPERTS), copy.deepcopy(ROUTER), comm)


def of_batch_norm(comm: rd.Communicator) -> Layer:
    return rd.SyncBatchNorm(6, comm=comm)


def of_plan(comm: rd.Communicator, *, sequence_parallel: bool) -> Layer:
    model = copy.deepcopy(START)
    plan = {"0": "norm", "1": "column", "2": "row"}
    if sequence_parallel:
        plan |= {"": "split", "3": "gather"}
    mesh = rd.Mesh(tp=comm.size, comm=comm)
    rd.apply_plan(model, plan, mesh, sequence_parallel=sequence_parallel)
    return lambda x: model(x.flatten(0, 1).transpose(0, 1))


#: What has a collective in its backward pass.
LAYERS: dict[str, Callable[[rd.Communicator], Layer]] = {
    "copy": lambda comm: lambda x: functions.copy(x, comm),
    "split": lambda comm: lambda x: functions.split(x, comm, 1),
    "all_gather": lambda comm: lambda x: functions.all_gather(x, comm),
    "reduce_scatter": lambda comm: lambda x: functions.reduce_scatter(x, comm, 1),
    "all_to_all": lambda comm: lambda x: functions.all_to_all(x, comm, 1, 3),
    "summed": lambda comm: lambda x: summed(comm, x)[0],
    "unshard_sequence": lambda comm: lambda x: rd.unshard_sequence(x, comm, 1),
    "ring": of_attention("ring"),
    "ulysses": of_attention("ulysses"),
    "experts": of_experts,
    "batch norm": of_batch_norm,
    "plan": lambda comm: of_plan(comm, sequence_parallel=False),
    "sequence parallel": lambda comm: of_plan(comm, sequence_parallel=True),
}


def passes(comm: rd.Communicator, name: str, order: list[int]) -> list[Any]:
    """Return the gradients of two inputs, whose losses go backward in that order."""
    layer = LAYERS[name](comm)
    inputs = [
        torch.arange(288.0, dtype=torch.float32).view(2, 6, 4, 6).sin().add(each).requires_grad_()
        for each in range(2)
    ]
    losses = [layer(x).square().sum() for x in inputs]
    for at in order:
        losses[at].backward()
    return [x.grad for x in inputs]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_another_order_on_one_rank_is_told_on_all(name: str, size: int) -> None:
    def body(comm: rd.Communicator) -> str:
        order = [1, 0] if comm.rank == size - 1 else [0, 1]
        with pytest.raises(CollectiveMismatch) as caught:
            passes(comm, name, order)
        return str(caught.value)

    for told in rd.run(body, size, "threads"):
        assert "label=" in told
        assert __file__.rpartition("/")[2] in told  # and no line of torch's
        assert "site-packages" not in told
    assert "in the same order on every rank" in told


@pytest.mark.parametrize("name", LAYERS)
def test_another_order_on_all_ranks_is_the_same(name: str) -> None:
    def body(comm: rd.Communicator) -> None:
        first, second = (passes(comm, name, order) for order in ([0, 1], [1, 0]))
        for one, other in zip(first, second, strict=True):
            assert torch.allclose(one, other)

    rd.run(body, 2, "threads")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "ps"])
def test_a_prepared_model_tells_too(strategy: str) -> None:
    torch.manual_seed(1)
    start = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def body(comm: rd.Communicator) -> None:
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mesh = rd.Mesh(tp=2, comm=comm)
        plan = {"0": "column", "1": "row", "2": "column", "3": "row"}
        model, _ = rd.prepare(model, optimizer, mesh=mesh, plan=plan, strategy=strategy)
        losses = [model(torch.ones(2, 4) + at).square().mean() for at in range(2)]
        with pytest.raises(CollectiveMismatch), rd.accumulate(model):
            for loss in losses[:: -1 if comm.rank else 1]:
                loss.backward()

    rd.run(body, 2, "threads")


class Skipping(nn.Module):  # type: ignore[misc, name-defined]
    """Two layers alike, of which each rank may leave another one out."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make(), make()])

    def forward(self, x: Any, only: int) -> Any:
        return self.layers[only](x)


def blocks(comm: rd.Communicator) -> Any:
    model = Skipping(lambda: nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 6)))
    rd.apply_plan(
        model, {"layers.*.0": "column", "layers.*.1": "row"}, rd.Mesh(tp=comm.size, comm=comm)
    )
    return model


def mixtures(comm: rd.Communicator) -> Any:
    return Skipping(lambda: rd.MoE(copy.deepcopy(EXPERTS), copy.deepcopy(ROUTER), comm))


@pytest.mark.parametrize("make", [blocks, mixtures])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_in_different_layers_are_told(make: Any, size: int) -> None:
    """Layers of one shape, which ranks that draw lots for themselves would mix."""

    def body(comm: rd.Communicator) -> None:
        model = make(comm)
        for only in (0, 1):
            model(torch.ones(4, 6, requires_grad=True), only).sum().backward()
        with pytest.raises(CollectiveMismatch, match="same seed"):
            model(torch.ones(4, 6, requires_grad=True), int(comm.rank > 0)).sum().backward()

    rd.run(body, size, "threads")
