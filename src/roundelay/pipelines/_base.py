"""A pipeline schedule as data: what each rank computes, in which order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from roundelay.arguments import indices_of, shown, whole
from roundelay.errors import InvalidArgumentError, ScheduleError, UnknownNameError
from roundelay.registry import Family

#: What a rank does with a micro-batch at a stage. A backward pass is whole, or it is split: first
#: the gradient of the stage's input, for which the stage before waits, then those of its weights.
ActionKind = Literal["forward", "backward", "input_grad", "weight_grad"]
KINDS: tuple[ActionKind, ...] = get_args(ActionKind)
MOST_RANKS, MOST_STAGES, MOST_MICRO_BATCHES = 1024, 8192, 65_536
MOST_ACTIONS = 1_000_000


class PipelineAction(NamedTuple):
    """One micro-batch at one stage, forward or backward."""

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} at stage {self.stage}"


@dataclass(frozen=True, eq=False)
class PipelineSchedule:
    """What every rank computes, in order; `placement` says which rank has which stage.

    Construction checks the form: stages, ranks and micro-batches in range. `prove_pipeline` checks
    the meaning.

    >>> alone = [PipelineAction("forward", 0, 0), PipelineAction("backward", 0, 0)]
    >>> PipelineSchedule(ranks=[alone], micro_batches=1).stages
    1
    """

    ranks: tuple[tuple[PipelineAction, ...], ...]
    micro_batches: int
    placement: tuple[int, ...]
    name: str

    def __init__(
        self,
        ranks: Iterable[Iterable[PipelineAction]],
        micro_batches: int,
        *,
        placement: Sequence[int] | None = None,
        name: str = "pipeline",
    ) -> None:
        listed = [tuple(actions) for actions in ranks]
        if not 1 <= len(listed) <= MOST_RANKS:
            raise ScheduleError(f"{name}: ranks", f"are 1 to {MOST_RANKS}, not {len(listed)}")
        stages = _placement(name, placement, len(listed))
        try:
            count = whole("micro_batches", micro_batches, 1, MOST_MICRO_BATCHES)
        except InvalidArgumentError as error:
            raise ScheduleError(name, str(error)) from None
        checked = tuple(
            tuple(_checked(f"{name}: ranks[{rank}]", actions, len(stages), count))
            for rank, actions in enumerate(listed)
        )
        values = {"ranks": checked, "micro_batches": count, "placement": stages, "name": name}
        for field, value in values.items():
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        return (
            f"<pipeline {self.name}: {self.stages} stages on {self.size} ranks, "
            f"{self.micro_batches} micro-batches>"
        )

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.placement)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank has."""
        return [stage for stage, owner in enumerate(self.placement) if owner == rank]

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """The stages and micro-batches whose backward pass is split in two."""
        return frozenset(
            (stage, micro_batch)
            for actions in self.ranks
            for kind, stage, micro_batch in actions
            if kind == "input_grad"
        )

    def backward_at(self, stage: int, micro_batch: int) -> PipelineAction:
        """Return what computes the gradient of a stage's input."""
        halved = (stage, micro_batch) in self.split
        return PipelineAction("input_grad" if halved else "backward", stage, micro_batch)

    def needs(self, action: PipelineAction) -> Iterator[PipelineAction]:
        """Yield what must be done before an action, wherever that is."""
        kind, stage, micro_batch = action
        if kind == "forward":
            if stage:
                yield PipelineAction("forward", stage - 1, micro_batch)
        elif kind == "weight_grad":
            yield PipelineAction("input_grad", stage, micro_batch)
        else:
            yield PipelineAction("forward", stage, micro_batch)
            if stage + 1 < self.stages:
                yield self.backward_at(stage + 1, micro_batch)


def _placement(name: str, given: Sequence[int] | None, size: int) -> tuple[int, ...]:
    """Return the rank of every stage: without a word, one stage a rank."""
    place = f"{name}: placement"
    stages = list(range(size)) if given is None else indices_of(given)
    if stages is None or not 1 <= len(stages) <= MOST_STAGES:
        raise ScheduleError(place, f"lists the rank of every stage, not {shown(given)}")
    for stage, rank in enumerate(stages):
        if not 0 <= rank < size:
            raise ScheduleError(
                f"{place}[{stage}]", f"rank {shown(rank)} is not one of the {size} ranks"
            )
    for rank in range(size):
        if rank not in stages:
            raise ScheduleError(place, f"rank {rank} has no stage")
    return tuple(stages)


