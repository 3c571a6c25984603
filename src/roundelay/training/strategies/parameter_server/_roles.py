"""Starts a parameter server: who is what, who keeps what, and the sharing for a worker."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, InvalidArgumentError
from roundelay.processes.death import ServerFinished
from roundelay.training._buckets import divide
from roundelay.training._setup import Setup
from roundelay.training.optimizer.masters import make_masters
from roundelay.training.optimizer.state_tree import beside
from roundelay.training.precision import cast_model, master_dtype
from roundelay.training.strategies.parameter_server._answers import Channels
from roundelay.training.strategies.parameter_server._async_worker import AsyncWorker
from roundelay.training.strategies.parameter_server._gradients import UpdateRules, Updates
from roundelay.training.strategies.parameter_server._server import ServerLoop
from roundelay.training.strategies.parameter_server._server_client import ServerClient
from roundelay.training.strategies.parameter_server._server_optimizer import (
    Options,
    server_optimizers,
)
from roundelay.training.strategies.parameter_server._sync_workers import (
    AggregatingWorker,
    UpdatedWorker,
)
from roundelay.training.strategies.parameter_server.server_state import beside_refused
from roundelay.training.strategies.parameter_server.share import Share
from roundelay.training.strategies.parameter_server.worker import Worker

if TYPE_CHECKING:
    from roundelay.training.strategies.parameter_server.strategy import ParameterServer

#: What `lost_workers=` means for the job, by the words of communicators.
LOST_WORKERS = {"allow": "passes", "fail": "fails"}
SHAPE = (6, 4)
SIZES = (1.0, 1e3, 1e-3)  # of the gradients of each step: what clips by size shows in one of them
CLOSE = 1e-9  # in float64: far above rounding, far below any difference in kind


@dataclass(frozen=True, slots=True)
class _Roles:
    """Who serves, who trains, and which parameters each server has."""

    servers: list[int]
    workers: list[int]
    parts: list[list[int]]  # indexes of parameters, for each server
    own: int | None  # which of the servers is on this rank


def build_roles(options: ParameterServer, setup: Setup) -> Worker:
    """Make every rank a worker, a server or both; a rank that only serves ends in here."""
    comm = setup.comm
    _check(options, setup)
    servers, workers = options.places(comm.size)
    parts = divide([parameter.tensor.nbytes for parameter in setup.parameters], len(servers))
    own = servers.index(comm.rank) if comm.rank in servers else None
    roles = _Roles(servers, workers, parts, own)
    channels = Channels(_everybody(comm), _everybody(comm))
    training = comm.group(workers) if options.dedicated else comm
    if training is None:
        _serve_only(options, setup, roles, channels)
        raise ServerFinished(0)
    state = _share_updates if options.server_updates else _share_gradients
    made = state(options, setup, roles, channels)
    comm.before_close(made.client.shutdown)  # which does not keep what was trained
    if options.mode != "sync" and own is None:
        comm.spare(LOST_WORKERS[options.lost_workers])
        made.client.shutdown.spared = True
    setup.comm = made.everyone = training
    return made


def _everybody(comm: Communicator) -> Communicator:
    """Return a group of all ranks whose messages no other one sees."""
    made = comm.group(range(comm.size))
    if made is None:
        raise CollectiveMismatch(f"Rank {comm.rank} is not in a group of all ranks.")
    return made


def _serve_only(options: ParameterServer, setup: Setup, roles: _Roles, channels: Channels) -> None:
    updates = None
    if options.server_updates and roles.own is not None:
        updates = _updates(setup, roles.parts[roles.own], Options(setup.optimizer))
    cast_model(setup.model, setup.precision)
    if roles.own is not None:
        _server(options, setup, roles, channels, updates).serve()


def _share_gradients(
    options: ParameterServer, setup: Setup, roles: _Roles, channels: Channels
) -> Worker:
    masters = make_masters(setup)
    client = _client(options, setup, roles, channels)
    return AggregatingWorker(options, setup, client, masters)


def _share_updates(
    options: ParameterServer, setup: Setup, roles: _Roles, channels: Channels
) -> Worker:
    known = Options(setup.optimizer)
    values = [_share(setup, part, master=True) for part in roles.parts]
    updates = None if roles.own is None else _updates(setup, roles.parts[roles.own], known)
    for parameter in setup.parameters:
        setup.optimizer.state.pop(parameter.tensor, None)  # the servers have it now
    cast_model(setup.model, setup.precision)
    client = _client(options, setup, roles, channels, values, updates, known)
    return (UpdatedWorker if options.mode == "sync" else AsyncWorker)(options, setup, client)


def _client(
    options: ParameterServer,
    setup: Setup,
    roles: _Roles,
    channels: Channels,
    values: Sequence[Share] | None = None,
    updates: Updates | None = None,
    known: Options | None = None,
) -> ServerClient:
    """Return this worker's line to all servers, with the one on its own rank at work."""
    grads = [_share(setup, part, master=False) for part in roles.parts]
    client = ServerClient(channels, roles.servers, len(roles.workers), grads, values, known)
    if roles.own is not None:
        client.serve_here(_server(options, setup, roles, channels, updates))
    return client


