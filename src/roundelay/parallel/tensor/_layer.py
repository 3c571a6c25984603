"""What a plan's words for one layer have in common: where it is, what they cut, what changes."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from roundelay.errors import InvalidArgumentError
from roundelay.parallel.cut_tensor import CutTensor
from roundelay.parallel.functions import counts_of
from roundelay.parallel.sharding import Sharding
from roundelay.parallel.tensor.axis import TensorAxis

WHOLE = "its whole input"


@dataclass(frozen=True)
class Place:
    """One layer of a model, and what the plan says of it."""

    name: str
    module: nn.Module
    parents: tuple[tuple[str, nn.Module], ...]  # nearest first
    argument: str  # after the colon
    words: frozenset[str]  # after the first one
    inside: bool  # a region around it has brought the input in
    axis: TensorAxis

    @property
    def label(self) -> str:
        """How messages call it."""
        return self.name or "the model itself"

    def __deepcopy__(self, memo: dict[int, Any]) -> Place:
        """Be the place of the copy; what lies around a layer is not copied with it."""
        return replace(self, module=copy.deepcopy(self.module, memo), parents=())


class LayerPlan(ABC):
    """What is done with a layer. Whatever can't be is refused by `cuts`, before anything is."""

    #: Words that may follow.
    takes: ClassVar[frozenset[str]] = frozenset()
    #: Whether something may follow a colon.
    argued: ClassVar[bool] = False

    def __init__(self, place: Place) -> None:
        self.place, self.axis = place, place.axis
        self.whole = "whole" in place.words

    def cuts(self) -> dict[str, Sharding]:
        """Return how parameters of the module are cut; those that are not named stay whole."""
        return {}

    @abstractmethod
    def apply(self, cuts: Mapping[str, Sharding]) -> None:
        """Change the module, once its parameters are cut."""

    # ---- for those that cut

    def sharding(self, dim: int, counts: list[list[int]]) -> Sharding:
        """Return how a dim is cut that consists of blocks, given how much of each a rank has."""
        pieces: list[list[tuple[int, int]]] = [[] for _ in range(self.axis.comm.size)]
        start = 0
        for block in counts:
            for rank, length in enumerate(block):
                pieces[rank].append((start, start + length))
                start += length
        axis = self.axis
        return Sharding(axis.name, axis.comm, dim, tuple(map(tuple, pieces)), by="plan")

    def counts(self, features: int, unit: int) -> list[int]:
        """Return how many features every rank has, of which so many stay together."""
        label, ranks = self.place.label, self.axis.comm.size
        if features % unit:
            raise InvalidArgumentError(
                f"{label} has {features} features, which are no multiple of the {unit} that "
                f"{self.place.argument!r} keeps together."
            )
        units = features // unit
        share = self.ranks_per_unit(units)
        if share > 1 and unit // self.factors()[0] % share == 0:
            return [features // ranks] * ranks
        if units < ranks:
            what = f"{units} times {unit} features" if unit > 1 else f"{units} features"
            raise InvalidArgumentError(
                f"{label} has {what}, too few for the {ranks} ranks of {self.axis.name}. Take "
                f"{self.axis.name}={units} or less, or 'replicate' for all layers around it."
            )
        return [count * unit for count in counts_of(units, ranks)]

    def expect_features(self, x: torch.Tensor, features: int, what: str) -> None:
        """Refuse an input that was cut where it should be whole, or the other way round."""
        whole = isinstance(x, CutTensor) and x.mark.cut.dim == -1 and what == WHOLE
        if x.dim() and (x.size(-1) != features or whole):
            raise InvalidArgumentError(
                f"{self.place.label} expects {what}, {features} features, and gets {x.size(-1)}. "
                f"'column' leaves features cut and 'row' makes them whole: take them in turns, say "
                f"'column gather', or 'replicate' for all of them. Where 'column:head_dim' or "
                f"'qkv:head_dim' keeps heads together, 'row:head_dim' cuts alike."
            )

    def ranks_per_unit(self, units: int) -> int:
        """Return how many ranks share one, where the plan says that they may; 1 if none do."""
        ranks = self.axis.comm.size
        may = "shared" in self.place.words and units < ranks and ranks % units == 0
        return ranks // units if may else 1

    def factors(self) -> list[int]:
        """Return the numbers that the argument names: attributes of a module around, or digits."""
        return [self._factor(word.strip()) for word in self.place.argument.split("*") if word]

    def unit(self) -> int:
        """Return how many features stay together: all that the argument names, multiplied."""
        return math.prod(self.factors())

    def _factor(self, word: str) -> int:
        if word.isdigit() and int(word):
            return int(word)
        for _, module in self.place.parents:
            value = getattr(module, word, None)
            if isinstance(value, int) and value > 0:
                return value
        around = ", ".join(name or "the model" for name, _ in self.place.parents)
        raise InvalidArgumentError(
            f"{self.place.label} is cut by {word!r}, which is no whole number above 0 and no "
            f"attribute with one of {around}."
        )


def is_conv1d(module: nn.Module) -> bool:
    """Say whether a module is transformers' Conv1D: a linear layer with a transposed weight."""
    named = any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
    return named and isinstance(getattr(module, "nf", None), int)


def weight_of(place: Place, kind: str) -> nn.Parameter:
    """Return the weight of a linear layer that can be cut, or say why it can't."""
    module = place.module
    conv1d = is_conv1d(module)
    if not conv1d and type(module).forward is not nn.Linear.forward:
        raise InvalidArgumentError(
            f"{place.label} is a {type(module).__name__}, and {kind!r} takes nn.Linear, without a "
            f"forward of its own, or transformers' Conv1D."
        )
    if any(isinstance(parent, nn.MultiheadAttention) for _, parent in place.parents):
        raise InvalidArgumentError(
            f"{place.label} is part of nn.MultiheadAttention, which never calls it. 'replicate' "
            f"the whole attention, or write it with layers of nn.Linear."
        )
    return own_parameter(place, "weight")


def own_parameter(place: Place, name: str) -> nn.Parameter:
    """Return a parameter that can be cut: there, of known shape, and nobody's product."""
    parameter = place.module._parameters.get(name)  # noqa: SLF001
    if not isinstance(parameter, nn.Parameter):
        raise InvalidArgumentError(
            f"{place.label}.{name} is no parameter, but computed from others; apply the plan "
            f"before parametrizations, or say 'replicate'."
        )
    if is_lazy(parameter):
        raise InvalidArgumentError(
            f"{place.label}.{name} has no shape yet. Call the model once before the plan."
        )
    return parameter


def become(module: nn.Module, mixin: type, plan: LayerPlan) -> None:
    """Give a module the forward of a mixin; it stays the same object, and of its own class too."""
    vars(module)["tensor_plan"] = plan
    own: Any = type(module)
    module.__class__ = _mixed(mixin, own)


@cache
def _mixed(mixin: Any, own: Any) -> Any:  # Any: a class that no checker knows
    def reduced(self: Any, protocol: Any) -> Any:
        """Say how it is made again, as its class has no name in any module.

        Copies are. A pickle comes to the communicator, which says that it can't be, and what can.
        """
        how, args, *rest = super(made, self).__reduce_ex__(max(2, protocol))
        return (_again, (mixin, own), *rest) if args[:1] == (type(self),) else (how, args, *rest)

    names = {"__module__": mixin.__module__, "__reduce_ex__": reduced}
    made: Any = type(f"{mixin.__name__}{own.__name__}", (mixin, own), names)
    return made


def _again(mixin: Any, own: Any) -> Any:
    kind = _mixed(mixin, own)
    return kind.__new__(kind)


def resize(module: nn.Module, *, inputs: int | None = None, outputs: int | None = None) -> None:
    """Have a linear layer say how many features it has here; Conv1D computes with it."""
    names = ("nx", "nf") if is_conv1d(module) else ("in_features", "out_features")
    for name, count in zip(names, (inputs, outputs), strict=True):
        if count is not None and hasattr(module, name):
            setattr(module, name, count)


def product(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Return what a linear layer makes of `x` before its bias."""
    weight: Any = module.weight  # Any: torch says it may be a module
    return nn.functional.linear(x, weight.t() if is_conv1d(module) else weight)
