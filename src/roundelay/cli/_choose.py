"""From words on the command line to collectives, algorithms, schedules and networks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roundelay.algorithms import (
    Algorithm,
    algorithm_of,
    algorithms_of,
    collective_called,
    collective_or_algorithm,
    default_algorithm,
)
from roundelay.arguments import config_folder
from roundelay.cli._types import MOST_RANKS
from roundelay.collectives import Collective
from roundelay.errors import InvalidArgumentError, UnknownNameError
from roundelay.networks import (
    Cluster,
    cluster_called,
    cluster_names,
    load_network,
    networks,
)
from roundelay.schedule import Network, Order, Price, Schedule, price

__all__ = [
    "MOST_OPTION",
    "ORDERS",
    "adds_up",
    "algorithm_of",
    "algorithms_of",
    "check_root",
    "cluster_from",
    "collective_called",
    "collective_or_algorithm",
    "default_algorithm",
    "network_called",
    "options_from",
    "own_networks",
    "priced",
    "schedule_of",
    "shared",
]

#: How a proof's order of addition reads in a sentence.
ORDERS: Mapping[Order, str] = {
    "rank_order": "rank order (0, 1, 2, ...)",
    "contiguous": "rank order, in groups of neighbours",
    "any": "a fixed order that is not rank order",
}

#: No option of an algorithm (segments, ranks per group) makes sense beyond this.
MOST_OPTION = 65_536


def _check_size(size: int) -> None:
    if size > MOST_RANKS:
        raise InvalidArgumentError(
            f"-n {size} is more than the command line takes; up to {MOST_RANKS} ranks are fine."
        )


def check_root(collective: Collective, root: int) -> None:
    """Refuse a root where there is none."""
    if root and not collective.rooted:
        raise InvalidArgumentError(
            f"{collective.name} has no root: its ranks are all alike. Leave out --root."
        )


def schedule_of(
    algorithm: Algorithm, size: int, root: int = 0, options: Mapping[str, Any] | None = None
) -> Schedule:
    """Return the schedule, after checking what the algorithm itself would trip over."""
    _check_size(size)
    check_root(algorithm.collective, root)
    options = dict(options or {})
    for name in options.keys() & algorithm.options.keys():
        _check_option(algorithm, name, options[name])
    return algorithm.schedule(size, root, **options)


def shared(
    algorithm: Algorithm, among: list[Algorithm], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options that are this algorithm's; one that nobody knows stays, to be refused."""
    others = {name for each in among if each is not algorithm for name in each.options}
    return {
        name: value
        for name, value in options.items()
        if name in algorithm.options or name not in others
    }


def adds_up(collective: Collective) -> bool:
    """Tell whether an order of addition means anything: data is reduced, not only news."""
    return collective.reduces and not collective.idempotent


def priced(schedule: Schedule, nbytes: int, network: Network) -> Price:
    """Price a schedule in elements of 4 bytes, or of 1 where that does not go."""
    return price(schedule, nbytes, itemsize=1 if nbytes % 4 else 4, network=network)


def _check_option(algorithm: Algorithm, name: str, value: Any) -> None:  # as the user wrote it
    annotation = str(inspect.signature(algorithm.function).parameters[name].annotation)
    if "int" in annotation and (type(value) is not int or not 0 < value <= MOST_OPTION):
        raise InvalidArgumentError(
            f"{name} of {algorithm.name} is a whole number from 1 to {MOST_OPTION}, "
            f"not {value!r}. Its default is {algorithm.options[name]}."
        )


def options_from(pairs: list[str], *, where: str) -> dict[str, Any]:
    """Read `name=value` pairs; values that look like numbers become numbers.

    >>> options_from(["direction=left", "segments=8", "latency=1e-6"], where="-O")
    {'direction': 'left', 'segments': 8, 'latency': 1e-06}
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not (name and equals and value):
            raise InvalidArgumentError(f"{where} takes name=value, not '{pair}'.")
        if name in options:
            raise InvalidArgumentError(f"{where} gives {name} twice.")
        options[name] = _number(value.strip())
    return options


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def own_networks() -> Path:
    """Return the folder of this user's clusters, where `roundelay bench --fit` writes."""
    return config_folder(os.environ) / "networks"


def cluster_from(text: str) -> Cluster:
    """Return a cluster by name, this user's first, or from a file."""
    return cluster_called(text, _own_networks())


def _own_networks() -> Path | None:
    try:
        return own_networks()
    except RuntimeError:  # nobody's home is known
        return None


def network_called(text: str, size: int) -> Network:
    """Return a network by name (`switch`), with options (`hosts:per_host=4`), or from a file."""
    if text.endswith(".json") or "/" in text:
        return load_network(Path(text))
    _check_size(size)
    name, _, rest = text.partition(":")
    if name in cluster_names(_own_networks()) and not rest:
        return cluster_from(name).network(size)
    make = networks.load(name.replace("-", "_"))
    pairs = [pair for pair in rest.split(",") if pair]
    options = options_from(pairs, where=f"--network {name}")
    known = [
        parameter.name
        for parameter in inspect.signature(make).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise UnknownNameError(f"network {name}", unknown[0], known)
    return make(size, **options)
