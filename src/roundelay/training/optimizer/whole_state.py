"""The optimizer's state as one device has it, of what the ranks have in pieces or on servers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from roundelay.errors import InvalidArgumentError, UnsendableError
from roundelay.training._mesh_state import whole_state_dict
from roundelay.training._run import Run
from roundelay.training._setup import Setup
from roundelay.training.checkpoint.parts import by_element
from roundelay.training.checkpoint.window import (
    from_windows,
    local_state,
    of_whole,
    whole_shape,
    window_of,
)
from roundelay.training.optimizer.state_arrays import as_arrays, as_tensors, received, sendable
from roundelay.training.optimizer.state_tree import beside, each_tensor, filled, put_beside, slots
from roundelay.training.shards.shard import Shard

__all__ = ["load_whole_state", "whole_beside", "whole_state"]


def whole_state(run: Run, place: int) -> dict[str, Any]:
    """Return what `state_dict()` of one optimizer on one device would be. Every rank calls it.

    The whole state is gathered on every rank; `rd.save` writes one that fits nowhere.
    """
    run.state.enter("optimizer.state_dict")
    run.take_edits()
    run.state.meet()
    setup = run.setup
    optimizer = setup.optimizer.all[place]
    listed = _listed(run, place)
    found = _of_parameters(run, place)
    trained = {id(parameter.tensor) for parameter in setup.parameters}
    for name, one in _in_groups(setup, place):
        old = id(one) not in trained or "groups" in vars(optimizer)
        here = setup.mesh is None or name in setup.mesh.own
        if old and here and name not in found and one in optimizer.state:
            found[name] = dict(optimizer.state[one])  # of when it was not frozen, or nothing
    state = _of_stages(run, found)
    groups, numbers = [], dict[str, int]()
    for group, own in zip(optimizer.param_groups, listed, strict=True):
        first = len(numbers)
        numbers.update((name, first + at) for at, name in enumerate(own))
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**options, "params": [*range(first, len(numbers))]})
    numbered = {at: state[name] for name, at in numbers.items() if name in state}
    return {"state": {**numbered, **whole_beside(optimizer)}, "param_groups": groups}


def _of_parameters(run: Run, place: int) -> dict[str, dict[str, Any]]:
    """Return the whole state of the parameters that this stage has and counts, by their names."""
    setup = run.setup
    shapes = {
        parameter.name: whole_shape(setup, parameter)
        for parameter in setup.parameters
        if parameter.owner == place
    }
    pieces: dict[str, dict[str, list[tuple[int, torch.Tensor]]]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, window, _, elements, whole in _all_parts(run, set(shapes)):
        if name not in shapes:  # of another stage
            continue
        found.setdefault(name, {}).update(received(whole))
        for key, values in as_tensors(elements).items():
            pieces.setdefault(name, {}).setdefault(key, []).append((window, values))
    for name, kinds in pieces.items():
        flat = {key: _flat(setup, name, values) for key, values in kinds.items()}
        inside = slots(found[name])
        found[name] = filled(found[name], flat, torch.Tensor.view)
        found[name] |= {key: one.view(shapes[name]) for key, one in flat.items()
                        if key not in inside}  # fmt: skip
    return found


def _of_stages(run: Run, found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the state of all stages of a pipeline, by the first names in the whole model."""
    mesh = run.setup.mesh
    if mesh is None or mesh.staging is None:
        return found
    mine = {
        mesh.staging.names[name]: sendable(state, f"the optimizer's state of {name}")
        for name, state in found.items()
    }
    every = mesh.staging.comm.all_gather_object(mine)
    return {name: received(state) for theirs in every for name, state in theirs.items()}


