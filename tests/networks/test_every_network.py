"""What every network promises, checked for every file in the folder and for users' own."""

from __future__ import annotations

import inspect
import json
import math
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.algorithms import algorithms
from roundelay.errors import InvalidArgumentError, NetworkError, UnsupportedSizeError
from roundelay.networks import Graph, load_network, networks
from roundelay.schedule import Link, price

Node = int | str
every_network = pytest.mark.parametrize("name", networks.names())


def cheapest(graph: Graph) -> dict[tuple[Node, Node], tuple[float, int]]:
    """Latency and number of links of the best path for every pair (Floyd and Warshall)."""
    nodes = sorted({end for link in graph.links for end in (link.src, link.dst)}, key=str)
    best = {(node, node): (0.0, 0) for node in nodes}
    best |= {(link.src, link.dst): (link.latency, 1) for link in graph.links}
    far = (math.inf, 0)
    for middle, a, b in product(nodes, repeat=3):
        (la, ha), (lb, hb) = best.get((a, middle), far), best.get((middle, b), far)
        best[a, b] = min(best.get((a, b), far), (la + lb, ha + hb))
    return best


def check_routes(graph: Graph) -> None:
    best = cheapest(graph)
    for src, dst in product(range(graph.size), repeat=2):
        route = graph.route(src, dst)
        assert route == graph.route(src, dst)
        nodes = [src, *(link.dst for link in route)]
        assert [link.src for link in route] == nodes[:-1]
        assert nodes[-1] == dst
        assert len(set(nodes)) == len(nodes)
        assert set(route) <= set(graph.links)
        if src != dst:
            latency, hops = best[src, dst]
            assert sum(link.latency for link in route) == pytest.approx(latency)
            assert len(route) == hops


@pytest.mark.parametrize("size", [*range(1, 10), 12, 16])
@every_network
def test_every_pair_has_a_cheapest_route(name: str, size: int) -> None:
    graph = networks.load(name)(size)
    assert (graph.name, graph.size) == (name, size)
    check_routes(graph)


@every_network
def test_routes_do_not_depend_on_what_was_asked_before(name: str) -> None:
    graph, again = networks.load(name)(9), networks.load(name)(9)
    pairs = list(product(range(9), repeat=2))
    forward = {pair: graph.route(*pair) for pair in pairs}
    assert forward == {pair: again.route(*pair) for pair in reversed(pairs)}


@pytest.mark.parametrize("size", [4, 6, 9, 12, 13])
def test_distances_are_those_of_the_shape(size: int) -> None:
    rows = max(r for r in range(1, size) if size % r == 0 and r * r <= size)
    columns = size // rows
    for a, b in product(range(size), repeat=2):
        down, across = abs(a // columns - b // columns), abs(a % columns - b % columns)
        hops = {
            "ring": min(abs(a - b), size - abs(a - b)),
            "mesh": down + across,
            "torus": min(down, rows - down) + min(across, columns - across),
            "fully_connected": int(a != b),
            "switch": 2 * (a != b),
        }
        for name, expected in hops.items():
            assert len(networks.load(name)(size).route(a, b)) == expected, (name, a, b)


def test_hosts_share_one_network_card() -> None:
    graph = networks.load("hosts")(8, per_host=4, nic_bandwidth=1e9)
    cost = price(algorithms.load("all_reduce_hierarchical").schedule(8, group=4), network=graph)
    flat = price(algorithms.load("all_reduce_one_shot").schedule(8), network=graph)
    cards = [link for link in graph.links if "network" in (link.src, link.dst)]
    assert {link.bandwidth for link in cards} == {1e9}
    assert len(cards) == 4
    # A quarter of the data from each of four ranks, once there and once back; 16 times all of it.
    assert {cost.links[link] for link in cards} == {cost.nbytes}
    assert {flat.links[link] for link in cards} == {16 * flat.nbytes}


def test_an_oversubscribed_tree_is_slow_between_leaves_only() -> None:
    direct = algorithms.load("all_to_all_direct").schedule(8)
    times = [
        price(direct, network=networks.load("fat_tree")(8, per_leaf=4, oversubscription=o)).seconds
        for o in (1, 4)
    ]
    assert times[0] is not None and times[1] is not None and times[0] < times[1]
    inside = algorithms.load("all_to_all_direct").schedule(4)
    times = [
        price(inside, network=networks.load("fat_tree")(8, per_leaf=4, oversubscription=o)).seconds
        for o in (1, 4)
    ]
    assert times[0] == times[1]


@every_network
def test_options_are_keywords_with_defaults_and_the_first_line_is_a_sentence(name: str) -> None:
    maker = networks.load(name)
    size, *options = inspect.signature(maker).parameters.values()
    assert size.name == "size"
    assert {"latency", "bandwidth", "reduce_bandwidth"} <= {option.name for option in options}
    assert all(o.kind is o.KEYWORD_ONLY and o.default is not o.empty for o in options)
    assert (inspect.getdoc(maker) or "").partition("\n")[0].endswith(".")


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, -math.inf, "1e9", None, True, 1j])
@every_network
def test_refuses_numbers_that_make_no_sense(name: str, value: Any) -> None:
    maker = networks.load(name)
    for option in inspect.signature(maker).parameters:
        if option in ("rows", "per_host") and value is None:
            continue  # the default
        if "latency" in option and value == 0:
            continue
        arguments: dict[str, Any] = {"size": 4, option: value}
        with pytest.raises(InvalidArgumentError):
            maker(**arguments)


