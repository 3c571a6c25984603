"""Parameters that several stages share, on ranks of their own: their gradients become the sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from roundelay.communicator import Communicator
from roundelay.reductions import Array
from roundelay.training.shards.shard import Shard

ROUNDING = {8: 1e-9, 4: 1e-4}  # of a norm, by the bytes of an element
NUMBERS = 4  # by which a copy is compared
APART = (
    "The parameter {name} is shared by stages of this pipeline, and rank {other} has other values "
    "of it than rank {first}. Copies stay equal if all ranks write the same into them and step "
    "with the same options: one lr= for all stages. rd.load or load_state_dict makes them equal "
    "again."
)
FROZEN = (
    "The parameter {name} is shared by stages of this pipeline, and of ranks {first} and {other} "
    "one has frozen it by requires_grad_(False) and the other has not. Freeze and unfreeze it on "
    "all ranks that have it, whatever name it has there."
)


class TiedParameters:
    """What this rank shares with others: each has a copy, and all copies get the same gradient.

    While micro-batches come, gradients are set aside. At the end of the step ranks exchange them,
    add them up in one order, and a last backward pass brings the sum to every copy, so that the
    copies stay equal to the last bit.
    """

    def __init__(
        self, holder: nn.Module, comm: Communicator, shared: dict[str, list[int]], names: Any
    ) -> None:
        self._shared: list[tuple[nn.Parameter, Communicator]] = []
        self._places: list[int] = []  # of those in `names`
        #: Of all that ranks share, here or elsewhere: the first name.
        self.names = [*shared]
        #: In a step: those that are trained, and their gradients so far.
        self._now: list[tuple[nn.Parameter, Communicator]] = []
        self._aside: list[torch.Tensor | None] = []
        groups: dict[tuple[int, ...], Communicator | None] = {}
        own = dict(holder.named_parameters(remove_duplicate=False))
        for place, (name, ranks) in enumerate(shared.items()):
            key = tuple(ranks)
            if key not in groups:  # all ranks make the groups, in one order
                groups[key] = comm.group(ranks)
            group = groups[key]
            mine = next((other for other in names(name) if other in own), None)
            if group is not None and mine is not None:
                group.follow_timeout(comm)
                parameter = own[mine]
                with torch.no_grad():
                    group.broadcast(parameter.detach())
                self._shared.append((parameter, group))
                self._places.append(place)
        self._hooks: list[Any] = []

    def __bool__(self) -> bool:
        """Whether gradients of some are added up, which are not frozen."""
        return any(parameter.requires_grad for parameter, _ in self._shared)

    def marks(self) -> list[int]:
        """Return the bits of four numbers for each in `names`, by which copies are compared.

        A norm, with 1 added, by how much one half is more than the other, whether it is frozen, and
        how much of the norm copies may differ by: strategies that step on parts of rows may round
        the last bit of a copy otherwise. All are 0 for what is not here.
        """
        found = np.zeros((len(self.names), NUMBERS))
        for place, (parameter, _) in zip(self._places, self._shared, strict=True):
            values = parameter.full() if isinstance(parameter, Shard) else parameter.detach()
            flat = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
            norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
            half, rest = (part.sum(dtype=torch.float64) for part in flat.tensor_split(2))
            more = float(half - rest) / max(1, flat.numel()) ** 0.5
            frozen = not parameter.requires_grad
            found[place] = 1 + float(norm), more, frozen, ROUNDING.get(flat.itemsize, 1e-2)
        bits: list[int] = found.reshape(-1).view(np.int64).tolist()
        return bits

    def apart(self, marks: Array, ranks: Sequence[int]) -> str:
        """Say how copies of the first that ranks have otherwise differ; nothing if none does."""
        every = np.ascontiguousarray(marks).view(np.float64).reshape(len(marks), -1, NUMBERS)
        for at, name in enumerate(self.names):
            here = np.flatnonzero(every[:, at, 0])
            given = every[here, at]
            for off, why in (
                (given[:, 2] != given[0, 2], FROZEN),
                (np.abs(given - given[0])[:, :2].max(1) > given[0, 3] * (given[:, 0].max() - 1),
                 APART),
            ):  # fmt: skip
                if off.any():
                    first, other = ranks[here[0]], ranks[here[off.argmax()]]
                    return why.format(name=name, first=first, other=other)
        return ""

    def set_aside(self) -> None:
        """Keep gradients of these parameters apart from now on, where they are trained."""
        self._now = [each for each in self._shared if each[0].requires_grad]
        self._aside = [None] * len(self._now)
        self._hooks = [
            parameter.register_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, (parameter, _) in enumerate(self._now)
        ]

    def _hook(self, index: int) -> Any:
        def keep(grad: torch.Tensor) -> torch.Tensor:
            before = self._aside[index]
            self._aside[index] = grad.clone() if before is None else before + grad
            return torch.zeros_like(grad)

        return keep

    def release(self) -> None:
        """Leave gradients alone again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def bring_together(self) -> None:
        """Add up over ranks what was set aside, and give every copy the sum."""
        sums = [
            _summed(group, torch.zeros_like(parameter) if mine is None else mine)
            for (parameter, group), mine in zip(self._now, self._aside, strict=True)
        ]
        ends = [
            (parameter * total).sum() for (parameter, _), total in zip(self._now, sums, strict=True)
        ]
        self._now, self._aside = [], []
        if ends:
            torch.autograd.backward(ends)


def _summed(group: Communicator, mine: torch.Tensor) -> torch.Tensor:
    every: Sequence[torch.Tensor] = list(group.all_gather(mine.contiguous()))
    total = every[0].clone()
    for other in every[1:]:
        total += other
    return total
