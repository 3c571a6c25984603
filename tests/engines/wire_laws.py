"""What calls with `wire="bf16"` owe their callers, on the ranks of any engine.

`failures(comm)` is called on every rank and returns what is not so, in words. What everybody brings
is known to all, so every rank judges its own results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

import roundelay as rd
from roundelay.errors import InvalidArgumentError, UnsupportedReductionError

COUNTS = (0, 1, 7, 1000, 40_003)
OPS = ("sum", "avg", "min", "max")
HALF_ULP = 2.0**-8  # of bfloat16, which has 8 bits; relative to the number that is rounded
SMALLEST = 2.0**-133  # that bfloat16 has beside 0
#: NaN whose payload is all in the lower half, infinities, the largest, numbers that round to
#: infinity and just not, subnormals of both, ties.
EXTREMES = np.array([
    0x7F800001, 0xFFC00000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF,
    0xFF7FFFFF, 0x00000001, 0x00008000, 0x00008001, 0x00018000, 0x80010000, 0x3F808000,
    0x3F818000, 0x3F808001, 0x00000000, 0x80000000,
], np.uint32).view(np.float32)  # fmt: skip


def failures(comm: Any, *, roundings: int = 2) -> list[str]:
    """Return what is wrong; a sum is rounded so often on its way, and a mean once more at most."""
    return [
        line
        for law in (_sums, _extremes, _gathered, _scattered, _refused)
        for line in law(comm, roundings)
    ]


def check_wire(comm: Any) -> Iterator[str]:
    """Yield what is wrong under MPI."""
    yield from failures(comm)


def rounded(values: Any) -> Any:
    """Return float32 as bfloat16 has them."""
    with np.errstate(all="ignore"):  # which warn of what is asked for here
        return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def brought(count: int, rank: int) -> Any:
    """Return numbers of many sizes, which round in every way."""
    rng = np.random.default_rng((count, rank))
    return (rng.standard_normal(count) * 10.0 ** rng.integers(-9, 9, count)).astype(np.float32)


def same(one: Any, other: Any) -> bool:
    """Compare bit for bit; NaN is NaN, whatever its payload."""
    return one.dtype == other.dtype and one.shape == other.shape and bool(
        np.all((one.view(np.uint32) == other.view(np.uint32)) | (np.isnan(one) & np.isnan(other)))
    )  # fmt: skip


def everywhere(comm: Any, what: str, found: Any) -> Iterator[str]:
    """All ranks have the same bits."""
    bits = comm.all_gather(found.view(np.uint32))
    if any(not np.array_equal(row, bits[0]) for row in bits):
        yield f"{what}: ranks have different bits"


def _sums(comm: Any, roundings: int) -> Iterator[str]:
    for count in COUNTS:
        inputs = [brought(count, rank) for rank in range(comm.size)]
        wide = np.array(inputs, np.float64).reshape(comm.size, count)
        mine = inputs[comm.rank]
        for op in OPS:
            what = f"all_reduce {op} [{count}]"
            out = np.full_like(mine, np.nan)
            found = comm.all_reduce(mine, op, out=out, wire="bf16")
            if found is not out or not np.array_equal(mine, brought(count, comm.rank)):
                yield f"{what}: out= is not what came, or x is not what it was"
            x = mine.copy()
            if comm.all_reduce(x, op, wire="bf16") is not x or not same(x, out):
                yield f"{what}: in place another result"
            begun = comm.start.all_reduce(mine.copy(), op, wire="bf16").wait()
            if not same(begun, out):
                yield f"{what}: in the background another result"
            yield from everywhere(comm, what, out)
            exact = {
                "sum": wide.sum(0),
                "avg": wide.mean(0),
                "min": wide.min(0),
                "max": wide.max(0),
            }
            # Each rounding adds its part, and so do the additions of float32 between them.
            often = 1 if op in ("min", "max") else roundings + (op == "avg")
            share = comm.size if op == "avg" else 1
            most = np.abs(wide).max(0) if often == 1 else np.abs(wide).sum(0) / share
            bound = ((1 + HALF_ULP) ** often - 1 + comm.size * 2.0**-23) * most + often * SMALLEST
            if not np.all(np.abs(out - exact[op]) <= bound):
                yield f"{what}: further off than {often} roundings"
            narrow = comm.all_reduce(mine.astype(ml_dtypes.bfloat16), op)
            if not same(narrow.astype(np.float32), out):
                yield f"{what}: not what the call gives on bfloat16"


def _extremes(comm: Any, _: int) -> Iterator[str]:
    """What one rank alone brings comes rounded: NaN as NaN, and what is too large as infinity."""
    mine = EXTREMES if comm.rank == comm.size - 1 else np.zeros_like(EXTREMES)
    found = comm.all_reduce(mine.copy(), wire="bf16")
    yield from everywhere(comm, "extremes", found)
    due = rounded(EXTREMES)
    if comm.size > 1:
        due = due + np.float32(0)  # minus zero is lost
    if not same(found, due):
        yield f"extremes: {found} are not {due}"
    if not np.array_equal(np.isinf(found), np.abs(EXTREMES) >= np.float32(3.3961775e38)):
        yield f"extremes: infinity where it should not be, or not where it should: {found}"


def _gathered(comm: Any, _: int) -> Iterator[str]:
    for count in COUNTS:
        due = [rounded(brought(count, rank)) for rank in range(comm.size)]
        mine = brought(count, comm.rank)
        if not same(comm.all_gather(mine, wire="bf16"), np.stack(due)):
            yield f"all_gather [{count}]: not everybody's, rounded once"
        out = np.empty(comm.size * count, np.float32)
        comm.all_gather(mine, out=out, axis=0, wire="bf16")
        if not same(out, np.concatenate(due)):
            yield f"all_gather [{count}] axis=0: not everybody's, rounded once"
    counts = list(range(1, comm.size + 1))
    uneven = [np.full(n, 1 + 2.0**-9 + n, np.float32) for n in counts]
    found = comm.all_gather(uneven[comm.rank], axis=0, counts=counts, wire="bf16")
    due = [rounded(each) for each in uneven]
    if not same(found, np.concatenate(due)):
        yield "all_gather counts=: not everybody's, rounded once"


def _scattered(comm: Any, roundings: int) -> Iterator[str]:
    for count in COUNTS:
        rows = [brought(comm.size * count, rank).reshape(comm.size, count)
                for rank in range(comm.size)]  # fmt: skip
        wide = np.array([each[comm.rank] for each in rows], np.float64).reshape(comm.size, count)
        found = comm.reduce_scatter(rows[comm.rank], wire="bf16")
        bound = ((1 + HALF_ULP) ** roundings - 1 + comm.size * 2.0**-23) * np.abs(wide).sum(0)
        if not np.all(np.abs(found - wide.sum(0)) <= bound + roundings * SMALLEST):
            yield f"reduce_scatter [{count}]: further off than {roundings} roundings"
        narrow = comm.reduce_scatter(rows[comm.rank].astype(ml_dtypes.bfloat16))
        if not same(narrow.astype(np.float32), found):
            yield f"reduce_scatter [{count}]: not what the call gives on bfloat16"


def _refused(comm: Any, _: int) -> Iterator[str]:
    """What can't be is refused before anybody waits, by its name, and the next call goes well."""
    square = np.ones((comm.size, 2), np.float32)
    own = rd.Op(lambda left, _: left, name="first")
    refusals: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: comm.all_reduce(np.ones(2), wire="bf16"), InvalidArgumentError, "float64"),
        (lambda: comm.all_reduce(np.ones(2, int), wire="bf16"), InvalidArgumentError, "int64"),
        (lambda: comm.all_gather(np.ones(2, np.float16), wire="bf16"), InvalidArgumentError,
         "float16"),
        (lambda: comm.reduce_scatter(square.astype(np.complex64), wire="bf16"),
         InvalidArgumentError, "complex64"),
        (lambda: comm.all_reduce(square, "prod", wire="bf16"), UnsupportedReductionError, "prod"),
        (lambda: comm.all_reduce(square, "maxloc", wire="bf16"), UnsupportedReductionError,
         "maxloc"),
        (lambda: comm.all_reduce(square, own, wire="bf16"), UnsupportedReductionError, "first"),
        (lambda: comm.reduce_scatter(square, own, wire="bf16"), UnsupportedReductionError, "first"),
        (lambda: comm.all_reduce(square, wire="fp8"), InvalidArgumentError, "fp8"),
        (lambda: comm.all_reduce(square, wire=True), InvalidArgumentError, "True"),
        (lambda: comm.start.all_reduce(np.ones(2), wire="bf16"), InvalidArgumentError, "float64"),
    ]  # fmt: skip
    for number, (call, kind, word) in enumerate(refusals):
        try:
            call()
        except kind as error:
            if word not in str(error) or "wire" not in str(error):
                yield f"refusal {number}: {error}"
        else:
            yield f"refusal {number}: {word} was taken"
    if comm.all_reduce(np.ones(1, np.float32), wire="bf16")[0] != comm.size:
        yield "after refusals: a wrong sum"
