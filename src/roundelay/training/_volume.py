"""What collectives should exchange, by price of the schedules chosen, and what optimizers keep."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

from roundelay.algorithms import algorithms
from roundelay.communicator import Communicator
from roundelay.schedule import Price, price
from roundelay.training._strategy import Volume
from roundelay.tuning import default_for

__all__ = ["add_up", "exchanged", "state_bytes"]


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


def state_bytes(optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor]) -> int:
    """Return what the optimizer keeps for these tensors once it has stepped on all of them."""
    total = 0
    groups = {id(one): group for group in optimizer.param_groups for one in group["params"]}
    known: dict[tuple[int, torch.dtype], float] = {}
    for tensor in tensors:
        group = groups.get(id(tensor), optimizer.param_groups[0])
        key = id(group), tensor.dtype
        if key not in known:
            known[key] = _state_per_element(optimizer, group, tensor.dtype)
        total += round(known[key] * tensor.numel())
    return total


def _state_per_element(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], dtype: torch.dtype
) -> float:
    """Step a tiny optimizer of the same kind and look at what it keeps."""
    kind = type(optimizer)
    own = getattr(kind, "own_class", kind)
    taken = inspect.signature(own).parameters  # groups also hold what a subclass fixes
    options = {key: value for key, value in group.items() if key in taken and key != "params"}
    sample = torch.nn.Parameter(torch.ones(8, 8, dtype=dtype))
    small = own([sample], **options)
    sample.grad = torch.zeros_like(sample)
    small.step(lambda: 0.0)  # some take no step without a closure
    state = small.state[sample].values()
    held = sum(v.nbytes for v in state if isinstance(v, torch.Tensor) and v.dim() > 0)
    return float(held / sample.numel())
