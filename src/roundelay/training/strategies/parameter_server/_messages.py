"""What workers and servers say to each other: control words of fixed length, then plain data.

A control word is one array of float64. The data that goes with it are buffers of tensors, whose
lengths both sides know from the model; nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from roundelay import errors
from roundelay.errors import NotFiniteError, PeerLost, RoundelayError
from roundelay.reductions import Array

#: Tags.
REQUEST, REPLY, TEXT, GOODBYE, DATA = 0, 1, 2, 3, 16
FACTORS = 4  # by which gradients may be multiplied, one after the other
HEAD = 7


class Kind(IntEnum):
    """What a worker asks for."""

    PUSH = 1  # together: bring gradients, have the aggregate made
    STEP = 2  # together: have the optimizer step on the aggregate, and take the parameters
    APPLY = 3  # alone: bring gradients, have them applied at once, and take the parameters
    PULL = 4  # take the parameters
    NORM = 5  # together: the norm of each aggregate
    COUNT = 6  # how many gradients of each worker were applied
    FAIL = 7  # this worker can't go on; nobody shall
    BYE = 8  # and wait until all others have said so
    FETCH = 9  # take all parameters with their state, for a checkpoint
    BRING = 10  # bring them back
    CLAMP = 12  # together: cut every element of the aggregates
    EDIT = 13  # bring elements of parameters that the user has written
    REST = 11  # don't wait for this worker until it takes parameters again
    MEET = 14  # wait for all workers that are still here, and hear which these are


class Status(IntEnum):
    """What a server answers."""

    DONE = 0
    FAILED = 1  # a text says why


@dataclass(slots=True)
class ServerRequest:
    """What a worker asks one server."""

    kind: int
    number: int = 0  # of this worker's pushes
    version: int = 0  # of the parameters that the gradients were computed on
    weighed: bool = False  # whether a sum is wanted in place of a mean
    norm_type: float = 2.0
    length: int = 0  # of a text that follows
    place: int = 0  # of the optimizer that steps
    factors: Sequence[float] = ()
    scales: Sequence[float] = ()  # by which the gradient of each parameter is multiplied
    used: Sequence[float] = ()  # which parameters have a gradient
    options: Sequence[float] = ()  # of the optimizer's groups

    @staticmethod
    def room(parameters: int, options: int) -> int:
        """How long the word is, for a server with so many parameters."""
        return HEAD + FACTORS + 2 * parameters + options

    def write(self, word: Array, parameters: int) -> None:
        """Put all of it into a word."""
        word[:HEAD] = (self.kind, self.number, self.version, self.weighed, self.norm_type,
                       self.length, self.place)  # fmt: skip
        word[HEAD:] = 0.0
        rest = word[HEAD:]
        rest[:FACTORS] = 1.0
        factors = list(self.factors)
        if len(factors) > FACTORS:
            factors[FACTORS - 1 :] = [float(np.prod(factors[FACTORS - 1 :]))]
        rest[: len(factors)] = factors
        rest = rest[FACTORS:]
        rest[: len(self.used)] = self.used
        rest[parameters : 2 * parameters] = self.scales or 1.0
        if len(self.options):
            rest[2 * parameters :] = self.options

    @classmethod
    def read(cls, word: Array, parameters: int) -> ServerRequest:
        """Return what a word says."""
        kind, number, version, weighed, norm_type, length, place = word[:HEAD].tolist()
        factors, rest = word[HEAD:].tolist()[:FACTORS], word[HEAD + FACTORS :].tolist()
        return cls(
            int(kind), int(number), int(version), bool(weighed), norm_type, int(length), int(place),
            factors=[factor for factor in factors if factor != 1.0],
            scales=rest[parameters : 2 * parameters],
            used=rest[:parameters],
            options=rest[2 * parameters :],
        )  # fmt: skip


@dataclass(slots=True)
class ServerReply:
    """What a server answers."""

    status: int = Status.DONE
    version: int = 0
    staleness: int = 0
    length: int = 0  # of a text that follows
    values: Sequence[float] = field(default_factory=list)

    @staticmethod
    def room(parameters: int, workers: int) -> int:
        """How long the word is."""
        return 4 + max(parameters, workers)

    def write(self, word: Array) -> None:
        """Put all of it into a word."""
        word[:] = 0.0
        word[:4] = self.status, self.version, self.staleness, self.length
        word[4 : 4 + len(self.values)] = self.values

    @classmethod
    def read(cls, word: Array) -> ServerReply:
        """Return what a word says."""
        status, version, staleness, length = word[:4].tolist()
        return cls(int(status), int(version), int(staleness), int(length), word[4:].tolist())


def as_text(error: BaseException) -> Array:
    """Return an error as bytes that every rank can make the same error of."""
    words = [type(error).__name__, str(error)]
    if isinstance(error, NotFiniteError):
        words = [type(error).__name__, " ".join(map(str, error.ranks)), *error.parameters]
    return np.frombuffer("\n".join(words).encode(), np.uint8)


def as_error(text: Array, server: int) -> RoundelayError:
    """Return the error that a server tells of; one of the user's own code as `PeerLost`."""
    name, first, *more = [*text.tobytes().decode().split("\n"), ""]
    if name == NotFiniteError.__name__:
        return NotFiniteError(more[:-1], [int(rank) for rank in first.split()])
    message = "\n".join([first, *more[:-1]])
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, RoundelayError):
        made = kind.__new__(kind)
        made.args = (message,)
        return made
    return PeerLost(f"The parameter server on rank {server} failed: {name}: {message}")
