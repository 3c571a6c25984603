"""What collectives should exchange, by price of the schedules chosen, and what optimizers keep."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch

from roundelay.algorithms import algorithms
from roundelay.communicator import Communicator, Traffic
from roundelay.schedule import Price, price
from roundelay.training._setup import Setup, in_messages, storage_bytes, written_once
from roundelay.training.optimizer.joined import JoinedOptimizers
from roundelay.training.precision import buffer_dtype, master_dtype
from roundelay.training.shards.shard import Shard
from roundelay.training.strategy import Volume
from roundelay.tuning import default_for

SMALL = 1 << 12  # elements that cost nothing to step on
CORNERS = (4, 8)  # sizes of dims from which larger ones are computed


def exchanged(
    comm: Communicator, collective: str, nbytes: int, *, item: int, root: int = 0
) -> Volume:
    """Return what this rank sends and receives in one call; `nbytes` is the largest buffer's."""
    if comm.size == 1:
        return Volume(calls={collective: 1})
    cost = _priced(collective, comm.size, root, nbytes, item)
    return Volume(cost.sent[comm.rank], cost.received[comm.rank], {collective: 1})


@cache
def _priced(collective: str, size: int, root: int, nbytes: int, item: int) -> Price:
    name = default_for(size).choose(collective, nbytes)
    return price(algorithms.load(name).schedule(size, root), nbytes, itemsize=item)


def add_up(volumes: Iterable[Volume]) -> Volume:
    """Return the sum of several calls."""
    listed = list(volumes)
    calls: Counter[str] = Counter()
    for volume in listed:
        calls.update(volume.calls)
    return Volume(
        sum(volume.sent for volume in listed),
        sum(volume.received for volume in listed),
        dict(calls),
    )


def traffic_of(comm: Communicator, groups: Iterable[Communicator | None]) -> list[Traffic] | None:
    """Return what every rank has exchanged, also in groups that each rank has of its own."""
    counted = comm.traffic()
    if counted is None:
        return None
    for group in groups:
        more = None if group is None else group.traffic()
        if group is None or more is None:
            continue
        if group.size < comm.size:  # every rank knows of its own group alone
            own = more[group.rank]
            every = comm.all_gather(np.array([own.sent, own.received], np.int64))
            more = [Traffic(*one) for one in every.tolist()]
        counted = [Traffic(one.sent + two.sent, one.received + two.received)
                   for one, two in zip(counted, more, strict=True)]  # fmt: skip
    return counted


def model_bytes(setup: Setup, *, but: Collection[int] = ()) -> int:
    """Return what the model's parameters and buffers take, but for some, by id."""
    precision = setup.precision
    total = 0
    for name, one in setup.model.named_parameters():
        if id(one) not in but:
            kind = setup.dtypes[name]
            cast = precision.compute if kind.is_floating_point else None
            total += one.shape.numel() * (cast or kind).itemsize
    seen: set[int] = set()
    for prefix, module in setup.model.named_modules():
        for name, one in module.named_buffers(prefix, recurse=False):
            if id(one) in seen:
                continue
            seen.add(id(one))
            kind = setup.dtypes.get(name, one.dtype)  # of one that has several names
            cast = buffer_dtype(module, precision) if kind.is_floating_point else None
            total += written_once(one).numel() * (cast or kind).itemsize
    return total


