"""What an optimizer hands out of divided parameters, and what it steps on.

`param_groups` and `state` show tensors that behave as the whole. Optimizers of torch that treat
every element by itself step on the bare pieces, at their own speed; any other steps on what is
shown, so that what it computes of several elements, or of several parameters, is right.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from roundelay.training._checkpoint_parts import Saved, by_element, restore_state
from roundelay.training._joined import Joined
from roundelay.training._ps_checkpoint import as_arrays, as_tensors
from roundelay.training._shard import Shard
from roundelay.training._shard_parameter import ShardParameter

__all__ = ["Groups", "groups_of"]

#: Torch's own that treat every element by itself, or every parameter: they step on what is here.
ELEMENTWISE = frozenset({
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.ASGD,
})  # fmt: skip

BY_PARAMETER = frozenset(
    getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)
)

Key = TypeVar("Key")


def cuts_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether a rank has a part of each of its parameters; or some of them, whole."""
    return type(optimizer) not in BY_PARAMETER


class Groups:
    """The divided parameters of one optimizer."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shown: Sequence[ShardParameter],
        bare: Sequence[torch.nn.Parameter],
    ) -> None:
        self.optimizer = optimizer
        #: Whether what is here is stepped on as it is.
        self.direct = type(optimizer) in ELEMENTWISE | BY_PARAMETER
        self.shown = {id(one.home.model): one for one in shown}
        #: What stands for a parameter, by the id of anything that means it.
        self.bare = {
            id(key): two
            for one, two in zip(shown, bare, strict=True)
            for key in (one, two, one.home.model)
        }
        self.of_bare = {id(two): one for one, two in zip(shown, bare, strict=True)}
        self.inside = 0  # steps on bare pieces that we are in
        self.known = False  # whether this rank has the state's numbers of what others step on
        self.state = States(self)
        self._cut_state()
        self.show()
        vars(optimizer)["groups"] = self

    @property
    def raw(self) -> MutableMapping[torch.Tensor, dict[str, Any]]:
        """The optimizer's own state, by what it steps on."""
        found: MutableMapping[torch.Tensor, dict[str, Any]] = vars(self.optimizer)["state"]
        return found

    def _cut_state(self) -> None:
        """Divide the state of what was stepped on alone."""
        for key, shown in self.shown.items():
            state = self.raw.pop(shown.home.model, None)
            if state is not None:
                mine = self.raw.setdefault(self.bare[key], {})
                for name, value in state.items():
                    if by_element(name, value, shown):
                        cut = _cut(value, shown)
                        shape = self.bare[key].shape
                        mine[name] = cut.view(shape) if self.direct else shown.made(cut)
                    else:
                        mine[name] = value

    def _put(self, choose: dict[int, Any]) -> None:
        for group in self.optimizer.param_groups:
            # In place, since some optimizers know the list. Frozen ones are never stepped on.
            group["params"][:] = [choose.get(id(one), one) for one in group["params"]]

    def show(self) -> None:
        """Have the groups hold what behaves as the whole."""
        self._put({**self.shown, **self.of_bare})

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Have the groups and the state hold bare pieces for a while."""
        if not self.inside:
            self._put(self.bare)
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            self.known = False
            if not self.inside:
                self.show()

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Have them hold what behaves as the whole for a while, in the middle of a step."""
        before, self.inside = self.inside, 0
        self.show()
        try:
            yield
        finally:
            self.inside = before
            if before:
                self._put(self.bare)

    def share_numbers(self) -> None:
        """Know of parameters that others step on alone how many steps they took. All ranks call it.

        An optimizer that treats elements by themselves steps only where there are some.
        """
        if self.known or not self.direct:
            return
        self.known = True
        lacking = [one for one in self.shown.values() if 0 in one.home.counts and one.numel()]
        if not lacking:
            return
        home = lacking[0].home
        mine = {}
        for number, one in enumerate(lacking):
            if one.home.start == 0 < one.home.stop:
                bare = self.bare[id(one)]
                mine[number] = as_arrays({
                    key: value.view(-1)[:0] if by_element(key, value, bare) else value
                    for key, value in self.raw.get(bare, {}).items()
                })  # fmt: skip
        for told in home.comm.all_gather_object(list(mine.items())):
            for number, state in told:
                bare = self.bare[id(lacking[number])]
                if state and not bare.numel():
                    self.raw[bare] = as_tensors(state)

    # ---- checkpoints

    def kept(self, bare: torch.Tensor) -> Kept:
        """Return the state of what is stepped on: what is divided like it, and what is not."""
        state = self.raw.get(bare, {})
        if self.direct:
            elements = {key: one.detach().reshape(-1) for key, one in state.items()
                        if by_element(key, one, bare)}  # fmt: skip
        else:
            elements = {key: one.piece for key, one in state.items() if isinstance(one, Shard)}
        return Kept(elements, {key: one for key, one in state.items() if key not in elements})

    def restore(self, saved: Saved) -> None:
        """Take the state of everything that is stepped on out of a checkpoint."""
        own = Joined([self.optimizer])
        with self.stepping():
            for shown in self.shown.values():
                home, bare = shown.home, self.bare[id(shown)]
                if home.start < home.stop:
                    restore_state(own, bare, saved, home.name, home.start, home.stop)
                elif not self.direct:  # which all ranks step on alike
                    restore_state(own, bare, saved, home.name, 0, 0)
                    names = saved.state(home.name, 0, min(1, shown.numel()))
                    self.raw[bare].update({key: one[:0] for key, one in names.items()})
                if not self.direct and bare in self.raw:
                    state = self.raw[bare]
                    divided = saved.state(home.name, 0, min(1, shown.numel()))
                    state.update({key: shown.made(state[key]) for key in divided if key in state})


