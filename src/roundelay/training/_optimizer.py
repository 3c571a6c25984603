"""The user's optimizer, which after `prepare` steps on every rank alike."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from roundelay.errors import InvalidArgumentError
from roundelay.training._run import Run

__all__ = ["Prepared", "take_over"]


class Prepared:
    """What `prepare` adds to an optimizer; the rest is the class that the user chose."""

    run: Run
    own_class: type  # that the user chose

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step as before, on gradients that all ranks have brought together."""
        run, now = self.run, self.run.step
        if now.holds or now.options is not None:
            now.check_options(self.param_groups)  # type: ignore[attr-defined]
        if now.holds:
            return None  # more micro-batches of this batch are to come
        now.check_whole()
        own = functools.partial(super().step)  # type: ignore[misc]
        run.check_still_the_same()
        sharing = run.sharing

        def ready() -> Any:
            with torch.enable_grad():
                loss = closure() if closure is not None else None
            sharing.before_step()
            return loss

        if closure is None:
            run.arrivals.flush()
            sharing.before_step()
            result = sharing.step(own, None) if run.may_step() else None
        else:
            run.refuse_closure()
            result = sharing.step(own, ready)
        sharing.after_step()
        now.stepped()
        now.number += 1
        return result

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss as backward should see it: `optimizer.scale(loss).backward()`.

        It is multiplied by the loss scale in fp16, and is the same loss in every other precision.
        """
        scaler = self.run.setup.scaler
        return loss if scaler is None else scaler.apply(loss)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's own
        """Forget the gradients, wherever the strategy keeps them, and how their losses weigh."""
        if self.run.step.holds:
            return
        self.run.step.begin()
        self.run.sharing.zero_grad(super().zero_grad, set_to_none=set_to_none)  # type: ignore[misc]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients down to a norm of at most `max_norm`; return what it was.

        The norm is that of one device on the whole batch under every strategy. All ranks call it.
        It is NaN, and nothing is scaled, while a loader's batch has more micro-batches to come.
        """
        if self.run.step.holds:
            return torch.tensor(math.nan)
        if not max_norm > 0:
            raise InvalidArgumentError(f"clip_grad_norm_ takes a norm above 0, not {max_norm!r}.")
        self.run.arrivals.flush()
        sharing = self.run.sharing
        norm = sharing.grad_norm(float(norm_type))
        factor = max_norm / (norm + 1e-6)  # as torch does
        if factor < 1:
            sharing.scale_grads(factor)
        return torch.tensor(norm, dtype=torch.float64)


def take_over(optimizer: torch.optim.Optimizer, run: Run) -> None:
    """Make the optimizer a prepared one, in place: schedulers that have it stay right."""
    own = type(optimizer)
    tracked = "step" in optimizer.__dict__  # a scheduler wants to know whether it was called
    optimizer.__dict__.pop("step", None)
    optimizer.__class__ = _prepared(own)  # type: ignore[arg-type] # mypy takes no class for hashable
    optimizer.run = run  # type: ignore[attr-defined]
    if tracked:
        _let_schedulers_know(optimizer)


@functools.cache
def _prepared(own: type) -> type:
    kept = {"__doc__": own.__doc__, "__module__": own.__module__, "own_class": own}
    return type(own.__name__, (Prepared, own), kept)


def _let_schedulers_know(optimizer: Any) -> None:  # Any: torch's private attributes
    step = type(optimizer).step

    @functools.wraps(step)
    def stepped(*args: Any, **options: Any) -> Any:
        optimizer._opt_called = True  # noqa: SLF001 - what torch's schedulers look at
        return step(optimizer, *args, **options)

    vars(stepped)["_wrapped_by_lr_sched"] = True
    optimizer.step = stepped
