"""Places that count this rank's tokens from 0, where others' tokens stand before them.

`torch.arange(x.shape[1])` and the first rows of a table are the places of a whole sequence, and on
every rank but the first they are wrong. What is computed of them is followed, and refused where
attention or a tensor that has tokens meets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from roundelay.parallel._cut_dim import words

__all__ = ["Places"]

STARTS = words("arange narrow __getitem__ cumsum")
#: What takes nothing of a tensor but its shape.
SHAPES = words("zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones "
               "new_empty new_full new_tensor")  # fmt: skip
Counts = Mapping[int, str]  # how many are counted, and by what


class Places:
    """The tensors that were made of places from 0 on."""

    def __init__(self) -> None:
        self._held: Any = WeakTensorKeyDictionary()  # Any: torch leaves out its types
        self._free: Any = WeakTensorKeyDictionary()

    def let(self, x: torch.Tensor) -> torch.Tensor:
        """Have a tensor not be followed: its places are this rank's, whoever asks."""
        self._free[x] = True
        return x

    def of(self, tensors: Iterable[Any]) -> Counts:
        """Return which places went into tensors."""
        found: dict[int, str] = {}
        if len(self._held):
            for one in tensors:
                if isinstance(one, torch.Tensor):
                    found |= self._held.get(one, {})
        return found

    def follow(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        options: Mapping[str, Any],
        result: Any,
    ) -> None:
        """Know of what a function has given that it was made of places."""
        name = getattr(func, "__name__", "")
        if name in SHAPES or not (name in STARTS or len(self._held)):
            return
        leaves = [one for one in tree_leaves((args, options)) if isinstance(one, torch.Tensor)]
        if any(one in self._free for one in leaves):
            return
        found = {**self.of(leaves), **dict(_counted(name, args, options))}
        for one in tree_leaves(result) if found else ():
            if isinstance(one, torch.Tensor):
                self._held[one] = found


def problem(what: str, length: int) -> str:
    """Return what is wrong with places that begin at 0 on every rank."""
    return (
        f"A model inside context_parallel takes the places 0 to {length - 1} for this rank's "
        f"{length} tokens, by {what}; but tokens of other ranks stand before them. Give it those "
        f"of rd.sequence_positions, as position_ids say, and have it look up tables by these; or "
        f"say rd.local(places) where the code has seen to it."
    )


def _counted(
    name: str, args: Sequence[Any], options: Mapping[str, Any]
) -> Iterator[tuple[int, str]]:
    """Yield how many places a call counts from 0, and the call in words."""
    x = args[0] if args else None
    if name == "arange":
        order = ("end",) if len(args) == 1 else ("start", "end", "step")
        given = {"start": 0, "step": 1, **dict(zip(order, args, strict=False)), **options}
        start, end, step = given["start"], given["end"], given["step"]
        numbers = all(isinstance(one, (int, float)) for one in (start, end, step))
        if numbers and (start, step) == (0, 1) and end == int(end):
            yield int(end), f"torch.arange({int(end)})"
    elif name == "narrow" and isinstance(x, torch.Tensor):
        named = (options.get(word) for word in ("dim", "start", "length"))
        dim, start, length = (*args[1:], *(one for one in named if one is not None))
        if isinstance(dim, int) and start == 0 and isinstance(length, int):
            yield from _first(x, dim % max(1, x.dim()), length)
    elif name == "cumsum" and isinstance(x, torch.Tensor) and not x.is_floating_point():
        if x.dim():  # of a mask of tokens
            yield x.size(-1), f"cumsum of shape {[*x.shape]}"
    elif name == "__getitem__" and isinstance(x, torch.Tensor):
        yield from _first_rows(x, args[1])


def _first_rows(x: torch.Tensor, index: Any) -> Iterator[tuple[int, str]]:
    """Yield the slices of an index that take the first of more."""
    each = index if isinstance(index, tuple) else (index,)
    at = 0
    for number, one in enumerate(each):
        if one is Ellipsis:
            at = x.dim() - sum(other is not None for other in each[number + 1 :])
            continue
        first = isinstance(one, slice) and one.start in (None, 0) and one.step in (None, 1)
        if first and isinstance(one.stop, int) and at < x.dim():
            yield from _first(x, at, one.stop)
        at += one is not None


def _first(x: torch.Tensor, dim: int, length: int) -> Iterator[tuple[int, str]]:
    """Yield the first rows of a table, which has more; along the last dim there are features."""
    if 0 < length < x.size(dim) and (dim < x.dim() - 1 or x.dim() == 1):
        yield length, f"the first {length} of a tensor of shape {[*x.shape]}"
