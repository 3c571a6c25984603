"""How torch's operations work on divided tensors: on the pieces, together, or on the whole."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from roundelay.training.shards._reductions import REDUCTIONS, norms
from roundelay.training.shards._views import is_view, same, view_of
from roundelay.training.shards.operands import operation, tensors_in, told, written_by, wrote
from roundelay.training.shards.shard import Shard

#: What works element by element, beside what torch says does.
PIECEWISE = {
    "clone", "copy_", "fill_", "zero_", "masked_fill_", "_to_copy", "zeros_like", "ones_like",
    "full_like", "empty_like", "polar",
}  # fmt: skip
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"

Operator = Any  # torch's operators have no public type


def operate(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute one operation of which at least one operand is divided."""
    name, overload = _name(func), func._overloadname  # noqa: SLF001 - has no other name
    if name.startswith(("_foreach_", "_fused_")) or name == UNSCALE:
        return _on_lists(func, name, args, kwargs)
    first = args[0] if args else None
    if isinstance(first, Shard):
        found = _of_one(func, name, overload, first, args, kwargs)
        if found is not NotImplemented:
            return found
    if torch.Tag.nondeterministic_seeded in func.tags:
        # Every rank draws for the whole, as one device does, and keeps what it owns.
        return _on_whole(func, args, kwargs, cut=True)
    if torch.Tag.pointwise in func.tags or name in PIECEWISE:
        found = _on_pieces(func, args, kwargs)
        if found is not NotImplemented:
            return found
    return _on_whole(func, args, kwargs)


