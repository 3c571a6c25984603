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
    refuse_stages(run)
    shapes = {
        parameter.name: whole_shape(setup, parameter)
        for parameter in setup.parameters
        if parameter.owner == place
    }
    pieces: dict[str, dict[str, list[tuple[int, torch.Tensor]]]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, window, _, elements, whole in _all_parts(run, set(shapes)):
        found.setdefault(name, {}).update(received(whole))
        for key, values in as_tensors(elements).items():
            pieces.setdefault(name, {}).setdefault(key, []).append((window, values))
    for name, kinds in pieces.items():
        flat = {key: _flat(setup, name, values) for key, values in kinds.items()}
        inside = slots(found[name])
        found[name] = filled(found[name], flat, torch.Tensor.view)
        found[name] |= {key: one.view(shapes[name]) for key, one in flat.items()
                        if key not in inside}  # fmt: skip
    names = {id(parameter.tensor): parameter.name for parameter in setup.parameters}
    state, groups, number = {}, [], 0
    optimizer = setup.optimizer.all[place]
    originals = setup.groups[setup.optimizer.groups_of(place)]
    for group, own in zip(optimizer.param_groups, originals, strict=True):
        numbers = range(number, number + len(own))
        number += len(own)
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**options, "params": list(numbers)})
        for at, one in zip(numbers, own, strict=True):
            if names.get(id(one)) in found:
                state[at] = found[names[id(one)]]
            elif (id(one) not in names or "groups" in vars(optimizer)) and one in optimizer.state:
                state[at] = dict(optimizer.state[one])  # of when it was not frozen, or nothing
    return {"state": {**state, **whole_beside(optimizer)}, "param_groups": groups}


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


def refuse_stages(run: Run) -> None:
    """Refuse the state of one optimizer where others have the other stages' parameters."""
    mesh = run.setup.mesh
    if mesh is not None and mesh.staged:
        raise InvalidArgumentError(
            f"optimizer.state_dict() and load_state_dict() know parameters by their number in one "
            f"optimizer, and in {mesh.mesh!r} every stage has some of them. Use rd.save and "
            f"rd.load, which know them by name; rd.read_checkpoint(path).optimizers() has it all."
        )


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
    refuse_stages(run)
    setup.refuse_renamed("optimizer.load_state_dict")
    optimizer = setup.optimizer.all[place]
    originals = setup.groups[setup.optimizer.groups_of(place)]
    theirs = given["param_groups"]
    mine = [len(own) for own in originals]
    if [len(group["params"]) for group in theirs] != mine:
        raise InvalidArgumentError(
            f"load_state_dict got groups of {[len(group['params']) for group in theirs]} "
            f"parameters, but this optimizer has groups of {mine}. Load the state of an optimizer "
            f"that was built alike."
        )
    names = {id(parameter.tensor): parameter for parameter in setup.parameters}
    state = _of_others(run, place)
    numbers = {at for group in theirs for at in group["params"]}
    others = {key: each_tensor(one, lambda _, it: it.clone())
              for key, one in given["state"].items() if key not in numbers}  # fmt: skip
    run.state.check_beside(others)
    for group, own in zip(theirs, originals, strict=True):
        for at, one in zip(group["params"], own, strict=True):
            if id(one) in names and at in given["state"]:
                state[names[id(one)].name] = given["state"][at]
            elif at in given["state"]:
                optimizer.state[one] = dict(given["state"][at])
    run.take_edits()
    weights = {name: one.clone() for name, one in whole_state_dict(run.state).items()
               if isinstance(one, torch.Tensor)}  # fmt: skip
    with torch.no_grad():
        run.state.take_back(local_state(setup, _GivenState(weights, state)))
    run.state.refresh()
    put_beside(optimizer, others)
    for group, options in zip(optimizer.param_groups, theirs, strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})


def _of_others(run: Run, place: int) -> dict[str, Mapping[str, Any]]:
    """Return the state of the model's other optimizers, by name: it stays as it is."""
    setup = run.setup
    names = {id(parameter.tensor): parameter.name for parameter in setup.parameters}
    found: dict[str, Mapping[str, Any]] = {}
    for other in range(len(setup.optimizer.all)):
        if other != place:
            state = whole_state(run, other)["state"]
            groups = setup.groups[setup.optimizer.groups_of(other)]
            listed = [one for group in groups for one in group]
            found.update((names[id(one)], state[at]) for at, one in enumerate(listed)
                         if id(one) in names and at in state)  # fmt: skip
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
