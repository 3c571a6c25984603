"""DDP: the whole model on every rank; buckets of gradients are all-reduced during backward."""

from __future__ import annotations

from roundelay.view.training_step.lanes import NEW, OWN, THERE, StepLanes

__all__ = ["play_ddp"]


def play_ddp(lanes: StepLanes) -> None:
    """Play a step: a bucket travels as soon as all ranks have filled it."""
    for rank in lanes.ranks:
        for part in ("parameters", "optimizer"):
            lanes.hold(0.0, rank, part, lanes.units, THERE)
        lanes.compute(rank, "forward", lanes.units)
    over = 0.0
    for number, bucket in enumerate(lanes.sizes.buckets):
        asked = [_backward(lanes, rank, bucket) for rank in lanes.ranks]
        over = lanes.together("all_reduce", "gradients", bucket, asked, number)
        for rank in lanes.ranks:
            lanes.hold(over, rank, "gradients", bucket, THERE)
    late = lanes.waited_for()
    for rank in lanes.ranks:
        end = lanes.compute(rank, "step", lanes.units, after=over, last=late[rank])
        lanes.hold(end, rank, "parameters", lanes.units, NEW)


def _backward(lanes: StepLanes, rank: int, bucket: tuple[int, ...]) -> float:
    """Compute the gradients of a bucket, layer by layer; return when it is full."""
    for unit in bucket:
        lanes.hold(lanes.compute(rank, "backward", (unit,)), rank, "gradients", (unit,), OWN)
    return lanes.cursor[rank]
