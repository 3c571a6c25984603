"""Many ranks in few words: every rank, GPU4…GPU7, ranks 2 apart, the rank 1 above."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from roundelay.view._graph import Groups
from roundelay.view.languages import Language
from roundelay.view.phrases import Phrases

#: So many ranks are named one by one.
FEW = 4


class Route(NamedTuple):
    """Who sends to whom, in words; without a `dst`, the sources exchange with one another."""

    src: str
    dst: str
    many: bool  # the source is plural
    to_many: bool = False  # so is the target


class RankNames:
    """Names sets of ranks, and the ways between them."""

    def __init__(
        self,
        names: Sequence[str],
        hosts: Groups = (),
        host: str = "host",
        language: Language = "en",
    ) -> None:
        self.names, self.hosts = names, hosts
        self.say = Phrases(language)
        self.host = self.say("host") if host == "host" else host

    def route(self, pairs: set[tuple[int, int]]) -> Route:
        """Say who sends to whom, by the pattern that all pairs share.

        >>> four = RankNames(["r0", "r1", "r2", "r3"])
        >>> tuple(four.route({(0, 1), (1, 2), (2, 3), (3, 0)}))[:2]
        ('every rank', 'the next rank')
        >>> tuple(four.route({(0, 2), (2, 0), (1, 3), (3, 1)}))[:2]
        ('pairs of ranks 2 apart', '')
        >>> tuple(four.route({(2, 0), (3, 1)}))[:2]
        ('r2 and r3', 'the rank 2 below')
        """
        sources, targets = {src for src, _ in pairs}, {dst for _, dst in pairs}
        if len(pairs) == len(sources) == len(targets):
            if all((dst, src) in pairs for src, dst in pairs):
                return self._exchange(pairs, sources)
            target = self._shift(pairs)
        else:
            target = self._crossing(pairs, sources | targets)
        subject = self.ranks(sources)
        many = len(sources) > 1 and not self._is_every(sources)
        others = self.say("every other")
        if target:
            return Route(subject, target, many)
        if len(targets) == 1 and len(sources) == len(self.names) - 1 and len(sources) > 1:
            return Route(others, self.ranks(targets), many=False)
        if len(sources) == 1 and len(targets) == len(self.names) - 1 and len(targets) > 1:
            return Route(subject, others, many)
        return Route(subject, self.ranks(targets), many, to_many=1 < len(targets) < len(self.names))

    def _exchange(self, pairs: set[tuple[int, int]], ranks: set[int]) -> Route:
        apart = {abs(src - dst) for src, dst in pairs}
        if len(ranks) < len(self.names) or len(apart) > 1:
            return Route(self.say("in pairs", ranks=self.ranks(ranks)), "", many=True)
        far = apart.pop()
        if len(ranks) == 2:  # noqa: PLR2004 - one pair
            return Route(self.say("the two"), "", many=True)
        subject = self.say("neighbours") if far == 1 else self.say("apart", n=far)
        return Route(subject, "", many=True)

    def _shift(self, pairs: set[tuple[int, int]]) -> str:
        """Name the target where everyone sends equally far, around the ring or along the line."""
        size = len(self.names)
        around = {(dst - src) % size for src, dst in pairs}
        if len(pairs) == size and len(around) == 1:
            return self._around(around.pop(), size)
        along = {dst - src for src, dst in pairs}
        if len(pairs) == 1 or len(along) > 1:
            return ""
        by = along.pop()
        return self.say("above", n=by) if by > 0 else self.say("below", n=-by)

    def _crossing(self, pairs: set[tuple[int, int]], ranks: set[int]) -> str:
        """Name the targets where everyone sends to all others: of all, of its host, or above it."""
        among = {(a, b) for host in self.hosts for a in host for b in host if a != b}
        if len(pairs) == len(self.names) * (len(self.names) - 1):
            return self.say("every other")
        if among and pairs == among:
            return self.say("every other of host", host=self.host)
        above = pairs == set(combinations(sorted(ranks), 2))
        return self.say("every above") if above else ""

    def _is_every(self, ranks: set[int]) -> bool:
        """Tell whether these are named as every rank, or every rank but one: in the singular."""
        return len(ranks) == len(self.names) > 1 or len(ranks) == len(self.names) - 1 > FEW

    def holders(self, ranks: set[int]) -> str:
        """Name those who hold something, in the singular."""
        names = self.ranks(ranks)
        if len(ranks) == 1 or self._is_every(ranks):
            return names
        return self.say("each of", ranks=names)

    def ranks(self, ranks: Iterable[int]) -> str:
        """Name a set of ranks, in the plural unless it is one, or every rank (but one)."""
        ordered = sorted(ranks)
        names = [self.names[rank] for rank in ordered]
        gaps = {high - low for low, high in pairwise(ordered)}
        if len(ordered) == len(self.names) > 1:
            return self.say("every rank")
        if len(ordered) == len(self.names) - 1 > FEW:
            (left,) = set(range(len(self.names))).difference(ordered)
            return self.say("every rank but", rank=self.names[left])
        if len(ordered) > 2 and gaps == {1}:  # noqa: PLR2004 - two have no run
            return f"{names[0]}…{names[-1]}"
        if len(ordered) <= FEW:
            return self.say.joined(names)
        if len(gaps) == 1:
            return f"{names[0]}{self.say('comma')}{names[1]} … {names[-1]}"
        return self.say("some ranks", n=len(ordered))

    def _around(self, by: int, size: int) -> str:
        """Name the rank `by` further around a ring of `size`."""
        if by in (1, size - 1):
            return self.say("next") if by == 1 else self.say("before")
        return self.say("above", n=by) if 2 * by <= size else self.say("below", n=size - by)
