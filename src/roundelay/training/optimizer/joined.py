"""The optimizers of one model, as if they were one: all their groups, and all their state."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch

__all__ = ["JoinedOptimizers"]

State = dict[str, Any]  # Any: what optimizers keep


class JoinedOptimizers:
    """Several optimizers in the order that the user gave them; often it is one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.all = list(optimizers)
        self.state: MutableMapping[torch.Tensor, State] = _States(self.all)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all of them, live."""
        return [group for one in self.all for group in one.param_groups]

    @property
    def name(self) -> str:
        """The classes that the user chose."""
        return " + ".join(type(one).__name__ for one in self.all)

    def owner(self, group: int) -> int:
        """Return which of them a group belongs to.

        >>> weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
        >>> first = torch.optim.SGD([{"params": one} for one in weights[:2]])
        >>> joined = JoinedOptimizers([first, torch.optim.Adam(weights[2:])])
        >>> [joined.owner(group) for group in range(3)]
        [0, 0, 1]
        """
        counts = (len(one.param_groups) for one in self.all)
        return [place for place, count in enumerate(counts) for _ in range(count)][group]

    def groups_of(self, place: int) -> slice:
        """Return which of the groups are those of one optimizer."""
        begin = sum(len(one.param_groups) for one in self.all[:place])
        return slice(begin, begin + len(self.all[place].param_groups))


def kept(optimizer: torch.optim.Optimizer) -> MutableMapping[torch.Tensor, State]:
    """Return the state of an optimizer by what it steps on, whatever it shows to the user."""
    found: MutableMapping[torch.Tensor, State] = vars(optimizer)["state"]
    return found


class _States(MutableMapping[torch.Tensor, State]):
    """By tensor, whichever optimizer steps on it."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, tensor: torch.Tensor) -> MutableMapping[torch.Tensor, State]:
        if len(self._optimizers) > 1:
            for optimizer in self._optimizers:
                if any(
                    tensor is mine for group in optimizer.param_groups for mine in group["params"]
                ):
                    return kept(optimizer)
        return kept(self._optimizers[0])

    def __getitem__(self, tensor: torch.Tensor) -> State:
        for optimizer in self._optimizers:
            if tensor in kept(optimizer):
                found: State = kept(optimizer)[tensor]
                return found
        raise KeyError(tensor)

    def __setitem__(self, tensor: torch.Tensor, state: State) -> None:
        self._of(tensor)[tensor] = state

    def __delitem__(self, tensor: torch.Tensor) -> None:
        for optimizer in self._optimizers:
            if tensor in kept(optimizer):
                del kept(optimizer)[tensor]
                return
        raise KeyError(tensor)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (tensor for optimizer in self._optimizers for tensor in kept(optimizer))

    def __len__(self) -> int:
        return sum(len(kept(optimizer)) for optimizer in self._optimizers)
