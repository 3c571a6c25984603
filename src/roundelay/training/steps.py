"""`rd.accumulate` and `rd.backward`: steps of several micro-batches, and losses that weigh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from zlib import crc32

import torch

from roundelay.arguments import number, shown
from roundelay.errors import InvalidArgumentError
from roundelay.parallel.mesh import Mesh
from roundelay.training._exchange import refuse_frozen
from roundelay.training._mesh_state import meet
from roundelay.training._run import Run, found_run, live_runs, run_of
from roundelay.training.read_loss import ReadLoss
from roundelay.training.scaler import Scaler

__all__ = [
    "StepPasses",
    "accumulate",
    "backward",
    "loss_scaler",
    "passes_of",
    "refuse_frozen",
    "stepped",
    "take_scaled",
]


UNKNOWN = "a step that failed"  # whose gradients some ranks let go of, and some have not
ELSEWHERE = (
    "backward got a loss that does not depend on any trained parameter of the prepared model. "
    "Compute it by calling the model that rd.prepare has returned, also where this rank has no "
    "data: a loss times 0, with weight=0."
)


@contextmanager
def accumulate(model: torch.nn.Module) -> Iterator[None]:
    """Have backward passes inside only add up gradients; the next one outside brings them together.

    The same under every strategy: k micro-batches are k - 1 inside and the last one outside.
    """
    step = run_of("accumulate", model).step
    step.inside += 1
    try:
        yield
    finally:
        step.inside -= 1


class StepPasses:
    """The backward passes of one step of a pipeline, as the strategy of its model hears of them."""

    def __init__(self, run: Run, model: torch.nn.Module) -> None:
        self._run, self._model = run, model
        #: Whether ranks with other data wait for gradients of this step.
        self._brings = run.state.every_pass or not run.step.accumulating
        self._ranks = ranks = run.setup.mesh
        #: Of all ranks that take the step together; None where it is of this pipeline alone.
        self.mesh: Mesh | None = None if ranks is None or not self._brings else ranks.mesh
        run.step.known, run.step.staged = False, True

    def meet(self) -> None:
        """See that all of them come to this step, and none to another call."""
        if self._ranks is not None and self.mesh is not None:
            meet(self._run.setup, self._ranks, "step of Pipeline")

    @property
    def count(self) -> int:
        """How many passes there ever were."""
        return self._run.step.count

    @property
    def known(self) -> bool:
        """Whether ranks with other data know that this step has failed, and go back no more."""
        return self._run.step.known

    def adding(self) -> AbstractContextManager[None]:
        """Have passes only add up."""
        return accumulate(self._model)

    def miss(self) -> None:
        """Take part in a pass of those ranks that does not come here, as the model has failed."""
        self._run.grad_hooks.miss()

    def miss_units(self) -> None:
        """Tell them that no more parameters are gathered here, for the same reason."""
        self._run.state.miss_units()

    def drop(self) -> None:
        """Let go of the gradients of a step that has failed on some rank."""
        self._run.step.together.append(UNKNOWN)
        self._run.grad_hooks.drop(all_of=self._brings)
        if self._brings:
            self._run.step.untold = False  # all ranks have heard of it


def passes_of(model: torch.nn.Module) -> StepPasses | None:
    """Return the passes of a step that a prepared model begins; None of one that is not."""
    run = found_run(model)
    return None if run is None else StepPasses(run, model)


def take_scaled(model: torch.nn.Module) -> float:
    """Return by what all gradients were multiplied that were stepped on since this was asked.

    By the user, that is; 0 if by nothing that is known.
    """
    run = found_run(model)
    if run is None:
        return 0.0
    found, run.step.scaled = run.step.scaled, 0.0
    return found


def stepped(model: torch.nn.Module) -> tuple[int, int, int]:
    """Return how many steps a model's optimizers were called for, and a number for their rates.

    The third is one for what was done since this was asked, if there was a backward pass, from
    which on it is the same on all stages. Each is 0 where the model is not prepared.
    """
    run = found_run(model)
    if run is None or not run.strategy.synchronous:
        return 0, 0, 0
    run.step.look_at_rates()
    before, *done = run.step.together or [UNKNOWN]
    run.step.together = [str(run.step.count)]
    known = UNKNOWN not in (before, *done) and run.step.together != [before]
    return 1 + run.step.calls, 1 + run.step.rated, 1 + crc32(repr(done).encode()) if known else 0


def loss_scaler(model: torch.nn.Module) -> Scaler | None:
    """Return what scales the losses of a model; None where nothing does."""
    run = found_run(model)
    return None if run is None else run.setup.scaler


def backward(
    loss_sum: torch.Tensor, *, weight: float, model: torch.nn.Module | None = None
) -> None:
    """Run backward on a sum of losses, so that the step uses their exact mean.

    `weight` is how many terms the sum has, tokens for example. The gradient of the step is that of
    the sum of all losses over the sum of all weights, over ranks and micro-batches alike, however
    unevenly they are spread. It holds for every prepared model that the loss comes from. `model`
    says whose loss scale is meant, where several have one.
    """
    total = number("weight of backward", weight)
    if not 0 <= total < math.inf:
        raise InvalidArgumentError(f"backward takes a weight from 0, not {shown(weight)}.")
    given: object = loss_sum
    if not isinstance(given, torch.Tensor) or given.numel() != 1:
        raise InvalidArgumentError(
            f"backward takes a loss, a tensor of one number, not {shown(loss_sum)}."
        )
    if isinstance(loss_sum, ReadLoss):
        loss_sum.backward()
    chosen = None if model is None else run_of("backward", model)
    runs = [*live_runs(), *([] if chosen is None else [chosen])]
    loss = _scaled(loss_sum, chosen, runs)
    if not loss.requires_grad:
        raise InvalidArgumentError(ELSEWHERE)
    before = [run.step.count for run in runs]
    for run in runs:
        run.step.offered = total
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for run in runs:
            run.step.offered = None
    reached = [run for run, count in zip(runs, before, strict=True) if run.step.count > count]
    if not reached or (chosen is not None and chosen not in reached):
        raise InvalidArgumentError(ELSEWHERE)


def _scaled(loss: torch.Tensor, chosen: Run | None, runs: Sequence[Run]) -> torch.Tensor:
    """Return the loss as backward wants it, if it is clear which model's scale is meant."""
    if not runs:
        raise InvalidArgumentError("backward needs a prepared model: call rd.prepare first.")
    scalers = {id(run.setup.scaler): run.setup.scaler for run in runs}
    if chosen is None and len(scalers) > 1:
        raise InvalidArgumentError(
            "Several prepared models have loss scales of their own, and backward can't tell which "
            "one this loss needs. Say so: rd.backward(loss_sum, weight=…, model=model)."
        )
    scaler = runs[0].setup.scaler if chosen is None else chosen.setup.scaler
    return loss if scaler is None else scaler.apply(loss)
