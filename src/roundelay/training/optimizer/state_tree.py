"""What optimizers keep in lists, tuples and dicts, and under keys that are no parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_map, tree_map_with_path

from roundelay.training.optimizer.joined import kept

__all__ = ["Made", "Slot", "beside", "each_tensor", "filled", "put_beside", "slots"]

Made = Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands in state for a tensor that has an element for each of its parameter's.

    These are kept by `key`, as the parameter's own elements are; together they have this shape.
    """

    key: str
    shape: tuple[int, ...]


def each_tensor(state: Any, make: Callable[[str, torch.Tensor], Any]) -> Any:  # Any: a tree
    """Return a tree with what `make` gives for each of its tensors, by its place and itself.

    >>> each_tensor({"ema": [torch.ones(2), 1]}, lambda place, one: place)
    {'ema': ["['ema'][0]", 1]}
    """
    return tree_map_with_path(
        lambda path, one: make(keystr(path), one) if isinstance(one, torch.Tensor) else one, state
    )


def filled(state: Any, elements: Mapping[str, torch.Tensor], made: Made) -> Any:
    """Return a tree with tensors where it has slots for them: what `made` makes of elements."""
    return tree_map(
        lambda one: made(elements[one.key], one.shape) if isinstance(one, Slot) else one, state
    )


def slots(state: Any) -> set[str]:
    """Return the keys of all elements that a tree has slots for."""
    found: set[str] = set()
    tree_map(lambda one: found.add(one.key) if isinstance(one, Slot) else None, state)
    return found


# ---- state of no parameter


def beside(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:  # Any: what optimizers keep
    """Return what an optimizer keeps under keys that are no tensor, as torch lets it."""
    own: MutableMapping[Any, Any] = kept(optimizer)
    return {key: one for key, one in own.items() if not isinstance(key, torch.Tensor)}


def put_beside(optimizer: torch.optim.Optimizer, found: Mapping[Any, Any]) -> None:
    """Have it keep this there, and nothing else."""
    own: MutableMapping[Any, Any] = kept(optimizer)
    for key in beside(optimizer):
        del own[key]
    own.update(found)
