"""Gradients that are not there to be used: whoever tries is told why, and what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Self

import torch

from roundelay.errors import InvalidArgumentError


class RefusedGrad(torch.Tensor):
    """Stands in `.grad` of a parameter and holds nothing; any use of it raises `why`.

    Without it, torch's own `clip_grad_norm_` would find no gradients and clip nothing.
    """

    why: str
    zero: Callable[[], None] | None  # makes it zero, where that can be done

    def __new__(cls, like: torch.Tensor, why: str, zero: Callable[[], None] | None = None) -> Self:
        """Make a placeholder of the shape, dtype and device that torch wants a gradient to have."""
        made = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's way to have no storage
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        made.why, made.zero = why, zero
        return made

    def __repr__(self) -> str:  # type: ignore[override] # torch's takes a private option
        return f"<gradient refused: {self.why}>"

    def numpy(self, *, force: bool = False) -> NoReturn:  # noqa: ARG002 - torch's own
        """Raise."""
        raise InvalidArgumentError(self.why)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:  # noqa: FBT001
        raise InvalidArgumentError(self.why)

    def tolist(self) -> NoReturn:
        """Raise."""
        raise InvalidArgumentError(self.why)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidArgumentError(self.why)

    # Everything goes to the dispatcher, autograd's own additions too.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch declares it loosely
        cls,
        func: Any,  # Any: torch's operators have no public type
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Raise, whatever is asked of it."""
        if func is torch.ops.aten.detach.default:
            return args[0]  # torch looks at gradients through it
        if func is torch.ops.aten.zero_.default and args[0].zero is not None:
            args[0].zero()
            return args[0]
        listed = [*args, *(kwargs or {}).values()]
        flat = [one for value in listed for one in (value if isinstance(value, list) else [value])]
        refused = next(one for one in flat if isinstance(one, cls))
        raise InvalidArgumentError(refused.why)
