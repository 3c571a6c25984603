"""What every strategy starts from: one model, one optimizer, and ranks that agree on both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, InvalidArgumentError
from roundelay.training.precision import Precision
from roundelay.training.scaler import Scaler

__all__ = [
    "Parameter",
    "Setup",
    "Weights",
    "agree",
    "find_parameters",
    "send_from_first",
    "storage_bytes",
]

SHOWN = 5  # names that a message lists


@dataclass(slots=True)
class Parameter:
    """A parameter that is trained, under every name that the model has for it."""

    names: tuple[str, ...]
    tensor: torch.nn.Parameter
    group: int  # the optimizer's parameter group

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]


@dataclass(slots=True)
class Weights:
    """How much the losses of this step weigh on this rank, where `backward` was told."""

    total: float = 0.0
    used: bool = False

    def clear(self) -> None:
        """Begin another step."""
        self.total, self.used = 0.0, False


@dataclass(slots=True)
class Setup:
    """A model and its optimizer on one rank, with the ranks that train it together."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    comm: Communicator  # of the ranks that train: strategies may replace it by a smaller group
    precision: Precision
    parameters: list[Parameter] = field(default_factory=list)
    weights: Weights = field(default_factory=Weights)
    scaler: Scaler | None = None  # of the loss, where the precision needs one
    #: What the optimizer steps on in place of the parameters, one for one, where a rank has whole
    #: master weights.
    masters: list[torch.Tensor] | None = None

    @property
    def stepped(self) -> list[torch.Tensor]:
        """The whole tensors that the optimizer steps on: master weights, or the parameters."""
        if self.masters is not None:
            return self.masters
        return [one.tensor for one in self.parameters]


def find_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Parameter]:
    """List the parameters that are trained, in the order of the model; each once."""
    where = {
        id(tensor): number
        for number, group in enumerate(optimizer.param_groups)
        for tensor in group["params"]
    }
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.nn.Parameter] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    strangers = [key for key in where if key not in tensors]
    if strangers:
        raise InvalidArgumentError(
            f"The optimizer has {len(strangers)} tensors that are no parameters of the model. "
            f"Build it from model.parameters() of the model that prepare gets."
        )
    trained = [key for key, one in tensors.items() if one.requires_grad]
    missing = [names[key][0] for key in trained if key not in where]
    if missing:
        raise InvalidArgumentError(
            f"The optimizer does not have the trainable parameters {_some(missing)}. Give it all "
            f"of them, or freeze these with requires_grad_(False)."
        )
    return [Parameter(tuple(names[key]), tensors[key], where[key]) for key in trained]


def agree(setup: Setup) -> None:
    """See that every rank has the same model and optimizer, or raise on all what differs."""
    comm = setup.comm
    mine = _described(setup)
    for rank, theirs in enumerate(comm.all_gather_object(mine)):
        if theirs != mine:
            raise CollectiveMismatch(_difference(comm.rank, mine, rank, theirs))


def _described(setup: Setup) -> list[str]:
    lines = [
        f"parameter {', '.join(one.names)}: {tuple(one.tensor.shape)} {one.tensor.dtype} in group "
        f"{one.group}"
        for one in setup.parameters
    ]
    frozen = [
        f"frozen parameter {name}: {tuple(one.shape)} {one.dtype}"
        for name, one in setup.model.named_parameters()
        if not one.requires_grad
    ]
    buffers = [
        f"buffer {name}: {tuple(one.shape)} {one.dtype}"
        for name, one in setup.model.named_buffers()
    ]
    optimizer = setup.optimizer
    options = [
        f"optimizer {type(optimizer).__name__} group {number}: "
        + ", ".join(f"{key}={value}" for key, value in sorted(group.items()) if key != "params")
        for number, group in enumerate(optimizer.param_groups)
    ]
    return [*lines, *frozen, *buffers, *options, f"precision {setup.precision}"]


def _difference(rank: int, mine: Sequence[str], other: int, theirs: Sequence[str]) -> str:
    for place in range(max(len(mine), len(theirs))):
        one = mine[place] if place < len(mine) else "nothing more"
        two = theirs[place] if place < len(theirs) else "nothing more"
        if one != two:
            return (
                f"prepare needs the same model and optimizer on every rank, but they differ:\n"
                f"  rank {rank}: {one}\n  rank {other}: {two}\n"
                f"Build both from the same code and configuration on all ranks."
            )
    return ""


def send_from_first(comm: Communicator, tensors: Sequence[torch.Tensor]) -> None:
    """Give every rank the first rank's values, in few large messages."""
    batch: list[torch.Tensor] = []
    room = 0
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        if batch and (tensor.dtype != batch[0].dtype or tensor.device != batch[0].device
                      or room + tensor.numel() > 1 << 22):  # fmt: skip
            _send(comm, batch)
            batch, room = [], 0
        batch.append(tensor.detach())
        room += tensor.numel()
    if batch:
        _send(comm, batch)


def _send(comm: Communicator, batch: Sequence[torch.Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in batch])
    comm.broadcast(flat)
    if comm.rank == 0:
        return
    start = 0
    for tensor in batch:
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def storage_bytes(tensors: Any) -> int:  # Any: an iterable of tensors, or of things with some
    """Count live storages, each once."""
    seen = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())
