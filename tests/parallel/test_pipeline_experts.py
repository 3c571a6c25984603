"""Mixtures of experts in stages train as on one device, also where experts do not divide evenly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import roundelay as rd

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from tests.parallel.mesh_models import ranks_of, shown  # noqa: E402 - only with torch
from tests.parallel.test_pipeline import EXACT  # noqa: E402 - likewise
from tests.parallel.test_pipeline_data_parallel import CLIP, adam  # noqa: E402
from tests.parallel.test_tensor_experts import given  # noqa: E402

from roundelay.errors import CollectiveMismatch  # noqa: E402 - only with torch
from roundelay.parallel.sharding import sharding_of  # noqa: E402
from roundelay.training._watch import gradients_of, share_of  # noqa: E402

nn = torch.nn
ROWS, STEPS = 24, 2
#: One replica, for which there is ddp; and several, under every stage of ZeRO, too.
ONE: list[dict[str, int]] = [{"ep": 2, "pp": 2}, {"pp": 2, "ep": 3}, {"ep": 3, "pp": 2}]
SEVERAL: list[dict[str, int]] = [{"dp": 2, "ep": 2, "pp": 2}, {"pp": 2, "ep": 2, "dp": 2}]
STAGES = ("ddp", "zero1", "zero2", "zero3")
WAYS = [*((axes, "ddp") for axes in ONE), *((axes, word) for axes in SEVERAL for word in STAGES),
        *(({"ep": 1, "pp": 2}, word) for word in (*STAGES, "ps"))]  # fmt: skip
Step = tuple[float, float]


def built(experts: int, comm: Any = None) -> Any:
    """Experts in either stage; the same values on however many ranks."""

    def mixture() -> Any:
        return rd.MoE(lambda: nn.Linear(6, 6), rd.Router(6, experts, top_k=2), comm)

    layers = (nn.Linear(6, 6), mixture(), nn.Tanh(), nn.Linear(6, 6), mixture(), nn.Linear(6, 6))
    return given(nn.Sequential(*layers).double())


def batch() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(ROWS, 6, generator=generator, dtype=torch.float64) for _ in "xy")


def alone(experts: int, steps: int) -> tuple[list[Step], Any, Any]:
    """Train one device; return losses and norms, its state, and its last gradients."""
    model = built(experts)
    optimizer, (x, y), every = adam(model.parameters()), batch(), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        grads = {name: one.grad.clone() for name, one in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        every.append((loss.item(), norm.item()))
    return every, (model.state_dict(), optimizer.state_dict()["state"]), grads


def prepared(comm: Any, axes: dict[str, int], experts: int, strategy: str, **options: Any) -> Any:
    mesh = rd.Mesh(comm=comm, **axes)
    pipe = rd.Pipeline(built(experts, mesh["ep"]), comm=mesh["pp"], micro_batches=2,
                       loss=nn.functional.mse_loss, **options)  # fmt: skip
    return mesh, *rd.prepare(pipe, adam(pipe.parameters()), mesh=mesh, strategy=strategy)


def train(mesh: Any, pipe: Any, optimizer: Any, steps: int = STEPS) -> tuple[list[Step], Any]:
    """Train on this rank's rows; return losses and norms, and what there is of gradients."""
    data = tuple(axis for axis in mesh.axes if axis in ("dp", "ep"))
    rows = [share_of(mesh, part) for part in batch()]
    every, grads = [], {}
    for _ in range(steps):
        optimizer.zero_grad()
        loss = pipe.step(*rows)
        mesh[data].all_reduce(loss.view(1))
        grads = {name: rd.local(one) for name, one in gradients_of(pipe).items()}
        norm = float(optimizer.clip_grad_norm_(CLIP))
        optimizer.step()
        every.append((loss.item() / mesh.size(*data), norm))
    return every, grads


def off(found: Any, wanted: Any) -> float:
    """The largest difference, anywhere in what is nested."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        return max(off(found[key], wanted[key]) for key in wanted)
    return float((found - wanted).abs().max())


@pytest.mark.parametrize("experts", [3, 4, 5])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-1f1b"])
@pytest.mark.parametrize(("axes", "strategy"), WAYS, ids=str)
def test_experts_in_stages_are_exact(
    axes: dict[str, int], strategy: str, schedule: str, experts: int
) -> None:
    """Losses, gradients, norms, weights and the optimizer's state are those of one device."""
    wanted, state, grads = alone(experts, STEPS)

    def body(comm: Any) -> None:
        mesh, pipe, optimizer = prepared(comm, axes, experts, strategy, schedule=schedule)
        found, mine = train(mesh, pipe, optimizer)
        assert [*sum(found, ())] == pytest.approx([*sum(wanted, ())], rel=EXACT)
        assert mine or strategy != "ddp"
        for name, grad in mine.items():
            sharding = sharding_of(pipe.get_parameter(name))
            right = grads[name] if sharding is None else sharding.local(grads[name])
            assert off(grad, right) <= EXACT, name
        assert off(rd.full_state_dict(pipe), state[0]) <= EXACT
        assert off(optimizer.state_dict()["state"], state[1]) <= EXACT

    rd.run(body, ranks_of(axes), "threads")


@pytest.mark.parametrize("experts", [3, 4, 5])
@pytest.mark.parametrize("before", WAYS[::3], ids=str)
@pytest.mark.parametrize("after", WAYS[::3], ids=str)
def test_experts_in_stages_go_from_mesh_to_mesh(
    before: Any, after: Any, experts: int, tmp_path: Path
) -> None:
    wanted, state, _ = alone(experts, 2 * STEPS)

    def body(comm: Any, way: Any, *, first: bool) -> None:
        mesh, pipe, optimizer = prepared(comm, way[0], experts, way[1])
        if not first:
            rd.load(tmp_path / "at", pipe, optimizer)
        found, _ = train(mesh, pipe, optimizer)
        right = wanted[:STEPS] if first else wanted[STEPS:]
        assert [*sum(found, ())] == pytest.approx([*sum(right, ())], rel=EXACT)
        if first:
            rd.save(tmp_path / "at", pipe, optimizer)
        else:
            assert off(rd.full_state_dict(pipe), state[0]) <= EXACT

    rd.run(lambda comm: body(comm, before, first=True), ranks_of(before[0]), "threads")
    rd.run(lambda comm: body(comm, after, first=False), ranks_of(after[0]), "threads")


@pytest.mark.parametrize("axes", ONE, ids=shown)
def test_replicas_of_other_models_are_refused(axes: dict[str, int]) -> None:
    """As many experts in all, and of another width on one replica."""

    def body(comm: Any) -> None:
        mesh = rd.Mesh(comm=comm, **axes)
        last = nn.Linear(6, 6 + (mesh.place["ep"] == 1))
        model = nn.Sequential(rd.MoE(lambda: nn.Linear(6, 6), rd.Router(6, 5), mesh["ep"]), last)
        pipe = rd.Pipeline(model, comm=mesh["pp"], loss=nn.functional.mse_loss)
        with pytest.raises(CollectiveMismatch, match="the model: of"):
            rd.prepare(pipe, adam(pipe.parameters()), mesh=mesh)

    rd.run(body, ranks_of(axes), "threads")
