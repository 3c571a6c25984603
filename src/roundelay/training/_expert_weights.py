"""Losses that weigh more on some ranks, where experts add up the gradients of all of them.

A loader gives ranks other numbers of rows, and what backward adds to a parameter is multiplied by
this rank's share. Gradients of experts come from the tokens of all ranks: each of these multiplies
what it sends, and the parameters of experts are left as they are.
"""

from __future__ import annotations

import weakref

from roundelay.parallel.expert.layer import MoE
from roundelay.training._autograd import kept
from roundelay.training._run import Run

__all__ = ["join_experts"]


class _LossWeight:
    """How much this rank's loss weighs in a backward pass; no copy of the model has it."""

    def __init__(self, run: Run) -> None:
        self._run = weakref.ref(run)

    def __call__(self) -> float:
        run = self._run()
        factor = 1.0 if run is None else run.step.factor
        if run is None or factor == 1:
            return 1.0
        asked = any(kept(parameter.tensor) for parameter in run.setup.parameters)
        return factor if asked else 1.0  # what torch.autograd.grad gives is the caller's own

    def __deepcopy__(self, _: object) -> None:
        """Leave it behind: a copy of a prepared model is not prepared."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def join_experts(run: Run) -> None:
    """Tell mixtures of experts how much the loss of this rank weighs."""
    for module in run.setup.model.modules() if run.setup.experts else ():
        if isinstance(module, MoE):
            module.loss_weight = _LossWeight(run)
