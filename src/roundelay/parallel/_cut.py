"""Along which dim a tensor is this rank's part, and how long the parts of all ranks are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from roundelay.parallel._cut_length import Length

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
    heads: bool = False  # of elements that were several features

    @property
    def here(self) -> int:
        """How long the dim is on this rank."""
        if self.blocks:
            return sum(block[self.rank] for block in self.blocks)
        return self.outer * self.parts[self.rank]

    @property
    def whole(self) -> int:
        """How long the dim is on all ranks together."""
        return sum(map(sum, self.blocks)) if self.blocks else self.outer * sum(self.parts)

    @property
    def grain(self) -> int:
        """The largest length of which every part is a multiple."""
        return math.gcd(*self.parts)

    def counts(self, length: int) -> bool:
        """Say whether a region counts so many elements on this rank, as heads or features."""
        return any(length == heads * unit for heads in self.counted for unit in (1, *self.units))

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
            heads=self.heads or length > 1,
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

    def again(self, change: Callable[[torch.Tensor], torch.Tensor], *, whole: bool = False) -> Any:
        """Call it with other tensors in the places of those that are cut.

        `whole`: as long as on one device; so are the lengths that were read off a part.
        """

        def changed(one: Any) -> Any:
            if isinstance(one, torch.Tensor):
                return change(one) if id(one) in self.cuts else one
            if type(one) in (tuple, list, torch.Size):
                return type(one)(changed(each) for each in one)
            if type(one) is slice:
                return slice(*map(changed, (one.start, one.stop, one.step)))
            return one.whole if whole and isinstance(one, Length) else one

        options = {key: changed(value) for key, value in self.options.items()}
        return self.func(*changed(tuple(self.args)), **options)

    @property
    def asks_lengths(self) -> bool:
        """Whether it asks how long a tensor is."""
        return self.name in ("shape", "size")

    def lengths(self, asked: Any) -> Any:
        """Return a shape, or one length of it, in which the dim that is cut knows its whole one."""
        x, cut = self.cut
        place, dim = x.dim() + cut.dim, self.given("dim", 1)
        if cut.piece is not None:
            return asked
        if isinstance(asked, torch.Size):
            known = (Length(n, cut.whole) if at == place else n for at, n in enumerate(asked))
            return torch.Size(known)
        return Length(asked, cut.whole) if dim in (place, cut.dim) else asked

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
