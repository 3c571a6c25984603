"""What every strategy starts from: one model, one optimizer, and ranks that agree on both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, InvalidArgumentError
from roundelay.training._step import Step
from roundelay.training.precision import Precision
from roundelay.training.scaler import Scaler

if TYPE_CHECKING:
    from roundelay.training._strategy import Strategy
    from roundelay.training._zero_offload import Host

__all__ = [
    "Parameter",
    "Setup",
    "agree",
    "find_parameters",
    "send_from_first",
    "share_buffers",
    "storage_bytes",
]

SHOWN = 5  # names that a message lists
MESSAGE = 16 << 20  # bytes that are sent together


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
class Setup:
    """A model and its optimizer on one rank, with the ranks that train it together."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    comm: Communicator  # of the ranks that train: strategies may replace it by a smaller group
    precision: Precision
    buffers: str = "first"  # whose buffers all ranks have after a step: rank 0's, or their "mean"
    parameters: list[Parameter] = field(default_factory=list)
    #: The parameters in the optimizer's groups as the user gave them, frozen ones too.
    groups: list[list[torch.nn.Parameter]] = field(default_factory=list)
    #: In which dtype the model's parameters and buffers came.
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    step: Step = field(default_factory=Step)
    scaler: Scaler | None = None  # of the loss, where the precision needs one
    #: What the optimizer steps on in place of the parameters, one for one, where a rank has whole
    #: master weights.
    masters: list[torch.Tensor] | None = None
    #: Where not all ranks divide what they hold between them: those that do, with this one among
    #: them, and those that hold the same as this one.
    shards: Communicator | None = None
    replicas: Communicator | None = None
    host: Host | None = None  # where the optimizer's state lies, if not beside the model

    @property
    def within(self) -> Communicator:
        """The ranks that divide what they hold between them."""
        return self.comm if self.shards is None else self.shards

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


def agree(comm: Communicator, make: Callable[[], tuple[Strategy, Setup]]) -> tuple[Strategy, Setup]:
    """Make the setup, and see that every rank has the same; raise on all what differs or fails."""
    made: tuple[Strategy, Setup] | None = None
    problem: InvalidArgumentError | None = None
    try:
        made = make()
        mine = ["", *_described(*made)]
    except InvalidArgumentError as error:
        problem, mine = error, [str(error)]
    every = comm.all_gather_object(mine)
    if made is None or problem is not None:
        raise problem or InvalidArgumentError("prepare needs a model and an optimizer.")
    for rank, theirs in enumerate(every):
        if theirs[0]:
            raise CollectiveMismatch(f"prepare was refused on rank {rank}: {theirs[0]}")
    for rank, theirs in enumerate(every):
        if theirs != mine:
            raise CollectiveMismatch(_difference(comm.rank, mine, rank, theirs))
    return made


def _described(strategy: Strategy, setup: Setup) -> list[str]:
    options = {one.name: getattr(strategy, one.name) for one in fields(strategy)}  # type: ignore[arg-type]
    told = ", ".join(f"{name}={_word(value)}" for name, value in options.items())
    first = [
        f"strategy {type(strategy).__name__}({told})",
        f"precision {setup.precision}",
        f"buffers {setup.buffers!r}",
    ]
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
    groups = [
        f"optimizer {type(optimizer).__name__} group {number}: "
        + ", ".join(f"{key}={value}" for key, value in sorted(group.items()) if key != "params")
        for number, group in enumerate(optimizer.param_groups)
    ]
    return [*first, *lines, *frozen, *buffers, *groups]


def _word(value: Any) -> str:  # Any: an option of a strategy
    """Return how an option is called, the same on every rank: functions and classes by name."""
    if isinstance(value, (list, tuple, set, frozenset)):
        words = [_word(one) for one in value]
        return f"[{', '.join(words if isinstance(value, (list, tuple)) else sorted(words))}]"
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return repr(value)


def _difference(rank: int, mine: Sequence[str], other: int, theirs: Sequence[str]) -> str:
    for place in range(max(len(mine), len(theirs))):
        one = mine[place] if place < len(mine) else "nothing more"
        two = theirs[place] if place < len(theirs) else "nothing more"
        if one != two:
            return (
                f"prepare needs the same model, optimizer and strategy on every rank, but they "
                f"differ:\n"
                f"  rank {rank}: {one}\n  rank {other}: {two}\n"
                f"Build both from the same code and configuration on all ranks."
            )
    return ""


def share_buffers(setup: Setup) -> None:
    """Give every rank rank 0's buffers, or where it was asked for the mean of floating ones."""
    comm = setup.comm
    buffers = list(setup.model.buffers())
    if comm.size == 1 or not buffers:
        return
    if setup.buffers == "mean":
        for buffer in buffers:
            if buffer.is_floating_point() or buffer.is_complex():
                own = _written_once(buffer)
                own.copy_(comm.all_reduce(own.contiguous(), "avg"))
        buffers = [one for one in buffers if not (one.is_floating_point() or one.is_complex())]
    send_from_first(comm, buffers)


def send_from_first(comm: Communicator, tensors: Sequence[torch.Tensor]) -> None:
    """Give every rank the first rank's values, in few large messages of bytes."""
    batch: list[torch.Tensor] = []
    room = 0
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        own = _written_once(tensor.detach())
        if batch and (own.device != batch[0].device or room + own.nbytes > MESSAGE):
            _send(comm, batch)
            batch, room = [], 0
        batch.append(own)
        room += own.nbytes
    if batch:
        _send(comm, batch)


def _written_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the dims in which it was expanded: each element once."""
    for dim in reversed(range(tensor.dim())):
        if tensor.size(dim) > 1 and tensor.stride(dim) == 0:
            tensor = tensor.select(dim, 0)
    return tensor


def _send(comm: Communicator, batch: Sequence[torch.Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in batch])
    comm.broadcast(flat)
    if comm.rank == 0:
        return
    start = 0
    for tensor in batch:
        values = flat[start : start + tensor.nbytes]
        start += tensor.nbytes
        if start % tensor.itemsize:
            values = values.clone()  # a view as wider numbers begins where such may begin
        tensor.copy_(values.view(tensor.dtype).view(tensor.shape))


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
