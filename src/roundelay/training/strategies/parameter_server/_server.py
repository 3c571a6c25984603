"""A parameter server: takes gradients, aggregates or applies them, and hands out what comes of it.

It takes one request after the other. Nothing that goes wrong here is lost: whoever waits for an
answer, or asks for one later, is told. A worker that is lost is named, and waited for no more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from roundelay.communicator import ANY
from roundelay.errors import CollectiveMismatch, CommunicationError, PeerLost
from roundelay.planning.clock import Clock, staleness_bound
from roundelay.training.strategies.parameter_server._answers import EVER, Answers, Channels
from roundelay.training.strategies.parameter_server._gradients import (
    ServerGradients,
    UpdateRules,
    Updates,
)
from roundelay.training.strategies.parameter_server._messages import (
    DATA,
    GOODBYE,
    REQUEST,
    TEXT,
    Kind,
    ServerReply,
    ServerRequest,
    as_error,
)
from roundelay.training.strategies.parameter_server.server_state import edit, packed, put_back
from roundelay.training.strategies.parameter_server.share import Share

WITH_GRADIENTS = (Kind.PUSH, Kind.APPLY)
WORDS = {Kind.PUSH: "brings gradients", Kind.STEP: "steps", Kind.NORM: "asks for a norm",
         Kind.CLAMP: "clips values"}  # fmt: skip


class ServerLoop:
    """One server at work, on a thread of its own or on a rank of its own."""

    def __init__(
        self,
        channels: Channels,
        *,
        workers: Sequence[int],
        share: Share,
        names: Sequence[str],
        rules: UpdateRules,
        updates: Updates | None,
        names_lost: bool = True,
    ) -> None:
        self._channels, self._share, self._rules = channels, share, rules
        self.updates = updates
        self.gradients = ServerGradients(share, names, rules, updates, len(workers))
        self._workers = list(workers)
        self._here = set(workers)  # those that have neither said goodbye nor been lost
        self._losses = 0  # that are known
        self._names_lost = names_lost
        self.applied = dict.fromkeys(workers, 0)  # gradients of each worker, each counted once
        self.error: Exception | None = None
        options = 0 if updates is None else updates.options.count
        self._word = np.zeros(ServerRequest.room(len(share.indexes), options))
        self.answers = Answers(channels, ServerReply.room(len(share.indexes), len(workers)))
        self._pending: dict[int, ServerRequest] = {}  # of workers that wait for the others
        self._blocked: dict[int, ServerReply] = {}  # for workers that are too far ahead
        self._meeting: set[int] = set()  # workers that wait for all that are here
        self._clock = Clock(workers, rules.bound)

    @torch.no_grad()
    def serve(self) -> None:
        """Answer until every worker has said goodbye; raises if the ranks lose one another."""
        asks = self._channels.asks
        asks.timeout = EVER
        while self._here:
            letter = asks.start.recv(self._word, ANY, REQUEST)
            # What a worker has asked for before it was lost comes first.
            while not asks.wait_unless_lost(letter, self._losses):
                self._see_losses()
                if not self._here:
                    return
            worker = letter.source
            if worker not in self._here:
                continue
            with self.answers.unless_lost(worker):
                self._take(worker, ServerRequest.read(self._word, len(self._share.indexes)))

    def _take(self, worker: int, request: ServerRequest) -> None:
        if request.kind in WITH_GRADIENTS:
            place = self._workers.index(worker) if self._rules.together else 0
            for number, buffer in enumerate(self.gradients.inboxes[place]):
                self._channels.asks.recv(buffer, worker, DATA + number)
                self.answers.count([worker], received=buffer.nbytes)
        if request.kind != Kind.MEET:
            self.answers.count([worker], received=self._word.nbytes)
        try:
            self._handle(worker, request)
        except CommunicationError:
            raise
        except Exception as error:  # noqa: BLE001 - raised again on every rank
            self._fail(error)

    def _handle(self, worker: int, request: ServerRequest) -> None:
        kind = Kind(request.kind)
        if kind is Kind.FAIL:
            text = np.empty(request.length, np.uint8)
            self._channels.asks.recv(text, worker, TEXT)
            self._fail(as_error(text, worker))
        elif kind is Kind.BYE:
            self._part_with(worker)
        elif self.error is not None:
            self.answers.tell(self.error, [worker])
        elif kind in WORDS:
            self._wait_for_all(worker, request)
        elif kind is Kind.APPLY:
            self._apply(worker, request)
        elif kind is Kind.MEET:
            self._meeting.add(worker)
            self._open_meeting()
        elif kind is Kind.PULL and self.updates is not None:
            self._clock.wake(worker)
            self.answers.send([worker], ServerReply(version=self.version), self.updates.values)
        elif kind in (Kind.FETCH, Kind.BRING, Kind.EDIT) and self.updates is not None:
            self._checkpoint(worker, request, self.updates)
        else:
            if kind is Kind.REST:
                self._clock.rest(worker)
                self._release()
            counts = [float(self.applied[one]) for one in self._workers]
            self.answers.send([worker], ServerReply(version=self.version, values=counts))

    @property
    def version(self) -> int:
        """Of the parameters: how many updates there were."""
        return self.gradients.version

    # ---- all workers together

    def _wait_for_all(self, worker: int, request: ServerRequest) -> None:
        self._pending[worker] = request
        kinds = {one: each.kind for one, each in self._pending.items()}
        if len(set(kinds.values())) > 1:
            told = "; ".join(f"rank {one} {WORDS[Kind(kind)]}" for one, kind in kinds.items())
            self._fail(CollectiveMismatch(f"The workers do different things: {told}."))
        elif len(self._here) < len(self._workers):
            self._miss(min(set(self._workers) - self._here))
        elif len(self._pending) == len(self._workers):
            self._do_together([self._pending[one] for one in self._workers])
            self._pending = {}  # not before: if this fails, all of them must be told

    def _miss(self, worker: int) -> None:
        others = min(self._pending)
        self._fail(PeerLost(
            f"Rank {worker} has finished, but rank {others} still waits for its gradients. Give "
            f"every worker the same number of steps, or use mode='async'."
        ))  # fmt: skip

    def _do_together(self, requests: Sequence[ServerRequest]) -> None:
        first, grads = requests[0], self.gradients
        if first.kind == Kind.PUSH:
            grads.aggregate(weighed=any(request.weighed for request in requests))
            data = grads.aggregates if self.updates is None else []
            self._count(self._workers)
            self.answers.send(self._workers, ServerReply(version=self.version), data)
            return
        grads.multiply(first.factors, first.scales)
        if first.kind == Kind.NORM:
            norms = grads.norms(first.norm_type)
            self.answers.send(self._workers, ServerReply(version=self.version, values=norms))
            return
        if first.kind == Kind.CLAMP:
            grads.clamp(first.norm_type, first.used)
            self.answers.send(self._workers, ServerReply(version=self.version))
            return
        places = {
            rank: request.place for rank, request in zip(self._workers, requests, strict=True)
        }
        if len(set(places.values())) > 1:
            told = ", ".join(f"rank {rank} number {place}" for rank, place in places.items())
            self._fail(CollectiveMismatch(f"The workers step different optimizers: {told}."))
            return
        odd = next((rank for rank, request in zip(self._workers, requests, strict=True)
                    if request.options != first.options), None)  # fmt: skip
        if odd is not None:
            self._fail(CollectiveMismatch(
                f"Rank {odd} steps with other options (learning rate, …) than rank "
                f"{self._workers[0]}. Give all workers the same schedule."
            ))  # fmt: skip
            return
        self.answers.send(self._workers, ServerReply(version=grads.update(first)), self._values())

    # ---- each worker for itself

    def _apply(self, worker: int, request: ServerRequest) -> None:
        staleness = self.version - request.version
        self._blocked[worker] = ServerReply(staleness=staleness)  # if this fails, it must be told
        bound = self._rules.bound
        if request.number != self.applied[worker] + 1 or staleness < 0:
            self._fail(CollectiveMismatch(
                f"Gradient {request.number} of rank {worker} came when {self.applied[worker]} of "
                f"its gradients had been applied."
            ))  # fmt: skip
            return
        if bound is not None and staleness > staleness_bound(len(self._workers), bound):
            self._fail(CollectiveMismatch(
                f"A gradient of rank {worker} is {staleness} updates old; no more than "
                f"{staleness_bound(len(self._workers), bound)} can be."
            ))  # fmt: skip
            return
        self.gradients.aggregate_one()
        self.gradients.update(request)
        self._clock.wake(worker)
        self._count([worker])
        self._clock.tick(worker)
        self._release()

    def _release(self) -> None:
        """Answer everybody who is not too far ahead of the slowest that is still here."""
        for worker in sorted(self._blocked):
            if self._clock.may_go_on(worker):
                reply = self._blocked.pop(worker)
                reply.version = self.version
                self.answers.send([worker], reply, self._values())

    def _open_meeting(self) -> None:
        """Tell those who wait for all workers which are here, once all of these do."""
        if self._meeting and self._meeting == self._here:
            here = [float(worker in self._here) for worker in self._workers]
            self._meeting = set()
            moved = self.answers.moved  # a meeting is no part of a step, and counts for nothing
            self.answers.send(sorted(self._here), ServerReply(version=self.version, values=here))
            self.answers.moved = moved

    def _count(self, workers: Iterable[int]) -> None:
        for worker in workers:
            self.applied[worker] += 1

    def _values(self) -> list[torch.Tensor]:
        return [] if self.updates is None else self.updates.values

    # ---- checkpoints

    def _checkpoint(self, worker: int, request: ServerRequest, updates: Updates) -> None:
        """Hand all parameters with their state to a worker, or take them, or edits, from it."""
        kind = Kind(request.kind)
        self.answers.send([worker], ServerReply(version=self.version))
        if kind is Kind.EDIT:
            for _ in range(request.number):
                edit(updates, self._channels.asks.recv_object(worker, TEXT))
            return
        for number in range(len(updates.parameters)):
            if kind is Kind.FETCH:
                self._channels.answers.send_object(packed(updates, number), worker, TEXT)
            else:
                put_back(updates, number, self._channels.asks.recv_object(worker, TEXT))

    # ---- failures

    def _fail(self, error: Exception) -> None:
        """End it for everybody: those who wait are told now, the others when they ask."""
        self.error = error
        waiting = sorted({*self._pending, *self._blocked, *self._meeting})
        self._pending, self._blocked, self._meeting = {}, {}, set()
        self.answers.tell(error, waiting)

    # ---- workers that go

    def _part_with(self, worker: int) -> None:
        self._here.discard(worker)
        self._clock.leave(worker)
        if self._pending and self.error is None:
            self._miss(worker)
        self._release()
        self._open_meeting()
        if not self._here:  # nobody leaves before the last: ranks that are gone look like lost ones
            self.answers.send(self._workers, ServerReply(version=self.version), tag=GOODBYE)

    def _see_losses(self) -> None:
        """Part with workers that were lost since, and name them."""
        asks = self._channels.asks
        self._losses = asks.losses
        for worker, told in asks.lost().items():
            if worker not in self._here:
                continue
            if self._names_lost:
                sys.stderr.write(
                    f"roundelay: {told} {self.applied[worker]} of its gradients were applied; the "
                    f"other workers go on.\n"
                )
            self._blocked.pop(worker, None)
            self._meeting.discard(worker)
            self._part_with(worker)
