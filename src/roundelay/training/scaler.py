"""Loss scaling: small gradients survive float16, and steps whose gradients overflow are skipped.

The loss is multiplied before backward, gradients are divided after it. The factor is halved when
something overflows and doubled after many steps in which nothing did.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError, NotFiniteError
from roundelay.training.precision import Precision
from roundelay.training.read_loss import ReadLoss

__all__ = ["Scaler", "scaler_of"]

log = logging.getLogger("roundelay")

#: Below this it is no overflow of float16 any more: the gradients are not finite at any scale.
SMALLEST = 2.0**-14
#: So many skipped steps in a row are usual at the start.
USUAL = 8
SCALED = "roundelay: scaled"  # what says of an operation that it has scaled a loss
NEAR = 16  # operations of a loss that are looked at


class Scaler:
    """The loss scale of one model in training, the same on every rank."""

    def __init__(self, scale: float, growth_interval: int | None) -> None:
        self.scale = scale
        self.growth_interval = growth_interval
        self.good = 0  # steps since the scale last changed
        self.skipped = 0  # steps, in all
        self._in_a_row = 0
        self._overflowed = False  # on this rank, in this step
        self._passing = False  # whether the backward pass that runs began at a scaled loss
        self._elsewhere = False  # or goes on with gradients of one that another rank has

    # ---- backward

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss multiplied by the scale, for backward."""
        if _is_scaled(loss):
            raise InvalidArgumentError(
                "This loss is scaled already, and its gradients would be too large by the scale: "
                "call optimizer.scale(loss) once. rd.backward(loss_sum, weight=…) scales by itself."
            )
        if isinstance(loss, ReadLoss):
            loss.backward()
        # A loss in float16 would overflow at once, and its gradient is one number.
        scaled = loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.scale
        made: Any = scaled.grad_fn  # Any: torch's types have no word for what is on it
        if made is not None:
            made.metadata[SCALED] = True
            scaled.register_hook(self._begun)  # type: ignore[no-untyped-call]
        return scaled

    def _begun(self, _: torch.Tensor) -> None:
        self._passing = True
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - as in _autograd
        engine.queue_callback(self._over)

    def _over(self) -> None:
        self._passing = False

    @contextmanager
    def from_elsewhere(self) -> Iterator[None]:
        """Have backward passes begin at gradients of a loss that is scaled, if on another rank."""
        self._elsewhere = True
        try:
            yield
        finally:
            self._elsewhere = False

    def check_scaled(self) -> None:
        """Refuse a gradient whose backward pass did not begin at a scaled loss."""
        if not (self._passing or self._elsewhere):
            raise InvalidArgumentError(
                "A loss was not scaled, and float16 would lose its small gradients: write "
                "optimizer.scale(loss).backward() in place of loss.backward(). "
                "rd.backward(loss_sum, weight=…) scales by itself, and bf16 needs no scaling."
            )

    # ---- step

    @property
    def inverse(self) -> float:
        """What gradients are multiplied with before the optimizer sees them."""
        return 1 / self.scale

    def unscale(self, grads: Sequence[torch.Tensor], factor: float = 1.0) -> None:
        """Divide float32 gradients by the scale, times `factor`, and see whether they overflowed.

        The gradients that one rank steps on; `settle` brings together what the ranks have seen.
        """
        for device in {grad.device for grad in grads}:
            here = [grad for grad in grads if grad.device == device]
            found = torch.zeros((), dtype=torch.float32, device=device)
            inverse = torch.full((), self.inverse * factor, dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(here, found, inverse)
            if found.item():
                self._overflowed = True

    def overflowed(self) -> None:
        """Have the next step skipped: this rank has seen gradients that are not finite."""
        self._overflowed = True

    def known(self) -> None:
        """Forget what was seen: whether to take this step is settled."""
        self._overflowed = False

    def settle(self, comm: Communicator, step: int, names: Sequence[str]) -> bool:
        """Tell whether to take this step, alike on all ranks, and adapt the scale. All call it."""
        seen = np.array([float(self._overflowed)])
        comm.all_reduce(seen, "max")
        self._overflowed = False
        if seen[0]:
            self._shrink(comm, step, names)
            return False
        self._in_a_row = 0
        self.good += 1
        if self.growth_interval is not None and self.good >= self.growth_interval:
            self._grow(comm, step)
        return True

    def _shrink(self, comm: Communicator, step: int, names: Sequence[str]) -> None:
        before, self.scale = self.scale, self.scale / 2
        self.good = 0
        self.skipped += 1
        self._in_a_row += 1
        if self.scale < SMALLEST:
            raise NotFiniteError(names, range(comm.size))
        if comm.rank == 0:
            usual = (
                "Normal in the first steps, and now and then later."
                if self._in_a_row <= USUAL
                else f"The {self._in_a_row}th in a row: the loss itself may not be finite. A "
                f"lower learning rate, clipping or bf16 are the usual cures."
            )
            log.warning(
                "step %d skipped: gradients overflowed in fp16; loss scale %g → %g. %s",
                step, before, self.scale, usual,
            )  # fmt: skip

    def _grow(self, comm: Communicator, step: int) -> None:
        before, self.scale = self.scale, self.scale * 2
        good, self.good = self.good, 0
        if comm.rank == 0:
            log.info(
                "step %d: no overflow in %d steps; loss scale %g → %g, so that smaller gradients "
                "survive.", step, good, before, self.scale,
            )  # fmt: skip

    # ---- checkpoints

    def state(self) -> dict[str, float]:
        """Return what it takes to go on."""
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from there."""
        self.scale = float(state["scale"])
        self.good, self.skipped = int(state["good"]), int(state["skipped"])


def _is_scaled(loss: torch.Tensor) -> bool:
    """Tell whether a loss was computed from a scaled one, in the last few operations."""
    left: list[Any] = [loss.grad_fn]  # Any: as above
    looked = 0
    while left and looked < NEAR:
        looked += 1
        node = left.pop(0)
        if node is not None:
            if SCALED in node.metadata:
                return True
            left += [one for one, _ in node.next_functions]
    return False


def scaler_of(precision: Precision) -> Scaler | None:
    """Return a scaler where this precision needs one."""
    first = precision.first_scale
    return None if first is None else Scaler(first, precision.growth_interval)
