"""The optimizer with op=hvd.Adasum: each rank steps alone, and the steps are combined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from roundelay.arguments import whole
from roundelay.errors import InvalidArgumentError
from roundelay.fronts.horovod.basics import Adasum
from roundelay.fronts.horovod.errors import UnsupportedOperationError
from roundelay.fronts.horovod.torch.collectives import allreduce_async_, synchronize
from roundelay.fronts.horovod.torch.compression import Compressor
from roundelay.fronts.horovod.torch.wrapping import Copied, names_of_new, watch

__all__ = ["AdasumSteps"]

Parameter = torch.nn.Parameter


class AdasumSteps(Copied):
    """What a wrapped optimizer does more: the difference that its own step makes is reduced."""

    def distribute(
        self, names: dict[Parameter, str], compression: type[Compressor], passes: int
    ) -> None:
        """Begin: watch gradients."""
        self._parameter_names, self._compression = names, compression
        self._begun: dict[Parameter, tuple[torch.Tensor, Any, Any]] = {}
        self.set_backward_passes_per_step(passes)
        self.watch_again()

    def watch_again(self) -> None:
        """Watch the gradients of the parameters that it has."""
        watch(self, [p for p in self._parameter_names if p.requires_grad], AdasumSteps._came)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, whose steps are combined as well; all ranks add the same."""
        super().add_param_group(param_group)  # type: ignore[misc]
        new = names_of_new(self.param_groups, self._parameter_names)
        self._parameter_names |= new
        self._left |= dict.fromkeys(new, self.backward_passes_per_step)
        watch(self, [p for p in new if p.requires_grad], AdasumSteps._came)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Expect so many backward passes before the steps are combined."""
        passes = whole("backward_passes_per_step", passes, 1)
        self.backward_passes_per_step = passes
        self._left = dict.fromkeys(self._parameter_names, passes)

    def _came(self, p: Parameter) -> None:
        if self._left[p] <= 0:
            raise InvalidArgumentError(
                f"The gradient of {self._parameter_names[p]!r} came more often than "
                f"backward_passes_per_step={self.backward_passes_per_step} before step()."
            )
        self._left[p] -= 1
        if not self._left[p]:
            self._begin(p)

    @torch.no_grad()
    def _begin(self, p: Parameter) -> None:
        """Step on one parameter, and send what that has changed."""
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        before = p.detach().clone()
        kept = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [q for q in group["params"] if q is p]
        try:
            super().step()  # type: ignore[misc]
        finally:
            for group, params in zip(self.param_groups, kept, strict=True):
                group["params"] = params
        packed, context = self._compression.compress(p.detach() - before)
        handle = allreduce_async_(packed, name=self._parameter_names[p], op=Adasum)
        self._begun[p] = before, handle, context

    def before_scaler(self) -> None:
        """Refuse: each rank has stepped in backward, on gradients that were still scaled."""
        raise UnsupportedOperationError(
            "op=hvd.Adasum steps during backward(), before a GradScaler can look at gradients or "
            "divide them. Take op=hvd.Average, or bfloat16, which needs no scaling."
        )

    def synchronize(self) -> None:
        """Do nothing: what is combined is steps, and `step` waits for them."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Refuse: there is nothing to skip."""
        raise InvalidArgumentError("skip_synchronize() does not go with op=hvd.Adasum.")
        yield

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Wait for everybody's steps, and make the combined one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in self._parameter_names:
            if p.requires_grad and p not in self._begun:
                self._begin(p)
        for p, (before, handle, context) in self._begun.items():
            p.copy_(before + self._compression.decompress(synchronize(handle), context))
        self._begun.clear()
        self._left = dict.fromkeys(self._parameter_names, self.backward_passes_per_step)
        return loss

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Forget gradients, unless steps are still on their way."""
        if self._begun:
            raise InvalidArgumentError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step(), while steps are on their way."
            )
        super().zero_grad(*arguments, **options)  # type: ignore[misc]
