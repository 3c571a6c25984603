"""What a strategy is: how the ranks share parameters, gradients and optimizer state.

A strategy is an object with options; `share` makes the live part for one model. Adding one is
adding a file to `strategies/`: the grids of the tests, the ledger and the tables find it there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from roundelay.communicator import Traffic
from roundelay.errors import InvalidArgumentError
from roundelay.planning.held import Held
from roundelay.training.checkpoint.parts import Saved, SavedPart, divided, hand_out, restore_whole

if TYPE_CHECKING:
    from roundelay.training._setup import Setup

__all__ = ["Held", "Only", "Strategy", "StrategyState", "Volume", "chosen"]

#: Numbers of the parameters that are meant, those of one optimizer of several; None: all.
Only = Collection[int] | None
Item = TypeVar("Item")


def chosen(items: Sequence[Item], only: Only) -> Sequence[Item]:
    """Return the items of the parameters that are meant, in their order."""
    return items if only is None else [items[index] for index in sorted(only)]


@dataclass(frozen=True, slots=True)
class Volume:
    """What one rank exchanges in one step."""

    sent: float = 0.0  # bytes
    received: float = 0.0
    calls: Mapping[str, int] = field(default_factory=dict)  # how many of which collective


class Strategy(ABC):
    """How the ranks share the work; a frozen dataclass of options."""

    #: By which words `prepare` knows it, and the options that each word stands for.
    names: ClassVar[Mapping[str, Mapping[str, Any]]]
    #: Whether every step gives what one device would give on the whole batch.
    synchronous: bool = True
    #: Whether `share` makes parameters that are still to be made; else `prepare` does.
    materializes: ClassVar[bool] = False
    #: Whether it takes sparse gradients and complex parameters.
    takes_odd: ClassVar[bool] = False
    #: Whether it moves parameters to other memory, where views of them don't follow.
    moves_parameters: ClassVar[bool] = False
    #: Whether the optimizer steps on copies of the parameters, elsewhere.
    steps_elsewhere: bool = False

    def take_experts(self, setup: Setup, name: str) -> None:  # noqa: ARG002 - others look at it
        """Take parameters that the axis ep divides, whose gradients fewer ranks bring together."""
        raise InvalidArgumentError(
            f"{type(self).__name__} brings all gradients together on one group of ranks, and those "
            f"of {name}, which is divided along ep, on another. Use strategy='ddp', 'zero1', "
            f"'zero2' or 'zero3'."
        )

    @abstractmethod
    def share(self, setup: Setup) -> StrategyState:
        """Take over a model and its optimizer on this rank. Every rank calls it."""


class StrategyState(ABC):
    """A strategy at work on one model, on one rank.

    The order of a step: `arrived` for every gradient while backward runs, `gathered` at its end,
    `before_step`, the optimizer's own step on its parameter groups, `after_step`. Of several
    optimizers each steps, clips and forgets by itself: `only` says which parameters it has.
    """

    setup: Setup
    #: Whether gradients are brought together in every backward pass, also in `rd.accumulate`.
    every_pass: bool = False
    #: Whether gradients of earlier passes made room for those that come now.
    lifted: bool = False
    #: Whether all ranks have the same whole parameters, and tell one another of every step.
    compares: bool = True
    #: Whether the optimizer steps here on whole parameters with whole gradients.
    sees_whole: bool = True
    #: Numbers of the parameters whose gradients are sparse.
    sparse: Collection[int] = ()

    def begin_backward(self) -> None:  # noqa: B027 - most have nothing to do
        """Make ready: the first gradient of a backward pass that communicates has come."""

    @abstractmethod
    def grad_ready(self, index: int) -> None:
        """Take the gradient of parameter `index`, which is complete on this rank."""

    @abstractmethod
    def backward_done(self) -> None:
        """Finish a backward pass: what did not arrive is not coming."""

    def micro_batch_done(self) -> None:  # noqa: B027 - likewise
        """Finish a backward pass inside `rd.accumulate`, where every pass is heard of."""

    def abandon(self, *, whole: bool) -> None:
        """Finish a backward pass that raised here, so that the ranks who wait for it hear of it.

        Where it is one that brings gradients together (`whole`), all ranks raise.
        """
        self.setup.step.untold = True
        if whole:
            self.backward_done()
        else:
            self.micro_batch_done()

    def miss_units(self) -> None:  # noqa: B027 - likewise
        """Hear that the model failed in a forward pass, and asks for no more of its parameters."""

    def before_step(self, only: Only = None) -> None:  # noqa: B027 - likewise
        """Make gradients ready for the optimizer."""

    def broke_step(self, only: Only = None) -> None:  # noqa: B027 - likewise
        """Bring what an optimizer changed until it raised an error to the model."""

    def brought_together(self, only: Only = None) -> None:  # noqa: B027 - likewise
        """Hear that gradients are what they should be, before the user gets to see them."""

    def done_to_grads(self, only: Only = None) -> list[tuple[str, str]]:  # noqa: ARG002 - likewise
        """Say what the user has done to gradients since then, which all ranks must do alike."""
        return []

    def after_step(self, only: Only = None) -> None:  # noqa: B027 - likewise
        """Bring what the optimizer changed to the model on every rank."""

    def step(self, own: Any, closure: Any, place: int = 0) -> Any:  # Any: what optimizers take
        """Run the own step of the optimizer at this place, here or where the strategy wants it."""
        del place
        return own(closure)

    @abstractmethod
    def grad_norm(self, norm_type: float, only: Only = None) -> float:
        """Return the norm of gradients, as one device would see it. Every rank calls it."""

    @abstractmethod
    def scale_grads(self, factor: float, only: Only = None) -> None:
        """Multiply gradients before the optimizer uses them."""

    @abstractmethod
    def clamp_grads(self, value: float, only: Only = None) -> None:
        """Cut every element of gradients to at most this size. Every rank calls it."""

    def shown_state(self, own: Any) -> Any:  # Any: what optimizers keep
        """Return what `optimizer.state` shows of what the optimizer has here."""
        return own

    def check_beside(self, state: Collection[Any]) -> None:  # noqa: B027 - likewise
        """Refuse state under keys that are no parameter, where the optimizer can't be given it."""

    def take_edits(self) -> None:  # noqa: B027 - likewise
        """Bring what the user has written into the parameters to what the optimizer steps on."""

    def loaded(self, index: int, values: torch.Tensor) -> None:  # noqa: B027 - likewise
        """Hear what `model.load_state_dict` brings, before it is rounded to the model's dtype."""

    def meet(self) -> None:  # noqa: B027 - likewise
        """Let `setup.comm` be the ranks that are left, before all of these make calls there."""

    def enter(self, call: str) -> None:  # noqa: B027 - likewise
        """Come to a call that all ranks make, where some may be on their way through the model."""

    def leave_evaluation(self, *, together: bool) -> None:  # noqa: B027 - likewise
        """Leave `rd.evaluate` by an error; in the end all ranks do it `together`."""

    def open(self, tensors: Sequence[torch.Tensor]) -> None:  # noqa: B027 - likewise
        """Have these parameters whole on every rank, and the same, until `shut`."""

    def written(self, tensors: Sequence[torch.Tensor]) -> bool:  # noqa: ARG002 - likewise
        """Tell whether the user has written into these parameters, where autograd can't see it."""
        return False

    def shut(self, tensors: Sequence[torch.Tensor], *, keep: bool, written: bool) -> None:  # noqa: ARG002
        """Take what was written into these parameters, the same on every rank, if it is kept."""
        if keep:
            self.take_edits()

    @abstractmethod
    def forget(self, only: Only = None) -> None:
        """Let go of gradients."""

    def zero_grad(self, own: Any, *, set_to_none: bool, only: Only = None) -> None:
        """Forget gradients, or make them zero."""
        if set_to_none:
            self.forget(only)
        else:
            own(set_to_none=False)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole model's state by the names that it has now. Every rank calls it."""
        state = dict(self.setup.model.state_dict())
        for names, tensor in zip(self.setup.names_now(), self.setup.stepped, strict=True):
            state.update({name: tensor.detach() for name in names if name in state})
        return state

    def whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same, one by one; a tensor is good until the next one is asked for."""
        yield from self.full_state_dict().items()

    def to_save(self) -> Iterable[SavedPart]:
        """Yield what this rank writes of a checkpoint: together, the ranks have everything once.

        As it is here, for strategies in which every rank has whole parameters and their state.
        """
        return divided(self.setup)

    def take_back(self, saved: Saved) -> None:
        """Read this rank's weights and optimizer state out of a checkpoint. Nobody waits here."""
        restore_whole(self.setup, saved)

    def refresh(self) -> None:
        """Bring weights that were read to the model on every rank, as after a step."""
        hand_out(self.setup)

    def traffic(self) -> list[Traffic] | None:
        """Return what every rank has exchanged so far, as counted. Every rank calls it."""
        return self.setup.comm.traffic()

    @abstractmethod
    def held(self) -> Held:
        """Count the bytes this rank holds now: live storages, each once."""

    @abstractmethod
    def predicted(self) -> tuple[Held, Volume]:
        """Say what a step should hold and exchange, by formula and by price of its schedules."""

    def close(self) -> None:  # noqa: B027 - likewise
        """Let go of what the strategy has beside the model."""
