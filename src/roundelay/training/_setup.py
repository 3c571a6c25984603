"""What every strategy starts from: one model, its optimizers, and ranks that agree on both."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, InvalidArgumentError
from roundelay.parallel.sharding import sharding_of
from roundelay.parallel.staging import staging_of
from roundelay.planning.rows import runs
from roundelay.training._step import StepState
from roundelay.training.optimizer.joined import JoinedOptimizers
from roundelay.training.precision import Precision
from roundelay.training.scaler import Scaler

if TYPE_CHECKING:
    from roundelay.training._mesh_ranks import MeshRanks
    from roundelay.training.strategies.zero.offload import HostMemory
    from roundelay.training.strategy import Strategy

SHOWN = 5  # names that a message lists
OF_ALL = 8  # lines that all ranks share, stages of a pipeline too; the mesh is the last but one
MESSAGE = 16 << 20  # bytes that are sent together


@dataclass(slots=True)
class Parameter:
    """A parameter that is trained, under every name that the model has for it."""

    names: tuple[str, ...]
    tensor: torch.nn.Parameter
    group: int  # of the groups of all optimizers
    owner: int = -1  # which of the optimizers has it; -1: none, since it is frozen

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]


@dataclass(slots=True)
class Setup:
    """A model and its optimizers on one rank, with the ranks that train it together."""

    model: torch.nn.Module
    optimizer: JoinedOptimizers  # all of them, as if they were one
    as_given: Callable[[list[Any]], Any]  # hands out a list of them as the user gave them
    comm: Communicator  # of the ranks that train: strategies may replace it by a smaller group
    precision: Precision
    buffers: str = "first"  # whose buffers all ranks have after a step: rank 0's, or their "mean"
    parameters: list[Parameter] = field(default_factory=list)
    #: The parameters in all groups of the optimizers as the user gave them, frozen ones too.
    groups: list[list[torch.nn.Parameter]] = field(default_factory=list)
    #: In which dtype the model's parameters and buffers came.
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    step: StepState = field(default_factory=StepState)
    scaler: Scaler | None = None  # of the loss, where the precision needs one
    #: What the optimizer steps on in place of the parameters, one for one, where a rank has whole
    #: master weights.
    masters: list[torch.Tensor] | None = None
    #: Where not all ranks divide what they hold between them: those that do, with this one among
    #: them, and those that hold the same as this one.
    shards: Communicator | None = None
    replicas: Communicator | None = None
    host: HostMemory | None = None  # where the optimizer's state lies, if not beside the model
    mesh: MeshRanks | None = None  # of which `comm` has the ranks with other data
    plan: str = ""  # by which the mesh divides the model, in words
    #: Numbers of the parameters that are experts, of which `same_experts` bring together gradients.
    experts: frozenset[int] = frozenset()

    @property
    def everyone(self) -> Communicator:
        """All ranks, those that have other parts of the model among them."""
        return self.comm if self.mesh is None or self.mesh.alone else self.mesh.everyone

    @property
    def same_experts(self) -> Communicator:
        """The ranks that have the same experts, and over which their gradients add up."""
        return self.comm if self.mesh is None else self.mesh.same_experts

    @property
    def within(self) -> Communicator:
        """The ranks that divide what they hold between them."""
        return self.comm if self.shards is None else self.shards

    #: Numbers of the parameters that have a gradient, on any rank; and of those ever stepped on.
    used: set[int] = field(default_factory=set)
    stepped_on: set[int] = field(default_factory=set)
    _only: dict[int, Collection[int]] = field(default_factory=dict)

    def only(self, place: int) -> Collection[int] | None:
        """Return the numbers of one optimizer's parameters; None where there is no other one."""
        if len(self.optimizer.all) == 1:
            return None
        if place not in self._only:
            mine = (at for at, parameter in enumerate(self.parameters) if parameter.owner == place)
            self._only[place] = frozenset(mine)
        return self._only[place]

    def names_now(self, parameters: Sequence[Parameter] | None = None) -> list[tuple[str, ...]]:
        """Return the names that the model has for parameters now; none for what it has no more."""
        names: dict[int, list[str]] = {}
        for name, tensor in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
        listed = self.parameters if parameters is None else parameters
        return [tuple(names.get(id(parameter.tensor), ())) for parameter in listed]

    def refuse_renamed(self, call: str) -> None:
        """Refuse what goes by the names of `prepare`, where the model has others by now."""
        for parameter, names in zip(self.parameters, self.names_now(), strict=True):
            if names[:1] != parameter.names[:1]:
                fate = f"is called {names[0]}" if names else "is no longer in the model"
                raise InvalidArgumentError(
                    f"{call} goes by the names that parameters had at prepare, and {parameter.name}"
                    f" {fate} by now. Take the model back and prepare it again, with an optimizer "
                    f"for the parameters that it has: model, optimizer = rd.unprepare(model)."
                )

    @property
    def stepped(self) -> list[torch.Tensor]:
        """The whole tensors that the optimizer steps on: master weights, or the parameters."""
        if self.masters is not None:
            return self.masters
        return [parameter.tensor for parameter in self.parameters]


