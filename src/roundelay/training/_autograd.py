"""What autograd is given to hold: hooks that keep nobody alive or weigh, and ends of passes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from roundelay.training._step import StepState


def weakly(method: Any, *given: Any) -> Callable[..., None]:  # Any: bound to an object
    """Return a hook that calls a method with what is given, for as long as its object is there.

    Python's collector does not see through hooks of tensors, so a strong one would keep the model,
    and the memory that its ranks share, for ever.
    """
    weak, function = weakref.ref(method.__self__), method.__func__

    def hook(*_: Any) -> None:
        alive = weak()
        if alive is not None:
            function(alive, *given)

    return hook


class TellEnd(Protocol):
    """Is told that a backward pass is over: all of it (`whole`), or because it raised an error."""

    def __call__(self, *, whole: bool) -> None: ...


class BackwardPass:
    """A backward pass, held by autograd while it runs; let go before its end, it raised."""

    def __init__(self, tell: TellEnd) -> None:
        """Begin with the pass that runs."""
        self._tell: TellEnd | None = tell
        # Called by autograd when this backward pass is over, and let go if it ends by an error.
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - torch's own DDP's way
        engine.queue_callback(self)

    def __call__(self) -> None:
        """Be told by autograd that all gradients have come."""
        self._end(whole=True)

    def __del__(self) -> None:
        """Be let go before that: the pass raised an error."""
        self._end(whole=False)

    def _end(self, *, whole: bool) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            tell(whole=whole)


def weighed(parameter: torch.Tensor, step: StepState) -> Any:  # Any: torch's handle
    """Have what backward passes add to a parameter's gradient multiplied by the step's factor."""

    def weigh(grad: torch.Tensor) -> torch.Tensor | None:
        factor = step.factor
        if factor == 1 or not kept(parameter):
            return None
        # A mean over no rows is NaN.
        return grad * factor if factor else torch.zeros_like(grad)

    return parameter.register_hook(weigh)  # type: ignore[no-untyped-call]


def kept(parameter: torch.Tensor) -> bool:
    """Tell a backward pass from `torch.autograd.grad`, whose results are the caller's own."""
    try:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documented way
            node = get_gradient_edge(parameter).node
        return bool(torch._C._will_engine_execute_node(node))  # noqa: SLF001 - as torch's own hooks
    except RuntimeError:
        return False
