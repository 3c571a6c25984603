"""From a schedule to programs: where every value lies, who moves it, and who waits for whom.

Every write of the schedule makes a new value. What a rank brings lies in its input, what the
contract asks for in its output, everything else in slots. The receiving rank pulls; only a copy
into an output that others can reach is pushed, by the rank that makes the value and has it at hand.

Every dependency between ranks leads from a lower level to a higher one, so no cycle can arise.
"""

from __future__ import annotations

from collections.abc import Iterator

from roundelay.errors import InvalidArgumentError
from roundelay.schedule.dataflow import Node, Value
from roundelay.schedule.emit import emit
from roundelay.schedule.program import Operand, Programs, Reach
from roundelay.schedule.prove import prove
from roundelay.schedule.replay import replay
from roundelay.schedule.schedule import Cell, Schedule

__all__ = ["compile_schedule"]

Inputs = dict[Cell, Value]


def compile_schedule(schedule: Schedule, reach: Reach | None = None) -> Programs:
    """Return one program per rank that does what the schedule says, and nothing else.

    >>> from roundelay.algorithms import algorithms
    >>> from roundelay.schedule import format_program
    >>> pair = compile_schedule(algorithms.load("all_reduce_one_shot").schedule(2))
    >>> print(format_program(pair.ranks[0]))
       0  APPLY SLOT 0[0] ← IN 0[0]
       1  POST 1
       2  WAIT 1,1
       3  APPLY OUT 0[0] ← fold(IN 0[0], SLOT 1[0])
    """
    reach = reach or Reach()
    if reach.in_place and not schedule.collective.in_place:
        raise InvalidArgumentError(f"{schedule.collective.name} can't be done in place.")
    prove(schedule)
    inputs, made = _values(schedule)
    end = 2 * len(schedule.steps) + 1
    nodes = [
        *_makers(made, inputs, reach),
        *_place_inputs(inputs, reach),
        *_place_made(made, inputs, reach, end),
    ]
    return emit(schedule, reach, nodes)


def _values(schedule: Schedule) -> tuple[Inputs, list[Value]]:
    """Return what the ranks bring, and all that is made on the way to some output, by step."""
    inputs = {cell: Value(cell, -1) for cell in schedule.held_before()}
    now = dict(inputs)
    made: list[Value] = []
    everyone = (1 << schedule.size) - 1
    for step in replay(schedule):
        fresh = [
            Value(
                write.cell,
                step.number,
                [now[Cell(src, write.cell.chunk)] for src in write.sources],
                complete=len(write.sources) > 1 and write.value.ranks == everyone,
            )
            for write in step.writes
        ]
        now.update((value.cell, value) for value in fresh)
        made += fresh
    for cell, _ in schedule.due_after():
        now[cell].final = True

    needed = []
    for value in reversed(made):
        if value.final or value.consumers:
            needed.append(value)
            for source in value.sources:
                source.consumers.append(value)
    return inputs, needed[::-1]


def _makers(made: list[Value], inputs: Inputs, reach: Reach) -> Iterator[Node]:
    """Give every value a node: its own at the receiver, or its source's, which then pushes."""
    for value in made:
        if _can_push(value, inputs, reach):
            value.node, value.pushed = value.sources[0].node, True
        else:
            rank, chunk = value.cell
            value.node = Node(rank, value.level, chunk, value.sources, value.complete)
            yield value.node


def _can_push(value: Value, inputs: Inputs, reach: Reach) -> bool:
    """Tell whether the rank that makes the source may write this copy of it straight away."""
    source = value.sources[0]
    return (
        reach.output
        and value.final
        and len(value.sources) == 1
        and source.node is not None
        and not source.pushed
        and all(
            reader is source or reader.level < source.level
            for reader in _overwrites(value, inputs, reach)
        )
    )


def _overwrites(value: Value, inputs: Inputs, reach: Reach) -> list[Value]:
    """List the readers of the input that writing this value to the output would overwrite."""
    if reach.in_place and value.cell in inputs:
        return inputs[value.cell].consumers
    return []


def _place_inputs(inputs: Inputs, reach: Reach) -> Iterator[Node]:
    """Bring inputs to where their readers can reach them, and to the output if they are due."""
    for value in inputs.values():
        rank, chunk = value.cell
        output = Operand("out", rank, chunk)
        remote = [reader.level for reader in value.consumers if reader.cell.rank != rank]
        if reach.input:
            value.place = Operand("in", rank, chunk)
        elif remote:
            value.node = Node(rank, min(remote) - 1, chunk, [value])
            if value.final and not reach.in_place:
                value.node.writes.append(output)  # one read for both
            if value.final and reach.output:
                value.place = output
            else:
                value.node.slot = value
            yield value.node
            continue
        if value.final and not reach.in_place:
            # Once all that others wait for is posted, and before waiting for them.
            yield Node(rank, 1, chunk, [value], writes=[output])


def _place_made(made: list[Value], inputs: Inputs, reach: Reach, end: int) -> Iterator[Node]:
    """Send values to the output or to a slot; copy to the output last what can't go there first."""
    for value in made:
        node = value.node
        if node is None:
            continue
        rank, chunk = value.cell
        output = Operand("out", rank, chunk)
        pulled = any(not reader.pushed for reader in value.consumers)
        if not value.final:
            node.slot = value if pulled else None
            continue
        # The input under this output: it must have been read by all before it is overwritten.
        readers = [other.node for other in _overwrites(value, inputs, reach) if other.node]
        before = [other for other in readers if other is not node]
        if any(other.level >= node.level for other in before):
            node.slot = value
            yield Node(rank, end, chunk, [value], writes=[output], after=before)
            continue
        node.writes.append(output)
        node.after += before
        if reach.output:
            value.place = output
        elif pulled:
            node.slot = value
