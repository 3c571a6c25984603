"""What workers of a parameter server have in common, whatever the mode."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roundelay.communicator import Traffic
from roundelay.errors import InvalidArgumentError
from roundelay.training._intake import finite
from roundelay.training._refused_grad import RefusedGrad
from roundelay.training._setup import Setup, share_buffers, storage_bytes
from roundelay.training._volume import (
    add_up,
    held_by,
    held_by_model,
    model_bytes,
    state_and_masters,
    state_bytes,
)
from roundelay.training.checkpoint.parts import Saved, SavedPart
from roundelay.training.optimizer.masters import merge
from roundelay.training.optimizer.state_arrays import as_arrays
from roundelay.training.precision import master_dtype
from roundelay.training.strategies.parameter_server._messages import (
    Kind,
    ServerReply,
    ServerRequest,
)
from roundelay.training.strategies.parameter_server._server_client import ServerClient
from roundelay.training.strategies.parameter_server._state_view import StateOnServers
from roundelay.training.strategies.parameter_server.server_state import (
    asked_by,
    beside_refused,
    bring,
    fetch,
)
from roundelay.training.strategies.parameter_server.share import Share
from roundelay.training.strategy import Held, StrategyState, Volume

if TYPE_CHECKING:
    from roundelay.training.strategies.parameter_server.strategy import ParameterServer

__all__ = ["Worker", "evaluated"]


class Worker(StrategyState):
    """A worker with a line to servers."""

    @property
    def sees_whole(self) -> bool:  # type: ignore[override] # an attribute of other strategies
        """Whether the optimizer steps here."""
        return not self.options.server_updates

    def __init__(self, options: ParameterServer, setup: Setup, client: ServerClient) -> None:
        self.options, self.setup, self.client = options, setup, client
        self._tensors = [parameter.tensor for parameter in setup.parameters]
        self.everyone = setup.comm  # all workers, lost ones among them
        self._shares = client.grads
        self._out = self._by_index(self._shares, client.out)
        self._state_names = {id(parameter.tensor): parameter.name for parameter in setup.parameters}
        #: How many of this worker's gradients were applied so many updates late.
        self.staleness: dict[int, int] = {}
        if options.server_updates:
            self._know_values()

    def _by_index(
        self, shares: Sequence[Share], buffers: Sequence[Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for share, mine in zip(shares, buffers, strict=True):
            found.update(zip(share.indexes, share.views(mine), strict=True))
        return [found[index] for index in range(len(self._tensors))]

    def _of_server(self, values: Sequence[float]) -> list[list[float]]:
        """Cut numbers, one for each parameter, into those that each server wants to know."""
        return [[float(values[index]) for index in share.indexes] for share in self._shares]

    def _not_finite(self) -> set[int]:
        """Return which of the gradients that are about to be sent are not finite."""
        if not self.options.check_finite or self.setup.scaler is not None:
            return set()
        if all(finite(buffer) for mine in self.client.out for buffer in mine):
            return set()
        return {index for index, one in enumerate(self._out) if not finite(one)}

    def _count_staleness(self, replies: Sequence[ServerReply]) -> None:
        most = max(reply.staleness for reply in replies)
        self.staleness[most] = self.staleness.get(most, 0) + 1

    # ---- parameters, where the servers have them

    @torch.no_grad()
    def _know_values(self) -> None:
        """Begin with what the servers have: the model as it is."""
        self._values = self._by_index(self.client.values, self.client.values_in)
        self._versions = [0] * len(self.client.servers)  # of the parameters that the model has
        self._loaded: set[int] = set()  # parameters that were loaded and not sent yet
        for tensor, value in zip(self._tensors, self._values, strict=True):
            value.copy_(tensor)

    @torch.no_grad()
    def _take(self, replies: Sequence[ServerReply]) -> None:
        """Bring the servers' parameters, which have come with these answers, to the model.

        Where one of several optimizers has stepped, others' parameters are the same as before, and
        a graph may still need them: what is not written into, autograd does not refuse.
        """
        self._versions = [reply.version for reply in replies]
        several = len(self.setup.optimizer.all) > 1
        for tensor, value in zip(self._tensors, self._values, strict=True):
            if not (several and torch.equal(tensor, value.to(tensor.dtype))):
                tensor.copy_(value)

    def shown_state(self, own: Any) -> Any:  # Any: what optimizers keep
        """Show that it is not here, where servers update."""
        return StateOnServers(self._state_names, own) if self.options.server_updates else own

    def check_beside(self, state: Collection[Any]) -> None:
        """Refuse it where servers update."""
        if self.options.server_updates and state:
            raise InvalidArgumentError(beside_refused(state))

    def loaded(self, index: int, values: torch.Tensor) -> None:
        """Keep what was loaded, unrounded, until the servers get it."""
        if self.options.server_updates:
            self._values[index].copy_(values)
            self._loaded.add(index)

    @torch.no_grad()
    def take_edits(self) -> None:
        """Bring the servers what the user has written into the model since it was pulled.

        In sync all workers write the same, so one of them brings it; else each brings its own.
        """
        edits: dict[int, torch.Tensor] = {}
        for index, (tensor, value) in enumerate(zip(self._tensors, self._values, strict=True)):
            where = merge(value, tensor)
            if index in self._loaded:
                where = torch.ones_like(value, dtype=torch.bool)
            if where is not None:
                edits[index] = where
        self._loaded.clear()
        together = self.options.mode == "sync"
        asked = asked_by(self.setup, self.client, dedicated=self.options.dedicated)
        for place, share in enumerate(self._shares):
            edited = [index for index in share.indexes if index in edits]
            if edited and (not together or place in asked):
                self.client.bring(place, Kind.EDIT, [
                    {"number": share.indexes.index(index), "where": as_arrays(edits[index]),
                     "values": as_arrays(self._values[index])}
                    for index in edited
                ])  # fmt: skip

    def open(self, tensors: Sequence[torch.Tensor]) -> None:  # noqa: ARG002 - all come at once
        """Have what the servers have, where they update."""
        if self.options.server_updates:
            self.take_edits()
            self._come_together()
            self.pull()
            self.setup.comm.barrier()  # or somebody's next gradient would come before a late pull

    def shut(self, tensors: Sequence[torch.Tensor], *, keep: bool, written: bool) -> None:
        """Bring the servers what was written before anybody's next gradient comes."""
        super().shut(tensors, keep=keep, written=written)
        if self.options.server_updates:
            self.setup.comm.barrier()

    def applied(self) -> list[list[int]]:
        """Ask how many gradients each server has taken of each worker, in rank order."""
        workers = self.everyone.size
        return [
            [int(count) for count in reply.values[:workers]]
            for reply in self.client.ask(ServerRequest(Kind.COUNT))
        ]

    def _options_now(self) -> list[float]:
        """Return the options of the optimizer that servers are to step with."""
        return [] if self.client.known is None else self.client.known.read(self.setup.optimizer)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state with the parameters as the servers have them, once all workers ask."""
        if not self.options.server_updates:
            return super().full_state_dict()
        self._come_together()
        self.pull()
        share_buffers(self.setup)
        state = dict(self.setup.model.state_dict())
        for names, value in zip(self.setup.names_now(), self._values, strict=True):
            state.update((name, value.clone()) for name in names if name in state)
        self.setup.comm.barrier()  # or somebody's next gradient would come before a late pull
        return state

    def pull(self) -> None:
        """Take the servers' parameters as they are now, where they update."""
        if self.options.server_updates:
            self._take(self.client.ask(ServerRequest(Kind.PULL), "values"))

    def rest(self) -> None:
        """Have other workers not wait for this one until it pulls: it may have no more steps."""
        if self.options.bound is not None:
            self.client.ask(ServerRequest(Kind.REST))

    def _come_together(self) -> None:
        """Wait for all workers, while none of them waits for this one's steps."""
        self.rest()
        self.meet()
        if self.options.mode == "sync":
            self.setup.comm.barrier()

    def meet(self) -> None:
        """Wait for workers that don't wait for one another, where they are about to do so.

        Some may be lost, or have finished. Then the others are a group of their own from here on.
        """
        if self.options.mode == "sync":
            return
        told = self.client.meet()
        here = [rank for rank in range(self.everyone.size) if told[rank]]
        if len(here) < self.setup.comm.size:
            self.setup.comm = self.everyone.regroup(here) or self.setup.comm

    def close(self) -> None:
        """Say goodbye to the servers; all workers do it."""
        self.client.shutdown()
        if self.client.shutdown.spared:
            self.everyone.spare("ends")

    # ---- checkpoints

    def to_save(self) -> Iterable[SavedPart]:
        """Yield what servers have, each asked by one worker, or a share of what workers have."""
        if not self.options.server_updates:
            return super().to_save()
        dedicated = self.options.dedicated
        return fetch(self.setup, self.client, self._shares, dedicated=dedicated)

    def take_back(self, saved: Saved) -> None:
        """Bring the servers what they had."""
        if not self.options.server_updates:
            super().take_back(saved)
            return
        dedicated = self.options.dedicated
        bring(self.setup, self.client, self._shares, saved, dedicated=dedicated)

    def refresh(self) -> None:
        """Take what the servers have got to the model."""
        if not self.options.server_updates:
            super().refresh()
            return
        self.pull()
        self.setup.comm.barrier()  # or somebody's next gradient would come before a late pull

    # ---- the ledger

    def moved(self) -> tuple[int, int]:
        """Return the bytes that this rank has sent and received in messages."""
        return self.client.moved()

    def traffic(self) -> list[Traffic] | None:
        """Add messages with servers to what the collectives of the workers have moved."""
        counted = self.setup.comm.traffic()
        every = self.setup.comm.all_gather(np.array(self.moved(), np.int64)).tolist()
        if counted is None:
            return None
        return [
            Traffic(one.sent + sent, one.received + received)
            for one, (sent, received) in zip(counted, every, strict=True)
        ]

    def told_volume(self) -> Volume:
        """Return what the workers tell one another in a step: nothing."""
        return Volume()

    def _gradients(self) -> list[torch.Tensor]:
        """Return the gradients that there are."""
        grads = [tensor.grad for tensor in self._tensors]
        return [grad for grad in grads if not (grad is None or isinstance(grad, RefusedGrad))]

    def held(self) -> Held:
        """Count the model, gradients, what a server on this rank keeps, and all buffers."""
        server = self.client.server
        updates = None if server is None else server.updates
        grads = self._gradients()
        optimizers = [self.setup.optimizer] + ([updates.optimizer] if updates else [])
        state = [value for optimizer in optimizers for value in held_by(optimizer)]
        transient = [one for one in self.client.held() if not _shares_memory(one, grads)]
        values = storage_bytes(updates.values if updates else [])
        return Held(
            parameters=held_by_model(self.setup) + values,
            gradients=storage_bytes(grads),
            optimizer=storage_bytes([*state, *(self.setup.masters or [])]),
            transient=storage_bytes(transient),
        )

    def _predicted(self, gradients: int, *volumes: Volume, waits: int = 0) -> tuple[Held, Volume]:
        """Predict what a step with these exchanges holds, and add them up.

        `gradients` are those that workers have, of which `waits` bytes lie in what was received.
        """
        setup = self.setup
        mine = self._own_share
        together = self.options.mode == "sync"
        served = self._values_bytes(mine) if self.options.server_updates else 0
        sent = sum(share.nbytes for share in self._shares)
        received = sum(self._values_bytes(share) for share in self._shares)
        inboxes = (setup.comm.size + 1 if together else 1) * (mine.nbytes if mine else 0)
        taken = received if self.options.server_updates else sent
        held = Held(
            parameters=model_bytes(setup) + served,
            gradients=gradients,
            optimizer=self._state(mine),
            transient=sent + taken + inboxes - waits,
        )
        return held, add_up(volumes)

    @property
    def _own_share(self) -> Share | None:
        """What a server on this rank has."""
        place = self.client.own_place
        return None if place is None else self._shares[place]

    def _values_bytes(self, share: Share | None) -> int:
        """Return the bytes of a server's parameters, in the dtype in which they are updated."""
        listed = [] if share is None else [self.setup.parameters[at] for at in share.indexes]
        return sum(one.tensor.shape.numel() * self._kind(one.name).itemsize for one in listed)

    def _kind(self, name: str) -> torch.dtype:
        kind = self.setup.dtypes[name]
        return master_dtype(kind) if self.setup.precision.mixed else kind

    def _state(self, mine: Share | None) -> int:
        """Return what the optimizers keep here, masters included."""
        setup = self.setup
        if not self.options.server_updates:
            return sum(state_and_masters(setup))
        listed = [] if mine is None else [(at, setup.parameters[at]) for at in mine.indexes]
        shapes = [(at, tuple(one.tensor.shape), self._kind(one.name)) for at, one in listed]
        return state_bytes(setup, shapes, self.ever_used())

    def ever_used(self) -> Collection[int]:
        """Return the parameters that were stepped on."""
        return self.setup.stepped_on


def _shares_memory(tensor: torch.Tensor, others: Sequence[torch.Tensor | None]) -> bool:
    place = tensor.untyped_storage().data_ptr()
    return any(
        other is not None and other.untyped_storage().data_ptr() == place for other in others
    )


def evaluated(own: Any, closure: Any) -> Any:  # Any: the optimizer's own step, and what it takes
    """Run the closure of a step that servers take: before it, as torch's own optimizers do."""
    if closure is None:
        return None
    step = own.func
    if not str(step.__module__).startswith("torch.optim"):
        raise InvalidArgumentError(
            f"{step.__qualname__}(closure) runs on the parameter server, which can't call the "
            f"closure in the middle of it. Use ParameterServer(update='worker'), or another "
            f"strategy."
        )
    return closure()
