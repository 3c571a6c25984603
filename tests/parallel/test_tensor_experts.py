"""A plan divides layers along tp, and leaves experts as they are divided along ep."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

from roundelay.errors import InvalidArgumentError  # noqa: E402 - only with torch
from roundelay.parallel.sharding import sharding_of  # noqa: E402

nn = torch.nn
PLAN = {"up": "column", "down": "row", "moe*": "replicate"}
AXES: list[dict[str, int]] = [{"ep": 2, "tp": 2}, {"tp": 2, "ep": 2}, {"dp": 2, "ep": 2, "tp": 2}]


class Net(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, experts: int, comm: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.moe = rd.MoE(lambda: nn.Linear(6, 6), rd.Router(6, experts, top_k=2), comm)

    def forward(self, x: Any) -> Any:
        return self.moe(self.down(torch.tanh(self.up(x))))


def given(net: Any) -> Any:
    """Return a net with the same values however many ranks make it."""
    for name, parameter in net.named_parameters():
        sharding = sharding_of(parameter)
        shape = parameter.shape if sharding is None else sharding.whole_shape(parameter.shape)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
        parameter.data = whole if sharding is None else sharding.local(whole)
    return net


def made(experts: int, comm: Any) -> tuple[Any, Any]:
    """Return a net of such values and its optimizer."""
    net = given(Net(experts, comm).double())
    return net, torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)


def train(net: Any, optimizer: Any, rows: Any) -> None:
    for _ in range(3):
        net(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("experts", [4, 5])
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_experts_train_beside_a_plan_as_on_one_device(axes: dict[str, int], experts: int) -> None:
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(3)).double()
    alone, own = made(experts, None)
    train(alone, own, rows)

    def body(comm: Any) -> float:
        mesh = rd.Mesh(comm=comm, **axes)
        net, optimizer = made(experts, mesh["ep"])
        net, optimizer = rd.prepare(net, optimizer, mesh=mesh, plan=PLAN)
        place = mesh.place.get("dp", 0) * mesh.size("ep") + mesh.place["ep"]
        train(net, optimizer, rows.tensor_split(mesh.size("dp", "ep"))[place])
        state = rd.full_state_dict(net)
        return max(float((state[name] - right).abs().max())
                   for name, right in alone.state_dict().items())  # fmt: skip

    ranks = int(torch.tensor([*axes.values()]).prod())
    assert max(rd.run(body, ranks, "threads")) < 1e-12


@pytest.mark.parametrize(
    ("plan", "words"),
    [({**PLAN, "moe.experts": "column"}, "divided along ep, and stays so: say 'replicate'"),
     ({"up": "column", "down": "row"}, "no pattern names")],
)  # fmt: skip
def test_a_plan_that_would_cut_experts_is_refused(plan: dict[str, str], words: str) -> None:
    def body(comm: Any) -> str:
        mesh = rd.Mesh(ep=2, tp=2, comm=comm)
        net, _ = made(4, mesh["ep"])
        with pytest.raises(InvalidArgumentError) as caught:
            rd.apply_plan(net, plan, mesh)
        return str(caught.value)

    assert all(words in told for told in rd.run(body, 4, "threads"))
