"""Where a cut dim goes when a tensor is given another shape.

Elements keep their order. What lies behind each other on one device must do so here: a dim that is
cut may be put together with others, or be divided, if its parts become the first of the pieces and
the others are as long as on one device. So the pieces behind are written down, and not counted on
this rank; or they are what the plan keeps together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from roundelay.parallel._cut import Call, CutDim
from roundelay.parallel._cut_length import Length

__all__ = ["MiscountedError", "reshaped"]

MANY = 1_000_003  # a prime that no shape has


class MiscountedError(RuntimeError):
    """A shape counts what only all ranks together have."""


def reshaped(call: Call) -> CutDim | None:
    """Return where the dim has gone: into one with others, or into several."""
    first, cut = call.cut
    if isinstance(call.given("dtype", 1), torch.dtype):
        return cut if first.element_size() == call.given("dtype", 1).itemsize else None
    like = torch.empty(first.shape, dtype=first.dtype, device="meta")
    new = [*call.again(lambda _: like).shape]
    said = _said(call, first, cut)
    if said is None:  # of other dims
        other = call.given("dim" if call.name == "unflatten" else "start_dim", 1, 0)
        before = first.dim() + cut.dim < other % first.dim()
        return cut._replace(dim=cut.dim - (len(new) - first.dim()) * before)
    counting = [each if each != first.size(cut.dim) else -1 for each in new]
    if new == [*first.shape] and said in (new, counting):
        return cut
    return _followed(first, cut, said, new) if first.numel() else None


def _followed(first: torch.Tensor, cut: CutDim, said: list[int], new: list[int]) -> CutDim | None:
    """Follow the dim into another shape."""
    kept = _kept(first, cut, said, new)
    if kept is not None:
        return kept
    if cut.blocks and len({*cut.blocks}) > 1:
        return None
    found = None
    if -1 in said and not (1 in cut.counted and _alone(first, cut, new)):
        found = _of_any_length(first, cut, said)
    return found or _of_this_length(first, cut, said, new)


def _said(call: Call, first: torch.Tensor, cut: CutDim) -> list[int] | None:
    """Return the shape that is asked for, in which -1 may stand; None: that dim stays."""
    shape, name = [*first.shape], call.name
    place = len(shape) + cut.dim
    if name in ("flatten", "ravel"):
        start, end = call.given("start_dim", 1, 0), call.given("end_dim", 2, -1)
        start, end = start % len(shape), end % len(shape)
        return [*shape[:start], -1, *shape[end + 1 :]] if start <= place <= end else None
    if name in ("view_as", "reshape_as"):
        return [*call.given("other", 1).shape]
    if name == "unflatten":
        dim = call.given("dim", 1) % len(shape)
        sizes = call.given("sizes", 2)
        return [*shape[:dim], *sizes, *shape[dim + 1 :]] if dim == place else None
    sizes = call.args[1:] or [call.options.get("shape", call.options.get("size"))]
    return [*(sizes[0] if isinstance(sizes[0], Sequence) else sizes)]


def _kept(first: torch.Tensor, cut: CutDim, said: list[int], new: list[int]) -> CutDim | None:
    """Return the cut of a dim that is written down as long as it is, others before it being one."""
    place, length = first.dim() + cut.dim, first.size(cut.dim)
    if -1 not in said or [*said[:place], -1] == [
        *first.shape[:place],
        said[place] if place < len(said) else 0,
    ]:
        return None
    for at, size in enumerate(new):
        here = size == length and math.prod(new[at + 1 :]) == _behind(first, cut)
        lone = at > 0 and said[at - 1] == 1 and 1 in cut.counted  # this rank's one head
        if here and -1 in said[:at] and not lone:
            if isinstance(said[at], Length):  # this rank's, as it was asked for
                return cut._replace(dim=at - len(new))
            if not cut.counts(length):  # one device's number, for it counts nothing here
                continue
            if length in cut.units:
                what = f"{length}, of which nobody sees whether they are one head or all features"
                raise MiscountedError(what)
            return cut._replace(dim=at - len(new))
    return None


def _of_any_length(first: torch.Tensor, cut: CutDim, said: list[int]) -> CutDim | None:
    """Follow the dim as if it were another one's: what is not written down grows with it."""
    many = first.numel() * MANY
    new = [each if each != -1 else many // -math.prod(said) for each in said]
    count = cut.parts[cut.rank] * MANY
    return _placed(_behind(first, cut), count, new, cut)


def _of_this_length(
    first: torch.Tensor, cut: CutDim, said: list[int], new: list[int]
) -> CutDim | None:
    """Follow the dim by its length here, where a shape may count this rank's heads."""
    behind, count = _behind(first, cut), cut.parts[cut.rank]
    place = _place(behind, behind * count, new)
    if place is None:
        return None
    at, stride = place
    alone = _alone(first, cut, new)
    if stride <= behind and not alone:  # in one with others, or as it was
        if stride == behind and new[at + 1 : at + 2] == [1] and first.shape[cut.dim :][1:2] != (1,):
            what = f"{new[at]} of 1, where nobody sees which of the two is this rank's number"
            raise MiscountedError(what)
        found = _placed(behind, count, new, cut)
        grown = found is not None and not _of_rows(found.outer // cut.outer, first, cut, said)
        return None if grown or -1 in said[at:] else found
    if alone:  # the dim before it counts the one head of this rank
        at, stride = at - 1, stride * count
    together, rest = divmod(stride, behind)
    outer = new[at] * stride // (behind * count)
    _check_pieces(cut, new, at, 0 if rest else together)
    within = -1 in said[at:] and math.prod(new[said.index(-1) + 1 :]) < stride
    counted = new[at] // max(1, outer) in cut.counted
    if (within and not counted) or not _of_rows(outer, first, cut, said):
        what = f"{new[at]} of them, and as much in each as this rank happens to have"
        raise MiscountedError(what)
    return _placed(behind, count, new, cut, at)


def _alone(first: torch.Tensor, cut: CutDim, new: list[int]) -> bool:
    """Say whether all that this rank has is one head, behind a dim that counts it."""
    place = _place(_behind(first, cut), _behind(first, cut) * cut.parts[cut.rank], new)
    if place is None or not place[0]:
        return False
    at, count = place[0], cut.parts[cut.rank]
    return count in cut.units and new[at] == count and new[at - 1] == 1


def _of_rows(outer: int, first: torch.Tensor, cut: CutDim, said: list[int]) -> bool:
    """Say whether so many parts in one dim are those of whole dims before it."""
    dims = [*first.shape[: first.dim() + cut.dim]]
    rows = {math.prod(dims[at:]) for at in range(len(dims) + 1)}
    return outer == 1 or (outer in rows and -1 not in said)


def _check_pieces(cut: CutDim, new: Sequence[int], at: int, together: int) -> None:
    """Refuse pieces that are not those that the plan keeps together."""
    if together not in cut.units:
        kept = ", ".join(map(str, cut.units)) or "1"
        what = f"{new[at]} of {together}, and {kept} stay together"
        raise MiscountedError(what)
    several = at + 2 < len(new) and new[at + 1] != together
    fused = several and len(cut.units) > 1
    odd = fused and (together != cut.units[-1] or new[at] == new[at + 1])
    if odd or (cut.blocks and at and new[at - 1] == new[at]):
        what = f"{tuple(new)}, of which nobody sees which ones are heads: write -1 for them"
        raise MiscountedError(what)


def _behind(first: torch.Tensor, cut: CutDim) -> int:
    return first.shape[cut.dim :].numel() // max(1, first.size(cut.dim))


def _place(behind: int, end: int, new: Sequence[int]) -> tuple[int, int] | None:
    """Return the dim in which a run of elements ends, and how many lie behind one of its own."""
    strides = [math.prod(new[at + 1 :]) for at in range(len(new))]
    for at, stride in enumerate(strides):
        if behind == end == stride and new[at] == 1:
            return at, stride
    for at, stride in enumerate(strides):
        if stride < end <= stride * new[at]:
            return at, stride
    return None


def _placed(
    behind: int, count: int, new: Sequence[int], cut: CutDim, at: int | None = None
) -> CutDim | None:
    """Return the dim that has the parts of ranks, if each part is whole there."""
    place = _place(behind, behind * count, new)
    if at is not None:
        place = at, math.prod(new[at + 1 :])
    if place is None:
        return None
    at, stride = place
    outer, odd = divmod(new[at] * stride, behind * count)
    if odd or not outer:
        return None
    found = cut._replace(dim=at - len(new), outer=outer, blocks=())
    if stride <= behind:
        many = behind // stride
        return (
            None if behind % stride else found._replace(heads=found.heads and many == 1).times(many)
        )
    together, odd = divmod(stride, behind)
    return None if odd or cut.grain % together else found.by(together)
