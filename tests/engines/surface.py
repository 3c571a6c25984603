"""The whole surface of a communicator, checked on its ranks against numpy; for any engine.

`failures(comm)` is called on every rank and returns what differs, in words; `reduced` says which
reductions, alike on all ranks. As a script it takes the communicator of `rd.init()` and ends with
exit code 1 if there was anything.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

import roundelay as rd
from roundelay.errors import CollectiveMismatch

COUNTS = (0, 1, 7, 1000, 30_000)
DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
FOLDS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a | b if a.dtype == bool else a + b,
    "prod": lambda a, b: a * b,
    "min": np.minimum,
    "max": np.maximum,
    "avg": lambda a, b: a + b,
    "land": lambda a, b: (a.astype(bool) & b.astype(bool)).astype(a.dtype),
    "lor": lambda a, b: (a.astype(bool) | b.astype(bool)).astype(a.dtype),
    "lxor": lambda a, b: (a.astype(bool) ^ b.astype(bool)).astype(a.dtype),
    "band": lambda a, b: a & b,
    "bor": lambda a, b: a | b,
    "bxor": lambda a, b: a ^ b,
}
KINDS = {"min": "biuf", "max": "biuf", "avg": "fc", "band": "biu", "bor": "biu", "bxor": "biu"}
#: Every reduction with every dtype that it takes, and some of them at every count.
REDUCED = [
    (op, dtype, count)
    for op, dtype, count in product(FOLDS, DTYPES, COUNTS)
    if np.dtype(dtype).kind in KINDS.get(op, "biufc")
    and (count == 7 or (op in ("sum", "max", "avg") and dtype in ("int64", "float32", "float16")))
]


def sample(dtype: str, count: int, rank: int) -> Any:
    """Return small whole numbers, exact in every order, zeros among them."""
    values = (np.arange(count) * 7 + rank * 3) % 4
    if dtype.startswith("complex"):
        return (values + 1j * ((values + rank) % 3)).astype(dtype)
    return values.astype(dtype)


def folded(op: str, arrays: list[Any], by: int) -> Any:
    wide = [a.astype(np.float32) if a.dtype == np.float16 else a for a in arrays]
    result = (wide[0] != 0).astype(wide[0].dtype) if op in ("land", "lor", "lxor") else wide[0]
    for other in wide[1:]:
        result = FOLDS[op](result, other)
    return (result / by if op == "avg" else result).astype(arrays[0].dtype)


class Checks:
    """What was expected and did not come."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.made = comm, 0
        self.found: list[str] = []

    def same(self, what: str, found: Any, due: Any) -> None:
        self.made += 1
        if due is None or found is None:
            good = found is due
        else:
            found, due = np.asarray(found), np.asarray(due)
            good = found.dtype == due.dtype and found.shape == due.shape
            close = due.dtype.kind in "fc" and "avg" in what
            good = good and (np.allclose if close else np.array_equal)(found, due)
        if not good:
            self.found.append(f"{what}: {str(found)[:80]} instead of {str(due)[:80]}")


def failures(comm: Any, reduced: Sequence[tuple[str, str, int]] = REDUCED) -> list[str]:
    """Return all that went wrong on this rank; every rank calls it."""
    checks = Checks(comm)
    others = {part.__name__: part(comm) for part in PARTS}
    for name, part in {"reductions": reductions(comm, reduced), **others}.items():
        for what, found, due in part:
            checks.same(f"{name} {what}", found, due)
    return checks.found if checks.made > len(DTYPES) else ["nothing was checked"]


Case = tuple[str, Any, Any]


def reductions(comm: Any, cells: Sequence[tuple[str, str, int]]) -> Iterator[Case]:
    """Reductions with a dtype and a count each, in every call that reduces."""
    for op, dtype, count in cells:
        yield from _reductions(comm, op, dtype, count)


def _reductions(comm: Any, op: str, dtype: str, count: int) -> Iterator[Case]:
    size, rank, root = comm.size, comm.rank, count % comm.size
    inputs = [sample(dtype, count, other) for other in range(size)]
    what = f"{op} {dtype}[{count}]"
    total = folded(op, inputs, size)
    yield f"all_reduce {what}", comm.all_reduce(inputs[rank].copy(), op), total
    kept = inputs[rank].copy()
    yield f"out= {what}", comm.all_reduce(kept, op, out=np.empty_like(kept)), total
    yield f"kept {what}", kept, inputs[rank]
    mine = inputs[rank].copy()
    yield f"reduce {what}", comm.reduce(mine, op, root), total if rank == root else None
    yield f"reduce leaves {what}", mine, total if rank == root else inputs[rank]
    rows = [np.stack([sample(dtype, count, a + 2 * b) for b in range(size)]) for a in range(size)]
    due = folded(op, [each[rank] for each in rows], size)
    yield f"reduce_scatter {what}", comm.reduce_scatter(rows[rank], op), due
    if op != "avg" and count in (0, 7):
        yield f"scan {what}", comm.scan(inputs[rank].copy(), op), folded(op, inputs[: rank + 1], 1)
        below = folded(op, inputs[:rank], 1) if rank else inputs[0]
        yield f"exscan {what}", comm.exscan(inputs[rank].copy(), op), below


