"""Laws of compilation: what is proved is what runs, with no wait too few and none too many."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from roundelay.algorithms import algorithms
from roundelay.engines._native.programs import IN_ARENA
from roundelay.errors import InvalidArgumentError, ProofError
from roundelay.schedule import (
    WINDOW,
    Apply,
    Operand,
    Program,
    Programs,
    Reach,
    Schedule,
    Wait,
    compile_schedule,
    format_program,
    prove_program,
)

PRIVATE = Reach()
IN_PLACE = Reach(input=True, output=True, in_place=True)
REACHES = [PRIVATE, Reach(input=True), Reach(output=True), Reach(input=True, output=True), IN_PLACE]


def collective(name: str) -> str:
    return algorithms.load(name).collective.name


def roots(name: str, size: int) -> range:
    return range(size if algorithms.load(name).collective.rooted else 1)


def reaches(name: str) -> list[Reach]:
    in_place = algorithms.load(name).collective.in_place
    return [reach for reach in REACHES if in_place or not reach.in_place]


def compiled(name: str, size: int, reach: Reach, root: int = 0) -> Programs:
    return compile_schedule(algorithms.load(name).schedule(size, root), reach)


@pytest.mark.parametrize("name", algorithms.names())
def test_programs_of_private_buffers_are_proved_for_sizes_1_to_16_and_every_root(
    name: str, sample: Any
) -> None:
    grid = [(size, root) for size in range(1, 17) for root in roots(name, size)]
    for size, root in sample.cells(grid, 4):
        prove_program(compiled(name, size, PRIVATE, root))


@pytest.mark.parametrize("name", algorithms.names())
def test_programs_are_proved_whatever_can_be_reached(name: str, sample: Any) -> None:
    grid = [
        (size, root, reach)
        for size in (1, 2, 3, 4, 7, 8, 12)
        for root in {0, size - 1} & set(roots(name, size))
        for reach in reaches(name)
    ]
    for size, root, reach in sample.cells(grid, 3):
        prove_program(compiled(name, size, reach, root))


@pytest.mark.parametrize("name", [one for one in algorithms.names() if collective(one) in IN_ARENA])
def test_programs_for_the_arena_are_proved_in_place_too(name: str) -> None:
    """A caller may pass one buffer for both, or a rank's own block of it."""
    for size in (1, 2, 3, 4, 7, 8, 12):
        for root in roots(name, size):
            reaching = compiled(name, size, IN_ARENA[collective(name)], root)
            prove_program(reaching, also_in_place=True)


@pytest.mark.parametrize("name", algorithms.names())
def test_programs_are_proved_where_small_slots_are_used_again(name: str, sample: Any) -> None:
    grid = [(size, root) for size in (2, 3, 5, 8) for root in roots(name, size)]
    for size, root in sample.cells(grid, 3):
        prove_program(compiled(name, size, PRIVATE, root), window=WINDOW)


def test_heads_that_are_a_slice_ahead_need_three_sets() -> None:
    programs = compiled("all_reduce_two_shot", 3, PRIVATE)
    prove_program(programs, window=3)
    with pytest.raises(ProofError, match="deadlock"):
        prove_program(programs, window=2)


@pytest.mark.parametrize("name", algorithms.names())
def test_who_hears_of_all_is_known_and_nobody_else_may_say_so(name: str) -> None:
    """Those need not ask whether slots can be written again; where all need all, these are all."""
    for size in (2, 3, 5):
        programs = compiled(name, size, PRIVATE)
        heard = [program.hears_all for program in programs.ranks]
        after = programs.schedule.collective.after
        for rank, program in enumerate(programs.ranks):
            needs = set().union(*after(size, programs.schedule.root, rank).values())
            assert heard[rank] or needs != set(range(size))
            liar = dataclasses.replace(program, hears_all=True)
            ranks = (*programs.ranks[:rank], liar, *programs.ranks[rank + 1 :])
            if not heard[rank]:
                with pytest.raises(ProofError, match=r"says that it does"):
                    prove_program(dataclasses.replace(programs, ranks=ranks))


def without(programs: Programs, kind: type) -> Iterator[Programs]:
    """Yield the programs with one instruction of a kind left out, for each there is."""
    for program in programs.ranks:
        for number, line in enumerate(program.instructions):
            if isinstance(line, kind):
                code = program.instructions
                yield with_code(programs, program, code[:number] + code[number + 1 :])


def with_code(programs: Programs, program: Program, code: tuple[object, ...]) -> Programs:
    ranks = list(programs.ranks)
    ranks[program.rank] = dataclasses.replace(program, instructions=code)  # type: ignore[arg-type]
    return dataclasses.replace(programs, ranks=tuple(ranks))


@pytest.mark.parametrize("kind", [Wait, Apply])
@pytest.mark.parametrize("name", algorithms.names())
def test_every_wait_and_every_apply_is_needed(name: str, kind: type) -> None:
    for size in (2, 3, 5):
        for reach in reaches(name):
            for broken in without(compiled(name, size, reach, roots(name, size)[-1]), kind):
                with pytest.raises(ProofError):
                    prove_program(broken)


