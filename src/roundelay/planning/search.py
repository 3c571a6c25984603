"""All ways to train a model on so many ranks, the quickest that fits, and why it is that one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from roundelay.errors import InvalidArgumentError, rank_count
from roundelay.planning.candidate import STRATEGIES, Candidate, MeshShape, Task
from roundelay.planning.memory import RankBytes, fullest_rank
from roundelay.planning.model import counted
from roundelay.planning.step_time import StepTime, step_time

__all__ = ["PlanChoices", "Planned", "TrainingPlan", "plan"]

MOST_MICRO_BATCH = 64
LEAST_TOKENS = 2048  # of a rank's part of a sequence: shorter ones are not cut along cp


@dataclass(frozen=True, slots=True)
class Planned:
    """A candidate with its bytes and seconds."""

    candidate: Candidate
    bytes: RankBytes
    time: StepTime
    memory: int
    tokens: int  # of a step, of all ranks

    @property
    def spare(self) -> int:
        """Bytes that are left; below 0, those that are missing."""
        return self.memory - self.bytes.total

    @property
    def fits(self) -> bool:
        """Whether it does."""
        return self.spare >= 0

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.tokens / self.time.total


@dataclass(frozen=True, slots=True)
class PlanChoices:
    """What is left to choose; an axis, or any other, may be fixed."""

    strategies: Sequence[str] = STRATEGIES
    precisions: Sequence[str] = ("bf16",)
    micro_batches: Sequence[int] | None = None
    recompute: Sequence[str] = ("none", "full")
    dp: int | None = None
    tp: int | None = None
    cp: int | None = None
    pp: int | None = None


@dataclass(frozen=True)
class TrainingPlan:
    """All that was looked at, and the best of it."""

    task: Task
    options: Sequence[Planned] = field(repr=False)

    @cached_property
    def best(self) -> Planned | None:
        """The quickest that fits; of equals the one with the fewest axes, then the most room."""
        fitting = [one for one in self.options if one.fits]
        return min(fitting, key=_speed, default=None)

    @cached_property
    def nearest(self) -> Planned:
        """Where nothing fits, what misses least."""
        return min(self.options, key=lambda one: one.bytes.total)

    def shown(self, most: int = 8) -> tuple[list[Planned], list[Planned]]:
        """Return each strategy along dp alone, and then the quickest meshes with other axes."""
        kinds = dict.fromkeys((one.candidate.precision, one.candidate.strategy)
                              for one in self.options)  # fmt: skip
        alone = [self.best_of(strategy, precision, alone=True) for precision, strategy in kinds]
        others = [one for one in self.options if one.candidate.mesh.dp < one.candidate.mesh.size]
        fitting = [one for one in others if one.fits]
        ordered = sorted(fitting, key=_speed) or sorted(others, key=lambda one: one.bytes.total)
        kept: dict[str, Planned] = {}
        for one in ordered:
            kept.setdefault(str(one.candidate.mesh), one)
        rows = [one for one in alone if one is not None]
        return rows, sorted(list(kept.values())[:most], key=_speed)

    def _repr_html_(self) -> str:
        """Show the table in a notebook, the best in bold."""
        from roundelay.planning.document import plan_html  # noqa: PLC0415 - it reads this file

        return plan_html(self)

    def best_of(self, strategy: str, precision: str, *, alone: bool) -> Planned | None:
        """Return the quickest of a strategy that fits, else the smallest; `alone`: dp only."""
        found = [one for one in self.options
                 if one.candidate.strategy == strategy and one.candidate.precision == precision
                 and (not alone or one.candidate.mesh.dp == one.candidate.mesh.size)]  # fmt: skip
        fitting = [one for one in found if one.fits]
        if fitting:
            return min(fitting, key=_speed)
        return min(found, key=lambda one: one.bytes.total, default=None)


def _speed(one: Planned) -> tuple[float, int, int, int]:
    """Order by time; of what is as quick to four digits, by fewer axes, then bytes."""
    mesh = one.candidate.mesh
    axes = sum(count > 1 for count in (mesh.tp, mesh.cp, mesh.pp))
    return float(f"{one.time.total:.4g}"), axes, one.bytes.total, one.candidate.micro_batch


def plan(task: Task, wanted: PlanChoices | None = None) -> TrainingPlan:
    """Look at every mesh, strategy, precision and micro-batch; 100,000 ranks take a second or two.

    >>> from roundelay.networks import cluster_called
    >>> from roundelay.planning.model import transformer
    >>> model = transformer(params=7_500_000_000, layers=32, hidden=4096)
    >>> task = Task(model, cluster_called("h100-ib"), gpus=64, memory=80 * 10**9, batch=1024,
    ...             sequence=2048)
    >>> found = plan(task)
    >>> found.best.fits, found.best.candidate.mesh.size
    (True, 64)
    """
    choice = PlanChoices() if wanted is None else wanted
    meshes = list(_meshes(task, choice))
    if not meshes:
        raise InvalidArgumentError(_no_mesh(task, choice))
    options = [_planned(task, one) for mesh in meshes for one in _candidates(task, choice, mesh)]
    if not options:
        raise InvalidArgumentError(
            f"A batch of {counted(task.batch, 'row')} does not divide into micro-batches of "
            f"{', '.join(map(str, choice.micro_batches or ()))} rows on any of the meshes: "
            f"{', '.join(map(str, meshes[:4]))}. Take another --batch or --micro-batch."
        )
    return TrainingPlan(task, options)


def _planned(task: Task, candidate: Candidate) -> Planned:
    return Planned(candidate, fullest_rank(task, candidate), step_time(task, candidate),
                   task.memory, task.batch * task.sequence)  # fmt: skip


def _meshes(task: Task, wanted: PlanChoices) -> Iterator[MeshShape]:
    model, per_host = task.model, task.cluster.per_host
    for tp in _axis(wanted.tp, _divisors(model.heads), most=per_host):
        for pp in _axis(wanted.pp, _divisors(model.layers), most=model.layers):
            for cp in _axis(wanted.cp, _powers(task.sequence // LEAST_TOKENS), most=task.sequence):
                rest, odd = divmod(task.gpus, tp * pp * cp)
                if odd or not rest or wanted.dp not in (None, rest):
                    continue
                if _cuts(task, tp, cp, pp) and task.batch % rest == 0:
                    yield MeshShape(rest, tp, cp, pp)


def _cuts(task: Task, tp: int, cp: int, pp: int) -> bool:
    """Tell whether heads, positions and layers divide."""
    return not (task.model.heads % tp or task.sequence % cp or task.model.layers % pp)


def _axis(fixed: int | None, found: Iterable[int], *, most: int) -> list[int]:
    return [fixed] if fixed is not None else [one for one in found if one <= most]


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(max(1, most).bit_length())]


def _candidates(task: Task, wanted: PlanChoices, mesh: MeshShape) -> Iterator[Candidate]:
    rows = task.batch // mesh.dp
    sizes = _powers(MOST_MICRO_BATCH) if wanted.micro_batches is None else wanted.micro_batches
    for micro_batch in sizes:
        if rows % micro_batch:
            continue
        for strategy in wanted.strategies:
            if strategy.startswith("ps") and mesh.size > mesh.data:
                continue  # parameter servers go with the axes of data alone
            for precision in wanted.precisions:
                for recompute in wanted.recompute:
                    yield Candidate(strategy, precision, mesh, micro_batch, recompute)


def _no_mesh(task: Task, wanted: PlanChoices) -> str:
    fixed = {name: getattr(wanted, name) for name in ("dp", "tp", "cp", "pp")}
    asked = ", ".join(f"{name}={count}" for name, count in fixed.items() if count is not None)
    model = task.model
    return (
        f"No mesh of {rank_count(task.gpus)}{f' with {asked}' if asked else ''} divides this "
        f"model: tp must divide {counted(model.heads, 'head')}, cp "
        f"{counted(task.sequence, 'position')}, pp {counted(model.layers, 'layer')}, dp the batch "
        f"of {counted(task.batch, 'row')}, and their product be {task.gpus}. Take "
        f"another number of GPUs, or another --batch: a multiple of {task.gpus}, say."
    )
