"""Parameters that are elsewhere at the moment: they compute as their shards do."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map

from roundelay.errors import InvalidArgumentError
from roundelay.parallel.part import mapped, on_parts
from roundelay.training.shards.parameter import WholeOf, asks, itself, written
from roundelay.training.shards.shard import Shard, nothing

__all__ = [
    "TRANSFORMED",
    "Absence",
    "ShardedParameter",
    "absence",
    "is_divided",
    "reshard_parameter",
    "transformed",
    "unshard_parameter",
]

MARK = "_roundelay_away"
DIVIDED = (
    "is divided between the ranks under zero3 and whole only while its module runs. Look at it and "
    "write into it inside `with rd.whole(module)`, or look at all by rd.full_state_dict(model), "
    "load it by rd.load, and name the module that computes with it in rd.Zero(stage=3, units=…)."
)


TRANSFORMED = (
    "torch.func transforms what a function computes, and {name} is divided between the ranks under "
    "zero3. Transform inside `with rd.whole(model):`, where parameters are whole."
)
_MAKES = torch.nn.Parameter.__new__.__code__  # makes another parameter of one
_functorch = torch._C._functorch  # noqa: SLF001 - torch has no other name


def transformed() -> bool:
    """Tell whether torch.func takes derivatives of what runs; vmap alone does as ever."""
    stack = _functorch.get_interpreter_stack() or ()
    return any(one.key() != _functorch.TransformType.Vmap for one in stack)


def is_divided(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is divided, or what torch.func has wrapped is."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return isinstance(tensor, (Shard, ShardedParameter))


#: What its shard looks like, and not what holds its place.
LOOKS = {"is_contiguous", "stride", "dim_order"}


class ShardedParameter(torch.nn.Parameter):
    """A parameter whose elements lie on several ranks; it keeps its shape, its name and its hooks.

    Without it, torch would compute with memory that is no longer there.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Any,  # Any: torch's functions have no public type
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what needs no elements; compute the rest together with the other ranks."""
        name = asks(func, args)
        if getattr(func, "__name__", "") in LOOKS and vars(args[0])[MARK].shard is not None:
            return func(vars(args[0])[MARK].shard, *args[1:], **(kwargs or {}))
        if name == "detach" and sys._getframe(1).f_code is _MAKES:  # noqa: SLF001 - who asks
            _refuse("nn.Parameter(…)", args[0])
        same = itself(name, args)
        if (found := on_parts(func, args, kwargs) if same is None else same) is not NotImplemented:
            return found
        if mapped(func) or (name and transformed()):
            what = vars(next(one for one in tree_leaves((args, kwargs)) if type(one) is cls))[MARK]
            raise InvalidArgumentError(TRANSFORMED.format(name=what.name))
        if not name:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documented way
                return func(*args, **(kwargs or {}))
        given = tuple(args), dict(kwargs or {})
        for one in tree_leaves(given):
            if type(one) is cls and vars(one)[MARK].shard is None:
                _refuse(name, one)
        if name == "data":
            return _data(*args)
        apart = name == "detach" or not torch.is_grad_enabled()
        first = written(name, *given)
        args, kwargs = tree_map(partial(_taken, apart=apart, first=first), given)
        if name in vars(Shard) and isinstance(args[0], Shard):
            func = getattr(Shard, name)  # that torch has written without regard to subclasses
        return func(*args, **kwargs)

    def set_(self, *_: Any) -> NoReturn:  # which torch does without asking
        """Refuse: it would be another parameter."""
        _refuse("set_", self, "memory of")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: what is kept of it would be a part of one rank's."""
        _refuse("Pickling or copying", self)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Refuse: the copy would hold nothing."""
        _refuse("A copy of the model", self)

    def __repr__(self) -> str:  # type: ignore[override] # torch's takes contents to be shown
        return (
            f"<parameter {vars(self)[MARK].name} {tuple(self.shape)}, which has no elements here>"
        )


@dataclass(frozen=True, slots=True)
class Absence:
    """What a parameter is while it is away; made once, since it may come and go all the time."""

    kind: type  # that the parameter has
    name: str
    why: str  # ends the sentence "needs the parameter …, which …"
    shard: Shard | None  # what can be computed with
    nothing: torch.Tensor  # of its shape


def _refuse(call: str, parameter: torch.Tensor, what: str = "parameter") -> NoReturn:
    """Raise that a call needs a parameter that is away, or what there is of it."""
    absent: Absence = vars(parameter)[MARK]
    raise InvalidArgumentError(f"{call} needs the {what} {absent.name}, which {absent.why}")


def _taken(value: Any, *, apart: bool, first: Any) -> Any:
    """Return what is computed with in place of a parameter that is away."""
    if type(value) is not ShardedParameter:
        return value
    shard: Shard = vars(value)[MARK].shard
    if apart or not value.requires_grad:
        return shard
    if value is first:  # is written, which torch refuses for parameters that have a gradient
        return shard.detach().requires_grad_()
    return WholeOf.apply(value, shard)  # type: ignore[no-untyped-call]


def _data(parameter: ShardedParameter, *value: torch.Tensor) -> torch.Tensor | None:
    """Get or set `parameter.data`."""
    shard: Shard = vars(parameter)[MARK].shard
    handed_out: list[weakref.ref[Any]] = vars(shard).setdefault("handed_out", [])
    handed_out[:] = [weak for weak in handed_out if weak() is not None]
    if not value:
        seen = shard.detach()
        handed_out.append(weakref.ref(seen))
        return seen
    before = shard.piece.clone() if handed_out else shard.piece
    shard.data = value[0].clone() if isinstance(value[0], Shard) else value[0]
    for one in (weak() for weak in handed_out):
        if one is not None:  # it stays what it was
            one.elements, one.wrote, one.past = partial(_same, before), nothing, [0]
    handed_out.clear()
    return None


def _same(piece: torch.Tensor) -> torch.Tensor:
    return piece


def absence(
    parameter: torch.nn.Parameter, name: str, why: str = DIVIDED, shard: Shard | None = None
) -> Absence:
    """Say what a parameter is to be while it is away: its shard, or nothing that computes."""
    number = torch.full(
        (), torch.nan if parameter.is_floating_point() else 0,
        dtype=parameter.dtype, device=parameter.device,
    )  # fmt: skip
    return Absence(type(parameter), name, why, shard, number.expand(parameter.shape))


def reshard_parameter(parameter: torch.nn.Parameter, absent: Absence) -> None:
    """Have a parameter hold no memory of its own; it computes as its shard, or refuses to."""
    if type(parameter) is not ShardedParameter:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documented way
            parameter.data = absent.nothing
        vars(parameter)[MARK] = absent
        parameter.__class__ = ShardedParameter


def unshard_parameter(parameter: torch.nn.Parameter, whole: torch.Tensor) -> None:
    """Give a parameter its elements again."""
    if type(parameter) is ShardedParameter:
        parameter.__class__ = vars(parameter).pop(MARK).kind
    parameter.data = whole