@pytest.mark.parametrize(("name", "option"), [("mesh", "rows"), ("torus", "rows"),
                                              ("hosts", "per_host")])  # fmt: skip
def test_refuses_what_does_not_divide_the_size(name: str, option: str) -> None:
    with pytest.raises(UnsupportedSizeError, match=f"{option}=3 does not run on 8 ranks"):
        networks.load(name)(8, **{option: 3})


def test_hosts_may_have_different_numbers_of_ranks() -> None:
    graph = networks.load("hosts")(6, per_host=[3, 1, 2])
    assert graph.hosts() == {"host0": [0, 1, 2], "host1": [3], "host2": [4, 5]}
    for wrong in ([3, 2], [3, 3, 0], [3, -1, 4], [3.0, 3], []):
        with pytest.raises(InvalidArgumentError, match="whose sum is the size 6"):
            networks.load("hosts")(6, per_host=wrong)


@pytest.mark.parametrize("rank", [-1, 4, True, 0.0, "switch"])
def test_refuses_routes_from_and_to_what_is_no_rank(rank: Any) -> None:
    graph = networks.load("switch")(4)
    for ends in ((rank, 1), (1, rank)):
        with pytest.raises(InvalidArgumentError, match="has no rank"):
            graph.route(*ends)


@given(st.integers(2, 6), st.data())
def test_any_connected_graph_is_routed_as_cheaply_as_it_goes(
    size: int, data: st.DataObject
) -> None:
    nodes: list[Node] = [*range(size), "a", "b"]
    around = [*range(size), 0]
    ends: set[tuple[Node, Node]] = set(pairwise(around))
    pairs = [(a, b) for a in nodes for b in nodes if a != b]
    ends |= set(data.draw(st.lists(st.sampled_from(pairs), max_size=12)))
    latency = st.sampled_from([0.0, 1.0, 2.0, 5.0])
    links = [Link(a, b, data.draw(latency), 1.0) for a, b in sorted(ends, key=str)]
    check_routes(Graph("drawn", size, links))


LINK = {"src": 0, "dst": 1, "latency": 1e-6, "bandwidth": 1e9, "both": True}
GOOD = {
    "roundelay_network": 1,
    "name": "pair",
    "size": 2,
    "reduce_bandwidth": 1e10,
    "links": [LINK],
}


def written(folder: Path, document: object) -> Path:
    path = folder / "mine.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


