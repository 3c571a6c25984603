"""Modules around cut layers: their input comes in once, and they count this rank's heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from roundelay.errors import InvalidArgumentError
from roundelay.parallel import functions
from roundelay.parallel.sharding import Sharding
from roundelay.parallel.tensor._layer import WHOLE, LayerPlan

__all__ = ["Gather", "Region", "Replicate", "Split"]


class Region(LayerPlan):
    """Bring in the input for all cut layers inside: `region`, or `region:num_heads,split_size`.

    Queries, keys and values then share one copy of it, and what the module reads off its input is
    of the whole sequence. After the colon stand attributes of the module that count heads: the
    least, and multiples of it, become this rank's. One with a question mark need not be there.
    `shared` says that the least one counts heads of keys, which several ranks may share.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"shared"})
    argued = True

    def cuts(self) -> dict[str, Sharding]:
        """Cut nothing; refuse parameters of the module's own, and heads that are too few."""
        _no_parameters(self.place.label, self.place.module, "region")
        if self.place.inside:
            raise InvalidArgumentError(
                f"{self.place.label} is a 'region' inside of another one, whose input has come in."
            )
        self.axis.counted[self.place.name] = frozenset(self._shares().values())
        return {}

    def _shares(self) -> dict[str, int]:
        """Return what every attribute becomes."""
        module, comm = self.place.module, self.axis.comm
        asked = [name.strip() for name in self.place.argument.split(",") if name.strip()]
        values: dict[str, int] = {}
        for name in asked:
            value = getattr(module, name.rstrip("?"), None)
            if isinstance(value, int) and value > 0:
                values[name.rstrip("?")] = value
            elif not name.endswith("?"):
                raise InvalidArgumentError(
                    f"{self.place.label} has no attribute {name!r} with a whole number above 0."
                )
        if not values:
            return {}
        least = min(values, key=lambda name: values[name])  # with GQA, heads of keys and values
        heads = values[least]
        share = self.ranks_per_unit(heads)
        others = [value for name, value in values.items() if name != least]
        if share > 1 and all(value // heads % share == 0 for value in others):
            return {name: max(1, value // comm.size) for name, value in values.items()}
        here = self.counts(heads, 1)[comm.rank]
        odd = [name for name, value in values.items() if value % heads]
        if odd:
            raise InvalidArgumentError(
                f"{self.place.label}.{odd[0]} is {values[odd[0]]}, no multiple of {least}, which "
                f"is {heads}."
            )
        return {name: value // heads * here for name, value in values.items()}

    def apply(self, cuts: Mapping[str, Sharding]) -> None:
        """Set attributes, and look at what comes in."""
        del cuts
        for name, share in self._shares().items():
            setattr(self.place.module, name, share)
        self.place.module.register_forward_pre_hook(
            _First(self._enter, self._copy), with_kwargs=True
        )

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        self.axis.draw_apart(x, self.place.label, training=self.place.module.training)
        return self.axis.enter(x, self.place.label)

    def _copy(self, x: torch.Tensor) -> torch.Tensor:
        return functions.copy(x, self.axis.comm) if x.requires_grad else x


class Split(LayerPlan):
    """Divide the sequence at the input of a module: here the sequence-parallel part begins."""

    def cuts(self) -> dict[str, Sharding]:
        """Cut nothing; refuse parameters of the module's own."""
        _no_parameters(self.place.label, self.place.module, "split")
        return {}

    def apply(self, cuts: Mapping[str, Sharding]) -> None:
        """Look at what comes in."""
        del cuts
        if self.axis.dim is not None:
            self.place.module.register_forward_pre_hook(_First(self._split), with_kwargs=True)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return self.axis.split(x, self.place.label)


class Gather(LayerPlan):
    """Make the output of a module the whole sequence: here the sequence-parallel part ends."""

    def cuts(self) -> dict[str, Sharding]:
        """Cut nothing; refuse parameters of the module's own."""
        _no_parameters(self.place.label, self.place.module, "gather")
        return {}

    def apply(self, cuts: Mapping[str, Sharding]) -> None:
        """Look at what goes out."""
        del cuts
        if self.axis.dim is not None:
            self.place.module.register_forward_hook(self._gather)

    def _gather(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return self.axis.gather(output, self.place.label)


class Replicate(LayerPlan):
    """Leave a layer as it is, on every rank alike."""

    def cuts(self) -> dict[str, Sharding]:
        """Cut nothing; refuse one that a region's gradients pass in parts."""
        own = any(True for _ in self.place.module.parameters(recurse=False))
        if self.place.inside and own:
            raise InvalidArgumentError(
                f"{self.place.label} lies in a 'region' of the plan, where every rank has its own "
                f"heads or features, and is 'replicate': say 'norm sharded', by which its "
                f"gradients are summed."
            )
        return {}

    def apply(self, cuts: Mapping[str, Sharding]) -> None:
        """Refuse shards of the sequence, once they come."""
        del cuts
        module = self.place.module
        own = any(True for _ in module.parameters(recurse=False))
        if self.axis.dim is not None and own and not isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(_First(self._check), with_kwargs=True)
        if type(module).forward is nn.Linear.forward:
            module.register_forward_pre_hook(_First(self._check_features), with_kwargs=True)

    def _check_features(self, x: torch.Tensor) -> torch.Tensor:
        features: Any = self.place.module.in_features  # Any: torch says it may be a module
        self.expect_features(x, features, WHOLE)
        return x

    def _check(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point() and self.axis.dim is not None and x.dim() >= -self.axis.dim:
            self.axis.expect_whole(x, self.place.label)
        return x


def _no_parameters(label: str, module: nn.Module, word: str) -> None:
    for name, _ in module.named_parameters(recurse=False):
        raise InvalidArgumentError(
            f"{label} is {word!r} in the plan, and has a parameter of its own, {name!r}, which "
            f"nobody's word says how to treat. Name modules without any."
        )


class _First:
    """A hook that changes the first tensor that comes in, and the others otherwise.

    No closure, so that a copy has its own, and a pickle comes to the ranks that refuse one.
    """

    def __init__(self, change: Any, others: Any = None) -> None:  # Any: torch's are not typed
        self._change, self._others = change, others

    def __call__(self, _module: nn.Module, inputs: Any, options: Any) -> Any:
        done: list[bool] = []
        changed = tuple(self._each(value, done) for value in inputs)
        return changed, {key: self._each(value, done) for key, value in options.items()}

    def _each(self, value: Any, done: list[bool]) -> Any:
        if type(value) in (tuple, list):
            return type(value)(self._each(part, done) for part in value)
        if not isinstance(value, torch.Tensor):
            return value
        if not done:
            done.append(True)
            return self._change(value)
        return value if self._others is None else self._others(value)
