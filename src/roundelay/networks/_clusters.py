"""Machines by name: what their links and processors do, in a small file with its source.

A cluster is a network of hosts of any size, and what one rank computes and holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import cast

from roundelay.errors import NetworkError, UnknownNameError
from roundelay.networks._base import Graph, above_zero
from roundelay.networks.hosts import hosts
from roundelay.schedule.strict_json import DocumentPath, parse, read

VERSION = 1
MOST_PER_HOST = 1024
NUMBERS = ("latency", "bandwidth", "nic_latency", "nic_bandwidth", "reduce_bandwidth")
REQUIRED = ("roundelay_cluster", "name", "source", "per_host", *NUMBERS)
FIELDS = (*REQUIRED, "flops", "memory")
PRECISIONS = ("bf16", "fp16", "fp32")
FOLDER = resources.files("roundelay.networks") / "clusters"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts of some ranks each: what `hosts` takes, and what one rank computes and holds."""

    name: str
    source: str  # where the figures are from
    per_host: int
    latency: float  # seconds between two ranks of a host (alpha)
    bandwidth: float  # bytes per second that a rank sends inside its host (1 / beta)
    nic_latency: float  # that crossing to another host adds
    nic_bandwidth: float  # that all ranks of a host share
    reduce_bandwidth: float  # bytes per second that a rank folds (1 / gamma)
    flops: Mapping[str, float]  # of one rank at its peak, by precision
    memory: int | None = None  # bytes of one rank

    def network(self, size: int) -> Graph:
        """Return the network of so many ranks, on which schedules are priced.

        >>> cluster_called("h100-ib").network(16)
        <network h100-ib of 16 ranks and 36 links>
        """
        full, rest = divmod(size, self.per_host)
        lengths = [self.per_host] * full + [rest] * (rest > 0)
        options = {name: getattr(self, name) for name in NUMBERS}
        made = hosts(size, per_host=lengths, **options)
        made.name = self.name
        return made


def cluster_names(folder: Path | None = None) -> list[str]:
    """Return the clusters that are known by name; those of a folder of the user's, too."""
    own = [] if folder is None or not folder.is_dir() else folder.glob("*.json")
    shipped = [Path(file.name).stem for file in FOLDER.iterdir() if file.name.endswith(".json")]
    return sorted({*shipped, *(file.stem for file in own)})


def cluster_called(name: str, folder: Path | None = None) -> Cluster:
    """Return a cluster by name, or from a file; what is in the user's folder comes first.

    >>> cluster_called("h100-ib").per_host
    8
    >>> cluster_called("h100")
    Traceback (most recent call last):
        ...
    roundelay.errors.UnknownNameError: clusters has no 'h100'. Did you mean 'h100-ib'? \
Known: a100-ib, gb200-nvl72, h100-ib, h200-ib, v100-ib.
    """
    if name.endswith(".json") or "/" in name:
        return load_cluster(Path(name))
    if name not in cluster_names(folder):
        raise UnknownNameError("clusters", name, cluster_names(folder))
    if folder is not None and (folder / f"{name}.json").is_file():
        return load_cluster(folder / f"{name}.json")
    with resources.as_file(FOLDER / f"{name}.json") as file:
        return load_cluster(file)


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster where `cluster_called` finds it, all of it or nothing."""
    document = {"roundelay_cluster": VERSION,
                **{name: getattr(cluster, name) for name in FIELDS[1:]}}  # fmt: skip
    if cluster.memory is None:
        del document["memory"]
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}.part")
    fresh.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def load_cluster(path: Path) -> Cluster:
    """Read a cluster from a JSON file; whatever is wrong raises `NetworkError` that says where."""
    top = DocumentPath(str(path), NetworkError)
    value = parse(read(path, top), top)
    top.keys(value, known=FIELDS, required=REQUIRED)
    document = cast("dict[str, object]", value)
    top.inside("roundelay_cluster").whole(document["roundelay_cluster"], VERSION, VERSION)
    source = document["source"]
    if not isinstance(source, str) or not source.strip():
        top.inside("source").fail("must say where the figures are from")
    numbers = {name: top.inside(name).number(document[name]) for name in NUMBERS}
    for name, number in numbers.items():
        above_zero(str(path), name, number, or_zero=name.endswith("latency"))
    memory = document.get("memory")
    return Cluster(
        name=top.inside("name").name(document["name"]),
        source=source,
        per_host=top.inside("per_host").whole(document["per_host"], 1, MOST_PER_HOST),
        flops=_flops(document.get("flops", {}), top.inside("flops")),
        memory=None if memory is None else int(top.inside("memory").number(memory)),
        **numbers,
    )


def _flops(value: object, place: DocumentPath) -> dict[str, float]:
    place.keys(value, known=PRECISIONS, required=())
    found = cast("dict[str, object]", value)
    return {name: above_zero(str(place), name, place.field(name).number(number))
            for name, number in found.items()}  # fmt: skip
