"""Gradients side by side in a few long buffers, so that each is one message."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from roundelay.communicator import Communicator
from roundelay.planning.rows import runs

#: Bytes of a bucket: what a CPU's cache holds; on a device, what keeps it busy for a while.
ON_CPU, ON_DEVICE = 8 << 20, 32 << 20


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """Where one parameter's gradient lies."""

    index: int  # of the parameter
    start: int  # in its bucket
    shape: tuple[int, ...]
    numel: int = field(init=False, repr=False)
    stride: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sizes = [max(1, one) for one in self.shape]
        steps = tuple(math.prod(sizes[at + 1 :]) for at in range(len(sizes)))
        object.__setattr__(self, "numel", math.prod(self.shape))
        object.__setattr__(self, "stride", steps)

    def view(self, row: torch.Tensor) -> torch.Tensor:
        """Return what lies there in a row, in a call: slices of tensors are slow to make."""
        return row.as_strided(self.shape, self.stride, int(row.storage_offset()) + self.start)


def bucket_limit(chosen: int | None, tensors: Sequence[torch.Tensor]) -> int:
    """Return how many bytes a bucket may have, where the user has not said so.

    >>> [bucket_limit(None, [torch.empty(3, device=one)]) >> 20 for one in ("cpu", "meta")]
    [8, 32]
    """
    if chosen is not None:
        return chosen
    return ON_CPU if all(tensor.device.type == "cpu" for tensor in tensors) else ON_DEVICE


class Bucket:
    """The gradients of some parameters, one after the other in memory that all ranks reach."""

    def __init__(self, flat: torch.Tensor, places: Sequence[BucketPlace]) -> None:
        self.flat = flat
        self.places = list(places)
        self.missing = {place.index for place in places}

    def view(self, place: BucketPlace) -> torch.Tensor:
        """Return one gradient where it lies."""
        return place.view(self.flat)

    def expect_all(self) -> None:
        """Begin another backward pass."""
        self.missing = {place.index for place in self.places}


def make_buckets(
    comm: Communicator,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    *,
    order: Sequence[int],
    most_bytes: int,
    apart: Collection[int] = (),
    apart_comm: Communicator | None = None,
) -> list[Bucket]:
    """Cut the gradients, in this order, into buckets of one dtype and about so many bytes.

    Those that are `apart` have buckets of their own, which fewer ranks share.
    """
    kinds = [dtypes[index] for index in order]
    keys = [(dtypes[index], index in apart) for index in order]
    sizes = [math.prod(shapes[index]) * dtypes[index].itemsize for index in order]
    buckets = []
    for run in runs(keys, sizes, most=most_bytes):
        places, start = [], 0
        for index in (order[at] for at in run):
            places.append(BucketPlace(index, start, tuple(shapes[index])))
            start += math.prod(shapes[index])
        ranks = comm if apart_comm is None or order[run[0]] not in apart else apart_comm
        buckets.append(Bucket(shared_tensor(ranks, start, kinds[run[0]], device), places))
    return buckets


def shared_tensor(
    comm: Communicator, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return memory where collectives need no copy: in the arena, or on the device."""
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    memory = torch.from_numpy(comm.empty(numel * dtype.itemsize, "uint8"))
    return memory.view(dtype).zero_()


def divide(nbytes: Sequence[int], parts: int) -> list[list[int]]:
    """Divide whole items between parts as evenly as the largest ones allow.

    The largest item goes first, each to the part that has the least so far.

    >>> divide([100, 10, 60, 50, 10], 2)
    [[0, 1, 4], [2, 3]]
    """
    given: list[list[int]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for item in sorted(range(len(nbytes)), key=lambda item: (-nbytes[item], item)):
        part = min(range(parts), key=lambda part: (filled[part], part))
        given[part].append(item)
        filled[part] += nbytes[item]
    return [sorted(items) for items in given]
