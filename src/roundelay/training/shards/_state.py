"""`optimizer.state` where it is divided: by parameter, of the groups or of the model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from roundelay.training.checkpoint.parts import by_element
from roundelay.training.optimizer.state_tree import each_tensor
from roundelay.training.shards.operands import told
from roundelay.training.shards.parameter import OptimizerParameter
from roundelay.training.shards.shard import Shard

if TYPE_CHECKING:
    from roundelay.training.shards.groups import ShardedGroups

Key = TypeVar("Key")


class _Shown(MutableMapping[Key, Any]):
    """A dictionary that is kept elsewhere in another form."""

    def __repr__(self) -> str:
        return repr(dict(self.items()))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Key, Any]:
        return {key: copy.deepcopy(value, memo) for key, value in self.items()}


class States(_Shown[torch.Tensor]):
    """`optimizer.state` as the user sees it: by parameter, of the groups or of the model."""

    def __init__(self, groups: ShardedGroups) -> None:
        self._groups = groups

    def _key(self, tensor: Any) -> Any:  # Any: a parameter, or what the optimizer knows itself
        self._groups.share_numbers()
        return self._groups.bare.get(id(tensor), tensor)

    def __getitem__(self, tensor: torch.Tensor) -> Any:
        key = self._key(tensor)
        state = self._groups.raw[key]
        shown = self._groups.of_bare.get(id(key))
        return state if shown is None else State(self._groups, state, shown)

    def __setitem__(self, tensor: torch.Tensor, state: MutableMapping[str, Any]) -> None:
        key = self._key(tensor)
        if id(key) in self._groups.of_bare:
            self._groups.raw[key] = {}
            self[tensor].update(state)
        else:
            self._groups.raw[key] = state  # type: ignore[assignment] # whatever is kept there

    def __delitem__(self, tensor: torch.Tensor) -> None:
        key = self._key(tensor)
        del self._groups.raw[key]
        if id(key) in self._groups.of_bare:
            self._groups.note(self._groups.of_bare[id(key)], "taking all out of")

    # What is asked for with something in its place is not made, as it is by [].

    def get(self, tensor: Any, default: Any = None) -> Any:
        """Return what is there, or the other."""
        return self[tensor] if tensor in self else default  # noqa: SIM401 - which this is

    def setdefault(self, tensor: Any, default: Any = None) -> Any:
        """Return what is there; else the other, which is there from now on."""
        if tensor not in self:
            self[tensor] = default
        return self[tensor]

    def pop(self, tensor: Any, *default: Any) -> Any:
        """Take out what is there, or return the other."""
        if tensor not in self and default:
            return default[0]
        found = self.get(tensor)  # which stays readable
        del self[tensor]
        return found

    def __contains__(self, tensor: object) -> bool:
        return self._key(tensor) in self._groups.raw

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Go through them in the order of the groups, on every rank, whatever is here first."""
        self._groups.share_numbers()
        groups = self._groups
        order = {id(groups.bare[id(one)]): at for at, one in enumerate(groups.shown.values())}
        found = sorted(groups.raw, key=lambda one: order.get(id(one), len(order)))
        return iter([groups.of_bare.get(id(one), one) for one in found])

    def __len__(self) -> int:
        self._groups.share_numbers()
        return len(self._groups.raw)


class State(_Shown[str]):
    """What an optimizer keeps for one parameter, as the user sees it."""

    def __init__(
        self, groups: ShardedGroups, raw: dict[str, Any], shown: OptimizerParameter
    ) -> None:
        self._groups, self._raw, self._of = groups, raw, shown

    def __getitem__(self, key: str) -> Any:
        value, of = self._raw[key], self._of
        if self._groups.direct and by_element(key, value, self._groups.bare[id(of)]):
            kind = f"{key} in the optimizer's state"

            def wrote(what: str) -> None:
                of.home.note(f"{what} into {kind} of {of.home.name}")

            return Shard(of.home, value.detach().view(-1), of.shape, kind=kind, wrote=wrote)
        self._groups.hand_out(self._of, key)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        of = self._of
        self._groups.note(of, f"putting {told(value)} as {key} into")
        divided = self._groups.direct and by_element(key, value, of)
        shape = self._groups.bare[id(of)].shape
        self._raw[key] = cut_out(value, of).view(shape) if divided else value

    def __delitem__(self, key: str) -> None:
        del self._raw[key]
        self._groups.note(self._of, f"taking {key} out of")

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._raw))

    def __len__(self) -> int:
        return len(self._raw)


def divided(key: str, state: Any, of: OptimizerParameter) -> Any:
    """Divide what goes with the elements of a parameter, also in containers."""

    def divide(_: str, tensor: torch.Tensor) -> torch.Tensor:
        mine = by_element(key, tensor, of) and not isinstance(tensor, Shard)
        return of.made(cut_out(tensor, of)) if mine else tensor

    return each_tensor(state, divide)


def lies_as(shard: Shard, shown: Shard) -> bool:
    """Tell whether the ranks have the same elements of both."""
    return shard.of is None and shard.home.counts == shown.home.counts


def cut_out(value: torch.Tensor, of: OptimizerParameter) -> torch.Tensor:
    """Return this rank's piece of state that goes with a parameter."""
    kind = of.dtype if value.is_floating_point() else value.dtype
    return of.own(value.detach()).reshape(-1).to(of.piece.device, kind, copy=True)
