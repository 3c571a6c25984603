"""ZeRO: each rank owns a shard of the optimizer's state, of gradients, of parameters."""

from __future__ import annotations

from roundelay.view.training_step.lanes import ABSENT, NEW, OWN, THERE, StepLanes

__all__ = ["play_zero"]


def play_zero(lanes: StepLanes, stage: int) -> None:
    """Play a step: gradients are reduce-scattered, each rank steps on its shard."""
    for rank in lanes.ranks:
        lanes.hold(0.0, rank, "optimizer", lanes.units, lanes.shard(rank, THERE))
    if stage == 3 and lanes.size > 1:  # noqa: PLR2004 - a stage
        _units(lanes)
    else:
        _buckets(lanes, stage)


def _buckets(lanes: StepLanes, stage: int) -> None:
    for rank in lanes.ranks:
        lanes.hold(0.0, rank, "parameters", lanes.units, lanes.whole(THERE))
        lanes.compute(rank, "forward", lanes.units)
    over = 0.0
    for number, bucket in enumerate(lanes.sizes.buckets):
        for rank in lanes.ranks:
            for unit in bucket:
                end = lanes.compute(rank, "backward", (unit,))
                lanes.hold(end, rank, "gradients", (unit,), lanes.whole(OWN))
        over = lanes.together("reduce_scatter", "gradients", bucket, lanes.cursor, number)
        for rank in lanes.ranks:  # stage 1 keeps the memory of the rest
            rest = lanes.shard(rank, THERE, OWN if stage == 1 else ABSENT)
            lanes.hold(over, rank, "gradients", bucket, rest)
    _step(lanes, over)
    for number, bucket in enumerate(lanes.sizes.buckets):
        over = lanes.together("all_gather", "parameters", bucket, lanes.cursor, number)
        for rank in lanes.ranks:
            lanes.hold(over, rank, "parameters", bucket, lanes.whole(NEW))
    late = lanes.waited_for()
    for rank in lanes.ranks:
        lanes.wait(rank, over, late[rank])


def _units(lanes: StepLanes) -> None:
    """Play stage 3: a layer is gathered before it computes, the next one meanwhile."""
    for rank in lanes.ranks:
        lanes.hold(0.0, rank, "parameters", lanes.units, lanes.shard(rank, THERE))
    over = _pass(lanes, "forward", list(lanes.units), 0.0)
    over = _pass(lanes, "backward", list(reversed(lanes.units)), over)
    _step(lanes, over)


def _pass(lanes: StepLanes, kind: str, order: list[int], over: float) -> float:
    gathered = {order[0]: _gather(lanes, order[0], list(lanes.cursor))}
    for place, unit in enumerate(order):
        late = lanes.waited_for()
        starts = [max(at, gathered[unit]) for at in lanes.cursor]
        if place + 1 < len(order):  # asked for when this one begins to compute
            gathered[order[place + 1]] = _gather(lanes, order[place + 1], starts)
        for rank in lanes.ranks:
            end = lanes.compute(rank, kind, (unit,), after=gathered[unit], last=late[rank])
            lanes.hold(end, rank, "parameters", (unit,), lanes.shard(rank, THERE))
            if kind == "backward":
                lanes.hold(end, rank, "gradients", (unit,), lanes.whole(OWN))
        if kind == "backward":
            over = lanes.together("reduce_scatter", "gradients", (unit,), lanes.cursor, unit)
            for rank in lanes.ranks:
                lanes.hold(over, rank, "gradients", (unit,), lanes.shard(rank, THERE))
    return over


def _gather(lanes: StepLanes, unit: int, asked: list[float]) -> float:
    over = lanes.together("all_gather", "parameters", (unit,), asked, unit)
    for rank in lanes.ranks:
        lanes.hold(over, rank, "parameters", (unit,), lanes.whole(THERE))
    return over


def _step(lanes: StepLanes, over: float) -> None:
    """Let each rank update its own shard."""
    late = lanes.waited_for()
    rest = ABSENT if lanes.sizes.choices.strategy == "zero3" and lanes.size > 1 else THERE
    for rank in lanes.ranks:
        end = lanes.compute(rank, "step", lanes.units, after=over, last=late[rank])
        lanes.hold(end, rank, "parameters", lanes.units, lanes.shard(rank, NEW, rest))