def find_parameters(model: torch.nn.Module, optimizer: JoinedOptimizers) -> list[Parameter]:
    """List the parameters that are trained, in the order of the model; each once."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.nn.Parameter] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if torch.nn.parameter.is_lazy(tensor):
            raise InvalidArgumentError(
                f"The parameter {name} has no shape yet: its layer is a lazy one, which gets it "
                f"from the first rows it sees. Call the model once before prepare."
            )
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    where: dict[int, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for tensor in group["params"]:
            if id(tensor) in where:
                both = sorted({optimizer.owner(where[id(tensor)]), optimizer.owner(number)})
                raise InvalidArgumentError(
                    f"The parameter {names.get(id(tensor), ['(no name)'])[0]} is in two optimizers,"
                    f" numbers {' and '.join(map(str, both))} of {optimizer.name}, and would be "
                    f"stepped on by both. Give each parameter to one of them."
                )
            where[id(tensor)] = number
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
    return [
        Parameter(tuple(names[key]), tensors[key], where[key], optimizer.owner(where[key]))
        for key in trained
    ]


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
        ours, others = _comparable(made[1], mine, rank, theirs)
        if others != ours:
            raise CollectiveMismatch(_difference(comm.rank, ours, rank, others))
    return made


def _comparable(
    setup: Setup, mine: list[str], rank: int, theirs: list[str]
) -> tuple[list[str], list[str]]:
    """Return what two ranks must have in common: where they are stages, not the model."""
    mesh = setup.mesh
    if mesh is None or not mesh.staged or theirs[OF_ALL - 2] != mine[OF_ALL - 2]:
        return mine, theirs
    if mesh.stage(rank) == mesh.stage(mesh.mesh.comm.rank):
        return mine, theirs
    return mine[:OF_ALL], theirs[:OF_ALL]


def _described(strategy: Strategy, setup: Setup) -> list[str]:
    options = {one.name: getattr(strategy, one.name) for one in fields(strategy)}  # type: ignore[arg-type]
    told = ", ".join(f"{name}={_word(value)}" for name, value in options.items())
    staging = staging_of(setup.model)
    first = [
        f"strategy {type(strategy).__name__}({told})",
        f"precision {setup.precision}",
        f"buffers {setup.buffers!r}",
        f"{len(setup.optimizer.param_groups)} groups of parameters",
        "no pipeline" if staging is None else f"a pipeline of {staging.told}",
        "no mesh" if setup.mesh is None else repr(setup.mesh.mesh),
        setup.plan or "no plan",
    ]
    lines = [
        f"parameter {', '.join(parameter.names)}: {_shape(parameter.tensor)} "
        f"{parameter.tensor.dtype} in group {parameter.group}"
        for parameter in setup.parameters
    ]
    frozen = [
        f"frozen parameter {name}: {_shape(one)} {one.dtype}"
        for name, one in setup.model.named_parameters()
        if not one.requires_grad
    ]
    buffers = [
        f"buffer {name}: {tuple(one.shape)} {one.dtype}"
        for name, one in setup.model.named_buffers()
    ]
    groups = [
        f"optimizer {type(own).__name__} group {number}: "
        + ", ".join(f"{key}={_word(one)}" for key, one in sorted(group.items()) if key != "params")
        for own in setup.optimizer.all
        for number, group in enumerate(own.param_groups)
    ]
    return [*first, *lines, *frozen, *buffers, *groups]


def _shape(tensor: torch.Tensor) -> str:
    """Return the shape of a whole parameter, and how a mesh divides it."""
    sharding = sharding_of(tensor)
    if sharding is None:
        return str(tuple(tensor.shape))
    return (
        f"{sharding.whole_shape(tensor.shape)} divided along {sharding.axis} in dim {sharding.dim}"
    )


ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the repr of an object that has no other


def _word(value: Any) -> str:  # Any: an option of a strategy
    """Return how an option is called, the same on every rank: functions and classes by name."""
    if isinstance(value, (list, tuple, set, frozenset)):
        words = [_word(one) for one in value]
        return f"[{', '.join(words if isinstance(value, (list, tuple)) else sorted(words))}]"
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return ADDRESS.sub("", repr(value))


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


def share_buffers(setup: Setup, *, once: bool = False) -> None:
    """Give every rank rank 0's buffers, or where it was asked for the mean of floating ones.

    With `once`, only where the first of several optimizers has stepped.
    """
    comm = setup.comm
    buffers = list(setup.model.buffers())
    if comm.size == 1 or not buffers or (once and len(setup.step.by) > 1):
        return
    if setup.buffers == "mean":
        for buffer in buffers:
            if buffer.is_floating_point() or buffer.is_complex():
                own = written_once(buffer)
                own = torch.view_as_real(own) if own.is_complex() else own
                own.copy_(comm.all_reduce(own.contiguous(), "avg"))
        buffers = [one for one in buffers if not (one.is_floating_point() or one.is_complex())]
    send_from_first(comm, buffers)


def send_from_first(comm: Communicator, tensors: Sequence[torch.Tensor]) -> None:
    """Give every rank the first rank's values, in few large messages of bytes."""
    own = [written_once(tensor.detach()) for tensor in tensors if tensor.numel()]
    for run in runs([one.device for one in own], [one.nbytes for one in own], most=MESSAGE):
        _send(comm, [own[at] for at in run])


def in_messages(sizes: Sequence[tuple[int, torch.device]]) -> list[int]:
    """Return the bytes of each message in which so many bytes, on these devices, are sent."""
    listed = runs([device for _, device in sizes], [nbytes for nbytes, _ in sizes], most=MESSAGE)
    return [sum(sizes[at][0] for at in run) for run in listed]


def written_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the dims in which it was expanded: each element once."""
    for dim in reversed(range(tensor.dim())):
        if tensor.size(dim) > 1 and tensor.stride(dim) == 0:
            tensor = tensor.select(dim, 0)
    return tensor


def _send(comm: Communicator, batch: Sequence[torch.Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in batch])
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
            sparse = tensor.is_sparse
            for one in (tensor._indices(), tensor._values()) if sparse else (tensor,):  # noqa: SLF001 - as they are
                storage = one.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())
