"""`rd.Pipeline`: a model cut into stages, which ranks run micro-batch by micro-batch."""

from __future__ import annotations

import os
import traceback
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, InvalidArgumentError, RankFailed
from roundelay.parallel.pipeline._messages import Form
from roundelay.parallel.pipeline._parts import attach, left_over, tied
from roundelay.parallel.pipeline._plan import Wanted, agreed_plan, device_of
from roundelay.parallel.pipeline._split_batch import (
    form_number,
    joined,
    rows_number,
    rows_of,
    split_batch,
)
from roundelay.parallel.pipeline._tied import TiedParameters
from roundelay.parallel.pipeline._walk import Batch, StepRecord, Walk, is_elsewhere
from roundelay.parallel.staging import stage_model
from roundelay.pipelines import PipelineSchedule
from roundelay.training.steps import accumulate, is_prepared, loss_scaler

__all__ = ["Pipeline"]

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
        self._loss = loss
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
        self._forms: dict[tuple[int, ...], dict[int, Form | None]] = {}
        self._record = StepRecord()
        self._walk: Walk | None = None
        made: count[int] = vars(comm).setdefault("pipelines", count(1))
        self._number = next(made)  # of those that were made with these ranks
        self._met = False  # whether ranks have compared the rows of a batch

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
        batch, key = self._batch(given, errand)
        forms = dict(self._forms.get(key, {}))
        walk = Walk(self._schedule, self._programs, self._comm, batch, forms, device_of(self))
        scaler = loss_scaler(self)
        with nullcontext() if scaler is None else scaler.from_elsewhere():
            loss = self._walked(walk, learns=batch.learns)
        self._forms[key] = forms
        if errand.loss is not None:
            return loss
        outputs = [walk.outputs[number] for number in sorted(walk.outputs)]
        return joined(outputs) if outputs else None

    def _walked(self, walk: Walk, *, learns: bool) -> torch.Tensor:
        """Do all that there is to do, and return the loss."""
        if learns and self._tied:
            self._tied.set_aside()
        self._walk = walk
        try:
            walk.run()
        finally:
            self._tied.release()
            self._walk = None
        loss = self._ended(walk)
        if learns:
            self._record = walk.record
            if self._tied:
                self._tied.bring_together()
        return loss

    def _loss_on(self, x: Any, target: Any, *, learns: bool) -> torch.Tensor:
        if self._loss is None:
            raise InvalidArgumentError(
                "This pipeline has no loss: make it by rd.Pipeline(…, loss=fn), where fn(output, "
                "target) gives a tensor of one number."
            )
        inputs = x if isinstance(x, tuple) else (x,)
        # By a call, so that hooks on the model see it: rd.prepare casts inputs by one.
        result: torch.Tensor = self(*inputs, errand=_Errand(target, learns=learns, loss=self._loss))
        return result

    def _batch(self, x: Any, errand: _Errand) -> tuple[Batch, tuple[int, ...]]:
        """Return this rank's micro-batches, and a key for their form, which all ranks share."""
        pieces = self._schedule.micro_batches
        problem = ""
        try:
            pieces = self._count(x, errand)
        except InvalidArgumentError as error:
            problem = str(error)
        numbers = [form_number(x), form_number(errand.target), pieces, errand.key,
                   self._trained(), bool(problem)]  # fmt: skip
        rows = [0, 0] if self._met else [rows_number(x), rows_number(errand.target)]
        told = np.array([*numbers, self._number, *rows, *self._tied.marks()], np.int64)
        every, which, given, marks = np.split(
            self._comm.all_gather(told).reshape(-1, len(told)),
            [len(numbers), len(numbers) + 1, len(numbers) + 3], axis=1,
        )  # fmt: skip
        if every[:, -1].any():
            self._refuse(problem)
        self._compare_pipelines(which[:, 0])
        self._compare_copies(marks)
        self._compare(every)
        self._compare_rows(given)
        self._met = True
        pieces = int(every[every[:, 0] > 0, 2][0])
        inputs = [()] * pieces if x is None else split_batch(tuple(x), pieces)
        targets = [None] * pieces if errand.target is None else split_batch(errand.target, pieces)
        adding = partial(accumulate, self) if is_prepared(self) else nullcontext
        batch = Batch(inputs, targets, errand.loss, errand.learns, pieces, adding, bool(self._tied))
        scaler = loss_scaler(self)
        batch.scale = scaler.apply if scaler is not None and errand.learns else None
        return batch, tuple(every[:, :-1].flatten().tolist())

    def _trained(self) -> int:
        """Return a number for which parameters are trained: it decides which gradients travel."""
        return zlib.crc32(bytes(each.requires_grad for each in self.parameters()))

    def _count(self, x: Any, errand: _Errand) -> int:
        """Return how many micro-batches this batch is cut into."""
        pieces, here = self._schedule.micro_batches, self._schedule.stages_of(self._comm.rank)
        last = self._schedule.stages - 1
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
        uneven = [each for each in rows if each % pieces]
        if uneven and errand.learns:
            raise InvalidArgumentError(
                f"A batch of {uneven[0]} rows does not divide into {pieces} micro-batches. Give "
                f"step a multiple of {pieces} rows, or the pipeline another micro_batches=."
            )
        return 1 if uneven else pieces

    def _refuse(self, problem: str) -> None:
        every = self._comm.all_gather_object(problem)
        if problem:
            raise InvalidArgumentError(problem)
        rank = next(rank for rank, each in enumerate(every) if each)
        raise CollectiveMismatch(f"step of Pipeline was refused on rank {rank}: {every[rank]}")

    def _compare(self, every: np.ndarray[Any, Any]) -> None:
        """Refuse batches that differ between ranks, where they have some."""
        for column, what in enumerate(("x", "target")):
            given = every[:, column]
            if len(set(given[given > 0].tolist())) > 1:
                raise CollectiveMismatch(
                    f"All ranks pass the same batch to a pipeline, but {what} has other shapes or "
                    f"dtypes on rank {self._differs(given)} than on the first rank that has it."
                )
        if len(set(every[:, 3].tolist())) > 1:
            raise CollectiveMismatch(
                f"All ranks call the same of a pipeline, but rank {self._differs(every[:, 3])} "
                f"does not do what rank 0 does: step, evaluate, or a plain call."
            )

    def _compare_pipelines(self, which: np.ndarray[Any, Any]) -> None:
        if len({*which.tolist()}) > 1:
            raise CollectiveMismatch(
                f"All ranks call the same pipeline, but of those that were made with this "
                f"communicator rank {self._differs(which)} calls number "
                f"{which[self._differs(which)]} and rank 0 number {which[0]}."
            )

    def _compare_rows(self, given: np.ndarray[Any, Any]) -> None:
        for column, what in enumerate(("x", "target")):
            marks = given[:, column]
            if len({*marks[marks > 0].tolist()}) > 1:
                raise CollectiveMismatch(
                    f"All ranks pass the same batch to a pipeline, but {what} has other values on "
                    f"rank {self._differs(marks)} than on the first rank that has it. Ranks along "
                    f"pp get the same rows, as rd.loader(…, mesh=mesh) gives them; those that have "
                    f"neither the first stage nor the last may pass None."
                )

    def _compare_copies(self, marks: np.ndarray[Any, Any] | None = None) -> None:
        """Refuse copies of a parameter that are no longer equal; every rank calls it."""
        if marks is None and not self._tied.names:
            return
        if marks is None:
            marks = self._comm.all_gather(np.array(self._tied.marks(), np.int64))
        found = self._tied.apart(marks)
        if found is not None:
            name, first, other = found
            raise CollectiveMismatch(
                f"The parameter {name} is shared by stages of this pipeline, and rank {other} has "
                f"other values of it than rank {first}. Copies stay equal if all ranks write the "
                f"same into them and step with the same options: one lr= for all stages. rd.load "
                f"or load_state_dict makes them equal again."
            )

    @staticmethod
    def _differs(given: np.ndarray[Any, Any]) -> int:
        first = next(number for number in given.tolist() if number > 0)
        return next(rank for rank, number in enumerate(given.tolist()) if number not in (0, first))

    def _ended(self, walk: Walk) -> torch.Tensor:
        """Share the loss, and hear whether all came to the end well."""
        own = walk.failure if not is_elsewhere(walk.failure) else None
        losses = [float(loss) for loss in walk.losses]
        mean = sum(losses) / len(losses) if losses else 0.0
        told = np.array([own is not None, walk.failure is not None, bool(losses), mean])
        every = self._comm.all_gather(told).reshape(-1, len(told))
        if every[:, :2].any():
            self._raise(own)
        last = self._schedule.placement[-1]
        return torch.tensor(float(every[last, 3]), dtype=torch.float64, device=device_of(self))

    def _raise(self, own: Exception | None) -> None:
        """Raise, on every rank, what went wrong on the first that failed."""
        told = None
        if own is not None:
            lines = "".join(traceback.format_exception(own))
            told = [type(own).__name__, str(own), lines]
        every = self._comm.all_gather_object(told)
        if own is not None:
            raise own
        for rank, error in enumerate(every):
            if error is not None:
                kind, message, lines = error
                raise RankFailed(rank, kind, message, traceback=lines)


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
