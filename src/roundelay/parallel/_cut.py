"""Along which dim a tensor is this rank's part, and how long the parts of all ranks are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["Call", "CutDim", "name_of"]


class CutDim(NamedTuple):
    """A dim, counted from the end, of which every rank has a part, ranks in order."""

    dim: int
    parts: tuple[int, ...]  # how much of it every rank has
    rank: int
    outer: int = 1  # so many parts lie one after the other, as those of rows do
    blocks: tuple[tuple[int, ...], ...] = ()  # parts of queries, of keys, of values
    units: tuple[int, ...] = ()  # what the plan keeps together, the least first
    counted: frozenset[int] = frozenset()  # heads of this rank, as a region counts them
    piece: tuple[int, int] | None = None  # one of this rank's heads, of so many: nothing is cut
    tokens: bool = False  # a share of the sequence, and not of features

    @property
    def here(self) -> int:
        """How long the dim is on this rank."""
        if self.blocks:
            return sum(block[self.rank] for block in self.blocks)
        return self.outer * self.parts[self.rank]

    @property
    def grain(self) -> int:
        """The largest length of which every part is a multiple."""
        return math.gcd(*self.parts)

    def alike(self, other: CutDim) -> bool:
        """Say whether two tensors have the same part of something."""
        return self[:5] == other[:5] and self.piece == other.piece

    def times(self, factor: int) -> CutDim:
        """Return the cut where every element has become so many, one after the other."""
        return self._replace(
            parts=tuple(part * factor for part in self.parts),
            blocks=tuple(tuple(part * factor for part in block) for block in self.blocks),
            units=tuple(unit * factor for unit in self.units),
        )

    def by(self, length: int) -> CutDim:
        """Return the cut where so many elements, one after the other, have become one."""
        return self._replace(
            parts=tuple(part // length for part in self.parts),
            units=tuple(unit // length for unit in self.units if unit % length == 0),
        )


class Call(NamedTuple):
    """A function of torch with what it is given, and which of that is cut where."""

    func: Any  # Any: torch's
    args: Sequence[Any]
    options: dict[str, Any]
    cuts: dict[int, CutDim]  # by the ids of tensors

    @property
    def name(self) -> str:
        """What it is called, in place or not."""
        return name_of(self.func).strip("_").removeprefix("special_")

    @property
    def cut(self) -> tuple[torch.Tensor, CutDim]:
        """The first tensor that is cut."""
        return next((one, cut) for one in self.tensors() if (cut := self.cuts.get(id(one))))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return all tensors that it is given."""
        for one in tree_leaves((self.args, self.options)):
            if isinstance(one, torch.Tensor):
                yield one

    def of(self, one: Any) -> CutDim | None:
        """Return where an argument is cut."""
        return self.cuts.get(id(one))

    def given(self, name: str, position: int, otherwise: Any = None) -> Any:
        """Return an argument."""
        there = len(self.args) > position
        return self.options.get(name, self.args[position] if there else otherwise)

    def again(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Call it with other tensors in the places of those that are cut."""

        def changed(one: Any) -> Any:
            if isinstance(one, torch.Tensor):
                return change(one) if id(one) in self.cuts else one
            if type(one) in (tuple, list):
                return type(one)(changed(each) for each in one)
            return one

        options = {key: changed(value) for key, value in self.options.items()}
        return self.func(*changed(tuple(self.args)), **options)

    def fits(self, cut: CutDim) -> bool:
        """Say whether all else that is given has the same part, or nothing along that dim."""
        for one in self.tensors():
            other = self.cuts.get(id(one))
            if other is None:
                if one.dim() >= -cut.dim and one.size(cut.dim) != 1:
                    return False
            elif not cut.alike(other):
                return False
        return True


Rule = Callable[[Call], CutDim | list[CutDim] | None]


def name_of(func: Any) -> str:
    """Return what a function of torch is called; a property by its own name.

    >>> name_of(torch.Tensor.T.__get__), name_of(torch.Tensor.add_)
    ('T', 'add_')
    """
    name: str = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
    return name
