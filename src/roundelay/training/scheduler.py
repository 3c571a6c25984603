"""`rd.scheduler`: a learning-rate scheduler that steps when the optimizer does."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from roundelay.errors import CollectiveMismatch, InvalidArgumentError
from roundelay.training.optimizer.prepared import PreparedOptimizer

__all__ = ["scheduler"]

SEEN = "_roundelay_seen"  # the attribute that says which optimizer steps a scheduler has seen


class Gated:
    """What `scheduler` adds to a scheduler; the rest is the class that the user chose."""

    optimizer: Any  # a prepared one

    def step(self, *args: Any, **options: Any) -> None:
        """Step, unless the optimizer has not: between micro-batches, or where it was skipped."""
        run = getattr(self.optimizer, "run", None)
        if run is None:  # the optimizer is no longer prepared
            super().step(*args, **options)  # type: ignore[misc]
            return
        whose, fit, skipped = vars(self)[SEEN]
        same = whose == id(run.step) and run.step.fit == fit and run.step.skipped > skipped
        if run.step.accumulating or same:
            return
        vars(self)[SEEN] = id(run.step), run.step.fit, run.step.skipped
        if isinstance(self, ReduceLROnPlateau):
            _compare(run.comm, *args, **options)
        super().step(*args, **options)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's own state."""
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        state.pop(SEEN, None)
        return state


def scheduler(given: Any) -> Any:  # Any: a scheduler of any class of torch's
    """Return the scheduler, the same object, which now steps once for each step of its optimizer.

    Its optimizer is a prepared one. `scheduler.step()` may follow every `optimizer.step()`: between
    the micro-batches of a batch, and where gradients overflowed and the optimizer's step was
    skipped, it does nothing. `ReduceLROnPlateau` compares its value over all ranks, which all call
    it. Schedulers inside another one are its own affair: give the outer one.
    """
    if not isinstance(given, LRScheduler):
        raise InvalidArgumentError(
            f"scheduler takes one of torch.optim.lr_scheduler, not {type(given).__name__}."
        )
    if isinstance(given, Gated):
        return given
    optimizer: Any = getattr(given, "optimizer", None)
    if not isinstance(optimizer, PreparedOptimizer):
        raise InvalidArgumentError(
            "scheduler needs one whose optimizer is prepared: call rd.prepare before."
        )
    step = optimizer.run.step
    vars(given)[SEEN] = id(step), step.fit, step.skipped
    given.__class__ = _gated(type(given))  # type: ignore[arg-type] # as in take_over
    return given


@functools.cache
def _gated(own: type) -> type:
    kept = {"__doc__": own.__doc__, "__module__": own.__module__}
    return type(own.__name__, (Gated, own), kept)


def _compare(comm: Any, metrics: Any, *_: Any, **__: Any) -> None:
    """Raise, on every rank, if the value by which ranks decide is not the same everywhere."""
    every = comm.all_gather(np.array([float(metrics)]))[:, 0]
    if len({repr(one) for one in every.tolist()}) > 1:
        told = ", ".join(f"{one!r} on rank {rank}" for rank, one in enumerate(every.tolist()))
        raise CollectiveMismatch(
            f"ReduceLROnPlateau.step got {told}, so that the ranks would go on with different "
            f"learning rates. Give all of them the same: what rd.evaluate returns, or a mean over "
            f"the ranks by comm.all_reduce."
        )
