"""Which parameters come and go together under ZeRO-3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from roundelay.errors import InvalidArgumentError

__all__ = ["Choice", "Unit", "find_units"]

#: Classes of modules, names of modules, or both.
Choice = Sequence[type[nn.Module] | str]


@dataclass(eq=False)
class Unit:
    """A module whose parameters are gathered together; the model itself has the rest."""

    name: str  # of the module; the model's is empty
    module: nn.Module
    parameters: list[torch.nn.Parameter] = field(default_factory=list)


def find_units(model: nn.Module, choice: Choice | None) -> list[Unit]:
    """Divide all parameters of a model into units; the model's own comes first.

    Without a choice, the elements of every ModuleList and Sequential are units. A parameter that
    several units share belongs to the model's own if that is one of them, else to the first.
    """
    chosen = list(_listed(model, "")) if choice is None else _named(model, choice)
    units = [Unit("", model), *(Unit(name, module) for name, module in chosen)]
    inside = {id(unit.module): unit for unit in units}
    owners: dict[int, Unit] = {}
    tensors: dict[int, nn.Parameter] = {}
    for module, unit in _regions(model, units[0], inside):
        for tensor in module.parameters(recurse=False):
            tensors[id(tensor)] = tensor
            if id(tensor) not in owners or unit is units[0]:
                owners[id(tensor)] = unit
    for key, owner in owners.items():
        owner.parameters.append(tensors[key])
    return [unit for unit in units if unit.parameters or unit is units[0]]


def _listed(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the elements of lists that are called; a list in a list is looked into."""
    for name, child in module.named_children():
        where = f"{prefix}{name}"
        called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        element = isinstance(module, nn.ModuleList | nn.Sequential)
        if element and called and any(True for _ in child.parameters()):
            yield where, child
        else:
            yield from _listed(child, f"{where}.")


def _named(model: nn.Module, choice: Choice) -> list[tuple[str, nn.Module]]:
    kinds = tuple(one for one in choice if isinstance(one, type))
    names = {one for one in choice if isinstance(one, str)}
    found = []
    for name, module in model.named_modules():
        if name and (name in names or isinstance(module, kinds)):
            found.append((name, module))
    missing = names - {name for name, _ in found}
    if missing or not found:
        raise InvalidArgumentError(
            f"rd.Zero(units=…) names {', '.join(sorted(missing)) or 'classes'} that the model does "
            f"not have. Give classes of its modules, or names as in model.named_modules()."
        )
    return found


def _regions(
    module: nn.Module, unit: Unit, inside: dict[int, Unit]
) -> Iterator[tuple[nn.Module, Unit]]:
    """Yield every module with the innermost unit that it lies in."""
    yield module, unit
    for child in module.children():
        yield from _regions(child, inside.get(id(child), unit), inside)
