"""What servers that update parameters have in a checkpoint: workers fetch it, and bring it back.

One parameter with its state is one message of plain values and arrays, so that neither side holds
more than one of them twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from roundelay.errors import UnsendableError
from roundelay.training._checkpoint_parts import (
    Part,
    Saved,
    divided,
    named,
    restore_state,
    stretch,
    taken,
)
from roundelay.training._setup import Setup
from roundelay.training._state_tree import beside

if TYPE_CHECKING:
    from roundelay.training._ps_gradients import Updates
    from roundelay.training._ps_layout import Share
    from roundelay.training._ps_line import Line

__all__ = [
    "as_arrays",
    "as_tensors",
    "asked_by",
    "beside_refused",
    "bring",
    "edit",
    "fetch",
    "packed",
    "put_back",
]


def fetch(setup: Setup, line: Line, shares: Sequence[Share], *, dedicated: bool) -> Iterator[Part]:
    """Yield the parameters of the servers that this worker asks, and its share of frozen ones."""
    unknown: list[str] = []
    for place in asked_by(setup, line, dedicated=dedicated):
        for index, message in zip(shares[place].indexes, line.fetch(place), strict=True):
            values, state = _unpacked(message)
            unknown += message["beside"]
            name = setup.parameters[index].name
            yield stretch(name, values, state, 0, values.numel())
    yield from divided(setup, _frozen(setup))
    if unknown:
        raise UnsendableError(beside_refused(unknown))


def beside_refused(keys: Iterable[Any]) -> str:
    """Say that state of no parameter stays where it is."""
    told = ", ".join(dict.fromkeys(str(key) for key in keys))
    return (
        f"The optimizer's state has the key {told}, which is no parameter. Parameter servers that "
        f"update have the state of their own parameters, and can neither be given that nor asked "
        f"for it. Use ParameterServer(update='worker'), or another strategy."
    )


@torch.no_grad()
def bring(
    setup: Setup, line: Line, shares: Sequence[Share], saved: Saved, *, dedicated: bool
) -> None:
    """Have the servers that this worker asks take back theirs; frozen ones are for all workers."""
    messages = {}
    for place in asked_by(
        setup, line, dedicated=dedicated
    ):  # all are read before any server is asked to wait for one
        messages[place] = [_read(setup, saved, index) for index in shares[place].indexes]
    for name, tensor in _frozen(setup).items():
        tensor.copy_(saved.values(name, 0, tensor.numel()).view(tensor.shape))
    for place, listed in messages.items():
        line.bring(place, listed)


def asked_by(setup: Setup, line: Line, *, dedicated: bool) -> list[int]:
    """Return which servers this worker asks: the one on its rank, or its share of all."""
    comm, count = setup.comm, len(line.servers)
    if dedicated:
        return list(range(comm.rank, count, comm.size))
    return [place for place in range(count) if place == line.own_place]


def _frozen(setup: Setup) -> dict[str, torch.Tensor]:
    trained = {one.name for one in setup.parameters}
    return {name: one for name, one in named(setup).items() if name not in trained}


def _read(setup: Setup, saved: Saved, index: int) -> dict[str, Any]:
    one = setup.parameters[index]
    count = one.tensor.numel()
    elements, whole = taken(saved, one.name, 0, count)
    return {
        "values": as_arrays(saved.values(one.name, 0, count).view(one.tensor.shape)),
        "elements": {
            key: as_arrays(value.view(one.tensor.shape)) for key, value in elements.items()
        },
        "whole": {key: as_arrays(value) for key, value in whole.items()},
    }


# ---- at a server


def packed(updates: Updates, number: int) -> dict[str, Any]:
    """Return one parameter with its state as it goes to a worker."""
    tensor = updates.parameters[number]
    state = updates.optimizer.state.get(tensor, {})
    return {
        "values": as_arrays(tensor),
        "elements": {},
        "whole": {key: as_arrays(value) for key, value in state.items()},
        "beside": [str(key) for one in updates.optimizer.all for key in beside(one)],
    }


def put_back(updates: Updates, number: int, message: dict[str, Any]) -> None:
    """Take one parameter with its state from a worker."""
    tensor = updates.parameters[number]
    tensor.copy_(as_tensors(message["values"]))
    restore_state(updates.optimizer, tensor, *taken(_Message(message), "", 0, tensor.numel()))


def edit(updates: Updates, message: dict[str, Any]) -> None:
    """Take elements of one parameter that a worker has written."""
    tensor = updates.parameters[message["number"]]
    where, values = as_tensors(message["where"]), as_tensors(message["values"])
    tensor.copy_(torch.where(where.to(tensor.device), values.to(tensor.device), tensor))


class _Message:
    """A message, as `restore_state` reads a checkpoint."""

    def __init__(self, message: dict[str, Any]) -> None:
        self._message = message

    def values(self, name: str, start: int, stop: int) -> torch.Tensor:  # noqa: ARG002
        """Return the elements, flat."""
        flat: torch.Tensor = as_tensors(self._message["values"]).reshape(-1)
        return flat[start:stop]

    def state(self, name: str, start: int, stop: int) -> dict[str, torch.Tensor]:  # noqa: ARG002
        """Return the state on these elements, flat."""
        elements = self._message["elements"]
        return {key: as_tensors(one).reshape(-1)[start:stop] for key, one in elements.items()}

    def whole_state(self, name: str) -> dict[str, Any]:  # noqa: ARG002
        """Return the state of the whole parameter."""
        return {key: as_tensors(one) for key, one in self._message["whole"].items()}


def _unpacked(message: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    state = {**message["elements"], **message["whole"]}
    return as_tensors(message["values"]), {key: as_tensors(one) for key, one in state.items()}


# ---- tensors as arrays, which go anywhere


ARRAY = {"dtype", "shape", "of"}


def as_arrays(value: Any) -> Any:  # Any: a tensor, a number, or several of them
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        kind = str(value.dtype).removeprefix("torch.")
        return {"dtype": kind, "shape": list(value.shape), "of": flat.view(torch.uint8).numpy()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(as_arrays(one) for one in value)
    if isinstance(value, dict):
        return {key: as_arrays(one) for key, one in value.items()}
    return value


def as_tensors(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() != ARRAY:
        return {key: as_tensors(one) for key, one in value.items()}
    if isinstance(value, dict):
        kind = getattr(torch, value["dtype"])
        if not len(value["of"]):  # an array of nothing has no strides to view it by
            return torch.empty(value["shape"], dtype=kind)
        flat = torch.from_numpy(value["of"].copy()).view(kind)
        return flat.view(value["shape"])
    if isinstance(value, list | tuple):
        return type(value)(as_tensors(one) for one in value)
    return value
