"""What callers pass beside tensors, in the forms that torch allows, as one struct of options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import AllreduceCoalescedOptions
from torch.distributed import ReduceOp

from roundelay.errors import InvalidArgumentError

__all__ = ["listed", "nested", "options"]


def options(
    kind: type[Any], given: object, named: Mapping[str, object], more: Sequence[object] = ()
) -> Any:  # of that kind
    """Return torch's struct of options; what is not one is a root, a reduction or a timeout."""
    if isinstance(given, (kind, AllreduceCoalescedOptions)):
        return given
    struct = kind()
    for value in (given, *more, *named.values()):
        if isinstance(value, kind):  # passed by name
            return value
        if isinstance(value, timedelta):
            struct.timeout = value
        elif isinstance(value, int):
            struct.rootRank = value
        elif isinstance(value, (ReduceOp, ReduceOp.RedOpType)):
            struct.reduceOp = value
        elif value is not None:
            raise InvalidArgumentError(
                f"{value!r} is neither {kind.__name__} nor a root, a reduction or a timeout."
            )
    return struct


def listed(tensors: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Return a list of tensors, also for one that came alone."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def nested(lists: Sequence[Any]) -> Sequence[Sequence[Tensor]]:
    """Return a list of lists of tensors, also for one list that came alone."""
    return [lists] if lists and isinstance(lists[0], Tensor) else lists
