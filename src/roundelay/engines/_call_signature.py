"""What a rank is about to do, as other ranks see it: by a number that is compared, and in words.

Libraries take it for granted that all ranks make the same call. When they do not, they hang, give
wrong numbers or crash. So in engines that stand on one, all ranks first compare their signatures.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from roundelay import _core
from roundelay.collectives import collectives
from roundelay.engines._call import CollectiveCall
from roundelay.errors import CollectiveMismatch, CommunicationError, PeerLost, ranks_text
from roundelay.reductions import Array

LONGEST = 512  # bytes of a description that others see
FAILED = "failed: "  # no call is described like this

_core.set_package(f"{Path(__file__).parent.parent}/")  # whose lines no error shows


@dataclass(frozen=True, slots=True)
class CallSignature:
    """What ranks are about to do: in words, by what makes it different, and where they say so."""

    ranks: tuple[int, ...]  # that are known to make it, as the user numbers them
    what: str
    details: str = ""
    site: str = ""
    raised: str = ""  # by what it ends, which is news to those who do not end as well

    @property
    def number(self) -> int:
        """Tell signatures apart."""
        said = f"{self.what} {self.details}".encode()
        return int.from_bytes(blake2b(said, digest_size=7).digest(), "little")

    def __str__(self) -> str:
        if self.raised:
            return f"{FAILED}{self.raised}"
        return f"{self.what}{f' at {self.site}' if self.site else ''}"


def signature_of(
    call: CollectiveCall, algorithm: str | None, ranks: tuple[int, ...]
) -> CallSignature:
    """Return what a call of these ranks is to others."""
    site = _user_site()
    if call.collective == "barrier":
        return CallSignature(ranks, call.part_of or "barrier", algorithm or "", site)
    kind = collectives.load(call.collective)
    count = sum(call.counts) if call.counts else call.count
    op = f" op={call.op}" if kind.reduces else f" op={call.custom_op}" if call.custom_op else ""
    root = f" root={call.root}" if kind.rooted else ""
    label = f" label={call.label}" if call.label else ""
    forced = f" algorithm={algorithm}" if algorithm else ""
    axis = " axis=0" if call.axis else ""
    part = f"{call.part_of}, by " if call.part_of not in ("", call.collective) else ""
    what = f"{part}{call.collective} {call.dtype}[{count}]{op}{root}{axis}{label}{forced}"
    return CallSignature(ranks, what, " ".join(map(str, call.counts)), site)


def end_signature(ranks: tuple[int, ...], raised: str = "") -> CallSignature:
    """Return what the end of all calls is to others; `raised` is by what."""
    return CallSignature(ranks, "closed the communicator", "", _user_site(), raised)


def encode(signature: CallSignature) -> Array:
    """Return who calls what as bytes of a length that all ranks know."""
    mine = np.zeros(LONGEST, np.uint8)
    said = f"{','.join(map(str, signature.ranks))} {signature}".encode()[:LONGEST]
    mine[: len(said)] = np.frombuffer(said, np.uint8)
    return mine


def mismatch(heard: Array) -> CommunicationError:
    """Return the error that lists who called what; one line for all ranks that did the same.

    If one of them ends by an exception, that is what there is to tell.

    >>> calls = [((0,), "barrier"), ((1, 3), "scan int8[3]"), ((2,), "barrier")]
    >>> print(mismatch(np.stack([encode(CallSignature(*call)) for call in calls])))
    The ranks made different calls:
      ranks 0, 2: barrier
      ranks 1, 3: scan int8[3]
    >>> calls.append(((4,), "closed", "", "", "ValueError: no data"))
    >>> print(mismatch(np.stack([encode(CallSignature(*call)) for call in calls])))
    Rank 4 failed: ValueError: no data
    """
    seen: dict[str, list[int]] = {}
    for row in heard:
        ranks, _, what = row.tobytes().rstrip(b"\0").decode(errors="replace").partition(" ")
        if what.startswith(FAILED):
            return PeerLost(f"Rank {ranks} {what}")
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
    inside = here.name and path.is_relative_to(here)  # all lies in the root folder
    return f"{path.relative_to(here) if inside else path}:{line}"
