"""Units of ZeRO-3 as they move: gathered, let go, and kept for whoever wants them to stay."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch

from roundelay.communicator import Communicator
from roundelay.communicator.start import Handle
from roundelay.errors import CollectiveMismatch, InvalidArgumentError
from roundelay.records import named, phase
from roundelay.training.strategies.zero._flat_parameter import FlatParameter
from roundelay.training.strategies.zero._row_pool import RowPool
from roundelay.training.strategies.zero._saved_tensors import SavedTensors
from roundelay.training.strategies.zero.offload import Copy
from roundelay.training.strategies.zero.units import Unit

LOST = (
    "A backward pass, or a stage of a pipeline, raised an error on rank {ranks}, and this rank "
    "needs units that were not gathered in the pass before, so that they no longer come and the "
    "job can't go on. Have neither raise on any rank: make a loss that is not finite 0 on all of "
    "them, say. Or use strategy='zero2'."
)
LEFT = (
    "rd.evaluate raised an error on rank {ranks}, so that units which this rank needs no longer "
    "come and the job can't go on. Have measure raise on no rank, or on all of them."
)
#: What units are gathered for; it belongs to the call, as the unit does.
FORWARD, PINNED, BACKWARD, LOOKING = range(4)
PURPOSES = ("", " in rd.whole", " in backward", " without gradients")
#: What all ranks do together, beside: each has a label of its own, after those of the units.
OTHERS = 1 << 16  # labels above are not of units and parameters
CALLS = (
    "leaving a backward pass", "leaving rd.evaluate", "rd.evaluate", "rd.full_state_dict",
    "rd.whole_tensors", "rd.save", "rd.load", "rd.unprepare", "optimizer.state_dict",
    "optimizer.load_state_dict", "clip_grad_norm_",
)  # fmt: skip
INSIDE = (
    "rd.whole was called while the model runs, when parameters come and go. Call it before or "
    "after model(x), not in a forward method or hook."
)


class ShardedUnit:
    """A unit that is away, on its way, or here."""

    def __init__(self, unit: Unit, flats: Sequence[FlatParameter]) -> None:
        self.unit, self.flats = unit, list(flats)
        self.handles: list[Handle | Copy] | None = None  # while on its way
        self.here = False
        self.kept = False  # its rows are here, but its parameters refuse to be used
        self.users = 0  # modules that run with it at the moment
        self.in_backward = False
        #: Parameters that get gradients, and those of them that have none yet in this pass.
        self.trained = frozenset(
            place.index for flat in flats if flat.trained for place in flat.layout.places
        )
        self.missing: set[int] = set()
        self.frozen = any(not flat.trained for flat in flats)
        self.calls = 0  # whose inputs are still to get gradients
        #: Calls since backward was last over, of however many graphs, that it has not left again.
        self.open = 0
        self.pins = 0  # blocks of `rd.whole` that we are in

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return f"unit {self.unit.name!r}" if self.unit.name else "the model's own unit"

    @property
    def nbytes(self) -> int:
        """What it takes up when it is here."""
        return sum(flat.nbytes for flat in self.flats)


class UnitGathering:
    """The units of one model on one rank, and what of them is here."""

    _saved: SavedTensors

    def __init__(
        self, comm: Communicator, units: Sequence[ShardedUnit], *, keeps: bool = False
    ) -> None:
        self.comm, self._units = comm, list(units)
        self.keeps = keeps  # units between forward and backward
        self._of_parameter = {id(tensor): unit for unit in units for tensor in unit.unit.parameters}
        self.order: list[ShardedUnit] = []  # of the latest forward pass
        self._depth = 0  # of calls of the model
        self._inside_backward = False
        self._prefetched: list[ShardedUnit] = []  # in the latest backward pass, as it came to them
        self._prefetched_before: list[ShardedUnit] = []  # in the one before
        self._leaving: Handle | None = None  # what says that this rank has left backward
        self.row_pool = RowPool()
        self.in_flight = 0  # bytes
        self.peak = 0

    # ---- staying

    def pin(self, tensors: Sequence[torch.Tensor]) -> list[ShardedUnit]:
        """Bring the units of these parameters, to stay until `unpin`; return them."""
        if self._depth or any(unit.users for unit in self._units):
            raise InvalidArgumentError(INSIDE)
        found = self.owners(tensors)
        for one in found:
            self._prefetch(one, PINNED)
        for one in found:
            self._unshard(one)
            one.pins += 1
        return found

    def owners(self, tensors: Sequence[torch.Tensor]) -> list[ShardedUnit]:
        """Return the units that have these parameters."""
        wanted = {id(self._of_parameter[id(tensor)]) for tensor in tensors}
        return [unit for unit in self._units if id(unit) in wanted]

    def unpin(self, pinned: Sequence[ShardedUnit]) -> None:
        """Let units go that nobody else wants to stay."""
        for one in pinned:
            one.pins -= 1
            for flat in one.flats:
                flat.attach()  # parameters may have been given other memory
            self._reshard(one)

    # ---- moving

    def _prefetch(self, unit: ShardedUnit | None, purpose: int = FORWARD) -> None:
        """Begin to gather a unit."""
        if unit is None or unit.here or unit.kept or unit.handles is not None:
            return
        if self._inside_backward:
            self._prefetched.append(unit)
            purpose = BACKWARD
        elif not (purpose or torch.is_grad_enabled()):
            purpose = LOOKING
        self.in_flight += unit.nbytes
        self.peak = max(self.peak, self.in_flight)
        unit.handles = []
        label = 1 + self._units.index(unit)  # two units may look alike
        label += purpose * len(self._units)
        for flat in unit.flats:
            with named(self.comm.trace, _told, "gather", unit):
                unit.handles.append(flat.gather(self.comm, label, self.row_pool))

    def _unshard(self, unit: ShardedUnit) -> None:
        if unit.here:
            return
        self._prefetch(unit)
        try:
            with phase(self.comm.trace, "gather", _told("wait for", unit)):
                self._wait(unit)
        except BaseException:
            self._let_go(unit)
            raise
        for flat in unit.flats:
            flat.attach()
        self._saved.here(unit)
        unit.here, unit.kept = True, False

    def _wait(self, unit: ShardedUnit) -> None:
        handles, unit.handles = unit.handles, None
        try:
            for handle in handles or ():
                handle.wait()
        except CollectiveMismatch as error:
            raise self._explained(error) from None

    def _explained(self, error: CollectiveMismatch) -> CollectiveMismatch:
        """Say what labels in an error mean, or who has left."""
        for call, why in zip(CALLS, (LOST, LEFT), strict=False):
            left = rf"rank (\d+): [^\n]*label={self._label(call)}\b"
            if ranks := re.findall(left, str(error)):
                return CollectiveMismatch(why.format(ranks=", ".join(ranks)))
        labels = sorted({int(label) for label in re.findall(r"label=(\d+)", str(error))})
        names = [f"{label} is {self._called(label)}" for label in labels]
        return CollectiveMismatch(
            f"{error}\nUnder zero3 all ranks must call the same units in the same order; of "
            f"the labels, {', '.join(names)}. A rank whose loss raised an error goes another "
            f"way, too. Call every unit on every rank, or use strategy='zero2'."
        )

    @property
    def labels(self) -> int:
        """How many labels its calls have: some for each unit, and those of other calls."""
        return len(PURPOSES) * len(self._units) + len(CALLS)

    def _label(self, call: str) -> int:
        return len(PURPOSES) * len(self._units) + 1 + CALLS.index(call)

    def _called(self, label: int) -> str:
        """Return what a call with this label was for."""
        if label > OTHERS:
            return "of a call outside of units"
        if label > self.labels:
            return f"parameter {label - self.labels - 1}, of which something was computed"
        purpose, number = divmod(label - 1, len(self._units))
        if purpose >= len(PURPOSES):
            return CALLS[label - 1 - len(PURPOSES) * len(self._units)]
        return f"{self._units[number].name}{PURPOSES[purpose]}"

    def meet(self, call: str) -> None:
        """Come to a call of all ranks; who comes to a unit instead is told of it, and of that."""
        try:
            self._tell(call).wait()
        except CollectiveMismatch as error:
            raise self._explained(error) from None

    def _tell(self, call: str) -> Handle:
        nothing = np.zeros(1, np.uint8)
        found: Handle = self.comm.start.all_gather(nothing, label=self._label(call))
        return found

    def _keep_rows(self, unit: ShardedUnit) -> None:
        """Keep the rows of a unit for backward; what is written into them would be lost."""
        unit.here, unit.kept = False, True
        for flat in unit.flats:
            flat.reshard_parameter()

    def reshard_all(self) -> None:
        """Let go of all units that nobody wants to stay."""
        for unit in self._units:
            self._reshard(unit)

    def _reshard(self, unit: ShardedUnit) -> None:
        if unit.pins or not (unit.here or unit.kept or unit.handles is not None):
            return
        try:
            self._wait(unit)
        finally:
            self._let_go(unit)

    def _let_go(self, unit: ShardedUnit) -> None:
        unit.here = unit.kept = False
        self._saved.gone(unit)
        self.in_flight -= unit.nbytes
        for flat in unit.flats:
            self.row_pool.keep(flat.free())

    # ---- a backward pass that raises

    def leave(self, *, follow: bool = True) -> None:
        """Leave a backward pass in the middle: gather with the others what they still need.

        What that is, the pass before has shown; where they need something else, they are told. Of
        the stages of a pipeline it does not show that, and nobody is followed.
        """
        if self._leaving is not None:
            return
        self.reshard_all()
        seen, before = self._prefetched, self._prefetched_before or self._expected()
        for one in before[len(seen) :] if follow and seen == before[: len(seen)] else ():
            self._prefetch(one, BACKWARD)
            self._reshard(one)
        self._leaving = self._tell("leaving a backward pass")

    def miss(self) -> None:
        """Leave a forward pass in the middle: others who need more units are told."""
        if self._leaving is None:
            self._finish()
            self._leaving = self._tell("leaving a backward pass")  # which then does not come

    def leave_evaluation(self, *, together: bool) -> None:
        """Leave `rd.evaluate` in the middle, where others may still need units; or end that."""
        if self._leaving is None:
            self._finish()
            self._leaving = self._tell("leaving rd.evaluate")
        if together:
            leaving, self._leaving = self._leaving, None
            leaving.wait()

    def left(self, *, follow: bool = True) -> None:
        """End a pass that some ranks have left, together with them."""
        if self._leaving is None:
            self._finish()
            self.leave(follow=follow)
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.wait()
        self._finish()

    def _finish(self) -> None:
        """Free all that is left at the end of backward."""
        self._inside_backward = False
        for unit in self._units:
            unit.users = unit.calls = 0
            unit.in_backward = False
            unit.missing.clear()
        self.reshard_all()
        self.row_pool.rows.clear()

    def _expected(self) -> list[ShardedUnit]:
        """Return what a first backward pass gathers, if it goes the way of forward."""
        order = [] if self.keeps else list(dict.fromkeys(reversed(self.order)))
        return sorted(order, key=lambda one: one.unit.name != "")  # the model's own unit first


def _told(what: str, unit: ShardedUnit) -> str:
    """Say in a trace what is done with a unit."""
    return f"{what} {unit.unit.name or 'the rest'}"
