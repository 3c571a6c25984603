"""Starts a parameter server: who is what, who keeps what, and the sharing for a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, InvalidArgumentError
from roundelay.processes.death import ServerFinished
from roundelay.training._masters import make_masters
from roundelay.training._ps_answers import Mails
from roundelay.training._ps_async import Alone
from roundelay.training._ps_checkpoint import beside_refused
from roundelay.training._ps_coupled import refuse_coupled
from roundelay.training._ps_gradients import Rules, Updates
from roundelay.training._ps_layout import Share, divide
from roundelay.training._ps_line import Line
from roundelay.training._ps_server import Server
from roundelay.training._ps_sharing import Serving
from roundelay.training._ps_sync import Aggregated, Stepped
from roundelay.training._ps_twin import Options, twins_of
from roundelay.training._setup import Setup
from roundelay.training._state_tree import beside
from roundelay.training.precision import cast_model, master_dtype

if TYPE_CHECKING:
    from roundelay.training.strategies.parameter_server import ParameterServer

__all__ = ["LOST_WORKERS", "open_shop"]

#: What `lost_workers=` means for the job, by the words of communicators.
LOST_WORKERS = {"allow": "passes", "fail": "fails"}


@dataclass(frozen=True, slots=True)
class _Plan:
    """Who serves, who trains, and which parameters each server has."""

    servers: list[int]
    workers: list[int]
    parts: list[list[int]]  # indexes of parameters, for each server
    own: int | None  # which of the servers is on this rank


def open_shop(options: ParameterServer, setup: Setup) -> Serving:
    """Make every rank a worker, a server or both; a rank that only serves ends in here."""
    comm = setup.comm
    _check(options, setup)
    servers, workers = options.places(comm.size)
    parts = divide([one.tensor.nbytes for one in setup.parameters], len(servers))
    own = servers.index(comm.rank) if comm.rank in servers else None
    plan = _Plan(servers, workers, parts, own)
    mails = Mails(_everybody(comm), _everybody(comm))
    training = comm.group(workers) if options.dedicated else comm
    if training is None:
        _serve_only(options, setup, plan, mails)
        raise ServerFinished(0)
    sharing = _share_updates if options.server_updates else _share_gradients
    made = sharing(options, setup, plan, mails)
    comm.before_close(made.line.goodbye)  # which does not keep what was trained
    if options.mode != "sync" and own is None:
        comm.spare(LOST_WORKERS[options.lost_workers])
        made.line.goodbye.spared = True
    setup.comm = made.everyone = training
    return made


def _everybody(comm: Communicator) -> Communicator:
    """Return a group of all ranks whose messages no other one sees."""
    made = comm.group(range(comm.size))
    if made is None:
        raise CollectiveMismatch(f"Rank {comm.rank} is not in a group of all ranks.")
    return made


def _serve_only(options: ParameterServer, setup: Setup, plan: _Plan, mails: Mails) -> None:
    updates = None
    if options.server_updates and plan.own is not None:
        updates = _updates(setup, plan.parts[plan.own], Options(setup.optimizer))
    cast_model(setup.model, setup.precision)
    if plan.own is not None:
        _server(options, setup, plan, mails, updates).serve()


def _share_gradients(options: ParameterServer, setup: Setup, plan: _Plan, mails: Mails) -> Serving:
    masters = make_masters(setup)
    grads = [_share(setup, part, master=False) for part in plan.parts]
    line = Line(
        mails, servers=plan.servers, workers=len(plan.workers), grads=grads, values=None, options=0
    )
    if plan.own is not None:
        line.serve_here(_server(options, setup, plan, mails, None))
    return Aggregated(options, setup, line, grads, masters)


def _share_updates(options: ParameterServer, setup: Setup, plan: _Plan, mails: Mails) -> Serving:
    known = Options(setup.optimizer)
    values = [_share(setup, part, master=True) for part in plan.parts]
    updates = None if plan.own is None else _updates(setup, plan.parts[plan.own], known)
    for one in setup.parameters:
        setup.optimizer.state.pop(one.tensor, None)  # the servers have it now
    cast_model(setup.model, setup.precision)
    grads = [_share(setup, part, master=False) for part in plan.parts]
    line = Line(
        mails,
        servers=plan.servers,
        workers=len(plan.workers),
        grads=grads,
        values=values,
        options=known.count,
    )
    if updates is not None:
        line.serve_here(_server(options, setup, plan, mails, updates))
    kind = Stepped if options.mode == "sync" else Alone
    return kind(options, setup, line, grads, values, known)


def _server(
    options: ParameterServer, setup: Setup, plan: _Plan, mails: Mails, updates: Updates | None
) -> Server:
    part = [] if plan.own is None else plan.parts[plan.own]
    return Server(
        mails,
        workers=plan.workers,
        share=_share(setup, part, master=False),
        names=[setup.parameters[index].name for index in part],
        rules=Rules(options.aggregate, together=options.mode == "sync", bound=options.bound),
        updates=updates,
        names_lost=plan.own == 0,
    )


def _check(options: ParameterServer, setup: Setup) -> None:
    if not options.server_updates:
        return
    if any(isinstance(one, torch.optim.LBFGS) for one in setup.optimizer.all):
        raise InvalidArgumentError(
            "LBFGS looks at the loss several times a step and at all parameters at once, which no "
            "server has. Use ParameterServer(update='worker') or another optimizer."
        )
    unknown = [key for one in setup.optimizer.all for key in beside(one)]
    if unknown:
        raise InvalidArgumentError(beside_refused(unknown))
    if len(options.places(setup.comm.size)[0]) > 1:
        for one in setup.optimizer.all:
            refuse_coupled(one)
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
        dtypes = [master_dtype(one.dtype) if mixed else one.dtype for one in tensors]
    else:
        dtypes = [wire or one.dtype for one in tensors]
    device = tensors[0].device if tensors else torch.device("cpu")
    return Share(indexes, [tuple(one.shape) for one in tensors], dtypes, device)


def _updates(setup: Setup, part: Sequence[int], options: Options) -> Updates:
    """Copy a server's parameters, and the user's optimizer with what it knows of them."""
    share = _share(setup, part, master=True)
    before = [setup.parameters[index].tensor for index in part]
    values = share.make()
    after = share.views(values)
    with torch.no_grad():
        for old, new in zip(before, after, strict=True):
            new.copy_(old)
    return Updates(values, after, twins_of(setup.optimizer, before, after), options)
