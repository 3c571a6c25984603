"""What servers that update parameters have in a checkpoint: workers fetch it, and bring it back.

One parameter with its state is one message of plain values and arrays, so that neither side holds
more than one of them twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from roundelay.errors import UnsendableError
from roundelay.training._setup import Setup
from roundelay.training.checkpoint.parts import (
    Saved,
    SavedPart,
    divided,
    named,
    restore_state,
    stretch,
    taken,
)
from roundelay.training.optimizer.state_arrays import as_arrays, as_tensors, received, sendable
from roundelay.training.optimizer.state_tree import beside
from roundelay.training.strategies.parameter_server._messages import Kind

if TYPE_CHECKING:
    from roundelay.training.strategies.parameter_server._gradients import Updates
    from roundelay.training.strategies.parameter_server._server_client import ServerClient
    from roundelay.training.strategies.parameter_server.share import Share

__all__ = [
    "asked_by",
    "beside_refused",
    "bring",
    "edit",
    "fetch",
    "packed",
    "put_back",
]


def fetch(
    setup: Setup, client: ServerClient, shares: Sequence[Share], *, dedicated: bool
) -> Iterator[SavedPart]:
    """Yield the parameters of the servers that this worker asks, and its share of frozen ones."""
    unknown: list[str] = []
    refused: list[str] = []
    for place in asked_by(setup, client, dedicated=dedicated):
        for index, message in zip(shares[place].indexes, client.fetch(place), strict=True):
            name = setup.parameters[index].name
            values, state = as_tensors(message["values"]), received(message["state"])
            unknown += message["beside"]
            refused += [f"{name}: {one}" for one in message["refused"]]
            yield stretch(name, values, state, 0, values.numel())
    yield from divided(setup, _frozen(setup))
    if refused:
        raise UnsendableError(refused[0])
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
    setup: Setup, client: ServerClient, shares: Sequence[Share], saved: Saved, *, dedicated: bool
) -> None:
    """Have the servers that this worker asks take back theirs; frozen ones are for all workers."""
    messages = {}
    for place in asked_by(
        setup, client, dedicated=dedicated
    ):  # all are read before any server is asked to wait for one
        messages[place] = [_read(setup, saved, index) for index in shares[place].indexes]
    for name, tensor in _frozen(setup).items():
        tensor.copy_(saved.values(name, 0, tensor.numel()).view(tensor.shape))
    for place, listed in messages.items():
        client.bring(place, Kind.BRING, listed)


def asked_by(setup: Setup, client: ServerClient, *, dedicated: bool) -> list[int]:
    """Return which servers this worker asks: the one on its rank, or its share of all."""
    comm, count = setup.comm, len(client.servers)
    if dedicated:
        return list(range(comm.rank, count, comm.size))
    return [place for place in range(count) if place == client.own_place]


def _frozen(setup: Setup) -> dict[str, torch.Tensor]:
    trained = {parameter.name for parameter in setup.parameters}
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
        "state": sendable(whole, f"the optimizer's state of {one.name}"),
    }


# ---- at a server


def packed(updates: Updates, number: int) -> dict[str, Any]:
    """Return one parameter with its state as it goes to a worker."""
    tensor = updates.parameters[number]
    state, refused = sendable({}, ""), []
    try:
        state = sendable(updates.optimizer.state.get(tensor, {}), "the optimizer's state")
    except UnsendableError as error:  # which the worker raises
        refused = [str(error)]
    return {
        "values": as_arrays(tensor),
        "state": state,
        "refused": refused,
        "beside": [str(key) for optimizer in updates.optimizer.all for key in beside(optimizer)],
    }


def put_back(updates: Updates, number: int, message: dict[str, Any]) -> None:
    """Take one parameter with its state from a worker."""
    tensor = updates.parameters[number]
    tensor.copy_(as_tensors(message["values"]))
    elements = {key: as_tensors(one) for key, one in message["elements"].items()}
    restore_state(updates.optimizer, tensor, elements, received(message["state"]))


def edit(updates: Updates, message: dict[str, Any]) -> None:
    """Take elements of one parameter that a worker has written."""
    tensor = updates.parameters[message["number"]]
    where, values = as_tensors(message["where"]), as_tensors(message["values"])
    tensor.copy_(torch.where(where.to(tensor.device), values.to(tensor.device), tensor))
