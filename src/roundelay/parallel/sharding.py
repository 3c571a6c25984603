"""Which part of a whole tensor a rank of an axis has, and how the whole comes together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

import torch

from roundelay.communicator import Communicator
from roundelay.parallel.part import PartParameter

__all__ = ["Sharding", "mark_divided", "shard_parameter", "sharding_of", "take_whole"]

EXPERTS = "ep"  # the axis along which ranks have other rows, and parts of parameters
Pieces = tuple[tuple[int, int], ...]  # where the pieces that a rank has start and stop


@dataclass(frozen=True)
class Sharding:
    """One dim of a tensor, divided along an axis of a mesh.

    Every rank has some pieces of the dim, one after the other: a fused projection of queries, keys
    and values is cut in three places, so that a rank has its heads of each.
    """

    axis: str
    comm: Communicator
    dim: int
    pieces: tuple[Pieces, ...]  # of every rank
    #: Who computes with the parts: methods of modules that somebody has written, or our layers.
    by: Literal["hand", "plan", "experts"] = field(default="hand", compare=False)
    #: Which parameter of those that these ranks have parts of; calls for another one are told.
    number: int = field(default=0, compare=False)

    @property
    def has_rows(self) -> bool:
        """Whether ranks have rows of their own, so that one device's loss is the mean of theirs."""
        return self.by == "experts" or self.axis == EXPERTS

    @property
    def counts(self) -> list[int]:
        """How long the dim is on every rank."""
        return [sum(stop - start for start, stop in pieces) for pieces in self.pieces]

    def whole_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        shape = list(local)
        shape[self.dim] = sum(self.counts)
        return tuple(shape)

    def local(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor, in memory of its own."""
        mine = [
            whole.narrow(self.dim, start, stop - start)
            for start, stop in self.pieces[self.comm.rank]
        ]
        return torch.cat(mine, self.dim).contiguous().clone()

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor of what every rank has. All ranks of the axis call it."""
        rows = local.detach().movedim(self.dim, 0).contiguous()
        counts = self.counts
        gathered = self.comm.all_gather(rows, axis=0, counts=counts)
        every = torch.split(gathered, counts)
        result = rows.new_empty(sum(counts), *rows.shape[1:])
        for pieces, theirs in zip(self.pieces, every, strict=True):
            lengths = [stop - start for start, stop in pieces]
            for (start, stop), piece in zip(pieces, torch.split(theirs, lengths), strict=True):
                result[start:stop] = piece
        return result.movedim(0, self.dim).contiguous()


def shard_parameter(parameter: torch.nn.Parameter, sharding: Sharding) -> None:
    """Keep this rank's part of a parameter; it stays the same object, in modules and optimizers."""
    with torch.no_grad():
        mine = sharding.local(parameter.data)
        # A graph that is still there would have torch expect gradients of the old shape; it forgets
        # that with the dtype.
        other = torch.float64 if mine.dtype is torch.float32 else torch.float32
        parameter.data = torch.empty(0, dtype=other, device=mine.device)
        parameter.data = mine
        if parameter.grad is not None:
            parameter.grad = sharding.local(parameter.grad)
    mark_divided(parameter, sharding)


def mark_divided(parameter: torch.nn.Parameter, sharding: Sharding) -> None:
    """Have a parameter, and every copy of it, know that it is a part."""
    numbers: count[int] = vars(sharding.comm).setdefault("parts", count(1))
    sharding = replace(sharding, number=next(numbers))

    def copied(memo: dict[int, Any]) -> torch.nn.Parameter:
        if id(parameter) not in memo:
            twin = torch.nn.Parameter(parameter.data.clone(), parameter.requires_grad)
            mark_divided(twin, sharding)
            memo[id(parameter)] = twin
        found: torch.nn.Parameter = memo[id(parameter)]
        return found

    vars(parameter).update({"sharding": sharding, "__deepcopy__": copied})
    if sharding.comm.size > 1:
        parameter.__class__ = PartParameter


def sharding_of(parameter: torch.Tensor) -> Sharding | None:
    """Return how a parameter is divided along an axis of the mesh; None if ranks have it whole."""
    sharding: Sharding | None = vars(parameter).get("sharding")
    return sharding


def take_whole(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Have `load_state_dict` of a module take whole tensors, of which this rank keeps its part.

    It is a hook that torch calls with a copy of the dict that it was given.
    """
    for name, parameter in module.named_parameters(recurse=False):
        sharding, given = sharding_of(parameter), state_dict.get(prefix + name)
        if sharding is None or not isinstance(given, torch.Tensor):
            continue
        whole = sharding.whole_shape(parameter.shape)
        if tuple(given.shape) == whole != tuple(parameter.shape):
            state_dict[prefix + name] = sharding.local(given)
