"""From `--hosts` to the hosts, and to the schedule of a collective over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import click

from roundelay.algorithms import Algorithm, algorithms
from roundelay.cli import _choose as choose
from roundelay.cli._types import MOST_RANKS
from roundelay.collectives import Collective
from roundelay.errors import (
    InvalidArgumentError,
    UnknownNameError,
    UnsupportedSizeError,
    rank_count,
)
from roundelay.networks import Graph, networks
from roundelay.schedule import (
    Axis,
    NestedCall,
    NestedSchedule,
    Schedule,
    lanes_for,
    over_hosts,
    split,
)

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
    if not numbers or min(numbers) < 1 or max(sum(numbers), size or 0) > MOST_RANKS:
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
        raise UnsupportedSizeError(f"--hosts {count}", ranks, f"at least {count} ranks")
    return tuple(tuple(range(run.start, run.stop)) for run in split(ranks, count))


@dataclass(frozen=True, slots=True)
class OverHosts:
    """A collective over hosts, ready to be proved, priced and drawn."""

    nested: NestedSchedule
    schedule: Schedule
    steps: Sequence[int]  # of each phase

    def network(self) -> Graph:
        """Return a network of these hosts."""
        return networks.load("hosts")(self.nested.size, per_host=list(map(len, self.nested.hosts)))

    def named_hosts(self) -> dict[str, Sequence[int]]:
        """Return the hosts by the names that the network gives them."""
        return {f"host{number}": ranks for number, ranks in enumerate(self.nested.hosts)}


def over_hosts_called(
    collective: Collective,
    hosts: Hosts,
    root: int,
    nbytes: int,
    options: Mapping[str, Any] | None = None,
) -> OverHosts:
    """Return what runs for buffers of `nbytes`, with the algorithms that engines would take."""
    options = options or {}
    unknown = options.keys() - OPTIONS.keys()
    if unknown:
        raise UnknownNameError("options of --hosts", min(unknown), list(OPTIONS))
    choose.check_root(collective, root)
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
                    return found.schedule(size, call.root)
        from roundelay.tuning import default_for  # noqa: PLC0415 - the rest needs no msgspec

        ends = [end for place in range(size) for end in (call.before(place), call.after(place))]
        nbytes = int(chunk * max(len(end or ()) for end in ends))
        name = default_for(size, cores=0).choose(call.collective.name, nbytes)
        return algorithms.load(name).schedule(size, call.root)

    made = OverHosts(nested, nested.expand(inner), nested.steps(inner))
    for option in sorted(options.keys() - used):
        _refuse(nested, option, options[option])
    return made


def _refuse(nested: NestedSchedule, option: str, name: object) -> None:
    phases = [phase for phase in nested.phases if phase.axis in OPTIONS[option]]
    kinds = sorted({call.collective.name for phase in phases for call in phase.calls})
    raise InvalidArgumentError(
        f"{nested.collective.name} over these hosts has no phase {option} that takes '{name}': "
        f"there it is {', '.join(kinds) or 'nothing'}."
    )


def _called(collective: Collective, name: str) -> Algorithm | None:
    try:
        return choose.algorithm_of(collective, name)
    except UnknownNameError:
        return None
