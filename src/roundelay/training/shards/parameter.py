"""Parameters that are divided: what can be asked of them, and where gradients flow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from roundelay.parallel.part import on_parts
from roundelay.training.shards.shard import Shard

__all__ = ["OptimizerParameter", "WholeOf", "asks", "for_graph", "itself", "written"]

#: What can be asked of a parameter without its elements: what it looks like, and its hooks.
ALLOWED = {
    "__delete__", "numel", "size", "dim", "ndimension", "nelement", "stride", "element_size",
    "is_contiguous", "is_floating_point", "is_complex", "requires_grad_", "register_hook",
    "register_post_accumulate_grad_hook", "untyped_storage", "__hash__", "__repr__", "__format__",
    "__len__", "storage_offset", "get_device", "is_same_size",
}  # fmt: skip
#: What gives the elements apart from autograd's graph.
APART = {"detach", "detach_", "retain_grad"}
#: Properties that would show, or replace, elements.
ELEMENTS = {"data", "T", "mT", "H", "mH", "real", "imag"}
#: What goes backward to a parameter, wherever that is.
DIFFERENTIATE = torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward
#: Operators that write, and do not end in an underscore.
WRITES = {
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
}  # fmt: skip


def asks(func: Any, args: Sequence[Any]) -> str:  # Any: torch's functions have no public type
    """Return the name of a function that needs elements; nothing for one that does not."""
    name = getattr(func, "__name__", "")
    if func in DIFFERENTIATE or (name == "type" and len(args) == 1):
        return ""
    if name in ("__get__", "__set__"):  # of a property, which has a name itself
        name = getattr(getattr(func, "__self__", None), "__name__", name)
        return name if name in ELEMENTS else ""
    return "" if name in ALLOWED else (name or str(func))


def writes(name: str) -> bool:
    """Tell whether a function changes its first argument."""
    return name in WRITES or (name.endswith("_") and not name.endswith("__"))


def written(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument that a function changes, the first one; torch.nn.init names it."""
    first = args[0] if args else next(iter(kwargs.values()), None)
    return first if writes(name) else None


class WholeOf(torch.autograd.Function):
    """The whole of a divided parameter, to compute with: its gradient is that of the parameter."""

    @staticmethod
    def forward(_: Any, parameter: torch.Tensor, shard: Shard) -> torch.Tensor:  # noqa: ARG004
        """Gather it, in the dtype of the parameter."""
        return shard.full()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Hand the gradient on."""
        return grad, None


Given = tuple[Sequence[Any], Mapping[str, Any]]


def for_graph(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Given | None:
    """Return arguments with whole tensors for divided ones, where the result has a gradient."""
    name = asks(func, args)
    if not name or name in APART:
        return None
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documented way
        found = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if not any(one.requires_grad for one in found):
            return None
        keep = [written(name, args, kwargs), kwargs.get("out")]  # are written where they lie

        def take(value: Any) -> Any:
            if not isinstance(value, Shard) or any(value is one for one in keep):
                return value
            if value.requires_grad:
                return WholeOf.apply(value, value)  # type: ignore[no-untyped-call]
            return value.full().to(value.dtype)

        made: Given = tree_map(take, (tuple(args), dict(kwargs)))
        left = [one for one in tree_leaves(made) if isinstance(one, Shard)]
        return made if len(left) < sum(isinstance(one, Shard) for one in found) else None


class OptimizerParameter(Shard):
    """A parameter in an optimizer's groups.

    What it holds is changed by the optimizer, or without autograd. With autograd the model's own
    parameter takes its place, so that a penalty on weights has its gradient.
    """

    _is_param = True  # as torch asks, in isinstance

    def __hash__(self) -> int:
        """Be found in sets and dicts of the model's parameters, and they in those of these."""
        return self.home.key

    @classmethod
    def __torch_function__(
        cls,
        func: Any,  # Any: torch's functions have no public type
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute on the elements, or with the model's parameter where gradients are wanted."""
        name, given = asks(func, args), (tuple(args), dict(kwargs or {}))
        if (found := itself(name, args)) is not None:
            return found
        if (whole := on_parts(func, args, kwargs)) is not NotImplemented:
            return whole
        if func in DIFFERENTIATE:
            args, kwargs = tree_map(_of_model, given)
            return func(*args, **kwargs)
        if torch.is_grad_enabled() and name and name not in APART:
            first = written(name, *given)  # is changed where it lies
            args, kwargs = tree_map(lambda one: one if one is first else _in_model(one), given)
            if not isinstance(first, cls):
                return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


class Itself(Shard):
    """What a parameter of the groups is, compared with that of the model: by element, and true."""

    def __bool__(self) -> bool:
        return True


def itself(name: str, args: Sequence[Any]) -> Itself | None:
    """Compare a parameter with itself, in the groups and in the model; None for others."""
    if (
        name not in ("eq", "__eq__")
        or args[0] is args[1]
        or _of_model(args[0]) is not _of_model(args[1])
    ):
        return None
    one = next(one for one in args if isinstance(one, OptimizerParameter))
    piece = one.piece
    return Itself(one.home, piece == piece, one.shape)  # noqa: PLR0124 - but where it is not a number


def _of_model(value: Any) -> Any:
    return value.home.model if isinstance(value, OptimizerParameter) else value


def _in_model(value: Any) -> Any:
    if isinstance(value, OptimizerParameter) and value.requires_grad:
        return value.home.model.to(value.dtype)
    return value
