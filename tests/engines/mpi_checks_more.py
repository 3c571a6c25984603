"""What else must work under MPI: the background, messages, groups, objects, time and errors."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from roundelay.communicator import ANY, Communicator
from roundelay.communicator.selection import Selection
from roundelay.engines.mpi import Mpi
from roundelay.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    InvalidArgumentError,
    UnknownNameError,
)
from roundelay.tuning import default_for


def raised(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - which one is what the check asks
        return error
    return None


def check_start_equals_the_call_at_once(comm: Any) -> Iterator[str]:
    last = comm.size - 1
    for numel in (0, 3, 50_000):
        one = np.arange(numel * 1.0) + comm.rank
        rows = np.arange(numel * comm.size * 1.0).reshape(comm.size, numel) + comm.rank
        calls: list[tuple[str, Any, dict[str, Any]]] = [
            ("all_reduce", one, {"op": "max"}),
            ("all_reduce", one, {"op": "avg"}),
            ("reduce", one, {"root": last}),
            ("broadcast", one, {"root": last}),
            ("all_gather", one, {}),
            ("gather", one, {"root": last, "axis": 0}),
            ("reduce_scatter", rows, {}),
            ("all_to_all", rows, {}),
            ("scan", one, {}),
            ("exscan", one, {"op": "min"}),
            ("barrier", None, {}),
        ]
        handles, due = [], []
        for name, x, options in calls:
            given = [] if x is None else [x.copy()]
            handles.append(getattr(comm.start, name)(*given, **options))
        for name, x, options in calls:
            given = [] if x is None else [x.copy()]
            due.append(getattr(comm, name)(*given, **options))
        out = np.zeros(numel)
        handles.append(comm.start.scatter(rows if comm.rank == 0 else None, out=out))
        due.append(comm.scatter(rows if comm.rank == 0 else None))
        for handle, wanted in reversed(list(zip(handles, due, strict=True))):
            got = handle.wait()
            if not handle.done() or handle.wait() is not got:
                yield "a handle that was waited for is done"
            if (got is None) != (wanted is None) or not np.array_equal(got, wanted):
                yield f"start gives {got}, the call at once {wanted}"


def check_many_under_way(comm: Any) -> Iterator[str]:
    same, own = random.Random(5), random.Random(comm.rank)
    pending: list[tuple[Any, float]] = []
    for turn in range(60):
        x = np.full(same.choice([1, 10, 5_000, 60_000]), comm.rank + 1.0 + turn)
        due = comm.size * (comm.size + 1) / 2 + turn * comm.size
        if same.random() < 0.6:
            pending.append((comm.start.all_reduce(x), due))
        elif not (comm.all_reduce(x) == due).all():
            yield f"turn {turn}"
        while pending and own.random() < 0.5:
            handle, wanted = pending.pop(own.randrange(len(pending)))
            if not (handle.wait() == wanted).all():
                yield f"a handle in turn {turn}"
    for handle, wanted in pending:
        if not (handle.wait() == wanted).all():
            yield "a handle at the end"
    x = np.ones(1000)
    first, second = comm.start.all_reduce(x), comm.start.all_reduce(x)
    if second.wait()[0] != comm.size**2 or not first.done():
        yield "calls in the background keep their order"


def check_progress_while_nobody_waits(comm: Any) -> Iterator[str]:
    for op in ("sum", "max"):  # of MPI's own, and by a schedule
        handle = comm.start.all_reduce(np.ones(200_000), op)
        time.sleep(0.3)
        limit = time.monotonic() + 20
        while not handle.done():
            if time.monotonic() > limit:
                yield "nothing moves in the background"
                return
            time.sleep(0.005)
        handle.wait()


def check_tags_out_of_order(comm: Any) -> Iterator[str]:
    if comm.rank == 0:
        for turn in range(50):
            for dst in range(1, comm.size):
                comm.send(np.array([turn]), dst, tag=(turn % 3) << 40)
        return
    for tag in (2, 0, 1):
        turns = range(tag, 50, 3)
        got = [int(comm.recv(np.zeros(1, int), 0, tag << 40)[0]) for _ in turns]
        if got != list(turns):
            yield f"tag {tag}: {got}"


def check_any_rank_and_tag(comm: Any) -> Iterator[str]:
    for numel in (1, 20_000):
        comm.barrier()
        for tag in range(5 if comm.rank else 0):
            comm.send(np.full(numel, comm.rank * 100 + tag), 0, tag)
        seen: dict[int, list[int]] = {}
        for _ in range(0 if comm.rank else 5 * (comm.size - 1)):
            message = comm.start.recv(np.zeros(numel, int), ANY, ANY)
            value = int(message.wait()[-1])
            if divmod(value, 100) != (message.source, message.tag):
                yield f"{value} from {message.source}, tag {message.tag}"
            seen.setdefault(message.source, []).append(message.tag)
        if comm.rank == 0 and seen != {rank: [0, 1, 2, 3, 4] for rank in range(1, comm.size)}:
            yield f"from any rank: {seen}"


def check_everybody_sends_first(comm: Any) -> Iterator[str]:
    for numel in (0, 1, 1000, 4096, 4097, 1_000_003):
        for dst in range(comm.size):
            comm.send(np.full(numel, comm.rank * 10 + dst, np.int8), dst)
        for src in range(comm.size):
            got = comm.recv(np.zeros(numel, np.int8), src)
            if not (got == src * 10 + comm.rank).all():
                yield f"{numel} bytes from {src}"
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        into = np.zeros(numel, int)
        if not (comm.sendrecv(np.full(numel, comm.rank), right, into, left) == left).all():
            yield f"sendrecv of {numel}"
    wide = np.zeros((40, 300))
    message = comm.start.recv(wide[:, ::3], left)
    comm.send(np.arange(4000.0).reshape(100, 40).T, right)
    message.wait()
    if not (wide[:, ::3] == np.arange(4000.0).reshape(100, 40).T).all() or wide[:, 1::3].any():
        yield "memory with gaps"


def check_a_message_of_another_kind(comm: Any) -> Iterator[str]:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for x in (np.ones(4, np.float32), np.ones(3), np.ones(70_000), np.ones(3)):
        comm.send(x, right)
    for numel, shown in ((4, "float32[4]"), (2, "float64[3]"), (2, "float64[70000]")):
        into = np.zeros(numel)
        error = raised(partial(comm.recv, into, left))
        if not isinstance(error, CollectiveMismatch) or shown not in str(error) or into.any():
            yield f"{shown}: {error!r}"
    if not comm.recv(np.zeros(3), left).all():
        yield "nothing is broken by it"


def check_split_and_group(comm: Any) -> Iterator[str]:
    rank, size = comm.rank, comm.size
    half = comm.split(rank % 2)
    members = [r for r in range(size) if r % 2 == rank % 2]
    for op in ("sum", "max"):
        due = {"sum": sum(members), "max": max(members)}[op]
        if half.all_reduce(np.array([1.0 * rank]), op) != due:
            yield f"{op} in a half"
    inner = half.group([half.size - 1])
    if (inner is None) == (half.rank == half.size - 1):
        yield "a group in a group"
    if comm.split(None if rank == 0 else 3, 0) is not None and rank == 0:
        yield "split leaves out who asks for it"
    some = comm.group([size - 1, 0] if size > 1 else [0])
    if rank in (0, size - 1) and some.all_gather(np.array([rank]))[-1, 0] != 0:
        yield "the order of group"
    half.close()
    if not isinstance(raised(half.barrier), InvalidArgumentError):
        yield "a closed group says so"


def check_groups_side_by_side(comm: Any) -> Iterator[str]:
    rank, size = comm.rank, comm.size
    back = comm.split(0, -rank)
    if (back.rank, back.size) != (size - 1 - rank, size):
        yield f"split by key: {back}"
    comm.send(np.array([1]), (rank + 1) % size)
    back.send(np.array([2]), (back.rank + 1) % size)
    if (back.recv(np.zeros(1, int), ANY, ANY), comm.recv(np.zeros(1, int), ANY, ANY)) != (2, 1):
        yield "groups keep their mail apart"
    for _ in range(10):  # begun in different orders on different ranks
        pair = [comm, back] if rank % 2 else [back, comm]
        handles = [one.start.all_reduce(np.ones(30_000)) for one in pair]
        for handle in handles if rank % 3 else reversed(handles):
            if not (handle.wait() == size).all():
                yield "two groups at once"


def check_objects(comm: Any) -> Iterator[str]:
    thing = {"rank": comm.rank, "shape": (2, 3), "array": np.arange(3)}
    if comm.broadcast_object(thing, comm.size - 1)["rank"] != comm.size - 1:
        yield "broadcast_object"
    if [one["rank"] for one in comm.all_gather_object(thing)] != list(range(comm.size)):
        yield "all_gather_object"
    if (comm.gather_object("x" * comm.rank) or [""])[-1] != "x" * (comm.size - 1) * (not comm.rank):
        yield "gather_object"
    things = [f"for {rank}" for rank in range(comm.size)]
    if comm.scatter_object(things if comm.rank == 0 else None) != f"for {comm.rank}":
        yield "scatter_object"
    comm.send_object([1, None], (comm.rank + 1) % comm.size)
    if comm.recv_object((comm.rank - 1) % comm.size) != [1, None]:
        yield "send_object"


def check_threads_share_a_communicator(comm: Any) -> Iterator[str]:
    sums: list[float] = []

    def add() -> None:
        sums.extend(float(comm.all_reduce(np.ones(2_000))[-1]) for _ in range(20))

    workers = [threading.Thread(target=add) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if sums != [comm.size] * 60:
        yield f"{sums}"


def _select_default(size: int, *, cores: int | None = None) -> Selection:
    del cores
    return Selection(size, default_for(size))


def check_more_than_mpi_can_count(comm: Any) -> Iterator[str]:
    """As for 2^31 elements, with an MPI that counts to 1000."""
    end = Mpi.of_world(_select_default, 20.0, most=1000)
    small = Communicator(end)
    size, rank, last = comm.size, comm.rank, comm.size - 1
    x = np.arange(3500.0) + rank
    rows = np.arange(3500.0 * size).reshape(size, -1) + rank
    for name, given, options in (
        *(("all_reduce", x, {"op": op}) for op in ("sum", "avg", "max")),
        *((name, x, {}) for name in ("scan", "exscan", "all_gather", "gather")),
        *((name, x, {"root": last}) for name in ("reduce", "broadcast")),
        *((name, rows, {}) for name in ("reduce_scatter", "all_to_all")),
    ):
        got, due = (getattr(one, name)(given.copy(), **options) for one in (small, comm))
        if (got is None) != (due is None) or not np.array_equal(got, due):
            yield f"{name} {options}"
    small.send(x, (rank + 1) % size)
    if small.recv(np.zeros(3500), (rank - 1) % size)[0] != (rank - 1) % size:
        yield "a message in pieces"
    small.close()


def check_time_runs_out(comm: Any) -> Iterator[str]:
    """Whoever is alone gives up, and its group is broken; other groups are not."""
    lone = comm.split(0)
    lone.timeout = 0.4
    late = comm.split(0)
    late.timeout = 0.4
    if comm.rank == 0:
        for one, wait in (
            (late, lambda: late.recv(np.zeros(1), ANY)),
            *(((lone, lone.barrier),) if comm.size > 1 else ()),
        ):
            began = time.monotonic()
            error = raised(wait)
            if not isinstance(error, CollectiveTimeout) or "0.4 s" not in str(error):
                yield f"{error!r}"
            if not 0.3 < time.monotonic() - began < 10:
                yield f"after {time.monotonic() - began} s"
            if not isinstance(raised(one.barrier), CollectiveTimeout):
                yield "it stays broken"
    if comm.all_reduce(np.ones(1)) != comm.size:
        yield "other groups go on"


def check_different_calls(comm: Any) -> Iterator[str]:
    """Every rank is told who called what, and where; nothing of it reaches MPI."""
    ones = np.ones(30_000)
    calls: list[tuple[str, Callable[[Any], Any]]] = [
        ("all_reduce float64[30000] op=sum", lambda group: group.all_reduce(ones.copy())),
        ("all_reduce float64[10] op=sum", lambda group: group.all_reduce(np.ones(10))),
        ("all_reduce float32[10] op=sum", lambda group: group.all_reduce(np.ones(10, np.float32))),
        ("all_reduce float32[10] op=max", lambda g: g.all_reduce(np.ones(10, np.float32), "max")),
        ("broadcast float64[30000] root=0", lambda group: group.broadcast(ones.copy())),
        ("broadcast float64[30000] root=1", lambda group: group.broadcast(ones.copy(), 1)),
        ("barrier", lambda group: group.barrier()),
    ]
    for mine, others in pairwise(calls):
        group = comm.split(0)
        if comm.size == 1:
            return
        error = raised(partial((mine if comm.rank == 0 else others)[1], group))
        due = [f"rank 0: {mine[0]} at ", f": {others[0]} at ", "mpi_checks_more.py:"]
        if not isinstance(error, CollectiveMismatch) or any(say not in str(error) for say in due):
            yield f"{due}: {error!r}"
        if not isinstance(raised(group.barrier), CollectiveMismatch):
            yield "it stays broken"


def check_bad_input(comm: Any) -> Iterator[str]:
    if not isinstance(
        raised(lambda: comm.all_reduce(np.ones(1), algorithm="rign")), UnknownNameError
    ):
        yield "an unknown algorithm"
    shared = comm.empty(4, np.float32)
    shared[:] = 1
    if comm.all_reduce(shared)[3] != comm.size:
        yield "memory of its own"