def _server(
    options: ParameterServer,
    setup: Setup,
    roles: _Roles,
    channels: Channels,
    updates: Updates | None,
) -> ServerLoop:
    part = [] if roles.own is None else roles.parts[roles.own]
    return ServerLoop(
        channels,
        workers=roles.workers,
        share=_share(setup, part, master=False),
        names=[setup.parameters[index].name for index in part],
        rules=UpdateRules(options.aggregate, together=options.mode == "sync", bound=options.bound),
        updates=updates,
        names_lost=roles.own == 0,
    )


def _check(options: ParameterServer, setup: Setup) -> None:
    if not options.server_updates:
        return
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in setup.optimizer.all):
        raise InvalidArgumentError(
            "LBFGS looks at the loss several times a step and at all parameters at once, which no "
            "server has. Use ParameterServer(update='worker') or another optimizer."
        )
    unknown = [key for optimizer in setup.optimizer.all for key in beside(optimizer)]
    if unknown:
        raise InvalidArgumentError(beside_refused(unknown))
    if len(options.places(setup.comm.size)[0]) > 1:
        for optimizer in setup.optimizer.all:
            _refuse_coupled(optimizer)
    if setup.scaler is not None:
        raise InvalidArgumentError(
            "A server that updates parameters can't skip steps for a scaled loss. Use "
            "precision='bf16', or strategy='ps', where workers update."
        )


def _share(setup: Setup, indexes: Sequence[int], *, master: bool) -> Share:
    """Lay out parameters as masters of what they are now, or gradients as they are sent."""
    tensors = [setup.parameters[index].tensor for index in indexes]
    mixed, wire = setup.precision.mixed, setup.precision.reduce
    if master:
        dtypes = [master_dtype(tensor.dtype) if mixed else tensor.dtype for tensor in tensors]
    else:
        dtypes = [wire or tensor.dtype for tensor in tensors]
    device = tensors[0].device if tensors else torch.device("cpu")
    return Share(indexes, [tuple(tensor.shape) for tensor in tensors], dtypes, device)


def _updates(setup: Setup, part: Sequence[int], options: Options) -> Updates:
    """Copy a server's parameters, and the user's optimizer with what it knows of them."""
    share = _share(setup, part, master=True)
    before = [setup.parameters[index].tensor for index in part]
    values = share.make()
    after = share.views(values)
    with torch.no_grad():
        for old, new in zip(before, after, strict=True):
            new.copy_(old)
    return Updates(values, after, server_optimizers(setup.optimizer, before, after), options)


def _refuse_coupled(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that looks at several parameters at once.

    It steps on two small parameters together, and on each of them by itself.
    """
    for number, group in enumerate(optimizer.param_groups):
        options = _options(optimizer, group)
        why, cause = "it steps differently on one parameter by itself", None
        try:
            whole = _stepped(optimizer, options, [[0, 1]])
            divided = _stepped(optimizer, options, [[0], [1]])
            if all(torch.allclose(one, two, rtol=CLOSE, atol=CLOSE)
                   for one, two in zip(whole, divided, strict=True)):  # fmt: skip
                continue
        except Exception as error:  # noqa: BLE001 - whatever an optimizer raises
            why, cause = f"it raises {type(error).__name__}: {error}", error
        raise InvalidArgumentError(
            f"Several servers have some of the parameters each, and {type(optimizer).__name__} "
            f"(group {number}) needs all of them at once: {why}. Use ParameterServer(servers=1), "
            f"update='worker', or another strategy."
        ) from cause


def _options(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the optimizer was made with: options of a group, and attributes of its own."""
    taken = inspect.signature(type(optimizer)).parameters
    known = {**vars(optimizer), **group}
    options = {key: known[key] for key in taken if key in known and key != "params"}
    if "lr" in options and float(options["lr"]) == 0:
        options["lr"] = 1e-2  # a warm-up begins at 0, which would show nothing
    return options


def _stepped(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], shares: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Step on two parameters, of which each optimizer has a share; return both."""
    line = torch.linspace(-1, 1, SHAPE[0] * SHAPE[1], dtype=torch.float64).view(SHAPE)
    values = [torch.nn.Parameter(line + 0.25 * two) for two in range(2)]
    for share in shares:
        small = type(optimizer)([values[number] for number in share], **options)
        for step, size in enumerate(SIZES):
            for number in share:
                values[number].grad = size * torch.cos((7 + number) * line + step)
            small.step()
    return [one.detach() for one in values]
