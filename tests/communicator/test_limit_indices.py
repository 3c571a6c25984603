"""Every place that takes a whole number takes whatever is one, and refuses by name what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import roundelay as rd
from roundelay.algorithms import algorithms
from roundelay.collectives import collectives
from roundelay.engines import run_schedule
from roundelay.errors import InvalidArgumentError
from roundelay.networks import networks
from roundelay.schedule import Layout, Schedule, Transfer, price


class Own:
    """Says which whole number it is, and nothing else."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


class Broken:
    """Can be neither shown nor taken for a number."""

    def __index__(self) -> int:
        raise ValueError("no")

    def __repr__(self) -> str:
        raise ValueError("no")


#: From a number to something that is that number.
WHOLE: dict[str, Callable[[int], Any]] = {
    "int": int,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
    "array of no dimension": np.array,
    "own": Own,
}
#: What is no whole number, wherever one is taken.
NEVER = [True, np.True_, 1.0, np.float64(1), 1 + 0j, "1", b"1", [[1]], {}, object(), Broken()]
NEVER += [np.ones((2, 2), int), np.array(1.0), float("nan"), float("inf"), 1 << 70, -(1 << 70)]


class Place(NamedTuple):
    """An argument of a public call that takes a whole number, and one that is right there."""

    call: Callable[[Any, Any], Any]  # of the communicator and the argument
    right: int = 0
    least: int = 0
    most: int = 0  # beyond it is refused
    none: bool = False  # may be left out


def to_self(comm: Any, dst: Any = 0, src: Any = 0, tag: Any = 0, expects: Any = 0) -> Any:
    return comm.sendrecv(np.ones(1), dst, np.zeros(1), src, tag=tag, recv_tag=expects)


def started(method: str) -> Callable[[Any, Any], Any]:
    return lambda comm, root: getattr(comm.start, method)(np.ones(1), root=root).wait()


def one(call: Callable[[Any, Any], Any]) -> Place:
    return Place(call, right=1, least=1, most=1)


MOST = (1 << 62) - 1
COLLECTIVE: dict[str, Place] = {
    "reduce root": Place(lambda c, n: c.reduce(np.ones(1), root=n)),
    "reduce root, own op": Place(lambda c, n: c.reduce(np.ones(1), rd.Op(np.add), n)),
    "reduce root, located": Place(lambda c, n: c.reduce(np.ones(1), "maxloc", n)),
    "reduce root, algorithm": Place(
        lambda c, n: c.reduce(np.ones(1), "sum", n, algorithm="direct")
    ),
    "broadcast root": Place(lambda c, n: c.broadcast(np.ones(1), n)),
    "gather root": Place(lambda c, n: c.gather(np.ones(1), n)),
    "scatter root": Place(lambda c, n: c.scatter(np.ones((1, 2)), n)),
    "start.reduce root": Place(started("reduce")),
    "start.broadcast root": Place(started("broadcast")),
    "start.gather root": Place(started("gather")),
    "start.scatter root": Place(
        lambda c, n: c.start.scatter(np.ones((1, 2)), n, out=np.ones(2)).wait()
    ),
    "broadcast_object root": Place(lambda c, n: c.broadcast_object("a", n)),
    "gather_object root": Place(lambda c, n: c.gather_object("a", n)),
    "scatter_object root": Place(lambda c, n: c.scatter_object(["a"], n)),
    "axis": Place(lambda c, n: c.all_gather(np.ones(1), axis=n), none=True),
    "axis of reduce_scatter": Place(lambda c, n: c.reduce_scatter(np.ones(1), axis=n), none=True),
    "axis of all_to_all": Place(lambda c, n: c.all_to_all(np.ones(1), axis=n), none=True),
}
MESSAGES: dict[str, Place] = {
    "send dst": Place(lambda c, n: to_self(c, dst=n)),
    "recv src": Place(lambda c, n: to_self(c, src=n)),
    "send tag": Place(lambda c, n: to_self(c, tag=n, expects=rd.ANY), most=MOST),
    "recv tag": Place(lambda c, n: to_self(c, expects=n), most=MOST, none=True),
    "start.send dst": Place(
        lambda c, n: (c.start.send(np.ones(1), n, 5), c.recv(np.ones(1), 0, 5))
    ),
    "start.send tag": Place(
        lambda c, n: (c.start.send(np.ones(1), 0, n), c.recv(np.ones(1), 0, rd.ANY)), most=MOST
    ),
    "send_object dst": Place(lambda c, n: c.send_object(1, n)),
    "recv_object src": Place(lambda c, n: (c.send_object(1, 0), c.recv_object(n))[1]),
}
SHAPES: dict[str, Place] = {
    "counts": one(lambda c, n: c.all_gather(np.ones(1), axis=0, counts=[n])),
    "counts of gather": one(lambda c, n: c.gather(np.ones(1), axis=0, counts=[n])),
    "counts of reduce_scatter": one(lambda c, n: c.reduce_scatter(np.ones(1), axis=0, counts=(n,))),
    "counts of all_to_all": one(lambda c, n: c.all_to_all(np.ones(1), axis=0, counts=[n])),
    "color": Place(lambda c, n: c.split(n), most=MOST, none=True),
    "key": Place(lambda c, n: c.split(0, n), least=-MOST, most=MOST, none=True),
    "group": Place(lambda c, n: c.group([n])),
    "empty": Place(lambda c, n: c.empty(n), right=3, most=MOST),
    "empty, several": Place(lambda c, n: c.empty((2, n)), right=3, most=MOST),
}
BY_RANK = COLLECTIVE | MESSAGES | SHAPES


def refused(place: Place) -> list[Any]:
    beyond = [place.least - 1, place.most + 1]
    return [*NEVER, *beyond, np.int64(place.least - 1), *([] if place.none else [None])]