@dataclass(frozen=True, slots=True)
class Kept:
    """What an optimizer keeps for one piece."""

    elements: dict[str, torch.Tensor]
    whole: dict[str, Any]


def groups_of(optimizer: torch.optim.Optimizer) -> Groups:
    """Return what an optimizer has of divided parameters."""
    found: Groups = vars(optimizer)["groups"]
    return found


class _Shown(MutableMapping[Key, Any]):
    """A dictionary that is kept elsewhere in another form."""

    def __repr__(self) -> str:
        return repr(dict(self.items()))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Key, Any]:
        return {key: copy.deepcopy(value, memo) for key, value in self.items()}


class States(_Shown[torch.Tensor]):
    """`optimizer.state` as the user sees it: by parameter, of the groups or of the model."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def _key(self, tensor: torch.Tensor) -> torch.Tensor:
        self._groups.share_numbers()
        found: torch.Tensor = self._groups.bare.get(id(tensor), tensor)
        return found

    def __getitem__(self, tensor: torch.Tensor) -> Any:
        key = self._key(tensor)
        state = self._groups.raw[key]
        shown = self._groups.of_bare.get(id(key))
        return state if shown is None else State(self._groups, state, shown)

    def __setitem__(self, tensor: torch.Tensor, state: MutableMapping[str, Any]) -> None:
        self._groups.raw.pop(self._key(tensor), None)
        self[tensor].update(state)

    def __delitem__(self, tensor: torch.Tensor) -> None:
        del self._groups.raw[self._key(tensor)]

    def __contains__(self, tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor) and self._key(tensor) in self._groups.raw

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._groups.share_numbers()
        return iter([self._groups.of_bare.get(id(one), one) for one in self._groups.raw])

    def __len__(self) -> int:
        self._groups.share_numbers()
        return len(self._groups.raw)


class State(_Shown[str]):
    """What an optimizer keeps for one parameter, as the user sees it."""

    def __init__(self, groups: Groups, raw: dict[str, Any], shown: ShardParameter) -> None:
        self._groups, self._raw, self._of = groups, raw, shown

    def __getitem__(self, key: str) -> Any:
        value, of = self._raw[key], self._of
        if self._groups.direct and by_element(key, value, self._groups.bare[id(of)]):
            kind = f"{key} in the optimizer's state"
            return Shard(of.home, value.detach().view(-1), of.shape, kind=kind)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        of = self._of
        divided = self._groups.direct and by_element(key, value, of)
        shape = self._groups.bare[id(of)].shape
        self._raw[key] = _cut(value, of).view(shape) if divided else value

    def __delitem__(self, key: str) -> None:
        del self._raw[key]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._raw))

    def __len__(self) -> int:
        return len(self._raw)


def _cut(value: torch.Tensor, of: ShardParameter) -> torch.Tensor:
    """Return this rank's piece of state that goes with a parameter."""
    kind = of.dtype if value.is_floating_point() else value.dtype
    return of.own(value.detach()).reshape(-1).to(of.piece.device, kind, copy=True)
