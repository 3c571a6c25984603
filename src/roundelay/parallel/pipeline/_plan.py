"""What a pipeline is to be, worked out alike on every rank: stages, schedule, who has what."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from roundelay.arguments import shown
from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, InvalidArgumentError, RoundelayError
from roundelay.parallel.pipeline._balance import balanced, module_seconds
from roundelay.parallel.pipeline._cut import (
    PipelineStage,
    read_off,
    stages_of_graph,
    stages_of_modules,
    units,
)
from roundelay.parallel.pipeline._parts import names_in
from roundelay.parallel.pipeline._stand_ins import PlainValue
from roundelay.parallel.sharding import sharding_of
from roundelay.pipelines import (
    PipelineMaker,
    PipelineSchedule,
    load_pipeline,
    pipeline_called,
    pipeline_to_json,
    prove_pipeline,
)

COSTS = ("parameters", "time")
MICRO_BATCHES = 8


@dataclass(frozen=True)
class Wanted:
    """What the caller asked for."""

    stages: Any
    schedule: Any
    micro_batches: Any
    stages_per_rank: Any
    split: Any
    cost: Any
    sample: Any


@dataclass(frozen=True)
class PipelinePlan:
    """The stages, and the schedule that is proved."""

    stages: list[PipelineStage]
    schedule: PipelineSchedule
    peaks: tuple[int, ...]
    told: dict[str, str]  # in words that ranks compare
    plain: list[PlainValue]  # that stages were given for good


def agreed_plan(
    model: nn.Module, comm: Communicator, wanted: Wanted, taken: Container[str]
) -> PipelinePlan:
    """Return the plan that all ranks have made alike; else all of them are told.

    Names that are `taken` are not for modules and tensors of the model.
    """
    starts = _together(comm, lambda: _starts(model, comm.size, wanted))
    if wanted.cost == "time" and isinstance(starts, _Unmeasured):
        # Ranks measure different times, and need one cut.
        mine = [starts.measure(model)] if comm.rank == 0 else None
        starts = comm.broadcast_object(mine)[0]

    def make() -> PipelinePlan:
        if wanted.split is not None:
            stages, plain = stages_of_modules(model, wanted.split(model)), []
        else:
            forward = read_off(model, starts)
            stages, plain = stages_of_graph(forward.graph, starts), forward.plain
        schedule = _schedule(wanted, comm.size, len(stages))
        _check_stages(model, stages)
        _check_names(stages, taken)
        peaks = prove_pipeline(schedule).peaks
        return PipelinePlan(stages, schedule, peaks, _description(model, stages, schedule), plain)

    plan: PipelinePlan = _together(comm, make)
    _compare(comm, plan.told)
    return plan


def _together(comm: Communicator, act: Callable[[], Any]) -> Any:
    """Do something that may be refused; if it is anywhere, every rank raises."""
    refused: RoundelayError | None = None
    result = None
    try:
        result = act()
    except RoundelayError as error:
        refused = error
    every = comm.all_gather_object("" if refused is None else str(refused))
    if refused is not None:
        raise refused
    for rank, problem in enumerate(every):
        if problem:
            raise CollectiveMismatch(f"Pipeline was refused on rank {rank}: {problem}")
    return result


def _compare(comm: Communicator, mine: dict[str, str]) -> None:
    """Refuse pipelines that differ between ranks."""
    for other, theirs in enumerate(comm.all_gather_object(mine)):
        for what, value in mine.items():
            if theirs[what] != value:
                raise CollectiveMismatch(
                    f"All ranks make the same pipeline, but {what} is {value} on rank {comm.rank} "
                    f"and {theirs[what]} on rank {other}."
                )


def _description(
    model: nn.Module, stages: Sequence[PipelineStage], schedule: PipelineSchedule
) -> dict[str, str]:
    shapes = [(name, _whole_shape(each)) for name, each in model.named_parameters()]
    cut = [[*stage.modules, *stage.tensors] for stage in stages]
    text = pipeline_to_json(schedule)
    return {
        "micro_batches": str(schedule.micro_batches),
        "the schedule": f"{schedule.name} ({zlib.crc32(text.encode()):08x})",
        "the model": f"of {len(shapes)} parameters ({zlib.crc32(repr(shapes).encode()):08x})",
        "the cut": f"{[names[0] if names else '' for names in cut]}"
        f" ({zlib.crc32(repr(cut).encode()):08x})",
    }


def _whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return what ranks of other axes have alike; parts may be uneven: 5 experts on 2 ranks."""
    sharding = sharding_of(parameter)
    local = tuple(parameter.shape)
    return local if sharding is None else sharding.whole_shape(local)


# ---- stages


@dataclass(frozen=True)
class _Unmeasured:
    """A cut that waits for times."""

    graph: fx.Graph
    weighs: list[bool]
    count: int
    sample: tuple[Any, ...]

    def measure(self, model: nn.Module) -> list[str]:
        seconds = module_seconds(model, self.graph, self.sample)
        known = units(self.graph)
        starts = balanced([seconds[name] for name in known], self.weighs, self.count)
        return [known[start] for start in starts]