def _in_groups(setup: Setup, place: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what is in the groups of an optimizer, frozen parameters too, by their first names."""
    names = {id(one): name for name, one in setup.model.named_parameters()}
    names |= {id(parameter.tensor): parameter.name for parameter in setup.parameters}
    for group in setup.groups[setup.optimizer.groups_of(place)]:
        yield from ((names.get(id(one), "(no name)"), one) for one in group)


def _listed(run: Run, place: int) -> list[list[str]]:
    """Return by name what one device has in the groups of an optimizer. Every rank calls it."""
    setup, mesh = run.setup, run.setup.mesh
    names = iter([name for name, _ in _in_groups(setup, place)])
    originals = setup.groups[setup.optimizer.groups_of(place)]
    mine = [[next(names) for _ in group] for group in originals]
    if mesh is None or not mesh.staged:
        return mine
    if mesh.staging is None:
        raise InvalidArgumentError(
            f"optimizer.state_dict() and load_state_dict() know parameters by their number in one "
            f"optimizer, and in {mesh.mesh!r} every stage has some of them. Use rd.Pipeline, which "
            f"knows the whole model, or rd.save and rd.load, which know parameters by name; "
            f"rd.read_checkpoint(path).optimizers() has it all."
        )
    first = mesh.staging.names
    order = {name: at for at, name in enumerate(first)}
    every = mesh.staging.comm.all_gather_object(mine)
    for own in (own for theirs in every for own in theirs):
        if own != sorted(own, key=order.__getitem__):
            raise InvalidArgumentError(
                f"optimizer.state_dict() and load_state_dict() of a pipeline number parameters in "
                f"the order of the model, and a group of this optimizer has another one: "
                f"{', '.join(own[:5])}, …. Build it in the order of pipe.parameters(), or use "
                f"rd.save and rd.load, which know parameters by name."
            )
    groups = [{first[name] for theirs in every for name in theirs[at]} for at in range(len(mine))]
    return [sorted(group, key=order.__getitem__) for group in groups]


def _all_parts(run: Run, names: Collection[str]) -> list[Any]:
    """Return what all ranks have of the state of some parameters, in the order of elements."""

    def parts() -> Iterator[list[Any]]:
        mesh = run.setup.mesh
        for part in run.state.to_save():
            if part.name in names and (part.elements or part.whole):
                if mesh is not None and part.name not in mesh.own:
                    continue  # another rank with the same data has the same
                sharding = None if mesh is None else mesh.shardings.get(part.name)
                window = 0 if sharding is None else sharding.comm.rank
                kept = of_whole(run.setup, part)
                whole = sendable(kept, f"the optimizer's state of {part.name}")
                yield [part.name, window, part.start, as_arrays(dict(part.elements)), whole]

    mine, told = [], ""
    try:
        mine = list(parts())
    except UnsendableError as error:  # which all ranks raise
        told = str(error)
    every = run.everyone.all_gather_object((told, mine))
    for rank, (told, _) in enumerate(every):
        if told:
            raise UnsendableError(f"optimizer.state_dict() on rank {rank}: {told}")
    return sorted((part for _, mine in every for part in mine), key=lambda part: part[:3])


def _flat(setup: Setup, name: str, values: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Return elements of a whole parameter of those in the parts of ranks, in their order."""
    sharding = None if setup.mesh is None else setup.mesh.shardings.get(name)
    if sharding is None:
        return torch.cat([part for _, part in values])
    rows = [torch.cat([part for at, part in values if at == rank])
            for rank in range(len(sharding.pieces))]  # fmt: skip
    windows = [
        (window_of(sharding, rank), lambda low, high, row=row: row[low:high])
        for rank, row in enumerate(rows)
    ]
    parameter = next(one for one in setup.parameters if one.name == name)
    shape = whole_shape(setup, parameter)
    return from_windows(windows, shape, 0, math.prod(shape))


def whole_beside(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return what an optimizer keeps for no parameter, gathered. Every rank calls it."""

    def full(_: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full() if isinstance(tensor, Shard) else tensor

    return {key: each_tensor(one, full) for key, one in beside(optimizer).items()}


def load_whole_state(run: Run, place: int, given: Mapping[str, Any]) -> None:
    """Take what `whole_state`, or the same optimizer on one device, has given. Every rank calls it.

    Each rank and server gets its own part of it.
    """
    setup = run.setup
    listed = _listed(run, place)
    setup.refuse_renamed("optimizer.load_state_dict")
    optimizer = setup.optimizer.all[place]
    theirs = given["param_groups"]
    mine = [len(own) for own in listed]
    if [len(group["params"]) for group in theirs] != mine:
        raise InvalidArgumentError(
            f"load_state_dict got groups of {[len(group['params']) for group in theirs]} "
            f"parameters, but this optimizer has groups of {mine}. Load the state of an optimizer "
            f"that was built alike."
        )
    state = _of_others(run, place)
    numbers = {at for group in theirs for at in group["params"]}
    others = {key: each_tensor(one, lambda _, it: it.clone())
              for key, one in given["state"].items() if key not in numbers}  # fmt: skip
    run.state.check_beside(others)
    found = {name: given["state"][at] for group, own in zip(theirs, listed, strict=True)
             for at, name in zip(group["params"], own, strict=True)
             if at in given["state"]}  # fmt: skip
    state |= _trained_here(run, place, found)
    run.take_edits()
    weights = {name: one.clone() for name, one in whole_state_dict(run.state).items()
               if isinstance(one, torch.Tensor)}  # fmt: skip
    with torch.no_grad():
        run.state.take_back(local_state(setup, _GivenState(weights, state)))
    run.state.refresh()
    put_beside(optimizer, others)
    for group, options in zip(optimizer.param_groups, theirs, strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})


def _trained_here(
    run: Run, place: int, found: Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """Return what is for parameters that this rank trains, by their names; frozen ones get it."""
    setup, mesh = run.setup, run.setup.mesh
    trained = {id(parameter.tensor) for parameter in setup.parameters}
    optimizer = setup.optimizer.all[place]
    mine: dict[str, Mapping[str, Any]] = {}
    for name, one in _in_groups(setup, place):
        whole = name if mesh is None or mesh.staging is None else mesh.staging.names[name]
        if whole in found and id(one) in trained:
            mine[name] = found[whole]
        elif whole in found:
            optimizer.state[one] = dict(found[whole])
    return mine


def _of_others(run: Run, place: int) -> dict[str, Mapping[str, Any]]:
    """Return the state of the model's other optimizers, by name: it stays as it is."""
    found: dict[str, Mapping[str, Any]] = {}
    for other in range(len(run.setup.optimizer.all)):
        if other != place:
            state = whole_state(run, other)["state"]
            numbered = enumerate(name for group in _listed(run, other) for name in group)
            theirs = {name: state[at] for at, name in numbered if at in state}
            found.update(_trained_here(run, other, theirs))
    return found


class _GivenState:
    """Weights as they are and state as it was given; strategies read it as they do a checkpoint."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], state: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._weights, self._state = weights, state

    def values(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return some elements of a flattened parameter."""
        return self._weights[name].detach().reshape(-1)[start:stop]

    def state(self, name: str, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the optimizer's state on these elements, flat."""
        return {
            key: value.detach().reshape(-1)[start:stop]
            for key, value in self._state.get(name, {}).items()
            if by_element(key, value, self._weights[name])
        }

    def whole_state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state that belongs to the whole parameter."""
        return {
            key: each_tensor(value, lambda _, one: one.clone())
            for key, value in self._state.get(name, {}).items()
            if not by_element(key, value, self._weights[name])
        }
