"""The user's optimizers again, on a server's own parameters; options follow the workers'."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from roundelay.errors import InvalidArgumentError
from roundelay.training.optimizer.joined import JoinedOptimizers


def server_optimizers(
    optimizer: JoinedOptimizers, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]
) -> JoinedOptimizers:
    """Return optimizers of the same classes, options and state that step on `after`."""
    return JoinedOptimizers([_server_optimizer(one, before, after) for one in optimizer.all])


def _server_optimizer(
    optimizer: torch.optim.Optimizer,
    before: Sequence[torch.Tensor],
    after: Sequence[torch.Tensor],
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class, options and state that steps on `after`.

    `after` stands for `before`, which may be some of its tensors. Hooks stay with the original.
    """
    other = {id(old): new for old, new in zip(before, after, strict=True)}
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name != "step":  # a scheduler's, and it knows the original
            vars(made)[name] = OrderedDict() if isinstance(value, OrderedDict) else value
    made.param_groups = [
        {key: _own(value) for key, value in group.items() if key != "params"}
        | {"params": [other[id(one)] for one in group["params"] if id(one) in other]}
        for group in optimizer.param_groups
    ]
    made.state = defaultdict(dict)
    for old, new in zip(before, after, strict=True):
        if old in optimizer.state:
            made.state[new] = {key: _fit(value, new) for key, value in optimizer.state[old].items()}
    return made


def _own(value: Any) -> Any:  # Any: an option of any optimizer
    return value.clone() if isinstance(value, torch.Tensor) else value


def _fit(value: Any, tensor: torch.Tensor) -> Any:  # Any: a piece of state of any optimizer
    if not isinstance(value, torch.Tensor):
        return value
    goes_with = value.shape == tensor.shape and value.is_floating_point()
    return value.detach().to(tensor.dtype if goes_with else value.dtype, copy=True)


class Options:
    """The numbers among the options of an optimizer's groups, as a schedule may change them."""

    def __init__(self, optimizer: JoinedOptimizers) -> None:
        self._places: list[tuple[int, str, int]] = []  # group, key, how many numbers
        self._fixed: list[tuple[int, str, Any]] = []
        self._group_of: dict[int, int] = {}  # by id of the parameter
        for number, group in enumerate(optimizer.param_groups):
            self._group_of.update({id(parameter): number for parameter in group["params"]})
            for key in sorted(group.keys() - {"params"}):
                numbers = _numbers(group[key])
                if numbers is None:
                    self._fixed.append((number, key, group[key]))
                else:
                    self._places.append((number, key, len(numbers)))

    @property
    def count(self) -> int:
        """How many numbers there are."""
        return sum(length for _, _, length in self._places)

    def read(self, optimizer: JoinedOptimizers) -> list[float]:
        """Return the numbers as they are now."""
        groups = optimizer.param_groups
        for number, group in enumerate(groups):
            known = {self._group_of.get(id(parameter), number) for parameter in group["params"]}
            if known - {number}:
                raise InvalidArgumentError(
                    f"Group {number} of the optimizer has parameters that were in group "
                    f"{min(known - {number})} at prepare, and the server has them there. Change "
                    f"options of the groups, or use ParameterServer(update='worker'); or call "
                    f"rd.unprepare, and prepare again with other groups."
                )
        for number, key, value in self._fixed:
            if groups[number].get(key) != value:
                raise InvalidArgumentError(
                    f"The option {key} of the optimizer's group {number} was {value!r} at prepare "
                    f"and is {groups[number].get(key)!r} now. The server can follow numbers only."
                )
        found: list[float] = []
        for number, key, length in self._places:
            numbers = _numbers(groups[number].get(key))
            if numbers is None or len(numbers) != length:
                raise InvalidArgumentError(
                    f"The option {key} of the optimizer's group {number} is "
                    f"{groups[number].get(key)!r}; at prepare it was {length} numbers, and the "
                    f"server needs as many."
                )
            found += numbers
        return found

    def write(self, numbers: Sequence[float], optimizer: JoinedOptimizers) -> None:
        """Set the options of a twin."""
        at = 0
        for number, key, length in self._places:
            group = optimizer.param_groups[number]
            group[key] = _like(group[key], numbers[at : at + length])
            at += length


def _numbers(value: Any) -> list[float] | None:  # Any: an option of any optimizer
    if isinstance(value, torch.Tensor):
        return [float(value)] if value.dim() == 0 else None
    if isinstance(value, (bool, int, float)):
        return [float(value)]
    if isinstance(value, (tuple, list)):
        numbers = [_numbers(one) for one in value]
        return [number for one in numbers if one for number in one] if all(numbers) else None
    return None


def _like(old: Any, numbers: Sequence[float]) -> Any:  # Any: likewise
    if isinstance(old, torch.Tensor):
        return old.fill_(numbers[0])
    if isinstance(old, (tuple, list)):
        return type(old)(_like(one, [number]) for one, number in zip(old, numbers, strict=True))
    if isinstance(old, bool):
        return bool(numbers[0])
    whole = isinstance(old, int) and numbers[0].is_integer()
    return int(numbers[0]) if whole else numbers[0]
