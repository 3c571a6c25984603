"""A user's own network, from a JSON file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from roundelay.errors import NetworkError
from roundelay.networks._base import REDUCE_BANDWIDTH, Graph
from roundelay.schedule import Link
from roundelay.schedule.strict_json import DocumentPath, is_name, parse, read

VERSION = 1
MAX_RANKS = 1024
MAX_LINKS = 100_000

FIELDS = ("roundelay_network", "name", "size", "reduce_bandwidth", "links")
REQUIRED = ("roundelay_network", "size", "links")
LINK_FIELDS = ("src", "dst", "latency", "bandwidth", "both")
LINK_REQUIRED = ("src", "dst", "latency", "bandwidth")


def load_network(path: str | os.PathLike[str]) -> Graph:
    """Read a network from a JSON file; whatever is wrong raises `NetworkError` that says where.

    Ranks are numbers, switches are names; latencies are seconds, bandwidths bytes per second; a
    link leads one way unless it has `"both": true`.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    ...     _ = file.write('''{"roundelay_network": 1, "name": "pair", "size": 2, "links": [
    ...         {"src": 0, "dst": 1, "latency": 1e-6, "bandwidth": 1e9, "both": true}]}''')
    ...     file.flush()
    ...     load_network(file.name)
    <network pair of 2 ranks and 2 links>
    """
    top = DocumentPath(os.fspath(path), NetworkError)
    value = parse(read(path, top), top)
    top.keys(value, known=FIELDS, required=REQUIRED)
    document = cast("dict[str, object]", value)
    top.inside("roundelay_network").whole(document["roundelay_network"], VERSION, VERSION)
    stem = Path(path).stem
    name = top.inside("name").name(document.get("name", stem if is_name(stem) else "network"))
    size = top.inside("size").whole(document["size"], 1, MAX_RANKS)
    fold = top.inside("reduce_bandwidth").number(document.get("reduce_bandwidth", REDUCE_BANDWIDTH))
    place = top.inside("links")
    links = [
        link
        for index, item in enumerate(place.list(document["links"], MAX_LINKS))
        for link in _links(item, place.item(index), size)
    ]
    try:
        return Graph(name, size, links, reduce_bandwidth=fold)
    except NetworkError as error:
        top.fail(f"{error.place}: {error.problem}")


def _links(item: object, place: DocumentPath, size: int) -> Iterator[Link]:
    place.keys(item, known=LINK_FIELDS, required=LINK_REQUIRED)
    fields = cast("dict[str, object]", item)
    ends = [_node(fields[word], place.field(word), size) for word in ("src", "dst")]
    latency, bandwidth = (place.field(word).number(fields[word]) for word in LINK_REQUIRED[2:])
    both = fields.get("both", False)
    if not isinstance(both, bool):
        place.field("both").fail("must be true or false")
    yield Link(ends[0], ends[1], latency, bandwidth)
    if both:
        yield Link(ends[1], ends[0], latency, bandwidth)


def _node(value: object, place: DocumentPath, size: int) -> int | str:
    if isinstance(value, str):
        return place.name(value)
    return place.whole(value, 0, size - 1)
