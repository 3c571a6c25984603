"""Where elements of a tensor that an axis of a mesh divides lie in the whole one, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from roundelay.parallel.sharding import Sharding
from roundelay.training.checkpoint.parts import Saved, SavedPart
from roundelay.training.optimizer.state_tree import Slot

if TYPE_CHECKING:
    from roundelay.training._setup import Parameter, Setup

__all__ = [
    "Window",
    "from_windows",
    "local_state",
    "of_whole",
    "shapes_of",
    "whole_shape",
    "window_of",
]

#: Gives elements from one place to another of a flattened tensor.
Read = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Window:
    """Some stretches of one dim of a whole tensor, one after the other, as a rank holds them."""

    dim: int
    spans: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        """How long the dim is in the window."""
        return sum(stop - start for start, stop in self.spans)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of what is in the window.

        >>> Window(1, ((0, 2), (4, 6))).shape((3, 8))
        (3, 4)
        """
        return (*whole[: self.dim], self.length, *whole[self.dim + 1 :])

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Yield where each stretch begins and ends in the whole dim, and where it begins here."""
        at = 0
        for start, stop in self.spans:
            yield start, stop, at
            at += stop - start

    def read(self, whole: Read, shape: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """Return elements of the window, flat, out of a whole tensor of this shape.

        >>> numbers = torch.arange(12)  # 2 rows of 6, of which these are the last 2 and the first
        >>> Window(1, ((4, 6), (0, 1))).read(lambda a, b: numbers[a:b], (2, 6), 1, 5)
        tensor([ 5,  0, 10, 11])
        """
        if start >= stop:
            return whole(0, 0)
        inner = math.prod(shape[self.dim + 1 :])
        outside, inside = shape[self.dim] * inner, self.length * inner
        first, last = start // inside, -(-stop // inside)
        low, high = start - first * inside, stop - first * inside
        if last - first > 1:
            rows = whole(first * outside, last * outside).view(last - first, -1, inner)
            mine = torch.cat([rows[:, begin:end] for begin, end in self.spans], 1)
            return mine.reshape(-1)[low:high]
        found = []
        for begin, end, at in self.places():
            one, two = max(low, at * inner), min(high, (at + end - begin) * inner)
            if one < two:
                move = first * outside + (begin - at) * inner
                found.append(whole(one + move, two + move))
        return found[0] if len(found) == 1 else torch.cat(found)


def from_windows(
    windows: Sequence[tuple[Window, Read]], shape: Sequence[int], start: int, stop: int
) -> torch.Tensor:
    """Return elements of a whole tensor, flat, out of windows that together have all of it.

    >>> left, right = torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])
    >>> halves = [(Window(1, ((0, 2),)), lambda a, b: left[a:b]),
    ...           (Window(1, ((2, 4),)), lambda a, b: right[a:b])]
    >>> from_windows(halves, (2, 4), 1, 7)
    tensor([1, 2, 3, 4, 5, 6])
    """
    if start >= stop:
        return windows[0][1](0, 0)
    dim = windows[0][0].dim
    inner = math.prod(shape[dim + 1 :])
    outside = shape[dim] * inner
    first, last = start // outside, -(-stop // outside)
    low, high = start - first * outside, stop - first * outside
    if last - first > 1:
        whole: torch.Tensor | None = None
        for window, read in windows:
            inside = window.length * inner
            mine = read(first * inside, last * inside).view(last - first, -1, inner)
            if whole is None:
                whole = mine.new_empty(last - first, shape[dim], inner)
            for begin, end, at in window.places():
                whole[:, begin:end] = mine[:, at : at + end - begin]
        return torch.empty(0) if whole is None else whole.view(-1)[low:high]
    found: dict[int, torch.Tensor] = {}
    for window, read in windows:
        for begin, end, at in window.places():
            one, two = max(low, begin * inner), min(high, end * inner)
            if one < two:
                move = first * window.length * inner + (at - begin) * inner
                found[one] = read(one + move, two + move)
    pieces = [found[place] for place in sorted(found)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def window_of(sharding: Sharding, rank: int | None = None) -> Window:
    """Return the window that a rank of the axis has, this one or another."""
    return Window(sharding.dim, sharding.pieces[sharding.comm.rank if rank is None else rank])


def whole_shape(setup: Setup, parameter: Parameter) -> tuple[int, ...]:
    """Return the shape of a whole parameter, of which a rank may have a part."""
    shape, mesh = tuple(parameter.tensor.shape), setup.mesh
    return shape if mesh is None else mesh.whole_shape(parameter.name, shape)


def shapes_of(setup: Setup) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters, whole, by their first names."""
    mesh = setup.mesh
    return {
        name: tuple(one.shape) if mesh is None else mesh.whole_shape(name, one.shape)
        for name, one in setup.model.named_parameters()
    }


def of_whole(setup: Setup, part: SavedPart) -> dict[str, Any]:
    """Return what the optimizer has on a parameter as a whole, as one device would have it."""
    whole, mesh = dict(part.whole), setup.mesh
    if not whole or mesh is None or part.name not in mesh.shardings:
        return whole
    parameter = next(one for one in setup.parameters if one.name == part.name)
    after: dict[str, Any] = _reshaped(whole, parameter.tensor.shape, whole_shape(setup, parameter))
    return after


def local_state(setup: Setup, saved: Saved) -> Saved:
    """Return a checkpoint as this rank reads it, which may have parts of some parameters."""
    mesh = setup.mesh
    if mesh is None or not mesh.shardings:
        return saved
    return _LocalState(saved, mesh.shardings, shapes_of(setup))


class _LocalState:
    """A checkpoint of whole tensors as a rank reads it that has a window of some of them."""

    def __init__(self, saved: Saved, shardings: Mapping[str, Sharding], shapes: Shapes) -> None:
        self._saved, self._shardings, self._shapes = saved, shardings, shapes

    def values(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return some elements of a flattened parameter."""
        if name not in self._shardings:
            return self._saved.values(name, start, stop)
        window = window_of(self._shardings[name])
        return window.read(
            lambda low, high: self._saved.values(name, low, high), self._shapes[name], start, stop
        )

    def state(self, name: str, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the optimizer's state on these elements, flat."""
        if name not in self._shardings:
            return self._saved.state(name, start, stop)
        window, shape = window_of(self._shardings[name]), self._shapes[name]
        keys = self._saved.state(name, 0, 0)
        return {
            key: window.read(
                lambda low, high, key=key: self._saved.state(name, low, high)[key],  # type: ignore[misc]
                shape, start, stop,
            )
            for key in keys
        }  # fmt: skip

    def whole_state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state that belongs to the whole parameter."""
        whole = self._saved.whole_state(name)
        if name not in self._shardings:
            return whole
        shape = self._shapes[name]
        local: dict[str, Any] = _reshaped(
            whole, shape, window_of(self._shardings[name]).shape(shape)
        )
        return local


Shapes = Mapping[str, Sequence[int]]  # of whole tensors, by name


def _reshaped(state: Any, before: Sequence[int], after: Sequence[int]) -> Any:  # Any: a tree
    """Return state whose places for elements of a tensor have the shape of another one."""
    old, new = tuple(before), tuple(after)
    return tree_map(
        lambda leaf: (
            replace(leaf, shape=new)
            if isinstance(leaf, Slot) and tuple(leaf.shape) == old
            else leaf
        ),
        state,
    )
