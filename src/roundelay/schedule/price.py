"""What a schedule costs, counted: steps, messages, bytes per rank, load per link, seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from roundelay.errors import InvalidArgumentError
from roundelay.schedule.layout import Layout
from roundelay.schedule.schedule import Schedule

__all__ = ["Link", "Network", "Price", "StepPrice", "price"]


@dataclass(frozen=True, slots=True)
class Link:
    """A one-way connection between two nodes: ranks by number, switches by name."""

    src: int | str
    dst: int | str
    latency: float  # seconds (alpha)
    bandwidth: float  # bytes per second (1 / beta)

    def __str__(self) -> str:
        return f"{self.src}→{self.dst}"


class Network(Protocol):
    """What pricing needs to know of a network; layer 3 has them by name."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def reduce_bandwidth(self) -> float:
        """Bytes per second that one rank can fold (1 / gamma)."""

    def route(self, src: int, dst: int) -> Sequence[Link]:
        """Return the links that a message from `src` to `dst` crosses."""


@dataclass(frozen=True, slots=True)
class StepPrice:
    """What one step costs; equal (step, src, dst) is one message."""

    messages: int
    nbytes: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Price:
    """What a schedule costs for `nbytes`, the largest buffer that a rank passes in or gets back."""

    nbytes: int
    steps: tuple[StepPrice, ...]
    sent: tuple[int, ...]  # bytes, by rank
    received: tuple[int, ...]
    links: Mapping[Link, int]  # bytes; empty without a network
    network: str | None

    @property
    def messages(self) -> int:
        """All messages of all steps."""
        return sum(step.messages for step in self.steps)

    @property
    def seconds(self) -> float | None:
        """The sum over the steps, or None without a network."""
        if self.network is None:
            return None
        return sum(step.seconds or 0.0 for step in self.steps)


def price(
    schedule: Schedule,
    nbytes: int = 1 << 20,
    *,
    itemsize: int = 4,
    network: Network | None = None,
) -> Price:
    """Price a schedule for buffers of `nbytes`, in elements of `itemsize`, on a network if given.

    A step takes as long as its slowest message: the latencies along its route, plus the time its
    busiest link needs for all bytes that cross it in this step; plus the time the busiest rank
    needs to fold what it received. Barriers carry no bytes.

    >>> from roundelay.algorithms import algorithms
    >>> ring = price(algorithms.load("all_reduce_ring").schedule(4), nbytes=4096)
    >>> len(ring.steps), ring.sent[0], ring.seconds
    (6, 6144, None)
    """
    raise NotImplementedError
