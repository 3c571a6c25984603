"""How a plan scales: the best of each strategy on more and more ranks, for the same batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roundelay.errors import RoundelayError
from roundelay.planning.candidate import Task
from roundelay.planning.search import PlanChoices, TrainingPlan, plan

__all__ = ["scaling"]

Curve = list[tuple[float, float]]


def scaling(task: Task, wanted: PlanChoices, *, times: Sequence[float] = ()) -> dict[str, Curve]:
    """Return tokens per second and rank by the number of ranks, for each strategy where it fits.

    Beside them stands what the ranks could do if they only computed: who is level with
    it scales without a loss.

    Ranks go from a 64th of the task's to 64 times as many, unless `times` says otherwise, and
    the batch stays. Axes of the mesh that are fixed stay, but for dp.
    """
    factors = times or [2.0**power for power in range(-6, 7)]
    sizes = [int(task.gpus * factor) for factor in factors if task.gpus * factor >= 1]
    free = replace(wanted, dp=None)
    curves: dict[str, Curve] = {name: [] for name in wanted.strategies}
    for gpus in dict.fromkeys(sizes):
        try:
            found = plan(replace(task, gpus=gpus), free)
        except RoundelayError:  # no mesh of so many divides this model and batch
            continue
        for name in wanted.strategies:
            best = _quickest(found, name)
            if best:
                curves[name].append((gpus, best / gpus))
    model = task.model
    operations = 6 * model.params + 6 * model.layers * task.sequence * model.hidden
    rate = max(task.rate(precision) for precision in wanted.precisions)
    places = sorted({gpus for line in curves.values() for gpus, _ in line})
    curves["compute alone"] = [(gpus, rate / operations) for gpus in places]
    return curves


def _quickest(found: TrainingPlan, strategy: str) -> float:
    return max((one.tokens_per_second for one in found.options
                if one.fits and one.candidate.strategy == strategy), default=0.0)  # fmt: skip