def movement(comm: Any) -> Iterator[Case]:
    """Every collective that only moves, for every dtype, count and root."""
    size, rank = comm.size, comm.rank
    for dtype in DTYPES:
        for count in COUNTS if dtype == "int64" else (7,):
            inputs = [sample(dtype, count, other) for other in range(size)]
            every, what = np.stack(inputs), f"{dtype}[{count}]"
            yield f"all_gather {what}", comm.all_gather(inputs[rank]), every
            square = np.stack([every + np.array(src, dtype) for src in range(size)])
            yield f"all_to_all {what}", comm.all_to_all(square[rank]), square[:, rank]
            for root in range(size):
                given = inputs[root] if rank == root else np.zeros(count, dtype)
                yield f"broadcast {what}", comm.broadcast(given.copy(), root), inputs[root]
                due = every if rank == root else None
                yield f"gather {what}", comm.gather(inputs[rank], root), due
                rows = every if rank == root else None
                yield f"scatter {what}", comm.scatter(rows, root), inputs[rank]


def uneven(comm: Any) -> Iterator[Case]:
    """Blocks of different lengths, some empty."""
    size, rank = comm.size, comm.rank
    for scale in (1, 20_000):
        counts = [(3 * other % 4) * scale for other in range(size)]
        inputs = [sample("int32", counts[other] * 2, other).reshape(-1, 2) for other in range(size)]
        whole = np.concatenate(inputs)
        yield "all_gather", comm.all_gather(inputs[rank], axis=0, counts=counts), whole
        due = whole if rank == size - 1 else None
        yield "gather", comm.gather(inputs[rank], size - 1, axis=0, counts=counts), due
        parts = [sample("int64", sum(counts), other) for other in range(size)]
        total = np.split(folded("sum", parts, 1), np.cumsum(counts)[:-1])
        yield "reduce_scatter", comm.reduce_scatter(parts[rank], axis=0, counts=counts), total[rank]
        table = [[(src + dst) % 3 * scale for dst in range(size)] for src in range(size)]
        rows = [
            [sample("int16", n, 3 * src + dst) for dst, n in enumerate(table[src])]
            for src in range(size)
        ]
        sent = np.concatenate(rows[rank])
        due = np.concatenate([rows[src][rank] for src in range(size)])
        yield "all_to_all", comm.all_to_all(sent, axis=0, counts=table[rank]), due


def background(comm: Any) -> Iterator[Case]:
    """Calls that were started, several at a time, and one at once among them."""
    size, rank = comm.size, comm.rank
    arrays = [np.full(10_000, rank + n) for n in range(5)]
    handles = [comm.start.all_reduce(array) for array in arrays]
    gathered = comm.start.all_gather(np.array([rank]))
    yield "at once", comm.all_reduce(np.ones(3)), np.full(3, float(size))
    for n, handle in enumerate(handles):
        yield "all_reduce", handle.wait(), np.full(10_000, sum(range(size)) + n * size)
        yield "done", handle.done(), True
    yield "all_gather", gathered.wait(), np.arange(size).reshape(-1, 1)
    yield "barrier", comm.start.barrier().wait(), None


def messages(comm: Any) -> Iterator[Case]:
    """Messages small and large, out of order, from any rank, with any tag, to oneself."""
    size, rank = comm.size, comm.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (0, 1, 1000, 100_000):
        due = np.arange(count) + left
        into = np.zeros(count, np.int64)
        yield "sendrecv", comm.sendrecv(np.arange(count) + rank, right, into, left), due
        swapped = np.arange(count) + rank
        yield "in place", comm.sendrecv(swapped, right, swapped, left), due
        sent = [comm.start.send(np.full(count, tag), right, tag) for tag in (5, 6)]
        later = [comm.start.recv(np.zeros(count, np.int64), left, tag) for tag in (6, 5)]
        for tag, message in zip((6, 5), later, strict=True):
            yield "out of order", message.wait(), np.full(count, tag)
            yield "whose", (message.source, message.tag), (left, tag)
        for message in sent:
            message.wait()
    if rank == 0:
        seen = []
        for _ in range(size - 1):
            message = comm.start.recv(np.zeros(1, np.int64), rd.ANY, rd.ANY)
            value = int(message.wait()[0])
            yield "any", (message.source, message.tag), (value, value + 100)
            seen.append(value)
        yield "all came", sorted(seen), list(range(1, size))
    else:
        comm.send(np.array([rank]), 0, 100 + rank)
    comm.barrier()  # or rank 0 would take what follows for one of those
    comm.send(np.array([1.5]), rank, 9)
    yield "to oneself", comm.recv(np.zeros(1), rank, 9), np.array([1.5])
    if size > 1:
        comm.start.send(np.zeros(3, np.int32), right, 11)
        try:
            comm.recv(np.zeros(4, np.int32), left, 11)
            told = ""
        except CollectiveMismatch as error:
            told = str(error)
        yield "wrong length", "int32[4]" in told and "int32[3]" in told, True
    comm.barrier()


