"""What a mesh has trained goes on, bit for bit, on any other mesh, or on none."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from tests.parallel.mesh_models import (  # noqa: E402
    STRATEGIES,
    adam,
    close,
    make_data,
    make_net,
    one_device,
    prepare_on,
    ranks_of,
    shown,
    train,
)

from roundelay.errors import CheckpointMismatch  # noqa: E402 - only with torch

#: From one mesh to the next, under changing strategies; the mesh of one rank is a plain prepare.
CHAINS: list[list[tuple[dict[str, int], str]]] = [
    [({"dp": 2, "tp": 2}, "zero2"), ({"dp": 1}, "ddp"), ({"dp": 3}, "zero3")],
    [({"tp": 3}, "ddp"), ({"dp": 2, "cp": 2, "tp": 2}, "zero3"), ({"cp": 2, "tp": 2}, "ps")],
    [({"dp": 2, "tp": 2}, "zero3"), ({"tp": 2, "dp": 3}, "zero1"), ({"dp": 2, "tp": 3}, "ddp")],
    [({"pp": 2, "dp": 2}, "zero2"), ({"dp": 1}, "ddp"), ({"dp": 3}, "zero3"), ({"pp": 4}, "ps")],
    [({"tp": 2, "pp": 2}, "ddp"), ({"dp": 2}, "ps"), ({"dp": 2, "pp": 2, "tp": 2}, "zero3")],
]
WITH_EXPERTS: list[list[tuple[dict[str, int], str]]] = [
    [({"dp": 2, "ep": 2}, "ddp"), ({"dp": 2, "ep": 2, "tp": 2}, "zero2"), ({"dp": 1}, "ddp")],
    [({"ep": 2, "dp": 2}, "zero3"), ({"dp": 3}, "zero1"), ({"ep": 4}, "ddp")],
    [({"pp": 2, "ep": 2, "dp": 2}, "zero1"), ({"dp": 1}, "ddp"), ({"ep": 2, "pp": 4}, "ddp")],
]


def gathered(net: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return rd.full_state_dict(net), optimizer.state_dict()


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, two))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


@pytest.mark.parametrize("chain", [*CHAINS, *WITH_EXPERTS], ids=lambda chain: shown(chain[0][0]))
def test_a_checkpoint_goes_from_mesh_to_mesh(chain: Any, tmp_path: Path) -> None:
    experts = chain in WITH_EXPERTS
    net = make_net(experts=experts)
    data = make_data(2 * len(chain))
    alone, own, _ = one_device(net, len(data))
    before: list[Any] = []
    for number, (axes, strategy) in enumerate(chain):
        steps = data[2 * number : 2 * number + 2]

        def body(comm: Any, axes: Any = axes, strategy: str = strategy, number: int = number,
                 steps: Any = steps) -> Any:  # fmt: skip
            mesh, mine, optimizer = prepare_on(comm, axes, net, strategy)
            fits = True
            if number:
                loaded = rd.load(tmp_path / "at", mine, optimizer)
                fits = same(gathered(mine, optimizer), before[-1]) and loaded.steps == 2 * number
            train(mesh, mine, optimizer, steps)
            rd.save(tmp_path / "at", mine, optimizer)
            return fits, copy.deepcopy(gathered(mine, optimizer))

        results = rd.run(body, ranks_of(axes), "threads")
        assert all(fits for fits, _ in results)
        assert all(same(kept, results[0][1]) for _, kept in results)
        before.append(results[0][1])
        read = rd.read_checkpoint(tmp_path / "at")
        assert same(read.state_dict(), dict(results[0][1][0]))
        moments = read.optimizers()[0]["state"]
        names = [name for name, one in net.named_parameters() if one.requires_grad]
        listed = [name for name, _ in net.named_parameters()]
        for name in names:
            mine = results[0][1][1]["state"][listed.index(name)]
            assert same(moments[name], mine), name
    weights, state = before[-1]
    assert all(close(weights[name], one) for name, one in alone.state_dict().items())
    for at, kept in own.state_dict()["state"].items():
        assert all(close(state["state"][at][key], one) for key, one in kept.items())


def test_a_checkpoint_of_a_mesh_is_exported_whole(tmp_path: Path) -> None:
    net = make_net()

    def body(comm: Any) -> Any:
        mesh, mine, optimizer = prepare_on(comm, {"dp": 2, "tp": 2}, net, "zero1")
        train(mesh, mine, optimizer, make_data(1))
        rd.save(tmp_path / "at", mine, optimizer, wait=False).wait()
        return {name: one.clone() for name, one in rd.full_state_dict(mine).items()}

    weights = rd.run(body, 4, "threads")[0]
    path = rd.export(tmp_path / "at", tmp_path / "all.safetensors")
    found = __import__("safetensors.torch").torch.load_file(path)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], one) for name, one in weights.items())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}], ids=shown)
def test_the_state_of_one_device_is_taken_by_a_mesh(axes: Any, strategy: str) -> None:
    net = make_net()
    alone, own, _ = one_device(net, 2)
    state = own.state_dict()

    def body(comm: Any) -> bool:
        mesh, mine, optimizer = prepare_on(comm, axes, alone, strategy)
        optimizer.load_state_dict(copy.deepcopy(state))
        kept = optimizer.state_dict()["state"]
        del mesh, mine
        return same(kept, state["state"])

    assert all(rd.run(body, 4, "threads"))


def test_a_model_that_differs_is_refused_on_all_ranks(tmp_path: Path) -> None:
    net = make_net()

    def body(comm: Any) -> list[str]:
        _, mine, optimizer = prepare_on(comm, {"tp": 2}, net, "ddp")
        rd.save(tmp_path / "at", mine, optimizer)
        other = torch.nn.Linear(3, 2)
        other, own = rd.prepare(other, adam(other.parameters()), comm=comm)
        with pytest.raises(CheckpointMismatch, match=r"parameter up.weight: \(12, 6\) in the"):
            rd.load(tmp_path / "at", other, own)
        result = rd.load(tmp_path / "at", other, own, strict=False)
        return [*result.unexpected]

    assert "up.weight" in rd.run(body, 2, "threads")[1]