def replaced(programs: Programs) -> Iterator[Programs]:
    """Yield the programs with one APPLY changed so that it does something else."""
    for program in programs.ranks:
        for number, line in enumerate(program.instructions):
            if not isinstance(line, Apply):
                continue
            changes = []
            if len(line.srcs) > 1:
                changes.append(line._replace(srcs=line.srcs[::-1]))
                changes.append(line._replace(srcs=line.srcs[:-1]))
            if len(line.dsts) > 1:
                changes += [line._replace(dsts=line.dsts[1:]), line._replace(dsts=line.dsts[:-1])]
            changes.append(line._replace(complete=not line.complete))
            src = line.srcs[0]
            changes.append(line._replace(srcs=(Operand("in", src.rank, 99), *line.srcs[1:])))
            for change in changes:
                code = (*program.instructions[:number], change, *program.instructions[number + 1 :])
                yield with_code(programs, program, code)


@pytest.mark.parametrize("name", algorithms.names())
def test_no_apply_can_be_changed(name: str) -> None:
    for size in (2, 3, 4):
        for reach in (PRIVATE, reaches(name)[-1]):
            for broken in replaced(compiled(name, size, reach)):
                with pytest.raises(ProofError):
                    prove_program(broken)


def test_a_wait_for_a_post_that_never_comes_is_a_deadlock_that_names_it() -> None:
    programs = compiled("all_reduce_one_shot", 2, PRIVATE)
    code = tuple(
        Wait(0, 9) if isinstance(line, Wait) else line for line in programs.ranks[1].instructions
    )
    with pytest.raises(ProofError, match=r"deadlock: nobody can go on: .*rank 1 in WAIT 0,9"):
        prove_program(with_code(programs, programs.ranks[1], code))


def test_a_wait_for_a_post_that_is_passed_over_is_malformed() -> None:
    programs = compiled("all_reduce_two_shot", 3, PRIVATE)
    code = tuple(line for line in programs.ranks[0].instructions if str(line) != "POST 1")
    with pytest.raises(ProofError, match=r"WAIT 0,1: which that rank passes over"):
        prove_program(with_code(programs, programs.ranks[0], code))


def test_flags_must_end_alike() -> None:
    programs = compiled("all_reduce_one_shot", 2, PRIVATE)
    code = tuple(line for line in programs.ranks[0].instructions if str(line) != "POST 1")
    with pytest.raises(ProofError, match=r"rank 0.*malformed: ends at flag 0, not 1"):
        prove_program(with_code(programs, programs.ranks[0], code))


def test_a_race_names_both_ranks_and_the_operand() -> None:
    programs = compiled("all_reduce_one_shot", 2, PRIVATE)
    code = tuple(line for line in programs.ranks[0].instructions if not isinstance(line, Wait))
    with pytest.raises(ProofError, match=r"rank 0.*(race|missing).*SLOT 1\[0\]"):
        prove_program(with_code(programs, programs.ranks[0], code))


TWO_SHOT_STAGED = """\
   0  APPLY SLOT 1[0] ← IN 1[0]
   1  APPLY SLOT 1[1] ← IN 1[2]
   2  POST 1
   3  WAIT 2,1
   4  WAIT 0,1
   5  APPLY {SLOT 1[2], OUT 1[1]} ← fold(SLOT 0[0], IN 1[1], SLOT 2[1])
   6  POST 2
   7  WAIT 2,2
   8  APPLY OUT 1[2] ← SLOT 2[2]
   9  WAIT 0,2
  10  APPLY OUT 1[0] ← SLOT 0[2]"""

TWO_SHOT_PUSHED = """\
   0  POST 1
   1  WAIT 2,1
   2  WAIT 0,1
   3  APPLY {OUT 1[1], OUT 0[1], OUT 2[1]} ← fold(IN 0[1], IN 1[1], IN 2[1])
   4  POST 2
   5  WAIT 2,2
   6  WAIT 0,2"""


@pytest.mark.parametrize(
    ("reach", "program"), [(PRIVATE, TWO_SHOT_STAGED), (IN_PLACE, TWO_SHOT_PUSHED)]
)
def test_two_shot_never_stages_its_own_slice_and_pushes_where_it_can(
    reach: Reach, program: str
) -> None:
    assert format_program(compiled("all_reduce_two_shot", 3, reach).ranks[1]) == program


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "name", ["all_reduce_two_shot", "all_reduce_ring", "all_reduce_halving_doubling"]
)
def test_in_place_traffic_of_two_shot_is_the_floor_and_others_are_above(
    name: str, size: int
) -> None:
    """Two-shot in place reads and writes every byte of every rank once: the least possible."""
    programs = compiled(name, size, IN_PLACE)
    moved = sum(
        len(line.srcs) + len(line.dsts)
        for program in programs.ranks
        for line in program.instructions
        if isinstance(line, Apply)
    )
    parts = programs.schedule.parts
    floor = 2 * size * parts
    assert moved == floor if name == "all_reduce_two_shot" else moved >= floor


def test_a_schedule_that_is_not_proved_is_not_compiled() -> None:
    ring = algorithms.load("all_reduce_ring").schedule(4)
    broken = Schedule(ring.collective, 4, ring.transfers[:-1], parts=4, name="broken")
    with pytest.raises(ProofError, match="broken"):
        compile_schedule(broken)


def test_reach_and_contract_must_fit() -> None:
    with pytest.raises(InvalidArgumentError, match="one buffer"):
        Reach(input=True, in_place=True)
    with pytest.raises(InvalidArgumentError, match="all_to_all can't be done in place"):
        compiled("all_to_all_direct", 3, IN_PLACE)
