"""Where the elements of one parameter lie, and how ranks compute on all of them together."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, InvalidArgumentError
from roundelay.parallel.part import part_of
from roundelay.reductions import Array
from roundelay.training._step import StepState

__all__ = ["Home", "as_bytes"]

Thing = TypeVar("Thing")


class Home:
    """A parameter that is divided: every rank has a stretch of its flattened elements.

    It holds nothing: gradients lead here, and torch holds them where Python's collector can't see.
    """

    def __init__(
        self,
        comm: Communicator,
        counts: Sequence[int],  # how many elements each rank has
        number: int,  # by which calls for one parameter are told from calls for another
        names: Sequence[str],  # of all parameters, by that number
        model: torch.nn.Parameter,  # the parameter, through which its gradients flow
    ) -> None:
        self.counts, self.number, self.names = list(counts), number, names
        self.name, self.rank = names[number], comm.rank
        self.start = sum(self.counts[: self.rank])
        self.stop = self.start + self.counts[self.rank]
        self.device = model.device  # of the whole, wherever elements lie
        #: Of what the parameter itself is a part, along another axis, and its shape.
        self.sharding, self.shape = part_of(model), tuple(model.shape)
        self.key = id(model)  # by which sets and dicts find the parameter
        self._comm, self._model = weakref.ref(comm), weakref.ref(model)
        self._taken = 0  # labels that other calls of these ranks have
        self._step: weakref.ref[StepState] | None = None

    def move(self, comm: Communicator, taken: int) -> None:
        """Call by another communicator of the same ranks, in which others have some labels."""
        self._comm, self._taken = weakref.ref(comm), taken

    def tell(self, step: StepState) -> None:
        """Have a step know what ranks do with what is divided."""
        self._step = weakref.ref(step)

    def note(self, what: str) -> None:
        """Note what was done here, which all ranks must do alike."""
        step = None if self._step is None else self._step()
        if step is not None:
            step.did(what)

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        return self._here(self._comm)

    @property
    def model(self) -> torch.nn.Parameter:
        """The parameter in the model."""
        return self._here(self._model)

    def _here(self, what: weakref.ref[Thing]) -> Thing:
        found = what()
        if found is None:
            raise InvalidArgumentError(
                f"The model with the parameter {self.name} is gone, and what was divided between "
                f"the ranks with it. Keep the model, or .full() of what you need."
            )
        return found

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return what this rank has of a whole tensor, flat."""
        return whole.reshape(-1)[self.start : self.stop]

    def gather(self, piece: torch.Tensor) -> torch.Tensor:
        """Return all elements, flat, in new memory. Every rank calls it."""
        if len(self.counts) == 1:
            return piece.detach().clone()
        whole = torch.empty(sum(self.counts), dtype=piece.dtype, device=piece.device)
        if whole.numel():
            counts = [count * piece.element_size() for count in self.counts]
            self._call(as_bytes(piece.contiguous()), as_bytes(whole), counts)
        return whole

    def together(self, mine: torch.Tensor) -> torch.Tensor:
        """Return what every rank has brought, a row of numbers each. Every rank calls it."""
        rows = mine.detach().reshape(1, -1).cpu()
        if len(self.counts) == 1:
            return rows.to(mine.device)
        every = rows.new_empty(len(self.counts), rows.shape[1])
        self._call(as_bytes(rows.reshape(-1)), as_bytes(every.reshape(-1)), None)
        return every.to(mine.device)

    def _call(self, mine: Any, out: Any, counts: Sequence[int] | None) -> None:
        try:
            label = 1 + self.number + self._taken
            self.comm.start.all_gather(mine, out=out, axis=0, counts=counts, label=label).wait()
        except CollectiveMismatch as error:
            labels = {int(label) for label in re.findall(r"label=(\d+)", str(error))}
            told = [f"{one} is {self.names[one - self._taken - 1]}" for one in sorted(labels)
                    if self._taken < one <= self._taken + len(self.names)]  # fmt: skip
            raise CollectiveMismatch(
                f"{error}\nWhat is computed from parameters or gradients that are divided between "
                f"the ranks must be asked for on every rank, in the same order; labels tell the "
                f"parameter: {', '.join(told)}."
            ) from None


def as_bytes(flat: torch.Tensor) -> Array | torch.Tensor:
    """Return the bytes of a tensor as collectives take them: an array, or on a device itself."""
    seen = flat.detach().view(torch.uint8)
    return seen.numpy() if seen.device.type == "cpu" else seen