def _of_one(
    func: Operator,
    name: str,
    overload: str,
    shard: Shard,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Compute what is asked of one tensor: a number, a view, or memory of its kind."""
    reduce = REDUCTIONS.get(f"{name}.{overload}")
    if reduce is not None:
        found = NotImplemented if shard.of is not None else reduce(shard, *args[1:], **kwargs)
        if found is not NotImplemented:
            for one in _shards((args, kwargs)):
                one.looked_at(name)
        return found.to(shard.device) if isinstance(found, torch.Tensor) else found
    if name == "_local_scalar_dense":
        return shard.full().item()
    if torch.Tag.inplace_view in func.tags or name in ("set_", "resize_"):
        shard.refuse(name)
    if name.startswith("new_"):
        return _new(func, shard, args, kwargs)
    if is_view(func):
        return view_of(func, name, shard, args[1:], kwargs)
    return NotImplemented


def _name(func: Operator) -> str:
    return str(func).removeprefix("aten.").partition(".")[0]


def _shards(values: Any) -> list[Shard]:
    return [one for one in tree_leaves(values) if isinstance(one, Shard)]


# ---- on pieces


def _on_pieces(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Work element by element on what is here; NotImplemented where the whole is needed."""
    written = written_by(func, args, kwargs)
    tensors = tensors_in((args, kwargs))
    lead = next(one for one in (written or tensors) if isinstance(one, Shard) or written)
    if not isinstance(lead, Shard) or not all(map(lead.lies_like, written)):
        return NotImplemented
    # A number that is a parameter counts less than others where dtypes meet; a piece would not.
    number = not written and lead.dim() == 0 and len(tensors) > 1
    # What comes of whole and divided tensors is whole: it may be put where a whole one was, and
    # a gradient on its way, which is this rank's own, is not yet the sum that a shard is part of.
    mixed = not written and any(
        tensor.dim() and not isinstance(tensor, Shard) for tensor in tensors
    )
    if lead.of is not None or number or mixed:
        return NotImplemented
    out = bool(written) and lead is not args[0]  # has the shape of the others, or torch changes it
    shapes = {tensor.shape for tensor in tensors if not out or tensor is not lead}
    if len(shapes) > 1 or out:
        together = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        if together != lead.shape or (out and not together):
            return NotImplemented

    def take(value: Any) -> Any:
        return lead.beside(value) if isinstance(value, torch.Tensor) else value

    if kwargs.get("memory_format") is not None:
        kwargs = {**kwargs, "memory_format": torch.preserve_format}
    what = operation(_name(func), args, kwargs, written)
    made = func(*tree_map(take, args), **tree_map(take, kwargs))
    if written:
        for one in written:
            wrote(one, what)  # type: ignore[arg-type] # a shard, as found above
        return lead if len(written) == 1 else tuple(written)
    device, past = kwargs.get("device"), zlib.crc32(what.encode())
    return tree_map(
        lambda one: lead.made(one, device, past) if isinstance(one, torch.Tensor) else one, made
    )


def _new(func: Operator, shard: Shard, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make memory of another shape whole, and of the same shape divided alike."""
    like = torch.empty(0, dtype=shard.dtype, device=shard.device)
    if tuple(args[1]) != tuple(shard.shape) or shard.of is not None:
        return func(like, *args[1:], **kwargs)
    length = [shard.home.stop - shard.home.start]
    strides = [[1]] if "strided" in str(func) else []
    made = func(like, length, *strides, *args[2 + len(strides) :], **kwargs)
    what = operation(_name(func), args, kwargs)
    return shard.made(made, made.device, zlib.crc32(what.encode()))


def _on_lists(func: Operator, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operation on lists of tensors, one after the other where it is not one call."""
    if name == "_foreach_norm":
        return _norms(*args, **kwargs)
    if name == UNSCALE:
        return _unscale(func, *args)
    if name.startswith("_fused_"):
        shards = [one for one in written_by(func, args, kwargs) if isinstance(one, Shard)]
        what = operation(name, args, kwargs)
        made = func(*tree_map(_piece, args), **tree_map(_piece, kwargs))
        for shard in shards:
            wrote(shard, what)
        return made
    single = name.removeprefix("_foreach_")
    if not hasattr(torch.ops.aten, single.removesuffix("_")):
        return _on_whole(func, args, kwargs)
    lists = [one for one in args if isinstance(one, (list, tuple))]
    found = []
    for at in range(len(lists[0])):
        mine = [one[at] if isinstance(one, (list, tuple)) else one for one in args]
        options = {key: one[at] if isinstance(one, (list, tuple)) else one
                   for key, one in kwargs.items()}  # fmt: skip
        if single.startswith("addc") and len(mine) > 3:  # noqa: PLR2004 - value= has no name there
            value = mine.pop()
            options["value"] = float(value[at]) if isinstance(value, torch.Tensor) else value
        clamps = single.rstrip("_") in CLAMPS and not isinstance(mine[1], torch.Tensor)
        found.append(_call(_clamp(single) if clamps else single, mine, options))
    return None if name.endswith("_") else found


def _call(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Call an operator for one tensor, which may not have a form that writes in place."""
    aten = torch.ops.aten
    if hasattr(aten, name):
        return getattr(aten, name)(*args, **options)
    return args[0].copy_(getattr(aten, name.removesuffix("_"))(*args, **options))


CLAMPS = {"maximum": "clamp_min", "minimum": "clamp_max"}


def _clamp(single: str) -> str:
    return CLAMPS[single.rstrip("_")] + ("_" if single.endswith("_") else "")


def _norms(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Compute many norms by one call of all ranks."""
    divided = [tensor for tensor in tensors if isinstance(tensor, Shard) and tensor.of is None]
    for one in divided:
        one.looked_at("the norm")
    found = dict(zip(map(id, divided), norms(divided, *args, **kwargs), strict=True))
    wholes = {
        id(tensor): tensor.full() if isinstance(tensor, Shard) else tensor
        for tensor in tensors
        if id(tensor) not in found
    }
    found |= {
        key: torch.linalg.vector_norm(whole, *args, **kwargs) for key, whole in wholes.items()
    }
    return [found[id(tensor)] for tensor in tensors]


def _piece(value: Any) -> Any:
    return value.piece if isinstance(value, Shard) else value


def _unscale(
    func: Operator, grads: Sequence[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor
) -> None:
    """Divide gradients by the loss scale; that one of them overflowed all ranks find out."""
    pieces = [_piece(grad) for grad in grads]
    here = found.to(pieces[0].device)
    func(pieces, here, inverse.to(here.device))
    found.copy_(_shards(grads)[0].home.together(here).max())


# ---- on the whole


def _on_whole(
    func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], *, cut: bool = False
) -> Any:
    """Compute from whole tensors, on every rank alike; or `cut` the result into pieces again."""
    lead = _shards((args, kwargs))[0]
    writes = [one for one in written_by(func, args, kwargs) if isinstance(one, Shard)]
    first = args[0] if args else None
    opened: dict[int, _Open] = {}

    def take(value: Any) -> Any:
        if not isinstance(value, Shard):
            return value
        if id(value) not in opened:
            out = value is not first and any(value is write for write in writes)
            opened[id(value)] = _Open(value, out=out)
        return opened[id(value)].whole

    what = operation(_name(func), args, kwargs, writes)
    made = func(*tree_map(take, args), **tree_map(take, kwargs))
    written = [opened[id(write)] for write in writes]
    if cut:  # each rank has drawn for the whole
        drawn = [one.whole for one in written] or made
        what = f"{what} gave {told(drawn)}"
    for one in written:
        one.put_back(str(func), what)

    def give(value: Any) -> Any:
        for one in written:
            if value is one.whole:
                return one.shard
        if cut and isinstance(value, torch.Tensor) and value.shape == lead.shape:
            return (
                value
                if lead.of is not None
                else lead.made(lead.home.cut(value).clone(), past=zlib.crc32(what.encode()))
            )
        return value

    return tree_map(give, made)


class _Open:
    """A divided tensor made whole for one operation."""

    def __init__(self, shard: Shard, *, out: bool) -> None:
        """For `out`, of which torch makes the shape that it needs, there is memory of none."""
        self.shard = shard
        self._root, view = shard.of or (shard, same)
        self._base = self._root.full()
        self._there = view(self._base)
        self.whole = self._there.new_empty(0) if out else self._there

    def put_back(self, name: str, what: str) -> None:
        """Write what is there now to where it lies."""
        if self.whole.shape != self.shard.shape:
            self.shard.refuse(f"{name} into another shape, {tuple(self.whole.shape)},")
        if self.whole is not self._there:
            self._there.copy_(self.whole)
        self._root.piece.copy_(self._root.home.cut(self._base))
        path = self.shard.path
        wrote(self._root, f"{what} at {path:08x}" if path else what)
