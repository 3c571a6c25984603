"""What an optimizer hands out of divided parameters, and what it steps on.

`param_groups` and `state` show tensors that behave as the whole. Optimizers of torch that treat
every element by itself step on the bare pieces, at their own speed; any other steps on what is
shown, so that what it computes of several elements, or of several parameters, is right.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from roundelay.training._parameter_edits import StateEdits
from roundelay.training.checkpoint.parts import Saved, by_element, placed, restore_state, taken
from roundelay.training.optimizer.joined import JoinedOptimizers, kept
from roundelay.training.optimizer.state_arrays import as_arrays, as_tensors
from roundelay.training.optimizer.state_tree import Slot, each_tensor
from roundelay.training.shards._state import States, cut_out, divided, lies_as
from roundelay.training.shards.parameter import OptimizerParameter
from roundelay.training.shards.shard import Shard

__all__ = ["ShardedGroups", "groups_of"]

#: Torch's own that treat every element by itself, or every parameter: they step on what is here.
ELEMENTWISE = frozenset({
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.ASGD,
})  # fmt: skip

BY_PARAMETER = frozenset(
    getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)
)


def cuts_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether a rank has a part of each of its parameters; or some of them, whole."""
    return type(optimizer) not in BY_PARAMETER


#: What these keep (Any: for isinstance); all else in the state was put there on all ranks.
TOLD: Any = (torch.Tensor, int, float, type(None))


class ShardedGroups:
    """The divided parameters of one optimizer."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shown: Sequence[OptimizerParameter],
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
        self.gathered: dict[int, torch.Tensor] = {}  # while a checkpoint is taken
        #: What of the state the user has that is not divided, by place.
        self._handed: dict[str, tuple[torch.Tensor, str]] = {}
        self._cut_state()
        self.show()
        vars(optimizer)["groups"] = self

    @property
    def raw(self) -> MutableMapping[torch.Tensor, dict[str, Any]]:
        """The optimizer's own state, by what it steps on."""
        return kept(self.optimizer)

    def _cut_state(self) -> None:
        """Divide the state of what was stepped on alone."""
        for key, shown in self.shown.items():
            state = self.raw.pop(shown.home.model, None)
            if state is not None:
                mine = self.raw.setdefault(self.bare[key], {})
                for name, value in state.items():
                    if self.direct and by_element(name, value, shown):
                        mine[name] = cut_out(value, shown).view(self.bare[key].shape)
                    else:
                        mine[name] = divided(name, value, shown)

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
                    if isinstance(value, TOLD) and not isinstance(value, Shard)
                }), list(self.raw.get(bare, {}))  # fmt: skip
        for told in home.comm.all_gather_object(list(mine.items())):
            for number, (state, keys) in told:
                bare = self.bare[id(lacking[number])]
                if keys and not bare.numel():
                    # What the user has put there is here as well.
                    both = {**self.raw.get(bare, {}), **as_tensors(state)}
                    self.raw[bare] = {key: both[key] for key in keys if key in both}

    def note(self, shown: OptimizerParameter, what: str) -> None:
        """Note what is done to the state of a parameter, unless the optimizer itself does it."""
        if not vars(self.optimizer).get("inside"):
            shown.home.note(f"{what} the optimizer's state of {shown.home.name}")

    def hand_out(self, shown: OptimizerParameter, key: str) -> None:
        """Look from now on what is written into something of the state that is not divided."""
        place, bare = f"{key} in the optimizer's state of {shown.home.name}", self.bare[id(shown)]
        self._handed[place] = bare, key
        edits = vars(self.optimizer).setdefault("edits", StateEdits(self._places, whole=False))
        edits.handed(place, self.raw[bare][key])

    def _places(self) -> Iterator[tuple[str, Any]]:
        for place, (bare, key) in self._handed.items():
            if key in (state := self.raw.get(bare, {})):
                yield place, state[key]

    # ---- checkpoints

    def kept(self, bare: torch.Tensor) -> Kept:
        """Return the state of what is stepped on: what is divided like it, and what is not."""
        shown, state = self.of_bare.get(id(bare)), self.raw.get(bare, {})
        if shown is None:  # a frozen one
            return Kept({}, {})
        elements = {key: one.detach().reshape(-1) for key, one in state.items()
                    if self.direct and by_element(key, one, bare)}  # fmt: skip
        whole = {key: one for key, one in state.items() if key not in elements}

        def put(place: str, tensor: torch.Tensor) -> Any:
            if not isinstance(tensor, Shard):
                return tensor
            if not lies_as(tensor, shown):
                return self.gathered[id(tensor)]
            elements[place] = tensor.piece
            return Slot(place, tuple(tensor.shape))

        for key, one in list(whole.items()):
            if isinstance(one, Shard) and by_element(key, one, shown) and lies_as(one, shown):
                elements[key] = whole.pop(key).piece
        return Kept(elements, each_tensor(whole, put))

    def gather_odd(self) -> None:
        """Have whole what is in the state of a parameter and is divided otherwise: views, others'.

        All ranks call it, before they look at what is kept.
        """

        def gather(_: str, tensor: torch.Tensor) -> None:
            if isinstance(tensor, Shard) and not lies_as(tensor, shown):
                self.gathered[id(tensor)] = tensor.full()

        for shown in self.shown.values():
            state = self.raw.get(self.bare[id(shown)], {})
            for key in sorted(state, key=str):
                each_tensor(state[key], gather)

    def restore(self, saved: Saved) -> None:
        """Take the state of everything that is stepped on out of a checkpoint."""
        own = JoinedOptimizers([self.optimizer])
        with self.stepping():
            for shown in self.shown.values():
                home, bare = shown.home, self.bare[id(shown)]
                made = partial(_made, shown, bare)
                elements, found = taken(saved, home.name, home.start, home.stop, made)
                whole = {key: divided(key, one, shown) for key, one in found.items()}
                if not self.direct:
                    whole |= {key: made(element, shown.shape) for key, element in elements.items()}
                    elements = {}
                restore_state(own, bare, elements, whole)


@dataclass(frozen=True, slots=True)
class Kept:
    """What an optimizer keeps for one piece."""

    elements: dict[str, torch.Tensor]
    whole: dict[str, Any]


def groups_of(optimizer: torch.optim.Optimizer) -> ShardedGroups:
    """Return what an optimizer has of divided parameters."""
    found: ShardedGroups = vars(optimizer)["groups"]
    return found


def _made(
    of: OptimizerParameter, bare: torch.Tensor, piece: torch.Tensor, shape: Sequence[int]
) -> Shard:
    """Return the whole of elements that are here, as a part of state."""
    return of.made(placed(piece, bare)).reshaped(shape)
