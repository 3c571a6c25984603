"""ZeRO: what all ranks would hold alike is divided between them.

Stage 1 divides the optimizer's state, stage 2 also the gradients, stage 3 also the parameters.
Every stage computes the same numbers as data parallel does.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from roundelay.arguments import index_of, shown, truth, whole
from roundelay.communicator import Traffic
from roundelay.errors import (
    CollectiveMismatch,
    CommunicationError,
    InvalidArgumentError,
    RoundelayError,
    UnknownNameError,
)
from roundelay.training._buckets import bucket_limit
from roundelay.training._exchange import PassReport, refuse_broken, tell_all
from roundelay.training._mesh_ranks import EXPERTS
from roundelay.training._setup import Setup, share_buffers
from roundelay.training.checkpoint.parts import Saved, SavedPart
from roundelay.training.shards.groups import groups_of
from roundelay.training.strategies.zero._account import held_by_zero, predicted_for
from roundelay.training.strategies.zero._partition import Partition, divide
from roundelay.training.strategies.zero._sharded_grads import ShardedGrads
from roundelay.training.strategies.zero._sharded_unit import ShardedUnit
from roundelay.training.strategies.zero.offload import OFFLOADS, host_for
from roundelay.training.strategies.zero.units import Choice
from roundelay.training.strategy import Held, Only, Strategy, StrategyState, Volume

__all__ = ["Zero"]

STAGES = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Zero(Strategy):
    """Data parallel with state, gradients and parameters divided between the ranks, by stage."""

    names: ClassVar[dict[str, dict[str, Any]]] = {
        f"zero{stage}": {"stage": stage} for stage in STAGES
    }
    materializes: ClassVar[bool] = True
    moves_parameters: ClassVar[bool] = True

    stage: int = 3
    bucket_bytes: int | None = None  # sent together in stages 1, 2; None: as the device likes it
    units: Choice | None = None  # what stage 3 gathers together: classes or names of modules
    check_finite: bool = True
    reshard_after_forward: bool = True  # False: stage 3 keeps units until backward is over
    offload: str | None = None  # to the host: the "optimizer", or in stage 3 its "parameters", too
    shard_over: int | None = None  # so many ranks divide it, those of a host; None: all of them

    def __post_init__(self) -> None:
        if index_of(self.stage) not in STAGES:
            raise InvalidArgumentError(f"Zero has stages 1, 2 and 3, not {shown(self.stage)}.")
        if self.bucket_bytes is not None:
            size = whole("bucket_bytes of Zero", self.bucket_bytes, 1)
            object.__setattr__(self, "bucket_bytes", size)
        if self.units is not None and self.stage != STAGES[-1]:
            raise InvalidArgumentError(f"units= is for stage 3; stage {self.stage} has none.")
        if self.offload is not None and self.offload not in OFFLOADS:
            raise UnknownNameError("what Zero offloads", str(self.offload), OFFLOADS)
        if self.offload == "parameters" and self.stage != STAGES[-1]:
            raise InvalidArgumentError(
                f"offload='parameters' is for stage 3; in stage {self.stage} every rank needs them "
                f"whole. Use offload='optimizer'."
            )
        if self.shard_over is not None:
            object.__setattr__(self, "shard_over", whole("shard_over of Zero", self.shard_over, 2))
        for name in ("reshard_after_forward", "check_finite"):
            object.__setattr__(self, name, truth(name, getattr(self, name)))
        if not self.reshard_after_forward and self.stage != STAGES[-1]:
            raise InvalidArgumentError(
                f"reshard_after_forward= is for stage 3; in stage {self.stage} parameters stay."
            )

    def take_experts(self, setup: Setup, name: str) -> None:
        """Divide all between ranks that have the same experts; others hold the rest once more."""
        ranks, frozen = setup.same_experts.size, not _all_trained(setup)
        wrong = (
            "frozen, so that no row has it"
            if frozen
            else f"the same on {ranks} rank, which has nobody to divide it with"
            if ranks == 1
            else f"divided along ep, beside shard_over={self.shard_over}"
            if self.shard_over is not None
            else ""
        )
        if wrong:
            raise InvalidArgumentError(
                f"Zero divides between ranks with the same experts, and {name} is {wrong}. Use "
                f"strategy='ddp', or a mesh with dp or cp above 1 and experts that are trained."
            )

    def share(self, setup: Setup) -> StrategyState:
        """Divide the model and its optimizer between the ranks."""
        setup.host = host_for(setup, self.offload)
        if setup.experts and setup.mesh is not None:
            setup.shards, setup.replicas = setup.same_experts, setup.mesh.experts
        if self.shard_over is not None:
            _make_replicas(setup, self.shard_over)
        return _Divided(self, setup)


def _all_trained(setup: Setup) -> bool:
    """Tell whether every parameter that ep divides is trained."""
    trained = {name for one in setup.parameters for name in one.names}
    mesh = setup.mesh
    return mesh is None or all(
        name in trained for name in mesh.shardings if mesh.axis_of(name) == EXPERTS
    )


def _make_replicas(setup: Setup, over: int) -> None:
    """Have each `over` ranks after one another divide the model, and hold what all others do."""
    rank, size = setup.comm.rank, setup.comm.size
    if size % over:
        raise InvalidArgumentError(
            f"Zero(shard_over={over}) needs a number of ranks that divides by {over}, not {size}. "
            f"Give the ranks of one host, or leave it out to divide the model between all of them."
        )
    if over < size:
        setup.shards, setup.replicas = setup.comm.split(rank // over), setup.comm.split(rank % over)
        for group in (setup.shards, setup.replicas):
            if group is not None:
                group.follow_timeout(setup.comm)


class _Divided(ShardedGrads):
    """ZeRO at work on one model: its gradients, and the partition of its parameters."""

    sees_whole = False

    def __init__(self, options: Zero, setup: Setup) -> None:
        self.options = options
        #: Stages 2 and 3 hold no whole gradients, so they bring them together in every pass.
        self.every_pass = options.stage > 1
        limit = bucket_limit(
            options.bucket_bytes, [parameter.tensor for parameter in setup.parameters]
        )
        self.partition: Partition = divide(
            setup, stage=options.stage, bucket_bytes=limit, units=options.units,
            keeps=not options.reshard_after_forward,
        )  # fmt: skip
        super().__init__(setup, self.partition, options.stage, check=options.check_finite)
        self._passing = False  # whether a pass runs that brings gradients together
        if self.partition.scheduler is not None:
            self.compares = False  # nobody has whole parameters
            self.partition.scheduler.torn = weakref.WeakMethod(self._torn)
            self.partition.scheduler.left_unit = weakref.WeakMethod(self._left_unit)

    # ---- while backward runs

    def begin_backward(self) -> None:
        """Expect every gradient anew."""
        self._passing = True
        self.begin_pass(self.partition.order_of_gradients())

    def grad_ready(self, index: int) -> None:
        """Put the gradient into its row; free the unit that waited for it."""
        self.buckets.take(index)
        self.partition.grad_ready(index)

    def _left_unit(self, unit: ShardedUnit) -> None:
        """Have the gradients of a unit go that backward has left."""
        if self._passing:
            self.buckets.leave(unit.flats)

    def micro_batch_done(self) -> None:
        """Add up this rank's part of the gradients of one micro-batch."""
        self._passing = False
        self.buckets.finish()
        if self.partition.scheduler is not None:
            self._tell([], [])
        self.stand_in()

    def backward_done(self) -> None:
        """Wait for all sums, and see that they are fit for a step."""
        self._passing = False
        self.buckets.finish()
        count = len(self.setup.parameters)
        mine = [index in self.buckets.intake.broken for index in range(count)]
        used = [index in self.buckets.used for index in range(count)]
        told = self._tell(used, mine)
        refuse_broken(self.setup.comm, told, mine, self.setup.parameters)
        self.settle(told.used, told.factor())

    def _tell(self, used: Sequence[bool], broken: Sequence[bool]) -> PassReport:
        """Tell the other ranks; after a pass that raised on one of them, units come again."""
        buckets, step = self.buckets, self.setup.step
        late = None if self.partition.scheduler is None else buckets.late
        try:
            told = tell_all(self.setup.comm, used, broken, step, late=late)
        except CollectiveMismatch:
            if self.partition.scheduler is not None:
                with contextlib.suppress(CommunicationError):  # where ranks can't go on at all
                    self.partition.scheduler.left(follow=not step.staged)
            raise
        if told.late:
            buckets.add_late()
        return told

    def abandon(self, *, whole: bool) -> None:
        """Finish a pass that raised here; other ranks may wait for units, and for gradients."""
        if self.partition.scheduler is not None:
            wait = self.buckets.give_up()
            with contextlib.suppress(CommunicationError):  # gradients are waited for all the same
                self.partition.scheduler.leave(follow=not self.setup.step.staged)
            wait()
        super().abandon(whole=whole)

    def miss_units(self) -> None:
        """Tell other ranks, who may wait for units."""
        if self.partition.scheduler is not None and self.setup.comm.size > 1:
            with contextlib.suppress(CommunicationError):
                self.partition.scheduler.miss()

    def _torn(self) -> None:
        """Finish a pass that raised here before any gradient came."""
        if not self._passing:
            step = self.setup.step
            with contextlib.suppress(RoundelayError):  # the others know
                self.begin_backward()
                self.abandon(whole=not step.accumulating)
            step.begin()
            self.forget()
            step.torn = True

    # ---- around the step

    def take_edits(self) -> None:
        """Bring what the user has written into the parameters to what is stepped on."""
        self.partition.take_edits()

    def loaded(self, index: int, values: torch.Tensor) -> None:
        """Bring what was loaded to this rank's piece, unrounded."""
        self.partition.load(index, values)

    def enter(self, call: str) -> None:
        """Come to a call of all ranks, in one order with the units."""
        if self.partition.scheduler is not None:
            self.partition.scheduler.meet(call)

    def leave_evaluation(self, *, together: bool) -> None:
        """Tell whoever still needs units; and end that together."""
        if self.partition.scheduler is not None:
            self.partition.scheduler.leave_evaluation(together=together)

    def open(self, tensors: Sequence[torch.Tensor]) -> None:
        """Gather the units of these parameters."""
        self.partition.open(tensors)

    def written(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Tell whether what this rank owns of these units was written into."""
        return self.partition.written(tensors)

    def shut(self, tensors: Sequence[torch.Tensor], *, keep: bool, written: bool) -> None:
        """Take what was written, and let the units go."""
        self.partition.shut(tensors, keep=keep, written=written)

    def broke_step(self, only: Only = None) -> None:
        """Bring what an optimizer changed to every rank."""
        self.after_step(only)

    def step(self, own: Any, closure: Any, place: int = 0) -> Any:
        """Step, with whole and fresh weights whenever a closure looks at the model."""
        optimizer, only = self.setup.optimizer.all[place], self.setup.only(place)
        host, groups = self.setup.host, groups_of(optimizer)
        if host is not None and closure is not None:
            raise InvalidArgumentError(
                "step(closure) looks at the model in the middle of a step, while offload= has it "
                "in two places. Use an optimizer that needs no closure, or leave out offload=."
            )

        def fresh() -> Any:
            self.partition.all_gather_parameters(only)
            with groups.showing():
                return closure()

        mine = [flat for flat in self.partition.trained
                if only is None or flat.layout.places[0].index in only]  # fmt: skip
        self.partition.stepping = True
        try:
            with groups.stepping() if groups.direct else nullcontext():
                if host is not None and groups.direct:
                    return host.step(optimizer, own, mine)
                result = own(None if closure is None else fresh)
            for flat in () if host is None else mine:
                flat.round_masters()
            return result
        finally:
            self.partition.stepping = False

    def after_step(self, only: Only = None) -> None:
        """Bring the new parameters to every rank, and rank 0's buffers."""
        self.stepped(only)
        self.partition.all_gather_parameters(only, rounded=self.setup.host is not None)
        share_buffers(self.setup, once=True)

    def zero_grad(self, own: Any, *, set_to_none: bool, only: Only = None) -> None:
        """Forget gradients, or make them zero."""
        del own  # what the optimizer steps on gets its gradients at the step
        if set_to_none:
            self.forget(only)
        else:
            self.zero(only)

    # ---- the whole state

    def whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole model's state, gathering one row of parameters at a time."""
        state = self.setup.model.state_dict(keep_vars=True)  # as it is: nothing is gathered for it
        names = self.setup.names_now(self.partition.parameters)
        for index, tensor in self.partition.whole_tensors():
            for name in names[index]:
                if state.pop(name, None) is not None:
                    yield name, tensor.detach()
        for name, other in state.items():
            yield name, other.detach() if isinstance(other, torch.Tensor) else other

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole model's state by the names that it has now. Every rank calls it."""
        state = dict(self.setup.model.state_dict(keep_vars=True))
        listed = self.setup.names_now(self.partition.parameters)
        trained = {name: names[0] for names in listed for name in names}
        copies: dict[str, torch.Tensor] = {}
        for name, tensor in self.whole_tensors():
            first = trained.get(name, name)  # tied parameters stay tied
            if name in trained and first not in copies:
                copies[first] = tensor.clone()
            state[name] = copies.get(first, tensor)
        return state

    def to_save(self) -> Iterable[SavedPart]:
        """Yield this rank's pieces, with their state."""
        return self.partition.to_save()

    def take_back(self, saved: Saved) -> None:
        """Read this rank's pieces."""
        self.partition.take_back(saved)

    def refresh(self) -> None:
        """Bring pieces that were read to the model on every rank."""
        self.partition.all_gather_parameters()

    # ---- the ledger

    def traffic(self) -> list[Traffic] | None:
        """Count both what gradients and what gathered parameters cost."""
        return self.partition.traffic()

    def held(self) -> Held:
        """Count what lies here now."""
        return held_by_zero(self.setup, self.partition, self.buckets)

    def predicted(self) -> tuple[Held, Volume]:
        """Say the formulas of the stage, and the price of its schedules."""
        return predicted_for(self.setup, self.partition, self.options.stage)

    @property
    def peak(self) -> int:
        """The most bytes of gathered parameters at a time, so far."""
        return self.partition.peak

    def close(self) -> None:
        """Watch the modules and parameters no more."""
        self.partition.close()
        self.remove()
