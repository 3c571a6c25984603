"""Parameters that are divided: what can be asked of them, and where gradients flow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from roundelay.training._shard import Shard

__all__ = ["ShardParameter", "WholeOf", "asks", "writes"]

#: What can be asked of a parameter without its elements: what it looks like, and its hooks.
ALLOWED = {
    "__delete__", "numel", "size", "dim", "ndimension", "nelement", "stride", "element_size",
    "is_contiguous", "is_floating_point", "is_complex", "requires_grad_", "register_hook",
    "register_post_accumulate_grad_hook", "untyped_storage", "__hash__", "__repr__", "__format__",
    "__len__", "storage_offset", "get_device", "is_same_size", "type",
}  # fmt: skip
#: Properties that would show, or replace, elements.
ELEMENTS = {"data", "T", "mT", "H", "mH", "real", "imag"}
#: What goes backward to a parameter, wherever that is.
DIFFERENTIATE = torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward
#: Operators that write, and do not end in an underscore.
WRITES = {
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
}  # fmt: skip


def asks(func: Any) -> str:  # Any: torch's functions have no public type
    """Return the name of a function that needs elements; nothing for one that does not."""
    if func in DIFFERENTIATE:
        return ""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):  # of a property, which has a name itself
        name = getattr(getattr(func, "__self__", None), "__name__", name)
        return name if name in ELEMENTS else ""
    return "" if name in ALLOWED else (name or str(func))


def writes(name: str) -> bool:
    """Tell whether a function changes its first argument."""
    return name in WRITES or (name.endswith("_") and not name.endswith("__"))


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


class ShardParameter(Shard):
    """A parameter in an optimizer's groups.

    What it holds is changed by the optimizer, or without autograd. With autograd the model's own
    parameter takes its place, so that a penalty on weights has its gradient.
    """

    _is_param = True  # as torch asks, in isinstance

    @classmethod
    def __torch_function__(  # type: ignore[override] # what is switched off elsewhere
        cls,
        func: Any,  # Any: torch's functions have no public type
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute on the elements, or with the model's parameter where gradients are wanted."""
        name, given = asks(func), (tuple(args), dict(kwargs or {}))
        if func in DIFFERENTIATE:
            args, kwargs = tree_map(_of_model, given)
            return func(*args, **kwargs)
        if torch.is_grad_enabled() and name and name != "detach" and not writes(name):
            args, kwargs = tree_map(_in_model, given)
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documented way
            return func(*args, **(kwargs or {}))


def _of_model(value: Any) -> Any:
    return value.home.model if isinstance(value, ShardParameter) else value


def _in_model(value: Any) -> Any:
    if isinstance(value, ShardParameter) and value.requires_grad:
        return value.home.model.to(value.dtype)
    return value
