"""What algorithms cost beside one another: a table at one point, and who wins over all points."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from roundelay.algorithms import Algorithm, algorithms_of
from roundelay.collectives import Collective, collectives
from roundelay.errors import UnsupportedSizeError
from roundelay.networks import Graph, cluster_called, cluster_names, networks
from roundelay.schedule import Price, Schedule, price, prove
from roundelay.view.terminal_text import nbytes_text, seconds_text
from roundelay.web.view import Document

__all__ = ["MOST_RANKS", "crossover_of", "network_names", "network_of", "priced", "prices_of"]

MOST_RANKS = 64
#: The points over which it is asked who wins.
RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
BYTES = tuple(1 << power for power in range(8, 31, 2))


def network_names() -> list[str]:
    """Return the networks by name: the textbook's first, then other shapes, then machines."""
    shapes = sorted(networks.names(), key=lambda name: (name != "switch", name))
    return [*shapes, *cluster_names()]


@lru_cache(maxsize=64)
def network_of(name: str, size: int) -> Graph:
    """Return a network of so many ranks."""
    if name in cluster_names():
        return cluster_called(name).network(size)
    return networks.load(name)(size)


def priced(schedule: Schedule, nbytes: int, network: str) -> Price:
    """Return the price of a schedule, in elements of 4 bytes, or of 1 where that does not go."""
    on = network_of(network, schedule.size)
    return price(schedule, nbytes, itemsize=1 if nbytes % 4 else 4, network=on)


@lru_cache(maxsize=256)
def _schedule(algorithm: Algorithm, size: int, root: int) -> Schedule:
    return algorithm.schedule(size, root)


def _schedules(collective: Collective, size: int, root: int) -> Iterator[tuple[str, Schedule]]:
    """Yield what runs on so many ranks, by short name."""
    for algorithm in algorithms_of(collective):
        try:
            yield algorithm.short_name, _schedule(algorithm, size, root)
        except UnsupportedSizeError:
            continue


def prices_of(collective: Collective, size: int, root: int, nbytes: int, network: str) -> Document:
    """Return every algorithm's price at one point, the quickest first."""
    adds = collective.reduces and not collective.idempotent
    rows = []
    for name, schedule in _schedules(collective, size, root):
        cost = priced(schedule, nbytes, network)
        seconds = cost.seconds or 0.0
        rows.append(
            {
                "algorithm": name,
                "steps": len(cost.steps),
                "messages": cost.messages,
                "sent": nbytes_text(max(cost.sent, default=0)),
                "order": prove(schedule).order if adds else "",
                "seconds": seconds,
                "time": seconds_text(seconds),
            }
        )
    rows.sort(key=lambda row: (row["seconds"], row["steps"], row["algorithm"]))
    return {"rows": rows, "network": network, "bytes": nbytes_text(nbytes)}


@lru_cache(maxsize=64)
def _crossover(name: str, network: str) -> Document:
    collective = collectives.load(name)
    rows = []
    for size in RANKS:
        row = []
        for nbytes in BYTES:
            found = sorted(
                (priced(schedule, nbytes, network).seconds or 0.0, len(schedule.steps), each)
                for each, schedule in _schedules(collective, size, 0)
            )
            row.append([[each, seconds_text(seconds)] for seconds, _, each in found[:2]])
        rows.append(row)
    return {
        "ranks": RANKS,
        "bytes": BYTES,
        "labels": [nbytes_text(nbytes) for nbytes in BYTES],
        "best": rows,  # by ranks, then bytes: the quickest and the next, with their times
        "algorithms": [each.short_name for each in algorithms_of(collective)],
    }


def crossover_of(collective: Collective, network: str) -> Document:
    """Return for a grid of ranks and bytes which algorithm is quickest, and which is next."""
    return _crossover(collective.name, network)
