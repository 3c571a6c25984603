"""What to measure and what was measured, as it goes to the measuring ranks and back."""

from __future__ import annotations

import msgspec

__all__ = [
    "ARENA",
    "OURS",
    "PEERS",
    "REGISTERED",
    "Case",
    "CaseResult",
    "Message",
    "PeerVersions",
    "Spec",
    "Timing",
]

OURS = "roundelay"
ARENA = "arena"
REGISTERED = "registered"
PEERS = ("gloo", "mpi", "mpich", "intel", "deepspeed")


class Case(msgspec.Struct, frozen=True):
    """One collective on buffers of so many bytes: the largest that any rank passes or gets."""

    collective: str
    nbytes: int


class Spec(msgspec.Struct, frozen=True):
    """A whole run. Contenders are measured in turn, again and again, on the same cases.

    A contender is `roundelay`, `arena` (the same on buffers from `comm.empty`), `registered` (on
    buffers that `comm.register` has moved there), the name of a peer, or the name of an algorithm
    of the case's collective.
    """

    size: int
    cases: tuple[Case, ...]
    contenders: tuple[str, ...] = (OURS,)
    engine: str = "shared_memory"
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    iterations: int = 0  # calls per case and contender; 0: as many as `seconds` allow
    seconds: float = 0.3  # per case and contender, roughly
    floor: bool = True  # measure what the memory allows, too
    job: str = ""  # where ranks meet that others have started


class Timing(msgspec.Struct, frozen=True):
    """What one contender took for one case: the median and the best of its rounds, per call."""

    seconds: float
    best: float
    calls: int
    wrong: int  # elements that differ from the oracle, over all ranks


class PeerVersions(msgspec.Struct, frozen=True, tag="head"):
    """What runs beside what: versions by name."""

    versions: dict[str, str]


class CaseResult(msgspec.Struct, frozen=True, tag="row"):
    """One case, measured. Contenders that can't do it are left out."""

    collective: str
    nbytes: int
    count: int  # elements of the largest buffer
    timings: dict[str, Timing]
    floor: float | None  # seconds in which memory alone could do it: see rounds.memory_pass


Message = PeerVersions | CaseResult

read_message = msgspec.json.Decoder(Message).decode
read_spec = msgspec.json.Decoder(Spec).decode
