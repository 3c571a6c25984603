"""Hears of every gradient the moment it is complete, and of the end of each backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from roundelay.training._strategy import Sharing

__all__ = ["Arrivals"]


class Arrivals:
    """Hooks on the parameters of one model, which tell its strategy; silent while accumulating."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self.accumulating = False
        self._running = False
        #: Told at the end of every backward pass, after the strategy.
        self.at_end: list[Callable[[], None]] = []
        self._hooks: list[Any] = [
            one.tensor.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, one in enumerate(sharing.setup.parameters)
        ]

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # Weak: Python's collector does not see through these hooks, so a strong one would keep the
        # model, and the memory that its ranks share, for ever.
        weak = weakref.ref(self)

        def tell(_: torch.Tensor) -> None:
            alive = weak()
            if alive is not None:
                alive.arrived(index)

        return tell

    def arrived(self, index: int) -> None:
        """Hear that a gradient is complete."""
        scaler = self._sharing.setup.scaler
        if scaler is not None:
            scaler.check_scaled()
        if self.accumulating and not self._sharing.every_pass:
            return
        if not self._running:
            self._begin()
        self._sharing.arrived(index)

    def _begin(self) -> None:
        self._running = True
        self._sharing.begin_backward()
        # Called by autograd when this backward pass is over, however it ends on this thread.
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - torch's own DDP's way
        engine.queue_callback(self._end)

    def _end(self) -> None:
        self._running = False
        if self.accumulating:
            self._sharing.passed()
            return
        self._sharing.gathered()
        for tell in self.at_end:
            tell()

    def remove(self) -> None:
        """Hear no more."""
        for hook in self._hooks:
            hook.remove()
