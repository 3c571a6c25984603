"""Models, optimizers and objects brought to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from roundelay.arguments import index_of, shown
from roundelay.errors import InvalidArgumentError, UnsendableError
from roundelay.fronts.horovod.basics import ProcessSet, global_process_set
from roundelay.fronts.horovod.session import current
from roundelay.fronts.horovod.torch.collectives import (
    allgather_async,
    broadcast_async_,
    synchronize,
)
from roundelay.processes.wire import decode, encode

__all__ = [
    "allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters",
]  # fmt: skip


def broadcast_parameters(
    params: Any,  # a dict of tensors; or tensors, or pairs with their names
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Fill tensors with the root's: a state_dict, `model.named_parameters()`, or a list of them."""
    pairs: list[tuple[Any, ...]] = [()]
    if isinstance(params, dict):
        pairs = sorted(params.items(), key=lambda pair: str(pair[0]))
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
        pairs = [one if isinstance(one, tuple) else (None, one) for one in params]
    if any(len(pair) != 2 for pair in pairs):  # noqa: PLR2004 - a pair
        raise InvalidArgumentError(
            f"hvd.broadcast_parameters takes a dict or a list of tensors, or pairs of a name and "
            f"a tensor, not {shown(params)}."
        )
    for name, one in pairs:
        if one is not None and not isinstance(one, torch.Tensor):
            at = "" if name is None else f" under {shown(name)}"
            raise InvalidArgumentError(
                f"hvd.broadcast_parameters fills tensors, and can't change {shown(one)}{at}. Take "
                f"what hvd.broadcast_object returns for it."
            )
    begun = [
        broadcast_async_(tensor, root_rank, None if name is None else str(name), process_set)
        for name, tensor in pairs
        if tensor is not None
    ]
    for handle in begun:
        synchronize(handle)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on every rank of the process set; it is pickled."""
    name = name or "broadcast_object"
    session = current("broadcast_object()")
    members = session.members(process_set)
    if index_of(root_rank) not in members:
        raise InvalidArgumentError(
            f"hvd.broadcast_object has no root_rank {shown(root_rank)}: the process set has ranks "
            f"{list(members)}."
        )
    here = session.rank == root_rank
    data = _packed(obj) if here else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(data)])
    synchronize(broadcast_async_(length, root_rank, f"{name}.size", process_set))
    if not here:
        data = torch.empty(int(length), dtype=torch.uint8)
    synchronize(broadcast_async_(data, root_rank, f"{name}.bytes", process_set))
    return obj if here else _unpacked(data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return everybody's object, in the order of ranks; they are pickled."""
    name = name or "allgather_object"
    data = _packed(obj)
    sizes = synchronize(allgather_async(torch.tensor([len(data)]), f"{name}.size", process_set))
    joined = synchronize(allgather_async(data, f"{name}.bytes", process_set))
    return [_unpacked(part) for part in joined.split(sizes.tolist())]


def _packed(obj: Any) -> torch.Tensor:
    try:
        data = encode(obj, allow_pickle=True)
    except Exception as error:  # noqa: BLE001 - pickling runs code of the object
        told = f"hvd can't send {shown(obj)}, which pickle refuses: {error}."
        raise UnsendableError(told) from None
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Any:
    return decode(data.numpy().tobytes(), allow_pickle=True)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank's optimizer the options and the state of the root's.

    The root may have stepped, as after loading a checkpoint, where others have not. `model` is
    not needed: which state there is, the root says.
    """
    del model
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"hvd.broadcast_optimizer_state takes an optimizer of torch, not {shown(optimizer)}."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgumentError(
            "hvd.broadcast_optimizer_state can't take torch.optim.LBFGS, whose state is lists and "
            "functions. Broadcast its state_dict() by hvd.broadcast_object."
        )
    here = current("broadcast_optimizer_state()").rank == root_rank
    state = optimizer.state_dict()
    if not state["state"]:  # where nothing has stepped, Horovod leaves gradients of zeros
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = torch.zeros_like(p) if p.requires_grad and p.grad is None else p.grad
    tensors: list[torch.Tensor] = []
    skeleton = _without_tensors(state, tensors) if here else None
    skeleton, kinds = broadcast_object(
        (skeleton, [(tuple(t.shape), t.dtype, t.device.type) for t in tensors]), root_rank
    )
    if not here:
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype, _ in kinds]
    named = [(f"optimizer.{number}", tensor) for number, tensor in enumerate(tensors)]
    broadcast_parameters(named, root_rank)
    if not here:
        devices = [kind for *_, kind in kinds]
        _take(optimizer, skeleton, tensors, devices)


def _take(
    optimizer: torch.optim.Optimizer,
    skeleton: Any,
    tensors: list[torch.Tensor],
    devices: list[str],
) -> None:
    """Give an optimizer a state as it is: torch's own way in casts what it finds."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.state.clear()
    for number, state in skeleton["state"].items():
        there = params[number].device

        def take(at: int, there: torch.device = there) -> torch.Tensor:
            return tensors[at] if devices[at] == "cpu" else tensors[at].to(there)

        optimizer.state[params[number]] = _with_tensors(state, take)
    for group, options in zip(optimizer.param_groups, skeleton["param_groups"], strict=True):
        own = _with_tensors(options, tensors.__getitem__)
        group.update({key: value for key, value in own.items() if key != "params"})


class TensorAt:
    """The place of a tensor in what is sent without its tensors."""

    def __init__(self, number: int) -> None:
        self.number = number


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return TensorAt(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _without_tensors(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(item, tensors) for item in value)
    return value


def _with_tensors(value: Any, take: Callable[[int], torch.Tensor]) -> Any:
    if isinstance(value, TensorAt):
        return take(value.number)
    if isinstance(value, dict):
        return {key: _with_tensors(item, take) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(item, take) for item in value)
    return value