def _starts(model: nn.Module, size: int, wanted: Wanted) -> list[str] | _Unmeasured:
    """Return the names at which stages start, where they are named or chosen here."""
    if wanted.split is not None:
        if not callable(wanted.split) or wanted.stages is not None:
            raise InvalidArgumentError(
                "Pipeline takes stages=, names of modules at which a stage starts, or split=, a "
                "function from the model to a list of modules; not both."
            )
        return []
    if wanted.cost not in COSTS:
        raise InvalidArgumentError(
            f"cost of Pipeline is one of {', '.join(COSTS)}, not {shown(wanted.cost)}."
        )
    if wanted.stages is not None:
        names = wanted.stages
        listed = isinstance(names, (list, tuple)) and all(isinstance(each, str) for each in names)
        if not listed:
            raise InvalidArgumentError(
                f"stages of Pipeline lists names of modules at which a stage starts, not "
                f"{shown(names)}."
            )
        return list(names)
    graph = read_off(model, []).graph
    known = units(graph)
    weights = [sum(each.numel() for each in model.get_submodule(name).parameters())
               for name in known]  # fmt: skip
    weighs = [weight > 0 for weight in weights]
    count = _stage_count(wanted, size)
    if wanted.cost == "parameters":
        return [known[start] for start in balanced(weights, weighs, count)]
    if wanted.sample is None:
        raise InvalidArgumentError(
            "Pipeline with cost='time' needs sample=, a micro-batch to measure the modules on."
        )
    balanced(weights, weighs, count)  # refused here, if at all
    sample = wanted.sample if isinstance(wanted.sample, tuple) else (wanted.sample,)
    return _Unmeasured(graph, weighs, count, sample)


def _check_stages(model: nn.Module, stages: Sequence[PipelineStage]) -> None:
    used: set[str] = set()
    for number, stage in enumerate(stages):
        names = names_in(model, stage)
        used |= names
        if not names:
            what = ", ".join(stage.modules) or "no module"
            raise InvalidArgumentError(
                f"Stage {number} of the pipeline has no parameters: it has {what}. Let stages "
                f"start elsewhere, or take fewer."
            )
    by_name = dict(model.named_parameters(remove_duplicate=False))
    held = {by_name[name] for name in used}
    for name, parameter in by_name.items():
        if parameter not in held and parameter.requires_grad:
            raise InvalidArgumentError(
                f"The parameter {name} is in no stage of the pipeline: the model's forward does "
                f"not use it. Freeze it by requires_grad_(False), or leave it out of the model."
            )


def _check_names(stages: Sequence[PipelineStage], taken: Container[str]) -> None:
    for stage in stages:
        for name in (*stage.modules, *stage.tensors):
            first = name.partition(".")[0]
            if first in taken:
                raise InvalidArgumentError(
                    f"Pipeline has a name {first!r} itself, so the model can't have a module or "
                    f"tensor called so. Rename it."
                )


# ---- the schedule


def _own(schedule: Any) -> PipelineSchedule | None:
    """Return a user's own schedule; None if it is a word."""
    if isinstance(schedule, PipelineSchedule):
        return schedule
    path = isinstance(schedule, os.PathLike) or str(schedule).endswith(".json")
    return load_pipeline(schedule) if path else None


def _stage_count(wanted: Wanted, size: int) -> int:
    own = _own(wanted.schedule)
    if own is not None:
        return own.stages
    return size * pipeline_called(wanted.schedule).stages_each(wanted.stages_per_rank)


def _schedule(wanted: Wanted, size: int, stages: int) -> PipelineSchedule:
    own = _own(wanted.schedule)
    if own is None:
        schedule = _made(pipeline_called(wanted.schedule), wanted, size, stages)
    else:
        schedule = own
        if wanted.micro_batches not in (None, own.micro_batches):
            raise InvalidArgumentError(
                f"The schedule {own.name} has {own.micro_batches} micro-batches, and "
                f"micro_batches={shown(wanted.micro_batches)}. Leave the latter out."
            )
    if schedule.size != size:
        raise InvalidArgumentError(
            f"The schedule {schedule.name} is for {schedule.size} ranks, and the communicator has "
            f"{size}."
        )
    if schedule.stages != stages:
        raise InvalidArgumentError(
            f"The schedule {schedule.name} has {schedule.stages} stages on {size} ranks, and the "
            f"model is cut into {stages}. Name {schedule.stages - 1} modules, at which the second "
            f"stage starts, the third and so on."
        )
    return schedule


def _made(maker: PipelineMaker, wanted: Wanted, size: int, stages: int) -> PipelineSchedule:
    each = wanted.stages_per_rank
    if maker.interleaves and each is None:
        if stages % size:
            raise InvalidArgumentError(
                f"{maker.word} has the same number of stages on each of {size} ranks, and the "
                f"model is cut into {stages}."
            )
        each = stages // size
    count = MICRO_BATCHES if wanted.micro_batches is None else wanted.micro_batches
    return maker(size, count, stages_per_rank=each)


def device_of(model: nn.Module) -> torch.device:
    """Return where a model is."""
    return next((each.device for each in model.parameters()), torch.device("cpu"))
