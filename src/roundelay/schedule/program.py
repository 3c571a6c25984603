"""What really runs: one flat program per rank, of three instructions.

    WAIT q,k            until rank q has posted k
    APPLY dsts ← srcs   fold the sources from left to right into every destination
    POST k              all before this is done and may be seen by others

Operands lie in a rank's input, its output, or one of its slots in memory that all can reach. A
program describes one slice of the data and holds no lengths. Slices are numbered across calls.
Small ones use `WINDOW` sets of slots in turn: before slice g writes its own, all ranks must have
posted in slice g - WINDOW + 1. Large ones use `LARGE` sets: before slice g, every rank that read
them in slice g - LARGE must have posted after that, or have ended that slice with a post.

Of a large message in private buffers the *head* of a program, all before its first wait, is a slice
ahead of the rest: in turn g a rank brings what it has of slice g, then ends slice g - 1. So it need
not wait until others have folded a slice before it brings the next. All end a turn at one flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from roundelay.errors import InvalidArgumentError
from roundelay.schedule.schedule import Schedule

__all__ = [
    "LARGE",
    "WINDOW",
    "Apply",
    "Instruction",
    "Operand",
    "Post",
    "Program",
    "Programs",
    "Reach",
    "Space",
    "Wait",
    "format_program",
]

Space = Literal["in", "out", "slot"]

#: Sets of small slots, and so how many slices a rank may be ahead of any other.
WINDOW = 32
#: Sets of large slots.
LARGE = 3


@dataclass(frozen=True, slots=True)
class Reach:
    """Which buffers the other ranks can reach, beside the slots, which all can.

    `in_place` says that input and output are one buffer: writing cell c of the output overwrites
    cell c of the input.
    """

    input: bool = False
    output: bool = False
    in_place: bool = False

    def __post_init__(self) -> None:
        if self.in_place and self.input != self.output:
            raise InvalidArgumentError(
                "Reach(in_place=True) is one buffer: its input and output are reached alike."
            )


class Operand(NamedTuple):
    """A chunk of a rank's input or output, or one of its slots."""

    space: Space
    rank: int
    at: int  # chunk of a buffer, or number of a slot

    def __str__(self) -> str:
        return f"{self.space.upper()} {self.rank}[{self.at}]"


class Wait(NamedTuple):
    """Until `rank` has posted at least `post`."""

    rank: int
    post: int

    def __str__(self) -> str:
        return f"WAIT {self.rank},{self.post}"


class Apply(NamedTuple):
    """Fold the sources into every destination; one source is a copy, several dsts are a push."""

    dsts: tuple[Operand, ...]
    srcs: tuple[Operand, ...]
    chunk: int  # whose length this moves
    complete: bool  # the fold that brings in the last contribution: here an average divides

    def __str__(self) -> str:
        dsts = ", ".join(map(str, self.dsts))
        srcs = ", ".join(map(str, self.srcs))
        if len(self.dsts) > 1:
            dsts = f"{{{dsts}}}"
        return f"APPLY {dsts} ← {srcs if len(self.srcs) == 1 else f'fold({srcs})'}"


class Post(NamedTuple):
    """Let the others see everything done so far."""

    post: int

    def __str__(self) -> str:
        return f"POST {self.post}"


Instruction: TypeAlias = Wait | Apply | Post


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank does for one slice."""

    rank: int
    instructions: tuple[Instruction, ...]
    slots: int  # how many it owns
    readers: tuple[int, ...]  # the other ranks that read them
    hears_all: bool  # it can't end before every rank has posted in the same slice

    @property
    def head(self) -> int:
        """How many instructions come before the first wait."""
        waits = (at for at, line in enumerate(self.instructions) if isinstance(line, Wait))
        return next(waits, len(self.instructions))

    @property
    def leads(self) -> int:
        """The last post before the first wait; 0 if there is none."""
        head = self.instructions[: self.head]
        return max((line.post for line in head if isinstance(line, Post)), default=0)

    @property
    def posts_last(self) -> bool:
        """Tell whether it ends with a post: then its last flag says that it has read all."""
        return bool(self.instructions) and isinstance(self.instructions[-1], Post)


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of all ranks for one schedule; every flag grows by `posts` per slice."""

    schedule: Schedule
    reach: Reach
    ranks: tuple[Program, ...]
    posts: int


def format_program(program: Program) -> str:
    """Write a program down, one numbered instruction per line."""
    lines = [f"{number:4d}  {line}" for number, line in enumerate(program.instructions)]
    return "\n".join(lines) if lines else "      (nothing to do)"