def buffers_volume(setup: Setup) -> Volume:
    """Return what it costs to share buffers after a step."""
    buffers = [buffer for buffer in setup.model.buffers() if buffer.numel()]
    listed = []
    if setup.buffers == "mean":
        mean = [buffer for buffer in buffers if buffer.is_floating_point() or buffer.is_complex()]
        kinds = [(written_once(one).numel() * one.itemsize, one) for one in mean]
        listed = [
            exchanged(setup.comm, "all_reduce", nbytes, item=one.itemsize // (1 + one.is_complex()))
            for nbytes, one in kinds
        ]
        buffers = [buffer for buffer in buffers if not any(buffer is other for other in mean)]
    sizes = [(written_once(buffer).numel() * buffer.itemsize, buffer.device) for buffer in buffers]
    listed += [exchanged(setup.comm, "broadcast", nbytes, item=1) for nbytes in in_messages(sizes)]
    return add_up(listed) if setup.comm.size > 1 else Volume()


def state_bytes(
    setup: Setup, shapes: Iterable[tuple[int, Sequence[int], torch.dtype]], only: Collection[int]
) -> int:
    """Return what the optimizers keep for tensors of these parameters once they have stepped.

    Each is the parameter's number, with the shape and dtype of what is stepped on.
    """
    groups, known = setup.optimizer.param_groups, dict[object, int]()
    total = 0
    for index, shape, dtype in shapes:
        if index in only:
            one = setup.parameters[index]
            key = one.group, dtype, tuple(shape)
            if key not in known:
                owner = setup.optimizer.all[one.owner]
                known[key] = _state_of(owner, groups[one.group], torch.Size(shape), dtype)
            total += known[key]
    return total


def state_and_masters(setup: Setup) -> tuple[int, int]:
    """Return what the optimizers keep where they step on whole parameters, and their masters."""
    kinds = [setup.dtypes[parameter.name] for parameter in setup.parameters]
    if setup.precision.mixed:
        kinds = [master_dtype(one) for one in kinds]
    shapes = [tuple(parameter.tensor.shape) for parameter in setup.parameters]
    listed = list(zip(range(len(kinds)), shapes, kinds, strict=True))
    masters = sum(math.prod(shape) * kind.itemsize for _, shape, kind in listed)
    state = state_bytes(setup, listed, setup.stepped_on)
    return state, masters if setup.precision.mixed else 0


# ---- as it is


def held_by(optimizer: JoinedOptimizers) -> list[torch.Tensor]:
    """Return what the optimizers keep now; numbers do not count."""
    kept = [value.piece if isinstance(value, Shard) else value
            for one in optimizer.state.values() for value in one.values()]  # fmt: skip
    return [one for one in kept if isinstance(one, torch.Tensor) and one.dim() > 0]


def held_by_model(setup: Setup) -> int:
    """Count the storages of the model's parameters and buffers."""
    return storage_bytes([*setup.model.parameters(), *setup.model.buffers()])


def _state_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], shape: torch.Size, dtype: torch.dtype
) -> int:
    """Step an optimizer of the same kind on a tensor without memory; count what it keeps."""
    kind = type(optimizer)
    own = getattr(kind, "own_class", kind)
    taken = inspect.signature(own).parameters  # groups also hold what a subclass fixes
    options = {key: value for key, value in group.items() if key in taken and key != "params"}
    try:
        return _kept(own, options, torch.empty(shape, dtype=dtype, device="meta"))
    except Exception:  # noqa: BLE001 - whatever an optimizer raises that looks at values
        if shape.numel() <= SMALL:
            return _kept(own, options, torch.ones(shape, dtype=dtype))
        return _by_corners(shape, lambda one: _kept(own, options, torch.ones(one, dtype=dtype)))


def _by_corners(shape: Sequence[int], count: Callable[[tuple[int, ...]], int]) -> int:
    """Return a count that grows with every dim by itself, from counts of small shapes.

    >>> _by_corners((1000, 50), lambda shape: 8 * sum(shape) + 4 * shape[0] * shape[1])
    208400
    """
    low, high = CORNERS
    total = 0.0
    for corner in product(CORNERS, repeat=len(shape)):
        shares = [(size - low if at == high else high - size) / (high - low)
                  for size, at in zip(shape, corner, strict=True)]  # fmt: skip
        total += math.prod(shares) * count(corner)
    return round(total)


def _kept(own: type, options: dict[str, Any], values: torch.Tensor) -> int:
    sample = torch.nn.Parameter(values)
    small = own([sample], **options)
    grad = torch.zeros_like(values)
    sample.grad = grad.to_sparse(1) if own is torch.optim.SparseAdam else grad
    small.step(lambda: 0.0)  # some take no step without a closure
    state = small.state[sample].values()
    return sum(one.nbytes for one in state if isinstance(one, torch.Tensor) and one.dim() > 0)
