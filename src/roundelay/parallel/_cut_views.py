"""Where a cut dim is in a view, and in what selects or moves elements.

A number in a program is one of the whole: `x[..., :4]` is all of a rank's four features, and half
of one device's eight. So a call is tried with another length of the dim, that of the whole or one
more: it keeps the dim if what comes out is as much longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from roundelay.parallel._cut import Call, CutDim

__all__ = ["elements_set", "moved", "viewed"]

EXACT = frozenset({"expand", "expand_as", "broadcast_to"})  # they take no other length


def viewed(call: Call) -> CutDim | list[CutDim] | None:
    """Return where the dim is in a view, or in several."""
    cut, index = call.cut[1], call.given("index", 1)
    parts = index if type(index) is tuple else (index,)
    if call.name == "getitem" and any(isinstance(each, torch.Tensor | list) for each in parts):
        return moved(call)
    if len(call.cuts) > 1 and call.name != "expand_as":
        return None
    places = _places(call, cut.here)
    if len({*places}) != 1 or places[0] is None:
        return _taken_apart(call)
    same = call.name in EXACT or places == _on_whole(call, _places)
    return cut._replace(dim=places[0]) if same else None


def elements_set(call: Call) -> CutDim | None:
    """Return the cut of a tensor in which elements are set, the same along the dim that is cut."""
    target, index, value = call.args[:3]
    if isinstance(value, torch.Tensor) and value.dim():
        return None
    cut = call.of(target)
    found = viewed(call._replace(func=torch.Tensor.__getitem__, args=(target, index)))
    if cut is None or not isinstance(found, CutDim) or found.piece is not None:
        return None
    return cut if found.parts == cut.parts else None


def _on_whole(call: Call, look: Callable[..., list[Any]]) -> list[Any]:
    """Return what is seen of a call where the dim is as long as on one device."""
    try:
        return look(call, call.cut[1].whole, whole=True)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return []  # there it is none


def _places(call: Call, length: int, *, whole: bool = False) -> list[int | None]:
    """Return which dim of each view has all of the dim, if it is so long.

    A tensor without memory tells it by its strides.
    """
    first, cut = call.cut
    shape = [*first.shape]
    shape[cut.dim] = length
    strides = [7 ** (first.dim() - at) for at in range(first.dim())]
    like = torch.empty_strided(shape, strides, device="meta")
    found: list[int | None] = []
    for view in _several(call.again(lambda _: like, whole=whole)):
        lies = [at for at, stride in enumerate(view.stride()) if stride == strides[cut.dim]]
        kept = len(lies) == 1 and view.size(lies[0]) == length
        found.append(lies[0] - view.dim() if kept else None)
    return found


def _several(made: Any) -> Sequence[torch.Tensor]:
    return (made,) if isinstance(made, torch.Tensor) else made


def _taken_apart(call: Call) -> CutDim | list[CutDim] | None:
    """Return the cut of queries, keys or values alone, or that of single heads."""
    first, cut = call.cut
    made = _numbered(call, cut.here)
    blocks = _blocks(call, cut.here) if cut.blocks else [None] * len(_several(made))
    counted = any(cut.counts(block[cut.rank]) for block in cut.blocks)
    if cut.blocks and not counted and blocks != _on_whole(call, _blocks):
        return None
    found = []
    for view, block in zip(_several(made), blocks, strict=True):
        ids = {*view.flatten().tolist()}
        if block is not None:
            found.append(cut._replace(parts=cut.blocks[block], outer=1, blocks=()))
        elif len(ids) == 1 and view.dim() < first.dim() and _of_heads(cut):
            found.append(cut._replace(piece=(ids.pop(), cut.here)))
        else:
            return None
    return found[0] if isinstance(made, torch.Tensor) else found


def _numbered(call: Call, length: int, *, whole: bool = False) -> Any:
    """Return views of a tensor whose elements are their places in the dim, if it is so long."""
    first, cut = call.cut
    shape, view = [*first.shape], [1] * first.dim()
    shape[cut.dim], view[cut.dim] = length, -1
    numbers = torch.arange(length).view(view).expand(shape)
    return call.again(lambda _: numbers, whole=whole)


def _blocks(call: Call, length: int, *, whole: bool = False) -> list[int | None]:
    """Return which block each view is, of those that the dim consists of."""
    first, cut = call.cut
    lengths = [sum(block) if whole else block[cut.rank] for block in cut.blocks]
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    spans = [[*range(start, start + long)] for start, long in zip(starts, lengths, strict=True)]
    found: list[int | None] = []
    for view in _several(_numbered(call, length, whole=whole)):
        ids = sorted({*view.flatten().tolist()})
        one = view.dim() == first.dim() and ids in spans
        found.append(spans.index(ids) if one else None)
    return found


def _of_heads(cut: CutDim) -> bool:
    """Say whether single elements of the dim are heads, and not features or tokens."""
    if cut.dim == -1 or cut.outer != 1 or cut.blocks or cut.tokens:
        return False
    return cut.heads or 1 in cut.units


def moved(call: Call) -> CutDim | None:
    """Return where the dim has gone by trying it: with one more, and its numbers for elements."""
    cut = call.cut[1]
    tensors = call.given("tensors", 0)
    first = {id(one) for one in (tensors if type(tensors) in (list, tuple) else [tensors])}
    if any(not cut.alike(other) or key not in first for key, other in call.cuts.items()):
        return None

    def numbered(one: torch.Tensor) -> torch.Tensor:
        shape, view = [*one.shape], [1] * one.dim()
        shape[cut.dim] += 1
        view[cut.dim] = -1
        return torch.arange(shape[cut.dim], device=one.device).view(view).expand(shape)

    try:
        made = call.again(numbered)
    except (RuntimeError, IndexError, TypeError):
        return None
    if not isinstance(made, torch.Tensor) or made.numel() == 0:
        return None
    for at in range(made.dim()):
        length = made.size(at)
        row = made.movedim(at, -1)
        if length == cut.here + 1 and torch.equal(
            row, torch.arange(length, device=made.device).expand(row.shape)
        ):
            return cut._replace(dim=at - made.dim())
    return None