@every_network
def test_a_network_written_by_hand_is_the_same_network(name: str, tmp_path: Path) -> None:
    graph = networks.load(name)(6)
    links = [
        {"src": ln.src, "dst": ln.dst, "latency": ln.latency, "bandwidth": ln.bandwidth}
        for ln in graph.links
    ]
    document = {**GOOD, "size": 6, "links": links, "reduce_bandwidth": graph.reduce_bandwidth}
    mine = load_network(written(tmp_path, document))
    schedule = algorithms.load("all_to_all_direct").schedule(6)
    assert price(schedule, network=mine).links == price(schedule, network=graph).links
    assert price(schedule, network=mine).seconds == price(schedule, network=graph).seconds


def test_what_may_be_left_out(tmp_path: Path) -> None:
    document = {
        key: value for key, value in GOOD.items() if key not in ("name", "reduce_bandwidth")
    }
    graph = load_network(written(tmp_path, document))
    assert (graph.name, graph.size, len(graph.links)) == ("mine", 2, 2)
    one_way = {**GOOD, "links": [{**LINK, "both": False}]}
    with pytest.raises(NetworkError, match="no path leads to rank 0 from rank 1"):
        load_network(written(tmp_path, one_way))


@pytest.mark.parametrize(
    ("document", "place", "problem"),
    [
        ({**GOOD, "size": 3}, "mine.json: pair", "no path leads from rank 0 to rank 2"),
        ({**GOOD, "size": 0}, "mine.json: size", "from 1 to 1024"),
        ({**GOOD, "size": 10**9}, "mine.json: size", "from 1 to 1024"),
        ({**GOOD, "roundelay_network": 2}, "mine.json: roundelay_network", "must be 1, not 2"),
        ({**GOOD, "reduce_bandwidth": 0}, "pair: reduce_bandwidth", "above 0"),
        ({**GOOD, "reduce_bandwidth": "1"}, "mine.json: reduce_bandwidth", "must be a number"),
        ({**GOOD, "name": "\x1b[2J"}, "mine.json: name", "printable"),
        ({**GOOD, "link": []}, "mine.json", "Did you mean 'links'"),
        ({**GOOD, "links": {}}, "mine.json: links", "must be a list, not an object"),
        ({**GOOD, "links": [[]]}, "mine.json: links[0]", "must be an object, not a list"),
        ({**GOOD, "links": [LINK, LINK]}, "pair: link 0→1", "is there twice"),
        ({**GOOD, "links": [{**LINK, "dst": 0}]}, "pair: link 0→0", "back to where it starts"),
        ({**GOOD, "links": [{**LINK, "dst": 2}]}, "mine.json: links[0].dst", "from 0 to 1, not 2"),
        ({**GOOD, "links": [{**LINK, "src": 1.0}]}, "mine.json: links[0].src", "not 1.0"),
        ({**GOOD, "links": [{**LINK, "src": ""}]}, "mine.json: links[0].src", "printable"),
        ({**GOOD, "links": [{**LINK, "both": 1}]}, "mine.json: links[0].both", "true or false"),
        ({**GOOD, "links": [{**LINK, "latency": -1}]}, "link 0→1: latency", "from 0, not -1"),
        ({**GOOD, "links": [{**LINK, "bandwidth": 0}]}, "link 0→1: bandwidth", "above 0, not 0"),
        ('{"roundelay_network": 1e999}', "mine.json", "lacks 'size'"),
        ('{"a": NaN}', "mine.json", "NaN"),
        ("{", "mine.json: line 1, column 2", "is not JSON"),
    ],
)
def test_a_faulty_file_is_refused_with_its_place(
    document: object, place: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(NetworkError) as caught:
        load_network(written(tmp_path, document))
    assert place in str(caught.value)
    assert problem in str(caught.value)


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    | st.sampled_from([*GOOD.values(), *LINK.values()]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from([*GOOD, *LINK]), inner, max_size=5),
))  # fmt: skip
def test_nothing_but_a_network_error_comes_of_any_json(
    tmp_path_factory: pytest.TempPathFactory, value: object
) -> None:
    path = written(tmp_path_factory.getbasetemp(), value)
    with pytest.raises(NetworkError):
        load_network(path)
    path = written(path.parent, {**GOOD, "links": [{**LINK, "bandwidth": value}]})
    try:
        load_network(path)
    except NetworkError:
        return
    assert isinstance(value, int | float) and value > 0
