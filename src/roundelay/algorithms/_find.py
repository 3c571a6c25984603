"""Collectives and algorithms by the names that people type, in any spelling."""

from __future__ import annotations

from roundelay.algorithms._base import Algorithm
from roundelay.collectives import Collective, collectives
from roundelay.errors import InvalidArgumentError, UnknownNameError
from roundelay.registry import Family

algorithms: Family[Algorithm] = Family("roundelay.algorithms")

#: What `explain` draws when no algorithm is named: the one that introductions show.
DEFAULTS = {
    "all_gather": "ring",
    "all_reduce": "ring",
    "all_to_all": "pairwise",
    "barrier": "dissemination",
    "broadcast": "binomial",
    "exscan": "hillis_steele",
    "gather": "binomial",
    "reduce": "binomial",
    "reduce_scatter": "ring",
    "scan": "hillis_steele",
    "scatter": "binomial",
}


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def collective_called(name: str) -> Collective:
    """Find a collective by any spelling: all_reduce, all-reduce, AllReduce."""
    known = {_key(each): each for each in collectives.names()}
    return collectives.load(known.get(_key(name), name))


def collective_or_algorithm(name: str) -> tuple[Collective, str | None]:
    """Find a collective by its name, or by the full name of one of its algorithms."""
    known = {_key(each): each for each in algorithms.names()}
    if _key(name) in known and _key(name) not in map(_key, collectives.names()):
        algorithm = algorithms.load(known[_key(name)])
        return algorithm.collective, algorithm.name
    return collective_called(name), None


def algorithms_of(collective: Collective) -> list[Algorithm]:
    """List the algorithms that keep the contract of a collective."""
    return [each for each in algorithms if each.collective is collective]


def algorithm_of(collective: Collective, name: str) -> Algorithm:
    """Find an algorithm by its short or full name, in any spelling."""
    candidates = algorithms_of(collective)
    known = {_key(each.short_name): each for each in candidates}
    known |= {_key(each.name): each for each in candidates}
    if _key(name) not in known:
        family = f"{collective.name} (see `roundelay list {collective.name}`)"
        raise UnknownNameError(family, name, [each.short_name for each in candidates])
    return known[_key(name)]


def default_algorithm(collective: Collective) -> Algorithm:
    """Return the algorithm that explains a collective best."""
    candidates = algorithms_of(collective)
    if not candidates:
        raise InvalidArgumentError(
            f"{collective.name} has no algorithm yet. Add a file "
            f"algorithms/{collective.name}_<name>.py, or draw your own schedule."
        )
    wanted = DEFAULTS.get(collective.name)
    return next((each for each in candidates if each.short_name == wanted), candidates[0])
