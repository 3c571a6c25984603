"""The optimizer's state as one device has it, of what the ranks have in pieces or on servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from roundelay.errors import InvalidArgumentError
from roundelay.training._checkpoint_parts import by_element
from roundelay.training._ps_checkpoint import as_arrays, as_tensors
from roundelay.training._run import Run

__all__ = ["load_whole_state", "whole_state"]


def whole_state(run: Run, place: int) -> dict[str, Any]:
    """Return what `state_dict()` of one optimizer on one device would be. Every rank calls it.

    The whole state is gathered on every rank; `rd.save` writes one that fits nowhere.
    """
    run.sharing.take_edits()
    run.sharing.meet()
    setup = run.setup
    shapes = {one.name: one.tensor.shape for one in setup.parameters if one.owner == place}
    mine = [
        [part.name, part.start, as_arrays(dict(part.elements)), as_arrays(dict(part.whole))]
        for part in run.sharing.to_save()
        if part.name in shapes and (part.elements or part.whole)
    ]
    parts = [part for rank in run.comm.all_gather_object(mine) for part in rank]
    pieces: dict[str, dict[str, list[torch.Tensor]]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, _, elements, whole in sorted(parts, key=lambda part: (part[0], part[1])):
        found.setdefault(name, {}).update(as_tensors(whole))
        for key, values in as_tensors(elements).items():
            pieces.setdefault(name, {}).setdefault(key, []).append(values)
    for name, kinds in pieces.items():
        for key, values in kinds.items():
            found[name][key] = torch.cat(values).view(shapes[name])
    names = {id(one.tensor): one.name for one in setup.parameters}
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
            elif (
                id(one) not in names and one in optimizer.state
            ):  # of a time when it was not frozen
                state[at] = dict(optimizer.state[one])
    return {"state": state, "param_groups": groups}


def load_whole_state(run: Run, place: int, given: Mapping[str, Any]) -> None:
    """Take what `whole_state`, or the same optimizer on one device, has given. Every rank calls it.

    Each rank and server gets its own part of it.
    """
    setup = run.setup
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
    names = {id(one.tensor): one for one in setup.parameters}
    state = _of_others(run, place)
    for group, own in zip(theirs, originals, strict=True):
        for at, one in zip(group["params"], own, strict=True):
            if id(one) in names and at in given["state"]:
                state[names[id(one)].name] = given["state"][at]
            elif at in given["state"]:
                optimizer.state[one] = dict(given["state"][at])
    run.sharing.take_edits()
    weights = {name: one.clone() for name, one in run.sharing.full_state_dict().items()}
    with torch.no_grad():
        run.sharing.take_back(_Given(weights, state))
    run.sharing.refresh()
    for group, options in zip(optimizer.param_groups, theirs, strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})


def _of_others(run: Run, place: int) -> dict[str, Mapping[str, Any]]:
    """Return the state of the model's other optimizers, by name: it stays as it is."""
    setup = run.setup
    names = {id(one.tensor): one.name for one in setup.parameters}
    found: dict[str, Mapping[str, Any]] = {}
    for other in range(len(setup.optimizer.all)):
        if other != place:
            state = whole_state(run, other)["state"]
            groups = setup.groups[setup.optimizer.groups_of(other)]
            listed = [one for group in groups for one in group]
            found.update((names[id(listed[at])], one) for at, one in state.items()
                         if id(listed[at]) in names)  # fmt: skip
    return found


class _Given:
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
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in self._state.get(name, {}).items()
            if not by_element(key, value, self._weights[name])
        }
