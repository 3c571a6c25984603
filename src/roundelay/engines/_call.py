"""What goes over the seam: calls and messages of one rank, and what is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from roundelay.collectives import collectives
from roundelay.reductions import Array

if TYPE_CHECKING:
    from roundelay.engines._call_signature import CallSignature

#: From here on tags belong to parts of larger messages, which "any tag" never takes.
INNER_TAGS = 1 << 62

#: By name; the native core hands the numbers on, and knows nothing else of them.
COLLECTIVES = {name: number for number, name in enumerate(collectives.names())}

#: Beside the root, where blocks are joined along the first dimension.
AXIS = 1 << 30

#: Calls whose float32 can travel as something smaller, and as what.
WIRED = ("all_gather", "all_reduce", "reduce_scatter")
WIRES = ("bf16",)


def wire_name(collective: str, wire: str) -> str:
    """Return what a call is to others that travels as something else than it is of.

    >>> wire_name("all_reduce", "bf16")
    'all_reduce wire=bf16'
    """
    return f"{collective} wire={wire}"


#: How a rank ends its calls: by `close`, by the end of its function or script, by letting go; and
#: by `close` while an exception was under way, which Ctrl-C raised where it was cancelled.
ENDINGS = ("closed", "returned", "script", "dropped", "raised", "cancelled")


@dataclass(slots=True)
class CollectiveCall:
    """One collective call of one rank, ready to run."""

    collective: str
    dtype: str
    item: int  # bytes of one element
    count: int  # elements of one block, where all are equal
    nbytes: int  # of the largest buffer of any rank
    finish: Callable[[], Any]  # makes the result once the data has come
    input: Array | None = None  # contiguous
    output: Array | None = None
    op: str = "sum"
    root: int = 0
    counts: Sequence[int] = ()  # elements of every block, where they differ
    label: int = 0  # what the caller knows it by; ranks that differ in it made different calls
    axis: bool = False  # whether blocks are joined along the first dimension, not stacked
    part_of: str = ""  # what the user called, where this is but a part of it
    custom_op: str = ""  # which reduction of the user's own is to fold what comes
    signature: CallSignature | None = None  # of the user's call, where this is a part of it
    wide: bool = False  # the caller's buffers are float32, and what travels is of `dtype`


@dataclass(slots=True)
class MessageCall:
    """One message that a rank sends, or waits for.

    The memory belongs to the engine until the request is done. Without `background` the caller
    waits for it next, so that it need not go on by itself.
    """

    data: Array  # flat
    dtype: str
    other: int | None  # the rank at the other end; None is any
    tag: int | None  # None is any below `INNER_TAGS`
    sends: bool
    background: bool = True


@dataclass(slots=True)
class OwnedMemory:
    """Memory that an object of Python's has and lets go of, as a whole, when it goes."""

    name: str  # as the user knows it
    address: int
    nbytes: int
    owner: Any  # an array, or a storage of torch's
    may_move: bool  # whether the owner may get other memory while it lives


class Arena(Protocol):
    """Memory of a host that all its ranks reach, and into which arrays can move."""

    def holds(self, address: int, nbytes: int) -> bool:
        """Tell whether this memory lies there."""

    def move_in(self, memories: Sequence[OwnedMemory]) -> None:
        """Move memory there, which keeps its address; all of it or none. Other ranks need not."""

    def move_out(self, memories: Sequence[OwnedMemory]) -> int:
        """Give it pages of its own again; return how many bytes had none."""

    def numpy_handler(self, least: int) -> object:
        """Return where numpy takes memory from, for arrays of at least so many bytes there."""


#: Takes a collective by its place in the alphabetical list, what goes in, what comes out, a
#: reduction by its place in `REDUCTIONS`, and the root. What it refuses comes again, built.
FastPath = Callable[[int, Any, Any, int, int], bool]


def no_fast_path(*_: object) -> bool:
    """Refuse every call, so that all take the long way."""
    return False


def tag_fits(wanted: int | None, tag: int) -> bool:
    """Tell whether a message with the tag `tag` is one that was asked for.

    >>> tag_fits(None, 7), tag_fits(None, INNER_TAGS), tag_fits(INNER_TAGS, INNER_TAGS)
    (True, False, True)
    """
    return wanted == tag or (wanted is None and tag < INNER_TAGS)


def divide(array: Array, by: int) -> None:
    """Make a sum of floats or complex numbers the mean; a complex one as the two reals it is.

    >>> total = np.array([3.0 + 1.5j])
    >>> divide(total, 3)
    >>> total
    array([1.+0.5j])
    """
    real = array.reshape(-1).view(array.real.dtype)
    np.divide(real, real.dtype.type(by), out=real)


class Request(Protocol):
    """Something under way."""

    def done(self) -> bool:
        """Tell whether `wait` would return at once."""

    def wait(self) -> None:
        """Return when the call is done, or raise what went wrong."""


#: Who sent what has come: the rank, the tag, the number of bytes and the dtype.
Status = tuple[int, int, int, str]


class MessageRequest(Request, Protocol):
    """A message under way."""

    def status(self) -> Status:
        """Say who sent what has come."""
