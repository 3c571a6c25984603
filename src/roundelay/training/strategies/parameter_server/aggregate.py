"""Folds the gradients of all workers into one, in rank order: the same bits as an all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from roundelay import _core
from roundelay.errors import InvalidArgumentError
from roundelay.training._intake import bits_of

__all__ = ["OwnAggregate", "aggregate_own", "fold_in_order"]

#: Makes one gradient out of those of all workers, which come in rank order.
OwnAggregate = Callable[[list[torch.Tensor]], torch.Tensor]


def fold_in_order(sources: Sequence[torch.Tensor], into: torch.Tensor, *, mean: bool) -> None:
    """Add flat tensors from left to right, in float32 where they are half; divide once."""
    divide_by = len(sources) if mean else 0
    if into.numel() == 0:
        return
    if into.device.type == "cpu":
        name = str(into.dtype).removeprefix("torch.")
        arrays = [bits_of(one) for one in (into, *sources)]
        _core.fold("avg" if mean else "sum", name, arrays[:1], arrays[1:], divide_by)
        return
    wide = torch.promote_types(into.dtype, torch.float32)
    total = sources[0].to(wide, copy=True)
    for source in sources[1:]:
        total += source
    into.copy_(total / divide_by if mean else total)


def aggregate_own(
    function: OwnAggregate, sources: Sequence[torch.Tensor], into: torch.Tensor, name: str
) -> None:
    """Have the user's function make one gradient; it must keep shape and dtype."""
    made: object = function(list(sources))
    if not isinstance(made, torch.Tensor) or (made.shape, made.dtype) != (into.shape, into.dtype):
        found = (
            f"{made.dtype} of shape {tuple(made.shape)}"
            if isinstance(made, torch.Tensor)
            else type(made).__name__
        )
        raise InvalidArgumentError(
            f"aggregate= made {found} out of the gradients of {name}, which are {into.dtype} of "
            f"shape {tuple(into.shape)}. It must keep shape and dtype."
        )
    into.copy_(made)
