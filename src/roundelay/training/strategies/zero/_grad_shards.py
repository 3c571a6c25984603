"""What stands in `.grad` where gradients are divided, and what the user does with it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from roundelay.errors import InvalidArgumentError
from roundelay.training.shards.parameter import OptimizerParameter
from roundelay.training.shards.shard import Shard, nothing
from roundelay.training.strategy import Only, chosen

Gradient = Callable[[int], torch.Tensor]


class GradShards:
    """A divided tensor in `.grad` of each parameter, in the model and in the optimizer's groups.

    It may be used and changed like any gradient; taken away, the gradient is forgotten.
    """

    def __init__(
        self,
        tensors: Sequence[torch.nn.Parameter],
        shown: Sequence[OptimizerParameter],
        gradient: Gradient,
        changed: Callable[[int, str], None],
    ) -> None:
        """`gradient` gives this rank's piece of one; `changed` hears that one was written."""
        self._tensors, self._shown = tensors, shown
        self.gradient, self.changed = gradient, changed
        self._made: dict[int, tuple[Shard, Shard]] = {}
        self._alone: list[int] = []  # references to a pair that nobody else holds

    def _make(self, index: int) -> tuple[Shard, Shard]:
        shown = self._shown[index]
        live = _Live(self, index)
        # In the model it says the parameter's dtype, as torch wants it, whatever it is kept in.
        one, two = (
            Shard(shown.home, live, shown.shape, dtype=like.dtype, device=like.device,
                  kind="gradient", wrote=live.wrote)
            for like in (self._tensors[index], shown)
        )  # fmt: skip
        return one, two

    def put(self, index: int) -> None:
        """Have a gradient stand there."""
        if index not in self._made:
            self._made[index] = self._make(index)
            if not self._alone:
                self._alone = self._references(index)
        self._tensors[index].grad, self._shown[index].grad = self._made[index]

    def _references(self, index: int) -> list[int]:
        pair = self._made[index]
        return [*map(sys.getrefcount, pair), sys.getrefcount(pair[0].elements)]

    def release(self, index: int) -> None:
        """Take a gradient away; whoever still holds it finds the values that it has now."""
        pair = self._made.get(index)
        if pair is None:
            return
        if self._tensors[index].grad is pair[0]:
            self._tensors[index].grad = None
        if self._shown[index].grad is pair[1]:
            self._shown[index].grad = None
        del pair
        found = self._references(index)
        if any(more > few for more, few in zip(found, self._alone, strict=True)):
            pair = self._made.pop(index)
            live = pair[0].elements
            if isinstance(live, _Live):
                live.keep(self.gradient(index).clone())
            for one in pair:
                one.wrote, one.past = nothing, pair[0].past

    def gone(self, index: int) -> bool:
        """Tell whether the user has taken one away, by `model.zero_grad()` for example."""
        return self._tensors[index].grad is None or self._shown[index].grad is None

    def own(self, index: int) -> Iterator[torch.Tensor]:
        """Yield the gradients that the user has put in the place of one."""
        mine = self._made.get(index, (None, None))
        places: tuple[torch.Tensor, torch.Tensor] = self._tensors[index], self._shown[index]
        for tensor, stand_in in zip(places, mine, strict=True):
            if tensor.grad is not None and tensor.grad is not stand_in:
                yield tensor.grad

    def clear(self, only: Only = None) -> None:
        """Have no gradient stand anywhere, or for some parameters."""
        for index in chosen(range(len(self._tensors)), only):
            self.release(index)
            self._tensors[index].grad = self._shown[index].grad = None


class _Live:
    """The elements of a gradient as they are at the moment; or as they were, once it is gone."""

    def __init__(self, grad_shards: GradShards, index: int) -> None:
        self._of = weakref.ref(grad_shards)  # a graph may hold the parameter that leads here
        self._index = index
        self._kept: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        """Return those that are here."""
        return self._alive().gradient(self._index) if self._kept is None else self._kept

    def wrote(self, what: str) -> None:
        """Hear that they were changed."""
        if self._kept is None:
            self._alive().changed(self._index, what)

    def keep(self, values: torch.Tensor) -> None:
        """Stay like this."""
        self._kept = values

    def _alive(self) -> GradShards:
        found = self._of()
        if found is None:
            raise InvalidArgumentError("The model of this gradient is gone. Keep it, or a clone().")
        return found
