"""How ZeRO divides the parameters of a model: into rows, and rows between the ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from roundelay.communicator import Communicator, Traffic
from roundelay.communicator.start import Handle
from roundelay.planning.rows import PARTS_AFTER_STEP, runs
from roundelay.training._buckets import shared_tensor
from roundelay.training._setup import Parameter, Setup
from roundelay.training._volume import traffic_of
from roundelay.training.checkpoint.parts import Saved, SavedPart, stretch
from roundelay.training.materialize import start_from_first
from roundelay.training.optimizer.masters import merge
from roundelay.training.precision import cast_model
from roundelay.training.shards.groups import cuts_parameters, groups_of
from roundelay.training.shards.parameter import OptimizerParameter
from roundelay.training.shards.sharded_parameter import ShardedParameter
from roundelay.training.strategies.zero._flat_parameter import FlatParameter
from roundelay.training.strategies.zero._groups import hand_out
from roundelay.training.strategies.zero._layout import Piece
from roundelay.training.strategies.zero._sharded_unit import ShardedUnit
from roundelay.training.strategies.zero._strays import strays, take_strays
from roundelay.training.strategies.zero._unit_scheduler import UnitScheduler
from roundelay.training.strategies.zero.units import Choice, Unit, find_units
from roundelay.training.strategy import Only

EACH = 4  # parameters for each rank, as large as the largest, in a row that cuts none


class Partition:
    """All rows of one model, what this rank owns of them, and how they become whole."""

    def __init__(self, setup: Setup, parameters: Sequence[Parameter]) -> None:
        self.setup = setup
        #: The trained ones, as numbered in the setup, and then the frozen ones that are divided.
        self.parameters = list(parameters)
        self.flats: list[FlatParameter] = []
        self.units: list[ShardedUnit] = []
        self.scheduler: UnitScheduler | None = None
        self._owner: dict[int, ShardedUnit] = {}
        #: What the optimizer hands out for each trained parameter, and what it steps on here.
        self.shown: list[OptimizerParameter] = []
        self.bare: list[torch.nn.Parameter] = []
        self.stepping = (
            False  # whether the optimizer is at work, and `all_gather_parameters` is to come
        )
        self._steps: deque[torch.Tensor] = deque()

    @property
    def trained(self) -> list[FlatParameter]:
        """The rows that get gradients."""
        return [flat for flat in self.flats if flat.trained]

    def schedule_units(
        self, comm: Communicator, units: Sequence[ShardedUnit], *, keeps: bool = False
    ) -> None:
        """Have units come and go, or stay between forward and backward."""
        self.units = [unit for unit in units if unit.flats]
        self.scheduler = UnitScheduler(
            comm, self.setup.model, self.units, keeps=keeps, step=self.setup.step
        )
        # What is computed from divided parameters comes in one order with the units.
        for home in (home for flat in self.flats for home in flat.homes.values()):
            home.move(comm, self.scheduler.labels)
        for flat in self.flats:
            flat.told = self.setup.step.wrote
        self._owner = {index: unit for unit in self.units for index in unit.trained}

    def grad_ready(self, index: int) -> None:
        """Let a unit know that one of its gradients has come."""
        if self.scheduler is not None:
            self.scheduler.grad_ready(index, self._owner[index])

    def order_of_gradients(self) -> list[FlatParameter]:
        """Return the rows in the order in which backward should complete them."""
        if self.scheduler is None:
            return self.trained
        used = [flat for one in dict.fromkeys(self.scheduler.order) for flat in one.flats]
        rest = [flat for flat in self.flats if flat not in used]
        return [flat for flat in [*reversed(used), *reversed(rest)] if flat.trained]

    # ---- after a step

    def all_gather_parameters(self, only: Only = None, *, rounded: bool = False) -> None:
        """Bring what an optimizer changed, which parts may have already, to the whole model."""
        if self.scheduler is not None:
            self.scheduler.reshard_all()
        going: deque[tuple[FlatParameter, Handle, torch.Tensor]] = deque()
        for flat in self.trained:
            if only is not None and flat.layout.places[0].index not in only:
                continue  # another optimizer's, as all of its row
            if not rounded:
                flat.round_masters()
            if flat.resident and flat.comm.size > 1:
                if len(going) == PARTS_AFTER_STEP:
                    self._wait(going)
                memory = self._steps.popleft()
                mine = memory[: flat.part.nbytes].view(flat.dtype)
                mine.copy_(flat.part)
                handle = flat.comm.start.all_gather(mine, out=flat.whole, axis=0)
                going.append((flat, handle, memory))
            flat.touch()
        while going:
            self._wait(going)

    def _wait(self, going: deque[tuple[FlatParameter, Handle, torch.Tensor]]) -> None:
        _, handle, memory = going.popleft()
        handle.wait()
        self._steps.append(memory)

    def make_steps(self) -> None:
        """Have memory that parts are copied through after a step."""
        most = max((flat.part.nbytes for flat in self.trained), default=0)
        for _ in range(PARTS_AFTER_STEP):
            device = self.flats[0].part.device
            self._steps.append(shared_tensor(self.setup.within, most, torch.uint8, device))

    # ---- what the user writes into the model

    @torch.no_grad()
    def take_edits(self) -> None:
        """Have rows and masters hold what the user has written into the parameters."""
        lent = [flat for unit in self.units if unit.pins for flat in unit.flats]
        flats = [*(flat for flat in self.trained if flat.resident), *lent]
        take_strays(self.parameters, flats)
        for flat in flats:
            if not flat.resident:
                flat.part.copy_(flat.own)
            if flat.has_masters and flat.edited:
                merge(flat.master, flat.part.to(flat.master.device))

    @torch.no_grad()
    def take_edit(self, flat: FlatParameter, index: int) -> None:
        """Do so for what this rank has of one parameter, which the user looks at elsewhere."""
        if self.stepping or isinstance(self.parameters[index].tensor, ShardedParameter):
            return
        if any(strays(self.parameters, flat)):
            take_strays(self.parameters, [one for one in self.trained if one.whole.numel()])
        mine = flat.piece(flat.part, index)
        if not flat.resident:
            mine.copy_(flat.piece(flat.own, index))
        if flat.has_masters:
            merge(flat.piece(flat.master, index), mine.to(flat.master.device))

    # ---- `rd.whole`

    def open(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have these parameters whole until `shut`."""
        if self.scheduler is not None:
            self.scheduler.pin(tensors)

    def written(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Tell whether the user has written into what this rank owns of these units."""
        if self.scheduler is None:
            return False  # autograd sees it by itself
        flats = [flat for owner in self.scheduler.owners(tensors) for flat in owner.flats]
        return any(
            not torch.equal(flat.own.to(flat.part.device), flat.part)
            or any(strays(self.parameters, flat))
            for flat in flats
        )

    @torch.no_grad()
    def shut(self, tensors: Sequence[torch.Tensor], *, keep: bool, written: bool) -> None:
        """Take what the user has written into these parameters, or let it go with their rows."""
        scheduler = self.scheduler
        lent = [] if scheduler is None else scheduler.owners(tensors)
        flats = [flat for one in lent for flat in one.flats]
        try:
            if keep:
                self.take_edits()
            for flat in flats if written else ():
                flat.touch()
            for flat in () if keep else flats:
                if flat.has_masters:
                    merge(flat.master, flat.part.to(flat.master.device))  # of what was loaded
        finally:
            if scheduler is not None:
                scheduler.unpin(lent)

    @torch.no_grad()
    def load(self, index: int, values: torch.Tensor) -> None:
        """Bring loaded values to this rank's piece of a parameter, in the optimizer's dtype."""
        for flat, piece, stepped in self._owned():
            if piece.index == index and flat.has_masters:
                stepped.copy_(values.reshape(-1)[piece.start : piece.stop].view(stepped.shape))

    # ---- looking at all of it

    def whole_tensors(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield every parameter by its number, whole, one row at a time."""
        for flat in self.flats:
            row = flat.gather_masters()
            for place in flat.layout.places:
                yield place.index, flat.view(place, row)

    def to_save(self) -> Iterator[SavedPart]:
        """Yield this rank's pieces of every row, and some of what every rank has whole."""
        replicas = self.setup.replicas
        first = replicas is None or replicas.rank == 0
        for optimizer in self.setup.optimizer.all:
            groups_of(optimizer).gather_odd()
        for _, piece, stepped in self._owned():
            if not first and piece.index not in self.setup.experts:
                continue
            name = self.parameters[piece.index].name
            owner = self.parameters[piece.index].owner
            state = groups_of(self.setup.optimizer.all[owner]).kept(stepped)
            values = stepped.detach().view(-1)
            whole = state.whole if piece.start == 0 else {}
            yield SavedPart(name, piece.start, piece.stop, values, state.elements, whole)
        for optimizer in self.setup.optimizer.all:
            groups_of(optimizer).gathered.clear()
        rank, size = self.setup.comm.rank, self.setup.comm.size
        for number, (name, tensor) in enumerate(self._undivided()):
            if number % size != rank:
                continue
            if tensor.numel():
                yield stretch(name, tensor, {}, 0, tensor.numel())
            else:  # it may be absent
                yield SavedPart(name, 0, 0, torch.empty(0, dtype=tensor.dtype))

    @torch.no_grad()
    def take_back(self, saved: Saved) -> None:
        """Read the same."""
        self.setup.step.check_shut("What is loaded")
        for _, piece, stepped in self._owned():
            where = self.parameters[piece.index].name, piece.start, piece.stop
            stepped.copy_(saved.values(*where).view(stepped.shape))
        for optimizer in self.setup.optimizer.all:
            groups_of(optimizer).restore(saved)
        for name, tensor in self._undivided():
            if tensor.numel() == 0:
                continue
            tensor.copy_(saved.values(name, 0, tensor.numel()).view(tensor.shape))

    def _owned(self) -> Iterator[tuple[FlatParameter, Piece, torch.nn.Parameter]]:
        for flat in self.flats:
            for piece, stepped in zip(flat.pieces, flat.stepped, strict=True):
                yield flat, piece, stepped

    def _undivided(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters that are in no row, or have no elements to be divided."""
        inside = {place.index for flat in self.flats for place in flat.layout.places}
        divided = {id(self.parameters[index].tensor) for index in inside}
        for name, tensor in self.setup.model.named_parameters():
            if id(tensor) not in divided or tensor.numel() == 0:
                yield name, tensor

    def traffic(self) -> list[Traffic] | None:
        """Return what every rank has exchanged in all of its groups."""
        setup = self.setup
        scheduled = [] if self.scheduler is None else [self.scheduler.comm]
        return traffic_of(setup.comm, [setup.shards, setup.replicas, *scheduled])

    @property
    def transient(self) -> list[torch.Tensor]:
        """The memory that parameters pass through."""
        scheduler = self.scheduler
        rows = (
            []
            if scheduler is None
            else [*scheduler.row_pool.rows, *(flat.whole for flat in self.flats)]
        )
        return [*self._steps, *rows]

    @property
    def peak(self) -> int:
        """The most bytes of gathered units at a time, so far."""
        return 0 if self.scheduler is None else self.scheduler.peak

    def close(self) -> None:
        """Watch the modules no more."""
        if self.scheduler is not None:
            self.scheduler.remove()


def divide(
    setup: Setup, *, stage: int, bucket_bytes: int, units: Choice | None, keeps: bool = False
) -> Partition:
    """Move a model into rows, point its optimizers at this rank's pieces of them.

    Optimizers that need whole parameters get whole ones: some on each rank.
    """
    cuts = [cuts_parameters(optimizer) for optimizer in setup.optimizer.all]
    apart = setup.host is not None and setup.host.parameters
    away = stage == 3 and (setup.comm.size > 1 or apart)  # noqa: PLR2004 - a stage
    if away:
        partition = _by_units(setup, units, cuts, keeps=keeps)
    else:
        partition = Partition(setup, setup.parameters)
        partition.flats = _by_buckets(setup, bucket_bytes, cuts)
        if partition.flats and setup.comm.size > 1:
            partition.make_steps()
    cast_model(setup.model, setup.precision)
    for home in (home for flat in partition.flats for home in flat.homes.values()):
        home.tell(setup.step)
    hand_out(partition)
    return partition


def _by_buckets(setup: Setup, most: int, cuts: Sequence[bool]) -> list[FlatParameter]:
    """Cut the trained parameters, last first as their gradients come, into rows."""
    found = []
    for owner, cut in enumerate(cuts):
        order = [at for at in reversed(range(len(setup.parameters)))
                 if setup.parameters[at].owner == owner]  # fmt: skip
        tensors = [setup.parameters[index].tensor for index in order]
        keys = [(tensor.dtype, tensor.device, index in setup.experts)
                for index, tensor in zip(order, tensors, strict=True)]  # fmt: skip
        sizes = [tensor.numel() * tensor.dtype.itemsize for tensor in tensors]
        # Whole parameters are divided evenly where there are several for each rank.
        room = most if cut else max([most, *(EACH * setup.within.size * size for size in sizes)])
        found += [([order[at] for at in run], cut) for run in runs(keys, sizes, most=room)]
    flats = []
    for indices, cut in sorted(found, key=lambda one: -min(one[0])):  # as they will be complete
        start_from_first(setup.comm, [setup.parameters[index].tensor for index in indices])
        flats.append(FlatParameter(setup.within, setup.parameters, indices, setup.precision,
                          resident=True, cut=cut, host=setup.host))  # fmt: skip
    start_from_first(setup.comm, setup.model.parameters())  # those that are not trained
    return flats


def _by_units(
    setup: Setup, choice: Choice | None, cuts: Sequence[bool], *, keeps: bool
) -> Partition:
    """Make rows of every unit, one by one, and have them come and go."""
    found = find_units(setup.model, choice)
    listed = [*setup.parameters, *_frozen(setup)]
    partition = Partition(setup, listed)
    number = {id(one.tensor): index for index, one in enumerate(listed)}
    units = []
    for unit in found:
        flats = _rows_of(setup, unit, listed, number, cuts)
        partition.flats.extend(flats)
        units.append(ShardedUnit(unit, flats))
    # Of their own, so that they keep their order whatever the order of gradients is.
    comm = setup.within.group(range(setup.within.size)) or setup.within
    comm.follow_timeout(setup.within)
    partition.schedule_units(comm, units, keeps=keeps)
    return partition


def _rows_of(
    setup: Setup,
    unit: Unit,
    listed: Sequence[Parameter],
    number: dict[int, int],
    cuts: Sequence[bool],
) -> list[FlatParameter]:
    start_from_first(setup.comm, unit.parameters)
    kinds: dict[object, list[int]] = {}
    for tensor in unit.parameters:
        index = number[id(tensor)]
        key = tensor.dtype, tensor.device, listed[index].owner, index in setup.experts
        kinds.setdefault(key, []).append(index)
    return [
        FlatParameter(setup.within, listed, indices, setup.precision, resident=False,
                      trained=owner >= 0, cut=owner < 0 or cuts[owner], host=setup.host)
        for indices in kinds.values()
        for owner in [listed[indices[0]].owner]
    ]  # fmt: skip


def _frozen(setup: Setup) -> list[Parameter]:
    names: dict[int, list[str]] = {}
    tensors = {}
    for name, tensor in setup.model.named_parameters(remove_duplicate=False):
        if not tensor.requires_grad:
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
    return [Parameter(tuple(names[key]), tensor, -1) for key, tensor in tensors.items()]
