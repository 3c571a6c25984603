"""A parameter server: takes gradients, aggregates or applies them, and hands out what comes of it.

It takes one request after the other. Nothing that goes wrong here is lost: whoever waits for an
answer, or asks for one later, is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from roundelay.communicator import ANY, Communicator
from roundelay.errors import CollectiveMismatch, CommunicationError, PeerLost
from roundelay.training._joined import Joined
from roundelay.training._ps_aggregate import OwnAggregate, aggregate_own, fold_in_order
from roundelay.training._ps_checkpoint import edit, packed, put_back
from roundelay.training._ps_layout import Share
from roundelay.training._ps_messages import (
    DATA,
    GOODBYE,
    REPLY,
    REQUEST,
    TEXT,
    Kind,
    Reply,
    Request,
    Status,
    as_error,
    as_text,
)
from roundelay.training._ps_twin import Options

__all__ = ["EVER", "WITH_GRADIENTS", "Mails", "Rules", "Server", "Updates", "staleness_bound"]

EVER = 10 * 365 * 86400.0  # seconds that a server waits for somebody to ask
WITH_GRADIENTS = (Kind.PUSH, Kind.APPLY)
WORDS = {Kind.PUSH: "brings gradients", Kind.STEP: "steps", Kind.NORM: "asks for a norm",
         Kind.CLAMP: "clips values"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mails:
    """Two groups of all ranks: one that carries requests, one that carries answers.

    Two, because a rank may be worker and server at once, in two threads: in each group only one of
    them sends, and only the other receives.
    """

    asks: Communicator
    answers: Communicator


@dataclass(frozen=True, slots=True)
class Rules:
    """What a server does with gradients."""

    aggregate: str | OwnAggregate  # "mean", "sum" or the user's own
    together: bool  # whether gradients wait for those of all workers
    bound: int | None = None  # steps that a worker may be ahead of the slowest; None: any number


@dataclass(frozen=True, slots=True)
class Updates:
    """What a server needs to update parameters itself."""

    values: list[torch.Tensor]  # the buffers in which the parameters live
    parameters: list[torch.Tensor]  # views of these
    optimizer: Joined
    options: Options


def staleness_bound(workers: int, bound: int) -> int:
    """Return how many updates a gradient can miss at most, if no worker gets ahead by more.

    A worker takes parameters after its c-th gradient when all others have had at least c - k
    applied; until its next one is applied, none of them can get beyond c + k + 1.

    >>> staleness_bound(4, 0), staleness_bound(4, 2)
    (3, 15)
    """
    return (workers - 1) * (2 * bound + 1)


class Server:
    """One server at work, on a thread of its own or on a rank of its own."""

    def __init__(
        self,
        mails: Mails,
        *,
        workers: Sequence[int],
        share: Share,
        names: Sequence[str],
        rules: Rules,
        updates: Updates | None,
    ) -> None:
        self._mails, self._share, self._rules = mails, share, rules
        self.names = list(names)  # of its parameters
        self.updates = updates
        self._workers = list(workers)
        self._here = set(workers)  # those that have not said goodbye
        self.applied = dict.fromkeys(workers, 0)  # gradients of each worker, each counted once
        self.ever_used = [False] * len(share.indexes)  # parameters that were stepped on
        self.version = 0
        self.error: Exception | None = None
        self.moved = (0, 0)  # bytes sent to and received from other ranks
        options = 0 if updates is None else updates.options.count
        self._word = np.zeros(Request.room(len(share.indexes), options))
        self._answer_word = np.zeros(Reply.room(len(share.indexes), len(workers)))
        # Gradients that wait for others need a place each; those applied at once need one for all.
        places = len(workers) if rules.together else 1
        self.inboxes = [share.make() for _ in range(places)]
        self.aggregates = share.make() if rules.together else self.inboxes[0]
        self._grads = share.views(self.aggregates)
        self._pending: dict[int, Request] = {}  # of workers that wait for the others
        self._blocked: dict[int, Reply] = {}  # for workers that are too far ahead
        self._clocks = dict.fromkeys(workers, 0)  # steps of each, as far as others wait for it
        self._resting: set[int] = set()  # workers that nobody waits for

    @torch.no_grad()
    def serve(self) -> None:
        """Answer until every worker has said goodbye; raises if the ranks lose one another."""
        asks = self._mails.asks
        asks.timeout = EVER
        while self._here:
            letter = asks.start.recv(self._word, ANY, REQUEST)
            letter.wait()
            worker = letter.source
            request = Request.read(self._word, len(self._share.indexes))
            if request.kind in WITH_GRADIENTS:
                place = self._workers.index(worker) if self._rules.together else 0
                for number, buffer in enumerate(self.inboxes[place]):
                    asks.recv(buffer, worker, DATA + number)
                    self._count_bytes([worker], received=buffer.nbytes)
            self._count_bytes([worker], received=self._word.nbytes)
            try:
                self._handle(worker, request)
            except CommunicationError:
                raise
            except Exception as error:  # noqa: BLE001 - raised again on every rank
                self._fail(error)

    def _handle(self, worker: int, request: Request) -> None:
        kind = Kind(request.kind)
        if kind is Kind.FAIL:
            text = np.empty(request.length, np.uint8)
            self._mails.asks.recv(text, worker, TEXT)
            self._fail(as_error(text, worker))
        elif kind is Kind.BYE:
            self._part_with(worker)
        elif self.error is not None:
            self._tell_failure([worker])
        elif kind in WORDS:
            self._wait_for_all(worker, request)
        elif kind is Kind.APPLY:
            self._apply(worker, request)
        elif kind is Kind.PULL and self.updates is not None:
            self._wake(worker)
            self._answer([worker], Reply(version=self.version), self.updates.values)
        elif kind in (Kind.FETCH, Kind.BRING, Kind.EDIT) and self.updates is not None:
            self._checkpoint(worker, request, self.updates)
        else:
            if kind is Kind.REST:
                self._resting.add(worker)
                self._release()
            counts = [float(self.applied[one]) for one in self._workers]
            self._answer([worker], Reply(version=self.version, values=counts))

    # ---- all workers together

    def _wait_for_all(self, worker: int, request: Request) -> None:
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

    def _do_together(self, requests: Sequence[Request]) -> None:
        first = requests[0]
        if first.kind == Kind.PUSH:
            self._aggregate(weighed=any(one.weighed for one in requests))
            data = self.aggregates if self.updates is None else []
            self._count(self._workers)
            self._answer(self._workers, Reply(version=self.version), data)
            return
        self._multiply(first.factors, first.scales)
        if first.kind == Kind.NORM:
            norms = [float(torch.linalg.vector_norm(one, first.norm_type)) for one in self._grads]
            self._answer(self._workers, Reply(version=self.version, values=norms))
            return
        if first.kind == Kind.CLAMP:
            for grad, used in zip(self._grads, first.used, strict=True):
                if used:
                    grad.clamp_(-first.norm_type, first.norm_type)
            self._answer(self._workers, Reply(version=self.version))
            return
        places = {rank: one.place for rank, one in zip(self._workers, requests, strict=True)}
        if len(set(places.values())) > 1:
            told = ", ".join(f"rank {rank} number {place}" for rank, place in places.items())
            self._fail(CollectiveMismatch(f"The workers step different optimizers: {told}."))
            return
        odd = next((rank for rank, one in zip(self._workers, requests, strict=True)
                    if one.options != first.options), None)  # fmt: skip
        if odd is not None:
            self._fail(CollectiveMismatch(
                f"Rank {odd} steps with other options (learning rate, …) than rank "
                f"{self._workers[0]}. Give all workers the same schedule."
            ))  # fmt: skip
            return
        self._answer(self._workers, Reply(version=self._update(first)), self._values())

    def _aggregate(self, *, weighed: bool) -> None:
        how = self._rules.aggregate
        if callable(how):
            each = [self._share.views(inbox) for inbox in self.inboxes]
            for number, name in enumerate(self.names):
                aggregate_own(how, [one[number] for one in each], self._grads[number], name)
            return
        for number, buffer in enumerate(self.aggregates):
            sources = [inbox[number] for inbox in self.inboxes]
            fold_in_order(sources, buffer, mean=how == "mean" and not weighed)

    def _multiply(self, factors: Iterable[float], scales: Iterable[float]) -> None:
        for factor in factors:
            for buffer in self.aggregates:
                buffer.mul_(factor)
        for grad, scale in zip(self._grads, scales, strict=True):
            if scale != 1.0:
                grad.mul_(scale)

    # ---- each worker for itself

    def _apply(self, worker: int, request: Request) -> None:
        staleness = self.version - request.version
        self._blocked[worker] = Reply(staleness=staleness)  # if this fails, it must be told
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
        if callable(self._rules.aggregate):
            for name, grad in zip(self.names, self._grads, strict=True):
                aggregate_own(self._rules.aggregate, [grad.clone()], grad, name)
        self._update(request)
        self._wake(worker)
        self._count([worker])
        self._clocks[worker] += 1
        self._release()

    def _slowest(self) -> int:
        """Return the lowest clock of all workers that others wait for."""
        return min((self._clocks[one] for one in self._here - self._resting), default=0)

    def _wake(self, worker: int) -> None:
        """Wait for a worker again; while it rested, its clock went on with the slowest."""
        if worker in self._resting:
            self._clocks[worker] = max(self._clocks[worker], self._slowest())
            self._resting.discard(worker)

    def _release(self) -> None:
        """Answer everybody who is not too far ahead of the slowest that is still here."""
        slowest = self._slowest()
        bound = self._rules.bound
        for worker in sorted(self._blocked):
            if bound is None or self._clocks[worker] - slowest <= bound:
                reply = self._blocked.pop(worker)
                reply.version = self.version
                self._answer([worker], reply, self._values())

    # ---- updates

    def _update(self, request: Request) -> int:
        """Step on the gradients that lie ready; return the new version."""
        updates = self.updates
        if updates is None:
            return self.version
        updates.options.write(request.options, updates.optimizer)
        for parameter, grad, used in zip(
            updates.parameters, self._grads, request.used, strict=True
        ):
            parameter.grad = grad.to(parameter.dtype) if used else None
        pairs = zip(self.ever_used, request.used, strict=True)
        self.ever_used = [ever or bool(used) for ever, used in pairs]
        updates.optimizer.all[request.place].step()
        for parameter in updates.parameters:
            parameter.grad = None  # which may be a copy
        self.version += 1
        return self.version

    def _count(self, workers: Iterable[int]) -> None:
        for worker in workers:
            self.applied[worker] += 1

    def _values(self) -> list[torch.Tensor]:
        return [] if self.updates is None else self.updates.values

    # ---- checkpoints

    def _checkpoint(self, worker: int, request: Request, updates: Updates) -> None:
        """Hand all parameters with their state to a worker, or take them, or edits, from it."""
        kind = Kind(request.kind)
        self._answer([worker], Reply(version=self.version))
        if kind is Kind.EDIT:
            for _ in range(request.number):
                edit(updates, self._mails.asks.recv_object(worker, TEXT))
            return
        for number in range(len(updates.parameters)):
            if kind is Kind.FETCH:
                self._mails.answers.send_object(packed(updates, number), worker, TEXT)
            else:
                put_back(updates, number, self._mails.asks.recv_object(worker, TEXT))

    # ---- answers

    def _count_bytes(self, workers: Iterable[int], *, sent: int = 0, received: int = 0) -> None:
        others = sum(worker != self._mails.asks.rank for worker in workers)
        self.moved = self.moved[0] + others * sent, self.moved[1] + others * received

    def _answer(
        self,
        workers: Sequence[int],
        reply: Reply,
        data: Sequence[torch.Tensor] = (),
        *,
        tag: int = REPLY,
    ) -> None:
        send = self._mails.answers.start.send
        reply.write(self._answer_word)
        nbytes = self._answer_word.nbytes + sum(one.nbytes for one in data)
        self._count_bytes(workers, sent=nbytes)
        letters = [send(self._answer_word, worker, tag) for worker in workers]
        letters += [send(one, worker, DATA + number)
                    for number, one in enumerate(data) for worker in workers]  # fmt: skip
        for letter in letters:  # until then, what they carry must stay as it is
            letter.wait()

    def _fail(self, error: Exception) -> None:
        """End it for everybody: those who wait are told now, the others when they ask."""
        self.error = error
        waiting = sorted({*self._pending, *self._blocked})
        self._pending, self._blocked = {}, {}
        self._tell_failure(waiting)

    def _tell_failure(self, workers: Sequence[int]) -> None:
        if self.error is None:
            return
        text = as_text(self.error)
        self._answer(workers, Reply(Status.FAILED, length=len(text)))
        for worker in workers:
            self._mails.answers.send(text, worker, TEXT)

    def _part_with(self, worker: int) -> None:
        self._here.discard(worker)
        if self._pending and self.error is None:
            self._miss(worker)
        self._release()
        if not self._here:  # nobody leaves before the last: ranks that are gone look like lost ones
            self._answer(self._workers, Reply(version=self.version), tag=GOODBYE)
