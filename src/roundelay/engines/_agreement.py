"""What a rank is about to do, as other ranks see it: by a number that is compared, and in words.

Libraries take it for granted that all ranks make the same call. When they do not, they hang, give
wrong numbers or crash. So the engines that stand on one have all ranks compare their plans first.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from roundelay import _core
from roundelay.collectives import collectives
from roundelay.engines._end import Job
from roundelay.errors import CollectiveMismatch, ranks_text
from roundelay.reductions import Array

__all__ = ["Plan", "differing", "end_plan", "plan_of", "spoken"]

LONGEST = 512  # bytes of a description that others see

_core.set_package(f"{Path(__file__).parent.parent}/")  # whose lines no error shows


@dataclass(frozen=True, slots=True)
class Plan:
    """What ranks are about to do: in words, by what makes it different, and where they say so."""

    ranks: tuple[int, ...]  # that are known to plan this, as the user numbers them
    what: str
    details: str = ""
    site: str = ""

    @property
    def number(self) -> int:
        """Tell plans apart."""
        said = f"{self.what} {self.details}".encode()
        return int.from_bytes(blake2b(said, digest_size=7).digest(), "little")

    def __str__(self) -> str:
        return f"{self.what}{f' at {self.site}' if self.site else ''}"


def plan_of(job: Job, algorithm: str | None, ranks: tuple[int, ...]) -> Plan:
    """Return what a job of these ranks is to others."""
    site = _user_site()
    if job.collective == "barrier":
        return Plan(ranks, job.call or "barrier", algorithm or "", site)
    kind = collectives.load(job.collective)
    count = sum(job.counts) if job.counts else job.count
    op = f" op={job.op}" if kind.reduces else f" op={job.own}" if job.own else ""
    root = f" root={job.root}" if kind.rooted else ""
    label = f" label={job.label}" if job.label else ""
    forced = f" algorithm={algorithm}" if algorithm else ""
    axis = " axis=0" if job.axis else ""
    part = f"{job.call}, by " if job.call not in ("", job.collective) else ""
    what = f"{part}{job.collective} {job.dtype}[{count}]{op}{root}{axis}{label}{forced}"
    return Plan(ranks, what, " ".join(map(str, job.counts)), site)


def end_plan(ranks: tuple[int, ...]) -> Plan:
    """Return what the end of all calls is to others."""
    return Plan(ranks, "closed the communicator", "", _user_site())


def spoken(plan: Plan) -> Array:
    """Return who plans what as bytes of a length that all ranks know."""
    mine = np.zeros(LONGEST, np.uint8)
    said = f"{','.join(map(str, plan.ranks))} {plan}".encode()[:LONGEST]
    mine[: len(said)] = np.frombuffer(said, np.uint8)
    return mine


def differing(heard: Array) -> CollectiveMismatch:
    """Return the error that lists who called what; one line for all ranks that did the same.

    >>> plans = [Plan((0,), "barrier"), Plan((1, 3), "scan int8[3]"), Plan((2,), "barrier")]
    >>> print(differing(np.stack([spoken(plan) for plan in plans])))
    The ranks made different calls:
      ranks 0, 2: barrier
      ranks 1, 3: scan int8[3]
    """
    seen: dict[str, list[int]] = {}
    for row in heard:
        ranks, _, what = row.tobytes().rstrip(b"\0").decode(errors="replace").partition(" ")
        seen.setdefault(what, []).extend(map(int, ranks.split(",")))
    lines = [f"  {ranks_text(sorted(ranks))}: {what}" for what, ranks in seen.items()]
    return CollectiveMismatch("\n".join(["The ranks made different calls:", *lines]))


def _user_site() -> str:
    """Return the line of the program that made the call, if there is one."""
    place = _core.caller()
    if place is None:
        return ""
    code, _, line = place
    path = Path(code.co_filename)
    here = Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"
