"""The phases of a nested schedule: collectives, so that their names say what they do."""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.schedule import NestedCall, NestedPhase, NestedSchedule
from roundelay.view.phases import Phase

__all__ = ["nested_phases"]

#: What each rank of a group has when the collective is over.
AIMS = {
    "all_gather": "each has what all of them had",
    "all_reduce": "each has the sum of all",
    "all_to_all": "each has what the others had for it",
    "barrier": "each knows who has come",
    "broadcast": "each has what one of them had",
    "exscan": "each has the sum of those below it",
    "gather": "one has what all of them had",
    "reduce": "one has the sum of all",
    "reduce_scatter": "each that carries a part has its sum",
    "scan": "each has the sum up to its own",
    "scatter": "each has its part of what one had",
}
GROUPS = {"inside": "of the ranks of a host", "lane": "of the ranks with one place on their hosts"}


def nested_phases(nested: NestedSchedule, steps: Sequence[int]) -> list[Phase]:
    """Return the phases, given how many steps each takes.

    >>> from roundelay.collectives.all_gather import all_gather
    >>> from roundelay.schedule import over_hosts
    >>> plan = over_hosts(all_gather, [(0, 1), (2, 3)], lanes=2)
    >>> [phase.name for phase in nested_phases(plan, [1, 1])]
    ['all-gather between hosts', 'all-gather inside each host']
    """
    found, first = [], 1
    for phase, count in zip(nested.phases, steps, strict=True):
        kinds: dict[str, list[NestedCall]] = {}
        for call in phase.calls:
            kinds.setdefault(call.collective.name, []).append(call)
        name = " and ".join(
            f"{kind.replace('_', '-')} {_where(nested, phase, calls)}"
            for kind, calls in kinds.items()
        )
        aims = " or ".join(AIMS[kind] for kind in kinds)
        group = GROUPS.get(phase.axis, "of all ranks")
        found.append(Phase(name, f"{group}, {aims}", first, first + count - 1))
        first += count
    return found


def _where(nested: NestedSchedule, phase: NestedPhase, calls: Sequence[NestedCall]) -> str:
    if phase.axis != "inside":
        return "between hosts" if phase.axis == "lane" else "of all ranks"
    there = [nested.hosts.index(call.ranks) for call in calls]
    if len(there) == sum(len(ranks) > 1 for ranks in nested.hosts):
        return "inside each host"
    return "inside " + ", ".join(f"host{number}" for number in there)
