"""Every data-parallel strategy on every mesh trains as one device does."""

from __future__ import annotations

from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")

from tests.parallel.mesh_models import (  # noqa: E402 - only with torch
    STRATEGIES,
    close,
    make_data,
    make_net,
    one_device,
    prepare_on,
    ranks_of,
    shown,
    train,
)

MESHES: list[dict[str, int]] = [
    {"dp": 2}, {"tp": 2}, {"tp": 3}, {"cp": 2}, {"dp": 2, "tp": 2}, {"tp": 2, "dp": 2},
    {"dp": 3, "tp": 2}, {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}, {"dp": 2, "cp": 2, "tp": 2},
    {"dp": 1, "tp": 4}, {"dp": 2, "tp": 1},
    {"pp": 2}, {"pp": 4}, {"dp": 2, "pp": 2}, {"pp": 3, "dp": 2}, {"pp": 2, "tp": 2},
    {"tp": 2, "pp": 4}, {"cp": 2, "pp": 2}, {"dp": 2, "pp": 2, "tp": 2},
    {"pp": 2, "cp": 2, "tp": 2}, {"dp": 2, "cp": 2, "pp": 2},
]  # fmt: skip
WITH_EXPERTS: list[dict[str, int]] = [
    {"dp": 2, "ep": 2}, {"dp": 2, "ep": 2, "tp": 2}, {"ep": 2, "dp": 2}, {"cp": 2, "ep": 2},
    {"dp": 3, "ep": 2}, {"pp": 2, "dp": 2, "ep": 2}, {"cp": 2, "ep": 2, "pp": 2},
]  # fmt: skip
#: Where nothing divides experts.
WITH_ALL_EXPERTS: list[dict[str, int]] = [
    {"ep": 1}, {"ep": 1, "tp": 3}, {"dp": 2, "ep": 1}, {"pp": 2, "ep": 1},
    {"cp": 2, "ep": 1, "tp": 2},
]  # fmt: skip


def same_as_one_device(axes: dict[str, int], strategy: Any, *, experts: bool = False) -> None:
    net = make_net(experts=experts)
    alone, own, norms = one_device(net)
    expected = alone.state_dict()
    moments = own.state_dict()["state"]

    def body(comm: Any) -> tuple[list[str], list[float]]:
        mesh, mine, optimizer = prepare_on(comm, axes, net, strategy)
        found = train(mesh, mine, optimizer, make_data())
        state = rd.full_state_dict(mine)
        kept = optimizer.state_dict()["state"]
        wrong = [name for name, tensor in expected.items() if not close(state[name], tensor)]
        wrong += [name for name, tensor in rd.whole_tensors(mine)
                  if not close(tensor, expected[name])]  # fmt: skip
        pairs = [(f"{number} {key}", kept[number][key], value)
                 for number, each in moments.items() for key, value in each.items()]  # fmt: skip
        wrong += [place for place, ours, value in pairs if not close(ours, value)]
        wrong += [] if kept.keys() == moments.keys() else ["state of others"]
        return wrong, found

    for wrong, found in rd.run(body, ranks_of(axes), "threads"):
        assert wrong == []
        assert found == pytest.approx(norms, rel=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("axes", MESHES, ids=shown)
def test_a_mesh_trains_as_one_device(axes: dict[str, int], strategy: str) -> None:
    same_as_one_device(axes, strategy)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("axes", WITH_EXPERTS, ids=shown)
def test_experts_train_as_on_one_device(axes: dict[str, int], strategy: str) -> None:
    same_as_one_device(axes, strategy, experts=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("axes", WITH_ALL_EXPERTS, ids=shown)
def test_experts_on_an_axis_of_one_rank_are_like_any_parameter(
    axes: dict[str, int], strategy: str
) -> None:
    same_as_one_device(axes, strategy, experts=True)


@pytest.mark.parametrize("axes", [{"ep": 2, "pp": 2}, {"tp": 2, "ep": 2, "pp": 2}], ids=shown)
def test_experts_in_stages_of_one_replica(axes: dict[str, int]) -> None:
    """ZeRO refuses these: no two ranks have the same experts."""
    same_as_one_device(axes, "ddp", experts=True)