def test_a_communicator_takes_whole_numbers_of_every_kind(threads: Any) -> None:
    def work(comm: Any) -> list[str]:
        wrong = []
        for name, place in BY_RANK.items():
            due = repr(place.call(comm, place.right))
            for kind, make in WHOLE.items():
                found = repr(place.call(comm, make(place.right)))
                if "object at" not in due and found != due:
                    wrong.append(f"{name}, {kind}: {found} is not {due}")
        return wrong

    assert threads(1, work) == [[]]


def test_what_is_no_whole_number_is_refused_by_name_and_breaks_nothing(threads: Any) -> None:
    def work(comm: Any) -> list[str]:
        wrong = []
        for name, place in BY_RANK.items():
            for value in refused(place):
                try:
                    place.call(comm, value)
                    wrong.append(f"{name}: took {value!r}")
                except InvalidArgumentError as error:
                    if len(str(error)) > 400:
                        wrong.append(f"{name}: {error}")
                except rd.errors.NoRoomError:
                    if not name.startswith("empty"):
                        raise
                except Exception as error:  # noqa: BLE001 - collected
                    wrong.append(f"{name}: {type(error).__name__}: {error}")
        assert comm.all_reduce(np.ones(1)) == 1
        return wrong

    assert threads(1, work) == [[]]


RING = algorithms.load("all_reduce_ring")
SUM = collectives.load("all_reduce")
BROADCAST = collectives.load("broadcast")
ALONE: dict[str, Place] = {
    "run ranks": Place(lambda _, n: rd.run(lambda c: c.size, n, "threads"), 2, 1, 1024),
    "Schedule size": Place(lambda _, n: Schedule(SUM, n, []).size, 1, 1, 1 << 70),
    "Schedule root": Place(lambda _, n: Schedule(BROADCAST, 1, [], root=n).root),
    "Schedule parts": Place(lambda _, n: Schedule(SUM, 1, [], parts=n).parts, 1, 1, 1 << 70),
    "Transfer step": Place(lambda _, n: pair(step=n)),
    "Transfer src": Place(lambda _, n: pair(src=n)),
    "Transfer dst": Place(lambda _, n: pair(dst=n), 1, 1, 1),
    "Transfer chunk": Place(lambda _, n: pair(chunk=n)),
    "algorithm size": Place(lambda _, n: RING.schedule(n).transfers, 3, 1, 1 << 70),
    "picture": Place(lambda _, n: SUM.picture(n), 3, 1, 1 << 70),
    "counts of an engine": one(
        lambda _, n: run_schedule(Schedule(SUM, 1, []), [np.ones(1)], counts=[n])
    ),
    "Layout": Place(lambda _, n: Layout.of(Schedule(SUM, 1, []), [n]).counts, most=1 << 71),
    "price nbytes": Place(lambda _, n: price(RING.schedule(2), n).nbytes, 64, 0, 1 << 63),
    "price itemsize": Place(
        lambda _, n: price(RING.schedule(2), 64, itemsize=n).nbytes, 4, 1, 1 << 70
    ),
    "route": Place(lambda _, n: networks.load("ring")(3).route(n, 1), 0, 0, 2),
}


def links_of(network: str) -> Place:
    return Place(lambda _, n: networks.load(network)(n).links, 4, 1, 1 << 70)


ALONE |= {f"size of {name}": links_of(name) for name in networks.names()}


def pair(step: Any = 0, src: Any = 0, dst: Any = 1, chunk: Any = 0) -> Any:
    return Schedule(BROADCAST, 2, [Transfer(step, src, dst, chunk)]).transfers


@pytest.mark.parametrize("name", ALONE)
def test_schedules_prices_and_networks_read_numbers_likewise(name: str) -> None:
    place = ALONE[name]
    due = place.call(None, place.right)
    for make in WHOLE.values():
        assert repr(place.call(None, make(place.right))) == repr(due)
    for value in refused(place):
        if type(value) is int and place.most >= 1 << 70 and value > place.least:
            continue
        with pytest.raises(InvalidArgumentError) as caught:
            place.call(None, value)
        assert len(str(caught.value)) < 400


def test_numpy_ranks_reach_the_right_rank(ranks: Any) -> None:
    """With more than one rank a number that is only nearly right would reach the wrong one."""

    def work(comm: Any) -> None:
        last = np.int64(comm.size - 1)
        assert comm.broadcast(np.array([comm.rank]), last) == comm.size - 1
        found = comm.gather(np.array([comm.rank]), np.uint8(last))
        assert (found is not None) == (comm.rank == comm.size - 1)
        assert comm.broadcast_object(comm.rank, last) == comm.size - 1
        around = (comm.rank + np.arange(2 * comm.size)) % comm.size
        got = comm.sendrecv(
            np.array([comm.rank]), around[1], np.zeros(1, int), around[comm.size - 1],
            tag=np.int16(7),
        )  # fmt: skip
        assert got == (comm.rank - 1) % comm.size
        sub = comm.group(np.arange(comm.size)[::-1])
        assert sub.rank == comm.size - 1 - comm.rank
        assert comm.split(np.uint8(1), np.int64(-comm.rank)).rank == comm.size - 1 - comm.rank
        counts = np.arange(1, comm.size + 1)
        mine = np.full(counts[comm.rank], comm.rank)
        assert comm.all_gather(mine, axis=np.int64(0), counts=counts).tolist() == [
            rank for rank in range(comm.size) for _ in range(rank + 1)
        ]
        assert comm.empty(np.array([2, 3]), np.int8).shape == (2, 3)

    for size in (2, 3, 4, 7):
        ranks(size, work)
