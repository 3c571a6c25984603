"""`rd.Pipeline`: a model cut into stages, which ranks run micro-batch by micro-batch."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, InvalidArgumentError
from roundelay.parallel.pipeline._agree import (
    ONE,
    CallRanks,
    StageRates,
    Told,
    compare_done,
    compare_scaled,
    compare_steps,
    rows_number,
)
from roundelay.parallel.pipeline._messages import Form
from roundelay.parallel.pipeline._parts import attach, left_over, names_in, tied
from roundelay.parallel.pipeline._plan import Wanted, agreed_plan, device_of
from roundelay.parallel.pipeline._shared_buffers import SharedBuffers
from roundelay.parallel.pipeline._split_batch import form_number, joined, rows_of, split_batch
from roundelay.parallel.pipeline._tied import TiedParameters
from roundelay.parallel.pipeline._walk import Batch, StepRecord, Walk, is_elsewhere
from roundelay.parallel.staging import stage_model
from roundelay.pipelines import PipelineSchedule
from roundelay.training.read_loss import ReadLoss
from roundelay.training.steps import StepPasses, loss_scaler, passes_of, stepped, take_scaled

__all__ = ["Pipeline"]

PLAIN = (
    "{name} of {where} was {value!r} when the pipeline was made, and is {now} now: stages go on "
    "with what it was. Make it a buffer and write into that, or use it in a module that is called "
    "as it is."
)
STEPPED = (
    "pipe.step(x, target) has run the backward pass of all micro-batches already, and returns "
    "their loss to be read. Leave out backward(); what else the loss should have belongs into the "
    "pipeline's loss=fn."
)
EVALUATED = (
    "pipe.evaluate(x, target) returns a loss without a gradient. pipe.step(x, target) runs forward "
    "and backward, on all ranks."
)
LossFunction = Callable[[Any, Any], torch.Tensor]


class Pipeline(nn.Module):
    """The stages of a model that this rank has, and `step`, which trains all stages on a batch.

    A stage starts at each of the modules that `stages` names; without, the model is cut so that
    stages have about as many parameters, or with `cost="time"` take about as long on `sample`.
    Parameters keep the names that they have in the whole model. `schedule` is the word for one of
    `roundelay.pipelines`, a schedule of your own, or the path of its JSON file.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        comm: Communicator,
        loss: LossFunction | None = None,
        stages: Sequence[str] | None = None,
        schedule: str | os.PathLike[str] | PipelineSchedule = "1f1b",
        micro_batches: int | None = None,
        stages_per_rank: int | None = None,
        split: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
        cost: str = "parameters",
        sample: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(comm, Communicator):
            raise InvalidArgumentError(
                f"Pipeline needs comm=, a communicator such as mesh['pp'], not {comm!r}."
            )
        if not isinstance(model, nn.Module):
            raise InvalidArgumentError(
                f"Pipeline needs a torch.nn.Module, not {type(model).__name__}."
            )
        wanted = Wanted(stages, schedule, micro_batches, stages_per_rank, split, cost, sample)
        plan = agreed_plan(model, comm, wanted, dir(type(self)))
        self._comm, self._schedule, self._peaks = comm, plan.schedule, plan.peaks
        self._loss, self._plain = loss, plan.plain
        mine = {number: plan.stages[number] for number in plan.schedule.stages_of(comm.rank)}
        rest = left_over(model, plan.stages)
        attach(self, model, mine.values(), [name for at in mine for name in rest.get(at, ())])
        told = "; ".join(f"{what}: {value}" for what, value in plan.told.items())
        staging = stage_model(self, model, comm, told, self._compare_copies)
        last = plan.schedule.stages - 1
        self._programs = {
            number: staging.looked_at(number, stage.bind(self), last=number == last)
            for number, stage in mine.items()
        }
        shared = tied(model, plan.stages, plan.schedule.placement)
        names = _names_of(model)
        self._tied = TiedParameters(self, comm, shared, lambda name: names[name])
        self._shared_buffers = SharedBuffers(self, model, plan.stages)
        self._uses = {number: sorted(names_in(model, stage)) for number, stage in mine.items()}
        #: Which one it is of the pipelines over these ranks, which all make in the same order.
        self._number = next(vars(comm).setdefault("pipelines", count(1)))
        self._rates = StageRates()
        self._called: set[int] = set()  # errands of which all rows were compared
        self._forms: dict[tuple[int, ...], dict[int, Form | None]] = {}
        self._record = StepRecord()
        self._walk: Walk | None = None

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copies and pickles: their stages would run the modules of this one."""
        raise InvalidArgumentError(
            "A pipeline can't be copied or pickled: its stages are cut out of one model, and run "
            "that one. Copy the model and make another rd.Pipeline of it; for its weights there "
            "are rd.full_state_dict(pipe) and rd.save, and pipe.state_dict() for this rank's."
        )

    @property
    def micro_batch(self) -> int:
        """The number of the micro-batch that is computed at the moment, from inside a stage."""
        return 0 if self._walk is None else self._walk.now.micro_batch

    @property
    def schedule(self) -> PipelineSchedule:
        """What all ranks do, in order."""
        return self._schedule

    @property
    def peaks(self) -> tuple[int, ...]:
        """Of how many micro-batches every rank keeps activations at most, as it is proved."""
        return self._peaks

    @property
    def record(self) -> StepRecord:
        """What this rank did in the last step, as counted: activations kept, messages, times."""
        return self._record

    def extra_repr(self) -> str:
        """Say which stages these are."""
        here = ", ".join(map(str, self._schedule.stages_of(self._comm.rank)))
        return f"{self._schedule.name}, stage {here} of {self._schedule.stages}"

    def step(self, x: Any, target: Any) -> torch.Tensor:
        """Run forward and backward on a batch, and return its loss, the same on all ranks.

        It is there to be read: `backward()` of it is refused, as all of that has run.
        Gradients are those of the mean over micro-batches, added to what is there. All ranks pass
        the same batch; those that have neither the first stage nor the last may pass None. An
        error on one rank is raised on all, when what was under way has come to its end.
        """
        return self._loss_on(x, target, learns=True)

    def evaluate(self, x: Any, target: Any) -> torch.Tensor:
        """Return the loss on a batch, the same on all ranks, without a gradient."""
        return self._loss_on(x, target, learns=False)

    def forward(self, *x: Any, errand: _Errand | None = None) -> Any:
        """Return what the model makes of a batch on the rank of the last stage, None on others.

        Without a gradient: `step` is for training.
        """
        given: Any = None if not x or x[0] is None else x
        if errand is None:
            errand = _Errand(None, learns=False, loss=None)
        passes = passes_of(self) if errand.learns else None
        together = None if passes is None or self._comm.size == 1 else passes.mesh
        if passes is not None and together is not None:
            passes.meet()
        ranks = CallRanks(self._comm, together)
        batch, key = self._batch(given, errand, ranks)
        batch.passes = passes
        forms = dict(self._forms.get(key, {}))
        walk = Walk(self._schedule, self._programs, self._comm, batch, forms, device_of(self))
        scaler = loss_scaler(self)
        try:
            with nullcontext() if scaler is None else scaler.from_elsewhere():
                loss = self._walked(walk, ranks, passes)
        except CollectiveMismatch as error:  # which may be what others make of an error here
            error.add_note(
                "In a call of a pipeline. Under zero3 a forward pass that raises on another "
                "replica ends so: its rank has the error."
            )
            raise walk.own_failure() or error from error.__cause__
        self._forms[key] = forms
        if errand.loss is not None:
            return loss
        outputs = [walk.outputs[number] for number in sorted(walk.outputs)]
        return joined(outputs) if outputs else None

    def _walked(self, walk: Walk, ranks: CallRanks, passes: StepPasses | None) -> torch.Tensor:
        """Do all that there is to do, and return the loss."""
        learns = walk.learns
        if learns and self._tied:
            self._tied.set_aside()
        self._walk, buffers = walk, self._shared_buffers.marks()
        try:
            walk.run()
            walk.attempt(lambda: self._shared_buffers.refuse_written(buffers))
        finally:
            self._tied.release()
            self._walk = None
        try:
            loss = self._ended(walk, ranks)
            if learns and self._tied.names:
                walk.attempt(self._tied.bring_together)
                self._ended(walk, ranks)
        except Exception:
            if passes is not None:
                passes.drop()
            raise
        if learns:
            self._record = walk.record
        return loss

    def _loss_on(self, x: Any, target: Any, *, learns: bool) -> torch.Tensor:
        if self._loss is None:
            raise InvalidArgumentError(
                "This pipeline has no loss: make it by rd.Pipeline(…, loss=fn), where fn(output, "
                "target) gives a tensor of one number."
            )
        inputs = x if isinstance(x, tuple) else (x,)
        errand = _Errand(target, learns=learns, loss=self._loss)
        with torch.enable_grad() if learns else nullcontext():
            # By a call, so that hooks on the model see it: rd.prepare casts inputs by one.
            result: torch.Tensor = self(*inputs, errand=errand)
        return ReadLoss.of(result, STEPPED if learns else EVALUATED)

    def _batch(self, x: Any, errand: _Errand, ranks: CallRanks) -> tuple[Batch, tuple[int, ...]]:
        """Return this rank's micro-batches, and a key for their form, which all ranks share."""
        parts, problem = self._schedule.micro_batches, ""
        try:
            parts = self._count(x, errand)
        except InvalidArgumentError as error:
            problem = str(error)
        whole = errand.key not in self._called
        rows, right = (
            0 if problem else rows_number(each, whole=whole) for each in (x, errand.target)
        )
        mine = Told(
            form_number(x), form_number(errand.target), parts, errand.key, self._trained(),
            self._number, rows, right, int(ONE * take_scaled(self)),
            *stepped(self), bool(problem),
        )  # fmt: skip
        frozen = {number: name for number, (name, one) in enumerate(self.named_parameters())
                  if not one.requires_grad}  # fmt: skip
        every, marks = ranks.tell(mine, self._tied.marks(), problem, frozen)
        for those in ranks.pipelines:
            self._compare_copies(marks[those], those)
            self._rates.compare(those, [every[rank].rates for rank in those])
        self._called.add(errand.key)
        told = [every[rank] for rank in ranks.mine]
        parts = next(each.micro_batches for each in told if each.x)
        inputs = [()] * parts if x is None else split_batch(tuple(x), parts)
        targets = [None] * parts if errand.target is None else split_batch(errand.target, parts)
        last_adds = errand.learns and bool(self._tied)
        batch = Batch(inputs, targets, errand.loss, errand.learns, parts, last_adds, self._trains)
        scaler = loss_scaler(self)
        batch.scale = scaler.apply if scaler is not None and errand.learns else None
        return batch, tuple(number for each in told for number in each.form)

    def _trains(self, stage: int) -> bool:
        """Tell whether a stage here has parameters that get gradients."""
        own = dict(self.named_parameters(remove_duplicate=False))
        return any(own[name].requires_grad for name in self._uses[stage] if name in own)

    def _trained(self) -> int:
        """Return a number for which parameters are trained: it decides which gradients travel."""
        return zlib.crc32(bytes(each.requires_grad for each in self.parameters()))

    def _count(self, x: Any, errand: _Errand) -> int:
        """Return how many micro-batches this batch is cut into."""
        count, here = self._schedule.micro_batches, self._schedule.stages_of(self._comm.rank)
        last = self._schedule.stages - 1
        if errand.learns and torch.is_inference_mode_enabled():
            raise InvalidArgumentError(
                "step of a pipeline was called inside torch.inference_mode(), where there are no "
                "gradients. Call it outside; pipe.evaluate and pipe(x) may be inside."
            )
        for plain in self._plain:
            if plain.changed:
                raise InvalidArgumentError(PLAIN.format(now=plain.changed, **plain._asdict()))
        if x is None and 0 in here:
            raise InvalidArgumentError("The rank of a pipeline's first stage needs a batch.")
        if errand.loss is not None and errand.target is None and last in here:
            raise InvalidArgumentError("The rank of a pipeline's last stage needs a target.")
        rows = {rows_of(what, value) for what, value in (("x", x), ("target", errand.target))
                if value is not None}  # fmt: skip
        if len(rows) > 1:
            told = " and ".join(map(str, sorted(rows)))
            raise InvalidArgumentError(
                f"x and target of a pipeline are cut into micro-batches alike, and have {told} "
                f"rows. Give step as many of each."
            )
        uneven = [each for each in rows if each % count]
        if uneven and errand.learns:
            raise InvalidArgumentError(
                f"A batch of {uneven[0]} rows does not divide into {count} micro-batches. Give "
                f"step a multiple of {count} rows, or the pipeline another micro_batches=."
            )
        return 1 if uneven else count

    def _compare_copies(
        self, marks: np.ndarray[Any, Any] | None = None, ranks: Sequence[int] | None = None
    ) -> None:
        """Refuse copies of a parameter that are no longer equal; every rank calls it."""
        if marks is None:
            every, stages = np.array([take_scaled(self), *stepped(self)]), range(self._comm.size)
            scaled, steps, rates, done = self._comm.all_gather(every).reshape(-1, 4).T.tolist()
            compare_scaled(stages, scaled)
            compare_steps(stages, steps)
            compare_done(stages, done)
            self._rates.compare(stages, [int(rate) for rate in rates])
            if not self._tied.names:
                return
            marks = self._comm.all_gather(np.array(self._tied.marks(), np.int64))
        problem = self._tied.apart(marks, range(self._comm.size) if ranks is None else ranks)
        if problem:
            raise CollectiveMismatch(problem)

    def _ended(self, walk: Walk, ranks: CallRanks) -> torch.Tensor:
        """Share the loss, and hear whether all came to the end well."""
        losses = [float(loss) for loss in walk.losses]
        mean = sum(losses) / len(losses) if losses else 0.0
        own = None if is_elsewhere(walk.failure) else walk.failure
        every = ranks.end(own, failed=walk.failure is not None, result=mean)
        last = ranks.mine[self._schedule.placement[-1]]
        return torch.tensor(float(every[last]), dtype=torch.float64, device=device_of(self))


class _Errand:
    """What a call of the pipeline is for; hooks on the model leave it as it is."""

    def __init__(self, target: Any, *, learns: bool, loss: LossFunction | None) -> None:
        self.target, self.learns, self.loss = target, learns, loss

    @property
    def key(self) -> int:
        """A number for what is done, from 1."""
        return 1 + self.learns + 2 * (self.loss is not None)


def _names_of(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of every parameter, by the first of them."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {each[0]: each for each in names.values()}
