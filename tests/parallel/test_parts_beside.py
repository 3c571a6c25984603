"""Parts beside what all ranks have, hooks of experts, and what would be lost or count twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundelay as rd
from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError

Penalty = Callable[[Any], Any]  # Any: parts, which compute as tensors do
BESIDE: dict[str, Penalty] = {
    "centred by columns": lambda w: (w - w.mean(0, keepdim=True)).pow(3).sum(),
    "centred": lambda w: (w - w.mean()).pow(3).sum(),
    "reversed": lambda w: (w.mean(0) - w).pow(3).sum(),
    "by its norm": lambda w: (w / w.norm()).pow(3).sum(),
    "by norms of columns": lambda w: (w / w.norm(dim=0, keepdim=True)).pow(3).sum(),
    "by norms of rows": lambda w: (w / w.norm(dim=1, keepdim=True)).pow(3).sum(),
    "where": lambda w: torch.where(w > 3, w, w.mean(0, keepdim=True)).pow(2).sum(),
    "lerp": lambda w: torch.lerp(w, w.mean(0), 0.5).pow(2).sum(),
    "times its sum": lambda w: (w * w.sum()).sum(),
}


def counted(parameter: torch.Tensor, more: float = 0.0) -> None:
    with torch.no_grad():
        numbers = torch.arange(parameter.numel(), dtype=torch.float64) * 0.3 + more
        parameter.copy_(numbers.sin().reshape(parameter.shape) * 3)


def linear() -> nn.Module:
    sizes: Any = {"bias": False, "dtype": torch.float64}
    model = nn.Sequential(nn.Linear(3, 6, **sizes), nn.Linear(6, 5, **sizes))
    for parameter in model.parameters():
        counted(parameter)
    return model


PLAN = {"0": "column", "1": "row"}


def stepped(penalty: Penalty, layer: int, comm: Communicator | None) -> torch.Tensor:
    model: Any = linear()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    if comm is not None:
        mesh = rd.Mesh(tp=comm.size, comm=comm)
        model, optimizer = rd.prepare(model, optimizer, mesh=mesh, plan=PLAN)
    (
        0 * model(torch.ones(1, 3, dtype=torch.float64)).sum() + penalty(model[layer].weight)
    ).backward()
    optimizer.step()
    state = model.state_dict() if comm is None else rd.full_state_dict(model)
    return state[f"{layer}.weight"].clone()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", BESIDE)
def test_what_all_ranks_have_gets_the_gradients_of_all_parts(name: str, layer: int) -> None:
    def body(comm: Communicator) -> torch.Tensor:
        return stepped(BESIDE[name], layer, comm)

    due = stepped(BESIDE[name], layer, None)
    for found in rd.run(body, 2 + layer, engine="threads"):
        torch.testing.assert_close(found, due, rtol=1e-12, atol=1e-12)


def experts(comm: Communicator | None) -> Any:
    modules = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(4)]
    for number, module in enumerate(modules):
        for parameter in module.parameters():
            counted(parameter, number)
    router = rd.Router(4, 4, top_k=2).double()
    for parameter in router.parameters():
        counted(parameter, 7)
    return rd.MoE(modules, router, comm=comm)


def trained(deed: str, strategy: str, comm: Communicator | None) -> dict[str, torch.Tensor]:
    """Train experts for two steps, with hooks or writes as somebody would do them."""
    mesh = None if comm is None else rd.Mesh(dp=comm.size // 2, ep=2, comm=comm)
    model = experts(None if mesh is None else mesh["ep"])
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.01)
    rows = torch.linspace(-1, 1, 8 * 4, dtype=torch.float64).reshape(8, 4)
    if comm is not None:
        model, optimizer = rd.prepare(model, optimizer, mesh=mesh, strategy=strategy)
        rows = rows.chunk(comm.size)[comm.rank]
    if deed == "hook":
        for parameter in model.experts.parameters():
            parameter.register_hook(lambda grad, own=parameter: grad + 0.1 * own.detach())
    for _ in range(2):
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if deed == "data":
            for parameter in model.parameters():
                parameter.data.mul_(0.5)
            for parameter in model.experts.parameters():
                parameter.detach().clamp_(-1, 1)
    state = model.state_dict() if comm is None else rd.full_state_dict(model)
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("deed", ["hook", "data"])
def test_hooks_of_experts_and_writes_into_them_are_those_of_one_device(
    deed: str, strategy: str
) -> None:
    due = trained(deed, strategy, None)
    for found in rd.run(lambda comm: trained(deed, strategy, comm), 4, engine="threads"):
        torch.testing.assert_close(found, due, rtol=1e-10, atol=1e-12)


def test_gradients_of_experts_that_are_asked_for_are_those_of_one_device() -> None:
    def body(comm: Communicator | None) -> list[torch.Tensor]:
        parameters = list(experts(comm).experts.parameters())
        loss = sum(one.pow(4).sum() for one in parameters)
        return [rd.local(one).clone() for one in torch.autograd.grad(loss, parameters)]

    for due, *parts in zip(body(None), *rd.run(body, 2, engine="threads"), strict=True):
        torch.testing.assert_close(torch.cat(parts), due, rtol=1e-12, atol=1e-12)


def refused(deed: Callable[[Any, Any], Any], comm: Communicator) -> str:
    model: Any = linear()
    mesh = rd.Mesh(tp=2, comm=comm)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = rd.prepare(model, optimizer, mesh=mesh, plan=PLAN)
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    with pytest.raises(InvalidArgumentError) as raised:
        deed(model[0].weight, optimizer)
    return str(raised.value)


def sets_data(weight: Any, _: Any) -> None:
    weight.grad.data = weight.grad.data * 0


DEEDS = {
    "would change what p.grad has given": sets_data,
    "takes the fan from the part's shape": lambda weight, _: nn.init.xavier_normal_(weight),
    "kaiming_normal_ on rank": lambda weight, _: nn.init.kaiming_normal_(weight),
}


@pytest.mark.parametrize("words", DEEDS)
def test_what_would_be_lost_or_of_the_part_is_refused(words: str) -> None:
    for said in rd.run(lambda comm: refused(DEEDS[words], comm), 2, engine="threads"):
        assert words in said


def test_averaged_gradients_of_experts_are_not_averaged_again() -> None:
    def body(comm: Communicator) -> str:
        mesh = rd.Mesh(ep=2, comm=comm)
        model = experts(mesh["ep"])
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.01)
        model, optimizer = rd.prepare(model, optimizer, mesh=mesh)
        rows = torch.ones(2, 4, dtype=torch.float64)
        model(rows).square().mean().backward()
        with pytest.raises(InvalidArgumentError, match="averaged already") as raised:
            model(rows).square().mean().backward()
        return str(raised.value)

    assert all("rd.accumulate" in said for said in rd.run(body, 2, engine="threads"))
