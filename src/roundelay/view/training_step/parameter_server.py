"""Parameter server: workers push gradients to rank 0 and pull; together, or each by itself."""

from __future__ import annotations

import heapq

from roundelay.planning.clock import Clock
from roundelay.view.training_step.choices import SLOWNESS
from roundelay.view.training_step.lanes import ABSENT, NEW, OWN, THERE, LaneSpan, StepLanes

__all__ = ["SERVER", "play_alone", "play_together", "rounds_of"]

SERVER = 0  # the rank that is the server, too
ROUNDS = 2  # steps of a worker, where all are equally fast


def play_together(lanes: StepLanes) -> None:
    """Play a synchronous step: the server waits for all, adds up and answers; workers step."""
    message = lanes.layers * lanes.sizes.unit * lanes.sizes.width.gradient
    for rank in lanes.ranks:
        for part in ("parameters", "optimizer"):
            lanes.hold(0.0, rank, part, lanes.units, THERE)
        _compute(lanes, rank)
    late, free = lanes.waited_for(), 0.0
    for rank in sorted(lanes.ranks, key=lambda one: (lanes.cursor[one], one)):
        start = max(lanes.cursor[rank], free) if rank != SERVER else lanes.cursor[rank]
        end = _carry(lanes, "push", rank, start, message)
        free = max(free, end)
    arrived = free
    for rank in lanes.ranks:
        end = _carry(lanes, "pull", rank, free, message)
        lanes.hold(end, rank, "gradients", lanes.units, THERE)
        lanes.wait(rank, arrived, late[rank])
        over = lanes.compute(rank, "step", lanes.units, after=end)
        lanes.hold(over, rank, "parameters", lanes.units, NEW)
        free = end


def rounds_of(lanes: StepLanes) -> list[int]:
    """Return how many steps are shown of each worker: a slow one has one while others go on."""
    choices = lanes.sizes.choices
    if choices.straggler is None:
        return [ROUNDS] * lanes.size
    quick = SLOWNESS
    if choices.strategy == "ps-ssp":  # then the bound lets nobody on
        quick = min(quick, 1 + choices.staleness)
    return [1 if rank == choices.straggler else quick for rank in lanes.ranks]


def play_alone(lanes: StepLanes) -> None:
    """Play asynchronous steps: the server applies each gradient as it comes, and answers it.

    With a bound on staleness the answer waits while its worker is too far ahead of the slowest.
    """
    choices, width = lanes.sizes.choices, lanes.sizes.width
    numel = lanes.layers * lanes.sizes.unit
    clock = Clock(lanes.ranks, choices.staleness if choices.strategy == "ps-ssp" else None)
    has, left, version = [0] * lanes.size, rounds_of(lanes), 0
    waiting: list[tuple[float, int]] = []
    free = 0.0
    for rank in lanes.ranks:
        parts = ("parameters", "optimizer") if rank == SERVER else ("parameters",)
        for part in parts:
            lanes.hold(0.0, rank, part, lanes.units, THERE)
    lanes.versions = [(0.0, rank, 0) for rank in (-1, *lanes.ranks)]
    ready = [(_compute(lanes, rank), rank) for rank in lanes.ranks]
    heapq.heapify(ready)
    while ready:
        at, rank = heapq.heappop(ready)
        stale, version = version - has[rank], version + 1
        came = _carry(lanes, "push", rank, max(at, free), numel * width.gradient, version, stale)
        free = came + lanes.each["step"]
        lanes.spans.append(LaneSpan(SERVER, "server", "step", tuple(lanes.units), came, free))
        lanes.versions.append((free, -1, version))
        clock.tick(rank)
        waiting.append((came, rank))
        for place in [one for one in waiting if clock.may_go_on(one[1])]:
            waiting.remove(place)
            _, worker = place
            late = rank if worker != rank else -1
            lanes.wait(worker, free, late)
            free = _carry(lanes, "pull", worker, free, numel * width.updated, version)
            has[worker] = version
            lanes.wait(worker, free)
            lanes.versions.append((free, worker, version))
            lanes.hold(free, worker, "parameters", lanes.units, NEW)
            left[worker] -= 1
            if left[worker]:
                lanes.hold(free, worker, "gradients", lanes.units, ABSENT)
                heapq.heappush(ready, (_compute(lanes, worker), worker))


def _compute(lanes: StepLanes, rank: int) -> float:
    """Let a worker do both passes on its part of the batch."""
    lanes.compute(rank, "forward", lanes.units)
    end = lanes.compute(rank, "backward", lanes.units)
    lanes.hold(end, rank, "gradients", lanes.units, OWN)
    return end


def _carry(
    lanes: StepLanes, kind: str, rank: int, start: float, nbytes: int, version: int = 0,
    stale: int = 0,
) -> float:  # fmt: skip
    """Carry a message between a worker and the server, one at a time."""
    src, dst = (rank, SERVER) if kind == "push" else (SERVER, rank)
    end = lanes.message(kind, src, dst, nbytes, start, version=version, stale=stale)
    if rank != SERVER:
        for lane, where in (("network", rank), ("server", SERVER)):
            lanes.spans.append(LaneSpan(where, lane, kind, tuple(lanes.units), start, end))
    return end
