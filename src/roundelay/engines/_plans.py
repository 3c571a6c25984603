"""From compiled programs to what the native interpreter walks."""

from __future__ import annotations

import zlib

from roundelay import _core
from roundelay.schedule import Apply, Operand, Programs, Schedule, Wait

__all__ = ["native_plan"]

SPACES = {"in": 0, "out": 1, "slot": 2}
WAIT, APPLY, POST = range(3)


def native_plan(programs: Programs, rank: int) -> _core.Plan:
    """Return the program of `rank`, with the blocks of every rank's buffers for its offsets."""
    schedule = programs.schedule
    buffers = {
        "in": [_before(schedule, other) for other in range(schedule.size)],
        "out": [_after(schedule, other) for other in range(schedule.size)],
    }
    lines: list[list[int]] = []
    operands: list[list[int]] = []
    for line in programs.ranks[rank].instructions:
        if isinstance(line, Apply):
            block, part = divmod(line.chunk, schedule.parts)
            counts = [len(line.dsts), len(line.srcs)]
            lines.append([APPLY, line.complete, *counts, 0, 0, len(operands), block, part])
            operands += [_operand(schedule, buffers, one) for one in (*line.dsts, *line.srcs)]
        elif isinstance(line, Wait):
            lines.append([WAIT, 0, 0, 0, line.rank, line.post, 0, 0, 0])
        else:
            lines.append([POST, 0, 0, 0, 0, line.post, 0, 0, 0])
    name = f"{schedule.collective.name} {schedule.name} {schedule.root} {schedule.parts}"
    return _core.Plan(
        rank,
        schedule.size,
        programs.posts,
        max(program.slots for program in programs.ranks),
        schedule.collective.blocks(schedule.size),
        schedule.parts,
        programs.reach.input,
        programs.reach.output,
        programs.reach.in_place,
        [program.posts_last for program in programs.ranks],
        zlib.crc32(name.encode()),
        lines,
        operands,
        buffers["in"],
        buffers["out"],
    )


def _operand(schedule: Schedule, buffers: dict[str, list[list[int]]], one: Operand) -> list[int]:
    if one.space == "slot":
        return [SPACES["slot"], one.rank, one.at, 0, 0, 0]
    block, part = divmod(one.at, schedule.parts)
    position = buffers[one.space][one.rank].index(block)
    return [SPACES[one.space], one.rank, 0, position, block, part]


def _before(schedule: Schedule, rank: int) -> list[int]:
    return list(schedule.collective.before(schedule.size, schedule.root, rank))


def _after(schedule: Schedule, rank: int) -> list[int]:
    return sorted(schedule.collective.after(schedule.size, schedule.root, rank))
