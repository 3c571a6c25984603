"""From compiled programs to what the native interpreter walks: words of 32 bits, for each rank."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

import numpy as np

from roundelay import _core
from roundelay.reductions import Array
from roundelay.schedule import Apply, Operand, Programs, Schedule, Wait

SPACES = {name: number for number, name in enumerate(_core.SPACES)}
WAIT, APPLY, POST = (_core.INSTRUCTIONS.index(name) for name in ("wait", "apply", "post"))


def view(array: Array) -> _core.View:
    """Return the native view of contiguous memory; pairs and bfloat16 are bytes to it."""
    return _core.View(array.reshape(-1).view(np.uint8) if array.dtype.kind == "V" else array)


def encoded(programs: Programs, ranks: Sequence[int]) -> list[bytes]:
    """Return the programs of these ranks as bytes, each with all that its rank must know."""
    schedule = programs.schedule
    place = schedule.size, schedule.root
    every = range(schedule.size)
    buffers = {
        "in": [list(schedule.collective.before(*place, rank)) for rank in every],
        "out": [sorted(schedule.collective.after(*place, rank)) for rank in every],
    }
    name = f"{schedule.collective.name} {schedule.name} {schedule.root} {schedule.parts}"
    head = [
        programs.posts,
        max(program.slots for program in programs.ranks),
        schedule.collective.blocks(schedule.size),
        schedule.parts,
        programs.reach.input,
        programs.reach.output,
        programs.reach.in_place,
        zlib.crc32(name.encode()),
    ]
    most = max(len(blocks) for lists in buffers.values() for blocks in lists)
    others = [word for one in programs.ranks for word in (one.posts_last, one.leads)]
    found = []
    for rank in ranks:
        here = [len(buffers["in"][rank]), len(buffers["out"][rank]), most]
        hears_all = programs.ranks[rank].hears_all
        words = array("I", [rank, hears_all, *head, *here, schedule.size, *others])
        _add_code(words, schedule, buffers, programs, rank)
        found.append(words.tobytes())
    return found


def idle(rank: int) -> bytes:
    """Return a program that does nothing."""
    return array("I", [rank, *[0] * 15]).tobytes()


def _add_code(
    words: array[int],
    schedule: Schedule,
    buffers: dict[str, list[list[int]]],
    programs: Programs,
    rank: int,
) -> None:
    """Add the instructions, their operands, and the blocks of the buffers in which these lie."""
    instructions: list[int] = []
    operands: list[int] = []
    visited: set[tuple[str, int]] = set()
    for instruction in programs.ranks[rank].instructions:
        if isinstance(instruction, Apply):
            block, part = divmod(instruction.chunk, schedule.parts)
            counts = (len(instruction.dsts), len(instruction.srcs))
            instructions += (
                APPLY,
                instruction.complete,
                *counts,
                0,
                0,
                len(operands) // 6,
                block,
                part,
            )
            for operand in (*instruction.dsts, *instruction.srcs):
                operands += _operand(schedule, buffers, operand)
                visited.add((operand.space, operand.rank))
        elif isinstance(instruction, Wait):
            instructions += (WAIT, 0, 0, 0, instruction.rank, instruction.post, 0, 0, 0)
        else:
            instructions += (POST, 0, 0, 0, 0, instruction.post, 0, 0, 0)
    for group, each in ((instructions, 9), (operands, 6)):
        words.append(len(group) // each)
        words.extend(group)
    for space in ("in", "out"):
        for other in range(schedule.size):
            runs = _runs(buffers[space][other]) if (space, other) in visited else []
            words.append(len(runs))
            words.extend(number for run in runs for number in run)


def _operand(
    schedule: Schedule, buffers: dict[str, list[list[int]]], operand: Operand
) -> tuple[int, ...]:
    if operand.space == "slot":
        return SPACES["slot"], operand.rank, operand.at, 0, 0, 0
    block, part = divmod(operand.at, schedule.parts)
    position = buffers[operand.space][operand.rank].index(block)
    return SPACES[operand.space], operand.rank, 0, position, block, part


def _runs(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return numbers as runs of even steps: the first, the step, and how many.

    >>> _runs([3, 7, 11, 12])
    [(3, 4, 3), (12, 1, 1)]
    """
    found: list[tuple[int, int, int]] = []
    at = 0
    while at < len(blocks):
        step = blocks[at + 1] - blocks[at] if at + 1 < len(blocks) else 1
        count = 1
        while at + count < len(blocks) and blocks[at + count] - blocks[at + count - 1] == step:
            count += 1
        found.append((blocks[at], step, count))
        at += count
    return found