def _checked(
    place: str, actions: Sequence[PipelineAction], stages: int, micro_batches: int
) -> Iterator[PipelineAction]:
    for index, action in enumerate(actions):
        where = f"{place}[{index}]"
        if not isinstance(action, PipelineAction):
            raise ScheduleError(where, f"is a {type(action).__name__}, not a PipelineAction")
        if action.kind not in KINDS:
            raise ScheduleError(where, f"{shown(action.kind)} is none of {', '.join(KINDS)}")
        numbers = indices_of(action[1:])
        if numbers is None:
            raise ScheduleError(where, f"{shown(action)} needs whole numbers")
        for what, number, end in zip(
            ("stage", "micro-batch"), numbers, (stages, micro_batches), strict=True
        ):
            if not 0 <= number < end:
                raise ScheduleError(where, f"{what} {shown(number)} is not one of {end}")
        yield PipelineAction(action.kind, *numbers)


# ---- the schedules of this folder

#: What rank `rank` of `size` does; the last two are micro-batches and stages on every rank.
RankActions = Callable[[int, int, int, int], Iterable[PipelineAction]]
#: How long each rank stands idle, of: ranks, and a stage's forward, input_grad and weight_grad.
Idle = Callable[[int, float, float, float], float]


@dataclass(frozen=True)
class PipelineMaker:
    """A schedule for any number of ranks and micro-batches, and what is known of it."""

    function: RankActions
    word: str  # what it is known as
    idle: Idle
    formula: str  # of the bubble's share of the time, where stages cost alike
    interleaves: bool  # whether a rank has several stages
    multiple: bool  # whether micro-batches come in multiples of the ranks

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    def __call__(
        self, size: int, micro_batches: int, *, stages_per_rank: int | None = None
    ) -> PipelineSchedule:
        """Return the schedule on so many ranks; stages go round the ranks.

        >>> pipeline_called("interleaved-1f1b")(4, 8).placement
        (0, 1, 2, 3, 0, 1, 2, 3)
        """
        ranks = whole("ranks of a pipeline", size, 1, MOST_RANKS)
        count = whole("micro_batches", micro_batches, 1, MOST_MICRO_BATCHES)
        each = self.stages_each(stages_per_rank)
        if 3 * ranks * count * each > MOST_ACTIONS:
            raise InvalidArgumentError(
                f"{self.word} on {ranks} ranks with {count} micro-batches has more than "
                f"{MOST_ACTIONS:,} actions. Take fewer micro-batches."
            )
        if self.multiple and count % ranks:
            raise InvalidArgumentError(
                f"{self.word} takes micro-batches in rounds of as many as there are ranks, and "
                f"{count} is no multiple of {ranks}. Take micro_batches="
                f"{ranks * (count // ranks + 1)}, or schedule='1f1b'."
            )
        return PipelineSchedule(
            [self.function(rank, ranks, count, each) for rank in range(ranks)],
            count,
            placement=[stage % ranks for stage in range(ranks * each)],
            name=self.word,
        )

    def stages_each(self, given: int | None) -> int:
        """Return how many stages each rank has: one, or two and more where stages interleave."""
        if not self.interleaves:
            if given not in (None, 1):
                raise InvalidArgumentError(
                    f"{self.word} has one stage on every rank, not {shown(given)}. "
                    f"schedule='interleaved-1f1b' takes several."
                )
            return 1
        return 2 if given is None else whole("stages_per_rank", given, 1, MOST_STAGES // MOST_RANKS)

    def bubble(
        self,
        size: int,
        micro_batches: int,
        *,
        stages_per_rank: int | None = None,
        costs: tuple[float, float, float] = (1, 1, 1),
    ) -> float:
        """Return the share of the time that ranks stand idle, by formula, when stages cost alike.

        `costs` are those of a stage: forward, gradient of its input, gradients of its weights.

        >>> pipeline_called("1f1b").bubble(4, 8)  # 3 / (8 + 3)
        0.2727272727272727
        """
        work = micro_batches * self.stages_each(stages_per_rank) * sum(costs)
        idle = self.idle(size, *costs)
        return idle / (idle + work)


def known_as(
    word: str, *, idle: Idle, formula: str, interleaves: bool = False, multiple: bool = False
) -> Callable[[RankActions], PipelineMaker]:
    """Mark a function as a pipeline schedule, by the word that people know it by."""

    def decorate(function: RankActions) -> PipelineMaker:
        return PipelineMaker(function, word, idle, formula, interleaves, multiple)

    return decorate


pipelines: Family[PipelineMaker] = Family("roundelay.pipelines")


def pipeline_called(word: object) -> PipelineMaker:
    """Return the schedule that a word stands for, in any spelling.

    >>> pipeline_called("1F1B").word, pipeline_called("zero_bubble").word
    ('1f1b', 'zb-h1')
    """
    known = {_key(name): pipelines.load(name) for name in pipelines.names()}
    known |= {_key(maker.word): maker for maker in pipelines}
    if not isinstance(word, str) or _key(word) not in known:
        raise UnknownNameError("pipelines", str(word), [maker.word for maker in pipelines])
    return known[_key(word)]


def _key(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")
