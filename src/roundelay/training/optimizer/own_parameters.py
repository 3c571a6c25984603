"""Optimizers that keep parameters outside their groups, and where that would step on nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from roundelay.errors import InvalidArgumentError
from roundelay.training._setup import Setup
from roundelay.training.strategy import Strategy

__all__ = ["refuse_own_parameters"]

#: What torch itself, or a scheduler, keeps in an optimizer.
TORCHS = {*vars(torch.optim.SGD([torch.zeros(1)])), "step", "_opt_called"}
LEAVES = (str, bytes, int, float, complex, type(None), type, FunctionType, MethodType,
          BuiltinFunctionType, ModuleType)  # fmt: skip


def refuse_own_parameters(strategy: Strategy, setup: Setup) -> None:
    """Refuse an optimizer that knows parameters beside its groups, where it steps on others.

    Servers step on copies of them, and mixed precision on master weights: what an optimizer does
    to the model's own would be lost.
    """
    if not (strategy.steps_elsewhere or setup.precision.mixed):
        return
    names = {id(one.tensor): one.name for one in setup.parameters}
    what, way = (
        ("on the parameter server's copies", "Use another strategy, such as 'ps' or 'ddp'")
        if strategy.steps_elsewhere
        else ("on master weights", "Use precision='fp32'")
    )
    for optimizer in setup.optimizer.all:
        lists = {id(group["params"]) for group in optimizer.param_groups}
        skipped = () if strategy.steps_elsewhere else lists
        for word, value in _own(optimizer):
            name = next((names[key] for key in _tensors(value, skipped) if key in names), None)
            if name is not None:
                raise InvalidArgumentError(
                    f"{type(optimizer).__name__} keeps the parameter {name} in its attribute "
                    f"{word}, beside its groups, and would step on it there, while here it has to "
                    f"step {what}. {way}, or have its step go over self.param_groups and keep what "
                    f"belongs to a parameter in self.state."
                )


def _own(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that the user's class has added."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        yield from ((word, one) for word, one in vars(optimizer).items() if word not in TORCHS)


def _tensors(root: Any, skipped: Collection[int]) -> Iterator[int]:  # Any: what users keep
    """Yield the ids of all tensors that can be got to from a value.

    Not through lists to skip: those of groups, in which the tensors are replaced in place.
    """
    seen, left = {*skipped}, [root]
    while left:
        value = left.pop()
        if isinstance(value, LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield id(value)
        elif isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, Collection):
            left += value
        left += vars(value).values() if hasattr(value, "__dict__") else ()
