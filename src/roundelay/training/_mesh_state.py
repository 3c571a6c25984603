"""What the ranks of a mesh have together: the norm of all gradients, and whole tensors by name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from roundelay.errors import InvalidArgumentError
from roundelay.parallel.passes import label_of
from roundelay.training._mesh_ranks import DATA, STAGES, MeshRanks
from roundelay.training._setup import Setup
from roundelay.training.strategy import Only, StrategyState


def grad_norm(state: StrategyState, order: float, only: Only) -> float:
    """Return the norm of all gradients of a model, each counted once. Every rank calls it."""
    setup = state.setup
    mesh = setup.mesh
    if mesh is None or (mesh.alone and not setup.experts):
        return state.grad_norm(order, only)
    if not order > 0:
        raise InvalidArgumentError(
            f"clip_grad_norm_ under a mesh takes norms above 0 or infinity, not {order!r}."
        )
    meet(setup, mesh, f"clip_grad_norm_ {order}")
    apart = _apart(setup, mesh)
    total = 0.0
    for axis, numbers in _by_axis(setup, mesh, only).items():
        norm = state.grad_norm(order, numbers)
        ranks = setup.same_experts if axis in DATA else setup.comm
        if apart and ranks.rank:  # all of them have the same
            continue
        total = max(total, norm) if math.isinf(order) else total + norm**order
    found = np.array([total])
    # Ranks with other data have the same, but for experts. Those that do not clip are told later.
    together = setup.everyone if apart else mesh.beside
    together.all_reduce(found, "max" if math.isinf(order) else "sum")
    return float(found[0] if math.isinf(order) else found[0] ** (1 / order))


def meet(setup: Setup, mesh: MeshRanks, call: str) -> None:
    """Have ranks come together in the groups where they meet next, without a byte.

    Those that do not make this call make their next one there, and all of them are told by which.
    In a group of all ranks these would wait for them, and they for these.
    """
    beside = [] if setup.step.beside is None else [setup.step.beside]
    stages = [mesh.mesh[STAGES]] if mesh.staged else []
    data = [setup.comm] if _apart(setup, mesh) else []
    for ranks in (*data, *beside, *stages):
        ranks.all_gather(np.zeros(0, np.uint8), label=label_of(call))


def _apart(setup: Setup, mesh: MeshRanks) -> bool:
    """Say whether ranks with other data have other experts; of stages, some may have none."""
    return bool(setup.experts) or mesh.staged


def _by_axis(setup: Setup, mesh: MeshRanks, only: Only) -> dict[str | None, list[int]]:
    """Return the numbers of parameters that are this rank's to count, by what divides them."""
    found: dict[str | None, list[int]] = {axis: [] for axis in (None, *mesh.mesh.axes)}
    for number, parameter in enumerate(setup.parameters):
        if parameter.name in mesh.own and (only is None or number in only):
            found[mesh.axis_of(parameter.name)].append(number)
    return {axis: numbers for axis, numbers in found.items() if numbers}


def whole_tensors(state: StrategyState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the whole model's state by its original names, one by one. Every rank calls it."""
    mesh = state.setup.mesh
    local = state.whole_tensors()
    if mesh is None:
        yield from local
        return
    whole = _gathered(mesh, local)
    yield from _of_all_stages(mesh, whole, _device(state)) if mesh.staged else whole


def _gathered(
    mesh: MeshRanks, local: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in local:
        sharding = mesh.shardings.get(name)
        yield name, tensor if sharding is None else sharding.whole(tensor)


def _of_all_stages(
    mesh: MeshRanks, own: Iterator[tuple[str, Any]], device: torch.device
) -> Iterator[tuple[str, Any]]:
    """Yield what all stages have, each value sent by the first that has it."""
    stages = mesh.mesh[STAGES]
    seen: set[str] = set()
    for stage in range(stages.size):
        sends = stage == stages.rank
        while True:
            name, value = next(own, ("", None)) if sends else ("", None)
            tensor = value.detach().contiguous() if isinstance(value, torch.Tensor) else None
            kind = value if tensor is None else [list(tensor.shape), str(tensor.dtype)]
            name, is_tensor, kind = stages.broadcast_object(
                (name, tensor is not None, kind), root=stage
            )
            if not name:
                break
            if is_tensor and tensor is None:
                word = kind[1].removeprefix("torch.")
                tensor = torch.empty(kind[0], dtype=getattr(torch, word), device=device)
            if tensor is not None and tensor.numel():
                stages.broadcast(tensor.reshape(-1).view(torch.uint8), root=stage)
            if name not in seen:
                yield name, kind if tensor is None else tensor
            seen.add(name)


def _device(state: StrategyState) -> torch.device:
    parameters = state.setup.parameters
    return parameters[0].tensor.device if parameters else torch.device("cpu")


def whole_state_dict(state: StrategyState) -> dict[str, Any]:
    """Return what `state_dict()` of the model on one device would be. Every rank calls it."""
    mesh = state.setup.mesh
    local: dict[str, Any] = state.full_state_dict()
    if mesh is None or not (mesh.shardings or mesh.staged):
        return local
    whole: dict[int, torch.Tensor] = {}

    def gathered() -> Iterator[tuple[str, Any]]:
        for name, value in local.items():
            sharding = mesh.shardings.get(name)
            if sharding is None:
                yield name, value
                continue
            place = value.data_ptr()
            if place not in whole:  # tied parameters stay tied
                whole[place] = sharding.whole(value)
            yield name, whole[place]

    if not mesh.staged:
        return dict(gathered())
    found = dict(_of_all_stages(mesh, gathered(), _device(state)))
    if mesh.staging is None:
        return found
    first = mesh.staging.names  # what is one parameter is one tensor
    return {name: found.get(first.get(name, name), found[name]) for name in mesh.staging.keys}
