"""The compiler's last pass: nodes become instructions, with no wait too few and none too many.

Ranks run level by level. Each keeps what it knows of the others' posts, directly or through a third
rank; a wait is written only for what is not yet known. A slot is used again once it is known that
all have read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from roundelay.schedule.dataflow import Node, Value
from roundelay.schedule.program import (
    Apply,
    Instruction,
    Operand,
    Post,
    Program,
    Programs,
    Reach,
    Wait,
)
from roundelay.schedule.schedule import Schedule

__all__ = ["emit"]


def emit(schedule: Schedule, reach: Reach, nodes: Sequence[Node]) -> Programs:
    """Return the programs that run `nodes` in order of level."""
    return _Emitter(schedule, reach, nodes).run()


class _Clock:
    """What a rank knew of everybody's posts when it posted."""

    def __init__(self, rank: int, known: Sequence[int]) -> None:
        self.posts = tuple(known)
        self.most = max((*known[:rank], *known[rank + 1 :]), default=0)  # of any other rank


class _Emitter:
    def __init__(self, schedule: Schedule, reach: Reach, nodes: Sequence[Node]) -> None:
        size = schedule.size
        self.schedule, self.reach, self.nodes = schedule, reach, nodes
        self.code: list[list[Instruction]] = [[] for _ in range(size)]
        self.posts = [0] * size
        self.unposted = [False] * size  # done, waited for by others, not yet posted
        self.known = [[0] * size for _ in range(size)]
        self.known_at: dict[tuple[int, int], _Clock] = {}  # by rank and post
        self.slots: list[list[Value]] = [[] for _ in range(size)]  # who lies in each
        self.taken = [0] * size  # so many of them, from the first, are in use for all that is known
        self.readers: dict[Value, list[Node]] = {}
        # Whose buffers a node reaches into: it begins after they, and they end after it.
        self.visits = {
            node: {operand.rank for operand in node.operands()} - {node.rank} for node in nodes
        }
        self.awaited: set[Node] = set()

    def run(self) -> Programs:
        visitors: list[list[Node]] = [[] for _ in self.code]
        for node in self.nodes:
            self.awaited |= node.waits_for()
            for rank in self.visits[node]:
                visitors[rank].append(node)
                self.awaited.add(node)
                self.unposted[rank] = True  # that this rank has begun
            for value in node.reads:
                self.readers.setdefault(value, []).append(node)

        levels: dict[int, list[Node]] = {}
        for node in self.nodes:
            levels.setdefault(node.level, []).append(node)
        for level in sorted(levels):
            if level % 2:  # staging for step t shares the post of the writes of step t - 1
                self.post_all()
            for node in self.in_order(levels[level]):
                self.apply(node)
        self.post_all()
        for rank, guests in enumerate(visitors):
            self.wait(rank, {(guest.rank, guest.post) for guest in guests})
        return self.finish()

    def in_order(self, level: list[Node]) -> list[Node]:
        """Return the nodes of a level so that ranks begin with different partners."""
        size = self.schedule.size

        def turn(node: Node) -> tuple[int, int, int]:
            return node.rank, (node.reads[0].cell.rank - node.rank) % size, node.chunk

        return sorted(level, key=turn)

    def apply(self, node: Node) -> None:
        rank = node.rank
        due = {(other.rank, other.post) for other in node.waits_for()}
        self.wait(rank, due | {(other, 1) for other in self.visits[node]})
        srcs = tuple(place for value in node.reads if (place := value.seen_from(rank)))
        dsts = list(node.writes)
        if node.slot is not None:
            slot = Operand("slot", rank, self.free_slot(rank, node.slot))
            node.slot.place = node.slot.place or slot
            dsts.insert(0, slot)
        self.code[rank].append(Apply(tuple(dsts), srcs, node.chunk, node.complete))
        node.emitted, node.post = True, self.posts[rank] + 1
        self.unposted[rank] |= node in self.awaited
        if any(value.in_slot_of(rank) for value in node.reads if value is not node.slot):
            self.taken[rank] = 0  # it may have been the last to read one of its own slots

    def free_slot(self, rank: int, value: Value) -> int:
        """Return a slot that nobody will read again, as far as this rank knows, or a new one."""
        slots = self.slots[rank]
        index = self.taken[rank]
        while index < len(slots) and not all(
            self.is_done(reader, rank) for reader in self.readers.get(slots[index], ())
        ):
            index += 1
        slots[index : index + 1] = [value]
        self.taken[rank] = index + 1
        return index

    def is_done(self, node: Node, rank: int) -> bool:
        return node.emitted and (node.rank == rank or self.known[rank][node.rank] >= node.post)

    def wait(self, rank: int, due: Iterable[tuple[int, int]]) -> None:
        """Write the waits for `due` posts that are neither known nor implied by one another."""
        known = self.known[rank]
        latest: dict[int, int] = {}
        for other, post in due:
            if known[other] < post:
                latest[other] = max(post, latest.get(other, 0))
        if not latest:
            return
        self.taken[rank] = 0  # what is learned may set slots free
        size = self.schedule.size
        # Most clocks tell of nobody but their own rank.
        least, first = min(known), min(latest.values())
        clocks = [(other, self.known_at[other, post]) for other, post in latest.items()]
        telling = [(third, clock.posts) for third, clock in clocks if clock.most >= first]
        for other, post in sorted(latest.items(), key=lambda item: (item[0] - rank) % size):
            if not any(posts[other] >= post for third, posts in telling if third != other):
                self.code[rank].append(Wait(other, post))
        for _, clock in clocks:
            if clock.most > least:
                known = self.known[rank] = list(map(max, known, clock.posts))
        for other, post in latest.items():
            known[other] = max(known[other], post)

    def post_all(self) -> None:
        for rank, waiting in enumerate(self.unposted):
            if waiting:
                self.post(rank, self.posts[rank] + 1)

    def post(self, rank: int, number: int) -> None:
        self.code[rank].append(Post(number))
        self.posts[rank] = self.known[rank][rank] = number
        self.known_at[rank, number] = _Clock(rank, self.known[rank])
        self.unposted[rank] = False

    def finish(self) -> Programs:
        """Bring all flags to one value and hand out the programs."""
        last = max(self.posts)
        for rank, number in enumerate(self.posts):
            if number < last:
                self.post(rank, last)
        readers: list[set[int]] = [set() for _ in self.code]
        for rank, code in enumerate(self.code):
            for line in code:
                if isinstance(line, Apply):
                    for operand in line.srcs:
                        if operand.space == "slot" and operand.rank != rank:
                            readers[operand.rank].add(rank)
        return Programs(
            self.schedule,
            self.reach,
            tuple(
                Program(
                    rank,
                    tuple(code),
                    len(self.slots[rank]),
                    tuple(sorted(readers[rank])),
                    hears_all=min(self.known[rank]) > 0,
                )
                for rank, code in enumerate(self.code)
            ),
            last,
        )
