"""The program that one rank really runs, as text."""

from __future__ import annotations

import click

from roundelay.errors import InvalidArgumentError
from roundelay.schedule import Schedule, compile_schedule, format_program, prove_program

__all__ = ["print_program"]


def print_program(schedule: Schedule, rank: int, *, ascii_only: bool) -> None:
    """Compile, prove, and print the program of one rank."""
    if not 0 <= rank < schedule.size:
        raise InvalidArgumentError(
            f"--program {rank}: {schedule.name} has ranks 0 to {schedule.size - 1}."
        )
    programs = compile_schedule(schedule)
    prove_program(programs)
    text = format_program(programs.ranks[rank])
    click.echo(text.replace("←", "<-") if ascii_only else text)
