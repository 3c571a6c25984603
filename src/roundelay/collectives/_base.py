"""The contract of a collective: whose contributions each rank holds per block, before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from roundelay.arguments import index_of, shown
from roundelay.errors import InvalidArgumentError, rank_count


def letter(index: int) -> str:
    """Name a block or chunk by letters, as spreadsheets name columns.

    >>> [letter(index) for index in (0, 1, 25, 26, 701, 702)]
    ['a', 'b', 'z', 'aa', 'zz', 'aaa']
    """
    name = ""
    while index >= 0:
        index, digit = divmod(index, 26)
        name = chr(ord("a") + digit) + name
        index -= 1
    return name


@dataclass(frozen=True, eq=False)
class Collective:
    """A contract over numbered blocks, for any size and root.

    `before` lists the blocks in a rank's input (its own contribution to each); `after` maps each
    block of a rank's output to the ranks whose contributions it holds. Cells that `after` does
    not name may end up holding anything.
    """

    name: str
    blocks: Callable[[int], int]
    before: Callable[[int, int, int], Iterable[int]]
    after: Callable[[int, int, int], Mapping[int, Iterable[int]]]
    rooted: bool = False
    reduces: bool = False
    #: A contribution counted twice is as good as once: only a barrier can say so.
    idempotent: bool = False
    #: Output cell c of a rank may share its memory with input cell c.
    in_place: bool = True
    #: Blocks that each have one source and one destination are called `2→5`; others by letters.
    named: Callable[[int, int], str] | None = None

    def block_name(self, size: int, block: int) -> str:
        """Name a block: `a`, or `2→5` for what rank 2 has for rank 5."""
        return letter(block) if self.named is None else self.named(size, block)

    def check(self, size: int, root: int = 0) -> tuple[int, int]:
        """Return size and root; refuse a size below 1 and a root that is not one of the ranks."""
        ranks, chosen = index_of(size), index_of(root)
        for word, value, number in (("size", size, ranks), ("root", root, chosen)):
            if number is None:
                raise InvalidArgumentError(
                    f"{self.name} needs a whole number as {word}, not {shown(value)}."
                )
        if ranks is None or ranks < 1:
            raise InvalidArgumentError(f"{self.name} needs at least 1 rank, not {shown(size)}.")
        if chosen is None or not 0 <= chosen < ranks:
            raise InvalidArgumentError(
                f"{self.name} on {rank_count(ranks)} has no root {shown(root)}; roots go from 0 to "
                f"{ranks - 1}."
            )
        return ranks, chosen

    def per_rank(self, size: int, root: int = 0) -> int:
        """Count the blocks of the largest buffer that any rank passes in or gets back."""
        return max(
            max(len(list(self.before(size, root, rank))), len(self.after(size, root, rank)))
            for rank in range(size)
        )

    def picture(self, size: int = 3, root: int = 0) -> str:
        """Draw who holds what before and after, as the docstrings of this folder show it."""
        size, root = self.check(size, root)
        join = " " if self.idempotent else "+"

        def term(block: int, source: int) -> str:
            return self.block_name(size, block) + ("" if self.named else str(source))

        rows = [("", "before", "after")]
        for rank in range(size):
            held = [term(block, rank) for block in self.before(size, root, rank)]
            due = [
                join.join(term(block, source) for source in sources)
                for block, sources in self.after(size, root, rank).items()
            ]
            rows.append((f"rank {rank}", "  ".join(held) or "-", "  ".join(due) or "-"))
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        return "\n".join(
            f"{name:<{widths[0]}}   {held:<{widths[1]}}   {due}".rstrip()
            for name, held, due in rows
        )
