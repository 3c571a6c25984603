"""A prepared model at work: the strategy, its hooks, and what the steps of this rank add up to."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import torch

from roundelay.communicator import Communicator, Traffic
from roundelay.errors import InvalidArgumentError
from roundelay.training._arrivals import Arrivals
from roundelay.training._setup import Setup
from roundelay.training._strategy import Sharing, Strategy

__all__ = ["Run", "latest_run", "run_of"]


class Run:
    """One model in training on one rank."""

    def __init__(self, strategy: Strategy, setup: Setup) -> None:
        self.strategy, self.setup = strategy, setup
        self.steps = 0
        self.micro_batches = 1  # of the step at hand, where a loader says so
        self._holds = False
        self.sharing: Sharing = strategy.share(setup)
        self.arrivals = Arrivals(self.sharing)
        self.arrivals.at_end.append(self._share_out)
        #: The steps, and what the ranks had exchanged, when counting began.
        self.counted_from: tuple[int, list[Traffic] | None] = 0, self.sharing.traffic()
        self._trained = {id(one.tensor) for one in setup.parameters}
        vars(setup.model)[_KEPT] = _Kept(self)
        _latest.run = weakref.ref(self)

    @property
    def comm(self) -> Communicator:
        """The ranks that train together."""
        return self.setup.comm

    def _share_out(self) -> None:
        """Make the sum over a loader's micro-batches their mean; weighted losses need it not."""
        if self.micro_batches > 1 and not self.setup.weights.used:
            self.sharing.scale_grads(1 / self.micro_batches)

    @property
    def holds(self) -> bool:
        """Whether the step waits for more micro-batches, which until then only add up."""
        return self._holds

    @holds.setter
    def holds(self, more: bool) -> None:
        self._holds = self.arrivals.accumulating = more

    def may_step(self) -> bool:
        """Tell whether the gradients are fit for a step; where the loss is scaled, all agree."""
        scaler = self.setup.scaler
        names = [one.name for one in self.setup.parameters]
        return scaler is None or scaler.settle(self.comm, self.steps, names)

    def refuse_closure(self) -> None:
        """Refuse a closure where steps may have to be skipped."""
        if self.setup.scaler is not None:
            raise InvalidArgumentError(
                "step(closure) can't be skipped when gradients overflow, so it does not go with a "
                "scaled loss. Use bf16 or fp32, or an optimizer that needs no closure."
            )

    def check_still_the_same(self) -> None:
        """Refuse a model whose trained parameters are others than they were."""
        trained = self._trained
        if all(one.requires_grad == (id(one) in trained) for one in _parameters(self.setup.model)):
            return
        for name, one in self.setup.model.named_parameters():
            if one.requires_grad != (id(one) in self._trained):
                word = "trained" if one.requires_grad else "frozen"
                raise InvalidArgumentError(
                    f"The parameter {name} was {word} after prepare, so the ranks would no longer "
                    f"agree. Freeze and replace parameters before prepare."
                )


def _parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield all parameters, shared ones more than once, in a third of torch's own time."""
    known, left = {model}, [model]
    while left:
        module = left.pop()
        for one in module._parameters.values():  # noqa: SLF001 - torch has no other name
            if one is not None:
                yield one
        for child in module._modules.values():  # noqa: SLF001 - likewise
            if child is not None and child not in known:
                known.add(child)
                left.append(child)


_KEPT = "_roundelay_run"  # the attribute by which a model keeps its run


class _Kept:
    """A run that stays behind when its model is copied or pickled: the copy is not prepared."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


_latest = threading.local()  # ranks may be threads of one process


def run_of(call: str, model: object) -> Run:
    """Return the run of a prepared model."""
    kept = vars(model).get(_KEPT) if isinstance(model, torch.nn.Module) else None
    if kept is None:
        raise InvalidArgumentError(
            f"{call} needs a model that rd.prepare has returned, not {type(model).__name__}."
        )
    found: Run = kept.run
    return found


def latest_run(call: str) -> Run:
    """Return the run of the model that this thread prepared last."""
    found = getattr(_latest, "run", None)
    run: Run | None = None if found is None else found()
    if run is None:
        raise InvalidArgumentError(f"{call} needs a prepared model: call rd.prepare first.")
    return run
