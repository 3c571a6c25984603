"""Every error a user can meet; each names the call, the value and the way out.

`except RoundelayError` catches all of them. The command line turns `InvalidArgumentError` and its
children into exit code 2 (wrong use) and every other one into exit code 1 (the work failed).
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roundelay.pipelines import PipelineFailure
    from roundelay.schedule import Failure

__all__ = [
    "CheckpointError",
    "CheckpointMismatch",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "CommunicationError",
    "DoesNotFitError",
    "FormatError",
    "InvalidArgumentError",
    "LimitError",
    "MissingPackageError",
    "NetworkError",
    "NoEngineError",
    "NoRoomError",
    "NotFiniteError",
    "OtherVersionError",
    "PeerLost",
    "ProofError",
    "RankFailed",
    "RecordError",
    "RendezvousError",
    "RoundelayError",
    "ScheduleError",
    "UnknownNameError",
    "UnsendableError",
    "UnsupportedReductionError",
    "UnsupportedSizeError",
]


SHOWN = 60  # characters of a name that a message repeats
RANKS_SHOWN = 8  # by number, before it says how many more


def rank_count(size: int) -> str:
    """Say how many ranks: 1 rank, 4 ranks."""
    return "1 rank" if size == 1 else f"{size} ranks"


def ranks_text(ranks: list[int]) -> str:
    """Name ranks in a sentence.

    >>> ranks_text([3]), ranks_text([1, 2, 5]), ranks_text(list(range(20)))
    ('rank 3', 'ranks 1, 2, 5', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    shown = ", ".join(map(str, ranks[:RANKS_SHOWN]))
    more = f" and {len(ranks) - RANKS_SHOWN} more" if len(ranks) > RANKS_SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


class RoundelayError(Exception):
    """The root of all errors raised on purpose by Roundelay."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Let it go from process to process as it is, whatever its class is made from."""
        return _made_again, (type(self), self.args), self.__dict__ or None


def _made_again(kind: type[RoundelayError], args: tuple[Any, ...]) -> RoundelayError:
    base: Any = kind
    while base.__module__ != "builtins":  # only its `__new__` is safe, whatever the class inherits
        base = base.__base__
    error: RoundelayError = base.__new__(kind)
    error.args = args
    return error


class InvalidArgumentError(RoundelayError, ValueError):
    """A value that no engine or algorithm could take: a size below 1, a root out of range."""


class UnknownNameError(InvalidArgumentError):
    """A name that is not there, with the nearest one that is.

    >>> print(UnknownNameError("engines", "thread", ["mpi", "threads"]))
    engines has no 'thread'. Did you mean 'threads'? Known: mpi, threads.
    """

    def __init__(
        self, family: str, name: str, known: Iterable[str], *, meant: str | None = None
    ) -> None:
        self.family, self.name, self.known = family, name, sorted(known)
        # A name may come from a stranger's file: show enough to recognise it, not all of it, and
        # no control characters; comparing is quadratic, so compare no more than is shown.
        shown = name if len(name) <= SHOWN else name[:SHOWN] + "…"
        near = [meant] if meant else difflib.get_close_matches(shown, self.known, n=1, cutoff=0.5)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        super().__init__(f"{family} has no {shown!r}.{hint} Known: {', '.join(self.known)}.")


class UnsupportedSizeError(InvalidArgumentError):
    """A size that this algorithm truly can't take; the message names the sizes it takes."""

    def __init__(self, algorithm: str, size: int, takes: str) -> None:
        self.algorithm, self.size, self.takes = algorithm, size, takes
        super().__init__(f"{algorithm} does not run on {rank_count(size)}; it takes {takes}.")


class UnsupportedReductionError(InvalidArgumentError, TypeError):
    """A reduction that has no meaning for this dtype, collective or order of addition."""


class FormatError(InvalidArgumentError):
    """Something that is not well formed; `place` says where: `mine.json: transfers[3].dst`."""

    def __init__(self, place: str, problem: str) -> None:
        self.place, self.problem = place, problem
        super().__init__(f"{place}: {problem}")


class ScheduleError(FormatError):
    """A schedule that is not well formed: wrong types, ranks or chunks out of range, over a limit.

    >>> raise ScheduleError("mine.json: transfers[3].dst", "4 is not one of the 4 ranks")
    Traceback (most recent call last):
        ...
    roundelay.errors.ScheduleError: mine.json: transfers[3].dst: 4 is not one of the 4 ranks
    """


class NetworkError(FormatError):
    """A network that is not well formed: nodes that are not linked, no bandwidth, over a limit."""


class RecordError(FormatError):
    """A record of a run that is not well formed: cut off, of another version, over a limit."""

    def __init__(self, place: str, problem: str, *, cure: str = "") -> None:
        super().__init__(place, f"{problem}.{f' {cure}' if cure else ''}")


class ProofError(RoundelayError):
    """A well-formed schedule or program that does not keep its contract; `failures` says where."""

    def __init__(self, what: str, failures: Iterable[Failure] | Iterable[PipelineFailure]) -> None:
        self.what = what
        self.failures: tuple[Any, ...] = tuple(failures)  # all of one kind or all of the other
        shown = [str(failure) for failure in self.failures[:5]]
        if len(self.failures) > len(shown):
            shown.append(f"… and {len(self.failures) - len(shown)} more")
        super().__init__("\n  ".join([f"{what} does not keep its contract:", *shown]))


class MissingPackageError(InvalidArgumentError, ModuleNotFoundError):
    """A package that this needs and that is not installed; the message says how to install it.

    >>> print(str(MissingPackageError("rd.prepare", "torch")).partition(", or")[0])
    rd.prepare needs torch, which is not installed: pip install 'roundelay[torch]'
    """

    def __init__(
        self, what: str, package: str, extra: str = "torch", *, also: str = "", how: str = ""
    ) -> None:
        more = f" {also}" if also else ""
        how = how or (
            f"pip install 'roundelay[{extra}]'{more}, or in a clone pip install -e "
            f"'.[{extra}]'{more}"
        )
        super().__init__(f"{what} needs {package}, which is not installed: {how}")
        self.name = package


class UnsendableError(InvalidArgumentError, TypeError):
    """A value that can't go from one process to another without pickle, which nobody asked for."""


class NoEngineError(RoundelayError, ImportError):
    """Ranks can't run here: Roundelay has no native core on this system, or it was not built.

    Or it was built from other sources than this Python, and `differs` is a table that tells so.
    """

    def __init__(self, *, differs: str = "") -> None:
        if differs:
            why = f"was built from other sources than this Python: its {differs} differ"
            cure = "Build it again: python -m pip install ."
        elif sys.platform.startswith("linux"):
            why = (
                f"was not built for this Python ({sys.implementation.cache_tag} on {sys.platform})"
            )
            cure = "Install Roundelay again, with a C++20 compiler at hand: python -m pip install ."
        else:
            why = f"needs Linux, and this is {sys.platform}"
            cure = "Run ranks on Linux: in a container, a virtual machine or WSL."
        super().__init__(
            f"Ranks run on Roundelay's native core, which {why}. {cure} Without it you can list, "
            f"prove, price and draw algorithms, and run them on the engine reference."
        )


class DoesNotFitError(RoundelayError):
    """No way to train this model fits the memory; the message names the nearest, and what would."""


class NoRoomError(RoundelayError, MemoryError):
    """There is no memory for so many bytes; told to every rank where it is memory that they share.

    >>> print(str(NoRoomError(10**9, 10**6, "empty"))[:78])
    empty: this host has no room for 1000000000 more bytes; 1000000 are available.
    """

    def __init__(self, nbytes: int, available: int | None = None, call: str = "") -> None:
        self.nbytes, self.available = nbytes, available
        has = "" if available is None else f"; {available} are available"
        said = f"{call}: this" if call else "This"
        super().__init__(
            f"{said} host has no room for {nbytes} more bytes{has}. Let go of arrays, those of "
            f"empty() among them, or give the machine or container more memory."
        )


class LimitError(RoundelayError, OSError):
    """A limit on open files, processes or threads is reached; the message says how to raise it."""

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.errno = number


class OtherVersionError(RoundelayError):
    """A running job of another version of the library, which this one can't look at."""


class RendezvousError(RoundelayError):
    """The processes of a job did not find one another; the message names who is missing, or why."""


class RankFailed(RoundelayError):  # noqa: N818 - says what happened
    """A rank raised or died: `rank` says which, `kind` and `message` by what, `traceback` where.

    >>> print(RankFailed(2, "ValueError", "no such layer"))
    rank 2 raised ValueError: no such layer
    >>> print(RankFailed(2, ended="was killed by SIGKILL"))
    rank 2 was killed by SIGKILL
    >>> print(RankFailed(2, "ValueError", "bad row", step=17))  # in training
    rank 2 in step 17 raised ValueError: bad row
    """

    def __init__(
        self,
        rank: int,
        kind: str = "",
        message: str = "",
        *,
        traceback: str = "",
        ended: str = "",
        step: int | None = None,
    ) -> None:
        self.rank, self.kind, self.message, self.traceback = rank, kind, message, traceback
        self.step = step
        who = f"rank {rank}" if step is None else f"rank {rank} in step {step}"
        super().__init__(f"{who} {ended or f'raised {kind}: {message}'}")
        if traceback:
            self.add_note(f"On rank {rank}:\n{traceback.rstrip()}")


class CommunicationError(RoundelayError, RuntimeError):
    """A call that the ranks could not finish together; the group is broken from then on."""

    ended: int | None = None  # the rank of which it tells only that it has ended, or closed


class CollectiveMismatch(CommunicationError):  # noqa: N818 - the public name
    """Ranks made different calls; the message is a table of who called what, where."""


class PeerLost(CommunicationError):  # noqa: N818 - the public name
    """A rank died, failed or left while others needed it."""


class CollectiveTimeout(CommunicationError):  # noqa: N818 - the public name
    """A rank did not come in time, though it is alive as far as anyone can tell."""


class CheckpointError(RoundelayError):
    """A checkpoint that could not be written or read: which file, on which rank, and why."""


class CheckpointMismatch(CheckpointError, InvalidArgumentError):  # noqa: N818 - says what happened
    """A checkpoint of another model or optimizer; the message lists what differs."""

    def __init__(self, path: object, differences: Sequence[str]) -> None:
        self.differences = list(differences)
        super().__init__(
            "\n  ".join([f"The checkpoint {path} is not one of this model:", *self.differences])
            + "\nNothing was loaded. rd.load(…, strict=False) loads what fits."
        )


class NotFiniteError(RoundelayError, ArithmeticError):
    """Raised on every rank when a gradient holds NaN or infinity."""

    def __init__(self, parameters: Sequence[str], ranks: Sequence[int]) -> None:
        most = 5
        shown = ", ".join(parameters[:most])
        more = f" and {len(parameters) - most} more" if len(parameters) > most else ""
        where = f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"
        super().__init__(
            f"The gradients of {shown}{more} are not finite; they came so from {where}. Nothing "
            f"was updated. Look for a loss that is NaN or too large there: a lower learning rate, "
            f"clipping, or bf16 instead of fp16 are the usual cures. If torch's GradScaler skips "
            f"such steps itself, give the strategy check_finite=False."
        )
        self.parameters, self.ranks = list(parameters), list(ranks)
