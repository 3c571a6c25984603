"""Horovod's callbacks for Keras 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from roundelay.errors import InvalidArgumentError
from roundelay.fronts.horovod import arrays
from roundelay.fronts.horovod.basics import Average, ProcessSet, global_process_set, size
from roundelay.fronts.horovod.keras.optimizer import broadcast_model

__all__ = [
    "BroadcastGlobalVariablesCallback", "LearningRateScheduleCallback",
    "LearningRateWarmupCallback", "MetricAverageCallback",
]  # fmt: skip


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """Begins training with the root's weights and optimizer state on every rank."""

    def __init__(
        self, root_rank: int, device: str = "", process_set: ProcessSet = global_process_set
    ) -> None:
        super().__init__()
        del device
        self._root, self._process_set = root_rank, process_set

    def on_train_begin(self, logs: Any = None) -> None:
        """Bring them, once Keras has built all of them."""
        del logs
        broadcast_model(self.model, self._root, self._process_set)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """Replaces what an epoch has logged by the mean over ranks, for the callbacks after it."""

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        del device
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average what is logged, in the order of names."""
        del epoch
        if logs:
            names = sorted(logs)
            values = np.array([float(logs[name]) for name in names])
            (means,) = arrays.allreduce([values], Average, None, (1.0, 1.0), self._process_set)
            logs.update(zip(names, means.tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """Multiplies the learning rate by a function of the epoch, from one epoch to another.

    By epochs, or with `staircase=False` by steps. `momentum_correction=` changes nothing: Keras 3
    compiles momentum in, as a number.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,  # noqa: FBT001, FBT002 - Horovod's order
        momentum_correction: bool = True,  # noqa: FBT001, FBT002
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        del momentum_correction
        if initial_lr is None:
            raise InvalidArgumentError("This callback needs initial_lr=.")
        self._initial, self._multiplier = initial_lr, multiplier
        self._start, self._end = start_epoch, end_epoch
        self._staircase, self._steps = staircase, steps_per_epoch
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set the rate of the epoch."""
        del logs
        self._epoch = epoch
        self._set(float(epoch))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of the step."""
        del logs
        if not self._staircase:
            steps = self._steps or (self.params or {}).get("steps")
            if not steps:
                raise InvalidArgumentError(
                    "This callback with staircase=False needs steps_per_epoch=: Keras does not "
                    "know how many steps an epoch has."
                )
            self._set(self._epoch + batch / steps)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the rate."""
        del epoch
        if logs is not None:
            logs["lr"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set(self, epoch: float) -> None:
        if epoch < self._start or (self._end is not None and epoch >= self._end):
            return
        by = self._multiplier(epoch) if callable(self._multiplier) else self._multiplier
        if hasattr(self.model, "jax_state_sync"):  # else its steps would not see it
            self.model.jax_state_sync()
        self.model.optimizer.learning_rate = self._initial * by


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr` / ranks to `initial_lr`, over the first epochs."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,  # noqa: FBT001, FBT002 - Horovod's order
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        del verbose
        self._warmup = warmup_epochs
        super().__init__(
            initial_lr,
            self._factor,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )

    def _factor(self, epoch: float) -> float:
        steps = self._steps or (self.params or {}).get("steps") or 1
        return (min(epoch + 1 / steps, self._warmup) * (size() - 1) / self._warmup + 1) / size()