def sent_first(comm: Any) -> Iterator[Case]:
    """Everybody sends to all, and only then receives: large ones, and very many."""
    size, rank = comm.size, comm.rank
    others = [other for other in range(size) if other != rank]
    for times, nbytes in ((1 + 9 // max(1, size - 1), 8 << 20), (1100, 4), (20, 70_000)):
        for turn in range(times):
            for dst in others:
                given = np.full(nbytes, (rank + turn) % 199, np.uint8)
                comm.send(given, dst, tag=turn % 2)
                given[:] = 255  # it may be used again at once
        wrong = []
        for turn in sorted(range(times), key=lambda turn: turn % 2):
            for src in others:
                came = comm.recv(np.zeros(nbytes, np.uint8), src, tag=turn % 2)
                if not (came == (src + turn) % 199).all():
                    wrong.append((turn, src, came[:1]))
        yield f"{times} x {nbytes}", wrong == [], True


def objects_from_any(comm: Any) -> Iterator[Case]:
    """Objects of all others and all tags, taken by two threads at once: none is torn or lost."""
    size, rank, each = comm.size, comm.rank, 60
    if rank:
        for turn in range(each):
            comm.send_object((rank, turn, bytes(rank * 1000 + turn * 300)), 0, tag=turn % 5)
        comm.barrier()
        return
    came: list[Any] = []

    def take() -> None:
        turns = range((size - 1) * each // 2)
        came.extend(comm.recv_object(rd.ANY, rd.ANY) for _ in turns)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = [(src, turn, src * 1000 + turn * 300) for src in range(1, size) for turn in range(each)]
    yield "all came", sorted((src, turn, len(data)) for src, turn, data in came) == every, True
    comm.barrier()


def groups(comm: Any) -> Iterator[Case]:
    """Groups by color and by list, of one rank and of all, with calls and messages of their own."""
    size, rank = comm.size, comm.rank
    part = comm.split(rank % 2, key=-rank)
    members = [other for other in reversed(range(size)) if other % 2 == rank % 2]
    yield "split", (part.rank, part.size), (members.index(rank), len(members))
    yield "sum", part.all_reduce(np.array([rank])), np.array([sum(members)])
    yield "order", part.all_gather(np.array([rank])).ravel(), np.array(members)
    large = part.all_reduce(np.full(30_000, rank))
    yield "large", large, np.full(30_000, sum(members))
    if part.size > 1:
        around = part.sendrecv(
            np.array([rank]), (part.rank + 1) % part.size, np.zeros(1, int),
            (part.rank - 1) % part.size,
        )  # fmt: skip
        yield "message", int(around[0]), members[(part.rank - 1) % part.size]
    chosen = list(range(size))[::2] + ([1] if size > 1 else [])
    group = comm.group(chosen)
    if rank in chosen:
        yield "of group", group.broadcast(np.array([rank]), group.size - 1), np.array(chosen[-1:])
        group.close()
    else:
        yield "not in it", group, None
    alone = comm.split(rank)
    yield "alone", alone.all_reduce(np.array([rank])), np.array([rank])
    none = comm.split(None if rank else 0)
    yield "none", none is None, rank != 0


def objects_and_own_ops(comm: Any) -> Iterator[Case]:
    """Objects, reductions of the user's, places of the largest, and memory of the engine's."""
    size, rank = comm.size, comm.rank
    yield "all_gather_object", comm.all_gather_object({"r": rank})[-1]["r"], size - 1
    yield "broadcast_object", comm.broadcast_object("x" * (1 + rank), size - 1), "x" * size
    first = rd.Op(lambda a, _: a, commutative=False)
    yield "own", comm.all_reduce(np.array([rank]), first), np.array([0])
    values = np.array([rank, -rank, 1])
    best = comm.all_reduce(values, "maxloc")
    yield "maxloc", best.values, np.array([size - 1, 0, 1])
    yield "locations", best.locations, np.array([size - 1, 0, 0])
    least = comm.reduce(values, "minloc", size - 1)
    yield (
        "minloc",
        None if least is None else least.values,
        (np.array([0, 1 - size, 1]) if rank == size - 1 else None),
    )
    made = comm.empty((4, 3), np.float32)
    made[:] = rank
    yield "empty", comm.all_reduce(made), np.full((4, 3), sum(range(size)), np.float32)


PARTS = [
    *(movement, uneven, background, messages, sent_first, objects_from_any, groups),
    objects_and_own_ops,
]


if __name__ == "__main__":
    found = failures(rd.init())
    sys.stdout.write("\n".join(found))
    sys.exit(bool(found))
