"""What every engine does before it runs: read the inputs of all ranks, or say what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from roundelay.arguments import shown
from roundelay.collectives import letter
from roundelay.errors import InvalidArgumentError, UnsupportedReductionError, rank_count
from roundelay.reductions import Array, Located, Op, Reduction, paired, reduction
from roundelay.schedule import Layout, Schedule, prove, split

#: What runners of schedules take and give.
ScheduleBuffer = Array | Located

LOCATING = ("maxloc", "minloc")
TAKEN = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")


def prepare(
    schedule: Schedule,
    inputs: Sequence[ScheduleBuffer | None],
    *,
    op: str | Op,
    counts: Sequence[int] | None,
) -> tuple[Reduction, list[Array | None], Layout]:
    """Return the reduction, each rank's input as one flat array, and how long every block is."""
    chosen = reduction(op)
    _check_meaning(schedule, chosen)
    arrays = _incoming(schedule, inputs, chosen)
    layout = Layout.of(schedule, counts if counts is not None else _counts(schedule, arrays))
    _check_lengths(schedule, arrays, layout)
    return chosen, arrays, layout


def _check_meaning(schedule: Schedule, chosen: Reduction) -> None:
    """Refuse what has no answer: a mean of a part, an order that the schedule does not keep."""
    name = schedule.collective.name
    if chosen.name == "avg" and name in ("scan", "exscan"):
        raise UnsupportedReductionError(
            f"{name} has no avg: every rank's result has another number of contributions. "
            f"Use sum, and divide by the rank's own count."
        )
    if not chosen.commutative and schedule.collective.reduces and prove(schedule).order == "any":
        raise UnsupportedReductionError(
            f"{schedule.name} on {rank_count(schedule.size)} adds in a fixed order that is not "
            f"rank order, but {chosen.name} is not commutative. Choose an algorithm that "
            f"`roundelay list` shows as rank_order or contiguous."
        )


def _incoming(
    schedule: Schedule, inputs: Sequence[ScheduleBuffer | None], chosen: Reduction
) -> list[Array | None]:
    """Flatten what came in; a pair becomes one array of (value, location)."""
    name, size = schedule.collective.name, schedule.size
    if len(inputs) != size:
        raise InvalidArgumentError(
            f"{name} on {rank_count(size)} needs {size} inputs, not {len(inputs)}."
        )
    arrays: list[Array | None] = []
    for rank, given in enumerate(inputs):
        needed = bool(list(schedule.collective.before(size, schedule.root, rank)))
        if given is None and needed and not schedule.collective.idempotent:
            raise InvalidArgumentError(
                f"{name}: rank {rank} brings no input, but has data to give."
            )
        if given is None or not needed:
            arrays.append(None)
        elif chosen.name in LOCATING:
            pair = given if isinstance(given, Located) else Located(given, np.array(rank))
            arrays.append(paired(name, _array(name, pair.values), pair.locations).ravel())
        elif isinstance(given, Located):
            raise UnsupportedReductionError(
                f"{chosen.name} takes arrays; Located is for maxloc and minloc."
            )
        else:
            arrays.append(_array(name, given).ravel())
    _check_dtypes(schedule, arrays, chosen)
    return arrays


def _check_dtypes(schedule: Schedule, arrays: Sequence[Array | None], chosen: Reduction) -> None:
    """Refuse dtypes that differ, and one that the reduction does not take."""
    dtypes = {str(array.dtype): rank for rank, array in enumerate(arrays) if array is not None}
    if len(dtypes) > 1:
        found = ", ".join(f"rank {rank} has {dtype}" for dtype, rank in dtypes.items())
        raise InvalidArgumentError(
            f"{schedule.collective.name} needs one dtype on every rank, but {found}."
        )
    if schedule.collective.reduces:
        for array in arrays:
            if array is not None:
                chosen.check(array.dtype)


def _array(call: str, given: object) -> Array:
    """Return what numpy makes of an input; refuse what no engine has a dtype for."""
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(f"{call} takes arrays, not {shown(given)}: {error}.") from None
    if array.dtype.name != "bfloat16" and array.dtype.str[1:] not in TAKEN:
        raise InvalidArgumentError(f"{call} does not take dtype {array.dtype}.")
    if not array.dtype.isnative:
        raise InvalidArgumentError(
            f"{call} takes the byte order of this machine, not dtype {array.dtype}: pass "
            f"x.astype(x.dtype.newbyteorder('='))."
        )
    return array


def cut_out(
    schedule: Schedule, rank: int, data: Array, counts: Sequence[int]
) -> Iterator[tuple[int, Array]]:
    """Cut what a rank brings into its blocks, and every block into its parts."""
    start = 0
    for block in schedule.collective.before(schedule.size, schedule.root, rank):
        whole = data[start : start + counts[block]]
        start += counts[block]
        runs = split(len(whole), schedule.parts)
        yield from zip(schedule.chunks_of(block), (whole[run] for run in runs), strict=True)


def outgoing(array: Array) -> ScheduleBuffer:
    """Hand an array back as it came in: a pair as `Located`."""
    return array if array.dtype.names is None else Located(array["value"], array["location"])


def _counts(schedule: Schedule, arrays: Sequence[Array | None]) -> list[int]:
    """Read the length of every block off the inputs."""
    name, size = schedule.collective.name, schedule.size
    found: dict[int, tuple[int, int]] = {}
    for rank, array in enumerate(arrays):
        blocks = list(schedule.collective.before(size, schedule.root, rank))
        numel = 0 if array is None else len(array)
        if blocks and numel % len(blocks):
            each = ",".join(str(run.stop - run.start) for run in split(numel, len(blocks)))
            raise InvalidArgumentError(
                f"{name}: rank {rank} has {numel} elements, which do not split evenly into "
                f"{len(blocks)} blocks. Pass counts, such as {each}, or pad to a multiple of "
                f"{len(blocks)}."
            )
        for block in blocks:
            length, first = found.setdefault(block, (numel // len(blocks), rank))
            if length != numel // len(blocks):
                raise InvalidArgumentError(
                    f"{name} needs one length on every rank, but rank {rank} has "
                    f"{numel // len(blocks)} elements for block {letter(block)} where rank {first} "
                    f"has {length}. Pad the shorter one."
                )
    return [found[block][0] for block in range(schedule.collective.blocks(size))]


def _check_lengths(schedule: Schedule, arrays: Sequence[Array | None], layout: Layout) -> None:
    """Refuse an input that does not hold the blocks of its rank."""
    for rank, array in enumerate(arrays):
        if array is None and schedule.collective.idempotent:
            continue
        numel = 0 if array is None else len(array)
        blocks = schedule.collective.before(schedule.size, schedule.root, rank)
        needs = sum(layout.counts[block] for block in blocks)
        if numel != needs:
            raise InvalidArgumentError(
                f"{schedule.collective.name}: rank {rank} has {numel} elements, but counts "
                f"give its blocks {needs}."
            )
