"""From `--hosts` to the hosts, and to the schedule of a collective over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import click

from roundelay.algorithms import Algorithm, algorithms
from roundelay.cli import _choose as choose
from roundelay.cli._types import MOST_RANKS
from roundelay.collectives import Collective
from roundelay.errors import InvalidArgumentError, UnknownNameError, rank_count
from roundelay.schedule import Axis, NestedCall, Schedule, lanes_for, over_hosts, split
from roundelay.tuning import default_for

__all__ = ["Hosts", "hosts_from", "hosts_option", "schedule_over"]

Hosts = tuple[tuple[int, ...], ...]

#: The options of a schedule over hosts, and the axes that each is for.
OPTIONS: Mapping[str, Sequence[Axis]] = {"inside": ("inside",), "between": ("lane", "everyone")}

hosts_option = click.option(
    "--hosts", metavar="HOSTS", help="Over so many hosts, or with so many ranks on each: 4,4,2."
)


def hosts_from(text: str, size: int | None) -> Hosts:
    """Read a number of hosts for `size` ranks, or the ranks of each; ranks go host by host.

    >>> hosts_from("2", 5), hosts_from("1,2", None)
    (((0, 1, 2), (3, 4)), ((0,), (1, 2)))
    """
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or sum(numbers) > MOST_RANKS:
        raise InvalidArgumentError(
            f"--hosts takes a number of hosts, or the ranks of each as in 4,4,2, not '{text}'. Up "
            f"to {MOST_RANKS} ranks are fine."
        )
    if len(numbers) > 1:
        if size not in (None, sum(numbers)):
            raise InvalidArgumentError(
                f"--hosts {text} has {rank_count(sum(numbers))}, not {size}. Leave out -n."
            )
        starts = [sum(numbers[:host]) for host in range(len(numbers) + 1)]
        return tuple(tuple(range(low, high)) for low, high in pairwise(starts))
    (count,), ranks = numbers, size or 0
    if ranks < count:
        raise InvalidArgumentError(
            f"--hosts {count} needs a rank on each, but there is only {rank_count(ranks)}. "
            f"Give more by -n."
        )
    return tuple(tuple(range(run.start, run.stop)) for run in split(ranks, count))


def schedule_over(
    collective: Collective,
    hosts: Hosts,
    root: int,
    nbytes: int,
    options: Mapping[str, Any] | None = None,
) -> Schedule:
    """Return the schedule for buffers of `nbytes`, with the algorithms that engines would take."""
    options = options or {}
    unknown = options.keys() - OPTIONS.keys()
    if unknown:
        raise UnknownNameError("options of --hosts", min(unknown), list(OPTIONS))
    if root and not collective.rooted:
        raise InvalidArgumentError(f"{collective.name} has no root. Leave out --root.")
    nested = over_hosts(collective, hosts, root, lanes=lanes_for(hosts, nbytes))
    chunk = nbytes / collective.per_rank(nested.size, root) / nested.parts
    used: set[str] = set()

    def inner(axis: Axis, call: NestedCall) -> Schedule:
        size = len(call.ranks)
        for option, axes in OPTIONS.items():
            if axis in axes and option in options:
                found = _called(call.collective, str(options[option]))
                if found is not None:
                    used.add(option)
                    return choose.schedule_of(found, size, call.root)
        largest = max(len({*call.before(place), *call.after(place)}) for place in range(size))
        name = default_for(size, cores=0).choose(call.collective.name, int(chunk * largest))
        return algorithms.load(name).schedule(size, call.root)

    schedule = nested.expand(inner)
    for option in sorted(options.keys() - used):
        phases = {
            call.collective.name
            for phase in nested.phases
            if phase.axis in OPTIONS[option]
            for call in phase.calls
        }
        raise InvalidArgumentError(
            f"{collective.name} over these hosts has no phase {option} that takes "
            f"'{options[option]}': there it is {', '.join(sorted(phases)) or 'nothing'}."
        )
    return schedule


def _called(collective: Collective, name: str) -> Algorithm | None:
    try:
        return choose.algorithm_of(collective, name)
    except UnknownNameError:
        return None
