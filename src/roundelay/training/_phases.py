"""Phases of training for a trace: forward, backward, what follows it, steps and checkpoints."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch.utils._pytree import tree_leaves

from roundelay.records import Trace, named, phase
from roundelay.records.phases import NUMBERS
from roundelay.training._autograd import weakly
from roundelay.training._module_hooks import ModuleHook
from roundelay.training._step import StepState

Call = TypeVar("Call", bound=Callable[..., Any])  # which comes out as it went in


class TracedPasses:
    """Takes down the passes of one model on one rank; without a trace it does nothing."""

    def __init__(self, trace: Trace | None, step: StepState) -> None:
        self.trace, self._step = trace, step
        self._forward: list[int] = []  # that run, each within the one before
        self._backward = 0

    def watch(self, model: torch.nn.Module) -> list[Any]:  # torch's handles
        """Hear of the forward passes of a model; return the hooks."""
        if self.trace is None:
            return []
        weak, outside = weakref.ref(self), torch.compiler.disable

        def before(own: torch.nn.Module, _: Any) -> None:
            passes = weak()
            if passes is not None and own is model:  # and no copy of it
                passes.enter_forward()

        def after(own: torch.nn.Module, _: Any, result: Any) -> None:
            passes = weak()
            if passes is not None and own is model:
                passes.leave_forward(result)

        return [
            model.register_forward_pre_hook(ModuleHook(outside(before)), prepend=True),  # type: ignore[no-untyped-call]
            model.register_forward_hook(ModuleHook(outside(after)), always_call=True, prepend=True),  # type: ignore[no-untyped-call]
        ]

    def enter_forward(self) -> None:
        """Begin a forward pass."""
        if self.trace is not None:
            self._forward.append(self.trace.begin(NUMBERS["forward"], 0, self._step.number))

    def leave_forward(self, result: Any) -> None:
        """End it, and hear when backward comes to what it gave."""
        if self.trace is None or not self._forward:
            return
        self.trace.end(self._forward.pop(), result is None)
        if torch.is_grad_enabled():
            for one in tree_leaves(result):
                if isinstance(one, torch.Tensor) and one.grad_fn is not None:
                    one.register_hook(weakly(self.enter_backward))  # type: ignore[no-untyped-call]

    def enter_backward(self) -> None:
        """Hear that backward has come to what forward gave, or to a first gradient."""
        if self.trace is not None and not self._backward:
            self._backward = self.trace.begin(NUMBERS["backward"], 0, self._step.number)

    def leave_backward(self, *, whole: bool) -> None:
        """Hear that backward is over."""
        begun, self._backward = self._backward, 0
        if self.trace is not None and begun:
            self.trace.end(begun, not whole)

    def exchanging(self) -> AbstractContextManager[None]:
        """Return what is entered while ranks bring together what backward has left to do."""
        return phase(self.trace, "exchange", number=self._step.number)


def of_bucket(
    trace: Trace | None, parameters: Sequence[Any], places: Sequence[Any]
) -> AbstractContextManager[None]:
    """Return what is entered while a bucket is sent: its name is in a trace, if there is one."""
    return named(trace, _bucket_name, parameters, places)


def _bucket_name(parameters: Sequence[Any], places: Sequence[Any]) -> str:
    """Name a bucket by the parameters that it begins and ends with, of which each has an index."""
    names = [parameters[places[at].index].name for at in (0, -1)]
    return f"bucket {' … '.join(dict.fromkeys(names))}"


def stepping(trace: Trace | None, number: int) -> AbstractContextManager[None]:
    """Return what is entered while the optimizer steps."""
    return phase(trace, "step", number=number)


def checkpointing(trace_of: Callable[[object], Trace | None]) -> Callable[[Call], Call]:
    """Return a decorator for what takes a path and a model, and writes or reads a checkpoint."""

    def traced(call: Call) -> Call:
        @functools.wraps(call)
        def one(*args: Any, **options: Any) -> Any:  # as `call` has them
            model = args[1] if len(args) > 1 else options.get("model")
            with phase(trace_of(model), "checkpoint", f"rd.{call.__name__}"):
                return call(*args, **options)

        return cast(Call, one)

    return traced
