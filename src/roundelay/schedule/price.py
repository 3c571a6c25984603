"""What a schedule costs, counted: steps, messages, bytes per rank, load per link, seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from roundelay.arguments import whole
from roundelay.errors import InvalidArgumentError, rank_count
from roundelay.schedule.layout import Layout
from roundelay.schedule.schedule import Schedule

__all__ = ["Link", "Network", "Price", "StepPrice", "price"]

#: More than any buffer; what is larger is a slip, and no longer fits the arithmetic of seconds.
MOST_BYTES = 1 << 63


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
    def name(self) -> str:
        """What to call it."""

    @property
    def size(self) -> int:
        """How many ranks it links."""

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
    nbytes = whole("nbytes of price", nbytes, 0, MOST_BYTES)
    lengths = _chunk_bytes(schedule, nbytes, whole("itemsize of price", itemsize, 1))
    routes = None if network is None else _Routes(network, schedule)
    sent, received = [0] * schedule.size, [0] * schedule.size
    steps = []
    for transfers in schedule.steps:
        messages: dict[tuple[int, int], int] = {}
        folded: dict[int, int] = {}
        for _, src, dst, chunk, op in transfers:
            pair, length = (src, dst), lengths[chunk]
            messages[pair] = messages.get(pair, 0) + length
            if op == "reduce":
                folded[dst] = folded.get(dst, 0) + length
        for (src, dst), length in messages.items():
            sent[src] += length
            received[dst] += length
        seconds = (
            None if routes is None else routes.seconds(messages, max(folded.values(), default=0))
        )
        steps.append(StepPrice(len(messages), sum(messages.values()), seconds))
    return Price(
        nbytes=nbytes,
        steps=tuple(steps),
        sent=tuple(sent),
        received=tuple(received),
        links={} if routes is None else routes.loads(),
        network=None if network is None else network.name,
    )


def _chunk_bytes(schedule: Schedule, nbytes: int, itemsize: int) -> list[int]:
    """Return how many bytes every chunk has; refuse what is no whole number of elements."""
    if nbytes % itemsize:
        raise InvalidArgumentError(
            f"price needs nbytes in whole elements, but {nbytes} is no multiple of the itemsize "
            f"{itemsize}. Take {nbytes - nbytes % itemsize}, or itemsize=1."
        )
    if schedule.collective.idempotent:
        return [0] * schedule.chunks
    elements = Layout.even(schedule, nbytes // itemsize).chunk_lengths()
    return [length * itemsize for length in elements]


class _Routes:
    """The links of a network that a schedule uses, numbered, with the bytes that crossed each."""

    def __init__(self, network: Network, schedule: Schedule) -> None:
        if network.size < schedule.size:
            raise InvalidArgumentError(
                f"{schedule.name} runs on {rank_count(schedule.size)}, but the network "
                f"{network.name} has only {network.size}. Take a network of at least "
                f"{rank_count(schedule.size)}."
            )
        self._network = network
        # Links are hashed once per route and not once per message: large schedules stay quick.
        self._numbers: dict[Link, int] = {}
        self._bandwidths: list[float] = []
        self._total: list[int] = []
        self._routes: dict[tuple[int, int], tuple[float, list[int]]] = {}
        # Most algorithms send the same messages step after step.
        self._same: dict[tuple[tuple[tuple[int, int], int], ...], tuple[float, dict[int, int]]] = {}

    def seconds(self, messages: Mapping[tuple[int, int], int], folded: int) -> float:
        """Return the time of one step, and add its bytes to the links."""
        key = tuple(messages.items())
        known = self._same.get(key)
        if known is None:
            known = self._same[key] = self._carry(messages)
        slowest, load = known
        for link, length in load.items():
            self._total[link] += length
        return slowest + folded / self._network.reduce_bandwidth

    def loads(self) -> dict[Link, int]:
        """Return the bytes that crossed every link in use."""
        return {link: self._total[number] for link, number in self._numbers.items()}

    def _carry(self, messages: Mapping[tuple[int, int], int]) -> tuple[float, dict[int, int]]:
        """Return the time of the slowest message, and the bytes on every link."""
        load: dict[int, int] = {}
        for pair, length in messages.items():
            for link in self._route(pair)[1]:
                load[link] = load.get(link, 0) + length
        busy = {link: length / self._bandwidths[link] for link, length in load.items()}
        slowest = 0.0
        for pair in messages:
            latency, links = self._routes[pair]
            slowest = max(slowest, latency + max((busy[link] for link in links), default=0.0))
        return slowest, load

    def _route(self, pair: tuple[int, int]) -> tuple[float, list[int]]:
        known = self._routes.get(pair)
        if known is None:
            route = self._network.route(*pair)
            known = sum(link.latency for link in route), [self._number(link) for link in route]
            self._routes[pair] = known
        return known

    def _number(self, link: Link) -> int:
        number = self._numbers.setdefault(link, len(self._numbers))
        if number == len(self._total):
            self._total.append(0)
            self._bandwidths.append(link.bandwidth)
        return number
