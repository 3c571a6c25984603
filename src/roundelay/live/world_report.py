"""What ranks do and wait for, as the shared memory shows it: in words, with the user's lines."""

from __future__ import annotations

from collections.abc import Sequence

from roundelay import _core
from roundelay.collectives import collectives
from roundelay.engines import ENDINGS, INNER_TAGS
from roundelay.live.call_words import read_word
from roundelay.live.hang_words import live_ranks, live_say
from roundelay.reductions import DTYPES, OPS

CallRecord = tuple[int, int, int, int, int, int, int, str]

CALL, RECV = _core.WAITS.index("call"), _core.WAITS.index("recv")
OWN = ("all_reduce", "reduce", "scan", "exscan", "reduce_scatter")
#: Each is a key of the words.
ENDED = ("closed", "returned", "script", "dropped", "raised", "cancelled")


class WorldReport:
    """What the ranks of a world do, with the names of algorithms by number.

    Errors are in English; what those see who look on may be in Chinese.
    """

    def __init__(self, world: _core.World, algorithms: Sequence[str], language: str = "en") -> None:
        self._world, self._algorithms, self._language = world, algorithms, language

    def call(self, record: CallRecord) -> str:
        """Describe a call: what, with what, how and where."""
        where = f" at {record[7]}" if record[7] else ""
        return f"{self.called(record, number=f' #{record[0]}')}{where}"

    def called(self, record: CallRecord, *, number: str = "") -> str:
        """Describe a call: what, with what and how; `number` is put where its number stands."""
        _, collective, algorithm, dtype, op, count, root, _ = record
        if collective == _core.ENDING:
            return live_say(ENDINGS[root], self._language)
        contract = collectives.load(collectives.names()[collective])
        word = read_word(root, rooted=contract.rooted)
        details = f" {DTYPES[dtype]}[{count}]" if contract.name != "barrier" else ""
        if contract.reduces and contract.name != "barrier":
            details += f" op={list(OPS)[op]}"
        if contract.rooted:
            details += f" root={word.root}"
        if word.axis:
            details += " axis=0"
        if word.rest:  # only reductions have one of the user's own, and no label
            own = word.call in OWN and not contract.reduces
            details += f" op=rd.Op {word.rest:x}" if own else f" label={word.rest}"
        short = self._algorithms[algorithm]
        if word.call not in ("", contract.name):
            by = live_say("by", self._language, name=contract.name)
            return f"{word.call}{number}{by}{details} ({short})"
        return f"{contract.name}{number}{details} ({short})"

    def last(self, record: CallRecord) -> str:
        """Tell of the last call of a rank."""
        if not record[0]:
            return "it had made no call yet"
        return (
            self.call(record)
            if record[1] == _core.ENDING
            else f"its last call was {self.call(record)}"
        )

    def last_of(self, at: int, rank: int) -> CallRecord:
        """Return a rank's last call in that group; if it made none, in the group of all ranks."""
        whole = self._world.calls(self._world.group_at)[2]
        inside = {member: latest for member, _, latest in self._world.calls(at)[2]} if at else {}
        found = inside.get(rank, whole[rank][2])
        return found if found[0] else whole[rank][2]

    def group(self, at: int) -> str:
        """Say in which group; nothing for the group of all ranks."""
        if at in (0, self._world.group_at):
            return ""
        serial, made, members = self._world.calls(at)
        language = self._language
        ranks = live_ranks([member[0] for member in members], language)
        where = live_say("made", language, site=made) if made else ""
        return live_say("group", language, group=serial, ranks=ranks, made=where)

    def of_rank(self, at: int, number: int, rank: int) -> list[str]:
        """Say what the threads of a rank wait for, or what it did last.

        `number` is the call that went wrong in the group that lies at `at`: who shows that one and
        does not wait came to it when all was over.
        """
        found = [self._wait(rank, wait) for wait in self._world.waits(rank)]
        latest = self.last_of(at, rank)
        if self._world.stood_still(rank):
            doing = f"it was in {'; '.join(dict.fromkeys(found))}" if found else self.last(latest)
            return [f"stopped (process {self._world.pid(rank)} does not run); {doing}"]
        if found:
            ended = [f"{self.call(latest)}{self.group(at)}"] if latest[1] == _core.ENDING else []
            return [*ended, *found]
        records = (
            {one: record for one, record, _ in self._world.calls(at, number)[2]} if number else {}
        )
        if latest[0] and latest == records.get(rank):
            return [f"came too late to {self.call(latest)}"]
        if latest[1] == _core.ENDING:
            return [f"{self.call(latest)}{self.group(at)}"]
        return [f"not waiting; {self.last(latest)}"]

    def _wait(self, rank: int, wait: tuple[int, int, int, int, int, str, int]) -> str:
        kind, at, number, other, _, site, _ = wait
        who = "any rank" if other < 0 else "itself" if other == rank else f"rank {other}"
        if kind == CALL:
            records = {member: record for member, record, _ in self._world.calls(at, number)[2]}
            return f"{self.call(records[rank])}{self.group(at)}, waiting for {who}"
        where = f" at {site}" if site else ""
        return f"{self.message(rank, wait)},{where}{self.group(at)}".rstrip(",")

    def message(self, rank: int, wait: tuple[int, int, int, int, int, str, int]) -> str:
        """Say for which message a rank waits."""
        kind, _, _, other, tag, _, _ = wait
        key = "any rank" if other < 0 else "itself" if other == rank else "rank"
        who, said = live_say(key, self._language, rank=other), _tag(tag, self._language)
        return live_say("recv" if kind == RECV else "send", self._language, who=who, tag=said)

    def circle(self) -> str:
        """Name ranks that wait for one another in a circle, in a line of its own, if any do."""
        steps = [f"rank {one} waits for rank {other}" for one, other in self.circle_of()]
        return f"\nThey wait in a circle: {', '.join(steps)}." if steps else ""

    def circle_of(self) -> list[tuple[int, int]]:
        """Return who waits for whom in a circle, if ranks do.

        A rank that waits in several threads counts by one of them; one that is stopped by none, as
        what it waited for may have come.
        """
        awake = [rank for rank in range(self._world.size) if not self._world.stood_still(rank)]
        waits = {rank: self._world.waits(rank) for rank in awake}
        waits_for = {rank: found[0][3] for rank, found in waits.items() if found}
        for start in waits_for:
            path = [start]
            while (after := waits_for.get(path[-1], -1)) not in (-1, *path):
                path.append(after)
            if after == start and len(path) > 1:
                return [(one, waits_for[one]) for one in path]
        return []


def left_over(rank: int, requests: list[tuple[bool, int, int, int, int, str]]) -> str:
    """Return the warning of messages that nobody received, and receives that got none."""
    came: list[str] = []
    wanted: list[str] = []
    for sent, other, tag, nbytes, dtype, site in requests:
        said = _tag(tag)
        who = "any rank" if other < 0 else f"rank {other}"
        where = f" at {site}" if site else ""
        one = f"from {who}, {said}, {nbytes} bytes of {DTYPES[dtype]}{where}"
        (came if sent else wanted).append(one)
    told = [f"messages that it never received: {'; '.join(came)}"] if came else []
    told += [f"receives for which no message came: {'; '.join(wanted)}"] if wanted else []
    return f"roundelay: rank {rank} ended with {', and with '.join(told)}."


def _tag(tag: int, language: str = "en") -> str:
    key = "any tag" if tag == _core.ANY_TAG else "object" if tag >= INNER_TAGS else "tag"
    return live_say(key, language, tag=tag)
