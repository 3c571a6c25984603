"""Every rank holds the whole model and trains on a part of the batch; gradients are averaged.

Gradients are copied into buckets in the shared arena the moment they are complete, and a bucket is
all-reduced in place as soon as it is full, while backward goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from roundelay.arguments import whole
from roundelay.communicator import Communicator
from roundelay.communicator.start import Handle
from roundelay.reductions import Array
from roundelay.training._buckets import Bucket, bucket_limit, make_buckets
from roundelay.training._exchange import Intake, refuse_broken, tell_all, told_bytes
from roundelay.training._masters import clamp, drop, make_masters, multiply, norm_of
from roundelay.training._setup import Setup, share_buffers, storage_bytes
from roundelay.training._strategy import Held, Sharing, Strategy, Volume
from roundelay.training._volume import add_up, exchanged, state_bytes

__all__ = ["Ddp", "Span", "Timeline"]

#: Begins to average a bucket over the ranks, and returns what waits for it.
Hook = Callable[[Communicator, torch.Tensor], Callable[[], Any]]


@dataclass(frozen=True, slots=True)
class Ddp(Strategy):
    """Data parallel: the whole model on every rank, gradients averaged while backward runs."""

    names: ClassVar[dict[str, dict[str, Any]]] = {"ddp": {}}

    bucket_bytes: int | None = None  # None: as the device likes it
    wire: torch.dtype | None = None  # on the way between ranks; None: as the gradients are
    hook: Hook | None = None  # replaces the all-reduce by an exchange of your own
    check_finite: bool = True

    def __post_init__(self) -> None:
        if self.bucket_bytes is not None:
            size = whole("bucket_bytes of Ddp", self.bucket_bytes, 1)
            object.__setattr__(self, "bucket_bytes", size)

    def share(self, setup: Setup) -> Sharing:
        """Give every parameter's gradient a place in a bucket."""
        return _Averaging(self, setup)


@dataclass(slots=True)
class Span:
    """When one bucket was full, and when it was all-reduced; seconds of the monotonic clock."""

    bucket: int
    nbytes: int
    full: float
    began: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """One backward pass: from its first gradient to its last, with the buckets meanwhile."""

    began: float
    ended: float
    spans: Sequence[Span]

    @property
    def hidden(self) -> float:
        """The share of the time on the way that backward hid."""
        total = sum(span.ended - span.began for span in self.spans)
        seen = sum(max(0.0, span.ended - max(span.began, self.ended)) for span in self.spans)
        return 1 - seen / total if total else 1.0


class _Averaging(Sharing):
    def __init__(self, options: Ddp, setup: Setup) -> None:
        self.options, self.setup = options, setup
        self._masters = make_masters(setup)
        self._wire = options.wire or setup.precision.reduce
        # A scaled loss may overflow: its step is skipped then, and nothing is wrong.
        self._intake = Intake(check=options.check_finite and setup.scaler is None)
        self._tensors = [one.tensor for one in setup.parameters]
        self._order = list(reversed(range(len(self._tensors))))
        self._arrived: list[int] = []
        self._settled = False  # whether the order of use is known
        self._buckets: list[Bucket] = []
        self._of: dict[int, Bucket] = {}
        self._next = 0  # the first bucket that is not on its way
        self._waits: list[Callable[[], Any]] = []
        self._handles: list[Handle] = []
        self._spans: list[Span] = []
        self._began = self._ended = 0.0
        if setup.comm.size > 1:
            self._lay_out()

    def _lay_out(self) -> None:
        self._buckets = make_buckets(
            self.setup.comm,
            [tuple(tensor.shape) for tensor in self._tensors],
            [self._wire or tensor.dtype for tensor in self._tensors],
            self._tensors[0].device if self._tensors else torch.device("cpu"),
            order=self._order,
            most_bytes=bucket_limit(self.options.bucket_bytes, self._tensors),
        )
        self._of = {place.index: one for one in self._buckets for place in one.places}

    # ---- while backward runs

    def begin_backward(self) -> None:
        """Expect every gradient anew."""
        if self._masters is not None:
            self._masters.refuse_more()
        self._next, self._waits, self._handles, self._arrived = 0, [], [], []
        self._began = time.monotonic()
        self._intake.clear()
        self._spans = []
        for bucket in self._buckets:
            bucket.expect_all()

    def arrived(self, index: int) -> None:
        """Copy the gradient into its bucket; send all buckets that are full, in their order."""
        if not self._buckets:
            return
        self._arrived.append(index)
        bucket = self._of[index]
        self._put(bucket, index)
        bucket.missing.discard(index)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send()

    def _put(self, bucket: Bucket, index: int) -> None:
        place = next(place for place in bucket.places if place.index == index)
        there, grad = bucket.view(place), self._tensors[index].grad
        if grad is None:
            there.zero_()
        elif grad.data_ptr() == there.data_ptr():
            self._intake.look(index, there)
        else:
            self._intake.put(index, there, grad)
            self._tensors[index].grad = None  # one copy is enough; the average comes back

    def _send(self) -> None:
        # All ranks send in the same order, whatever order their gradients come in.
        bucket = self._buckets[self._next]
        self._intake.flush()
        comm = self.setup.comm
        self._spans.append(Span(self._next, bucket.flat.nbytes, time.monotonic()))
        self._next += 1
        if self.options.hook is not None:
            self._waits.append(self.options.hook(comm, bucket.flat))
            return
        op = "sum" if self.setup.step.weighed else "avg"
        handle = comm.start.all_reduce(bucket.flat, op)
        self._handles.append(handle)
        self._waits.append(handle.wait)

    def gathered(self) -> None:
        """Send what is left, wait for all, and give every parameter its average."""
        if not self._buckets:
            self._weigh_alone()
            return
        used = [tensor.grad is not None for tensor in self._tensors]
        for bucket in self._buckets:
            used = self._fill(bucket, used)
        while self._next < len(self._buckets):
            self._send()
        self._ended = time.monotonic()
        for wait in self._waits:
            wait()
        mine = [index in self._intake.broken for index in range(len(self._tensors))]
        told = tell_all(self.setup.comm, used, mine, self.setup.step)
        refuse_broken(self.setup.comm, told, mine, self.setup.parameters)
        factor = told.factor()
        if factor is not None and self.options.hook is not None:
            factor *= self.setup.comm.size  # a hook averages, where a sum is wanted
        self._hand_back(told.used, factor)

    def _fill(self, bucket: Bucket, used: list[bool]) -> list[bool]:
        """Put in what did not arrive: zeros, or what earlier micro-batches have left."""
        for place in bucket.places:
            if place.index in bucket.missing:
                self._put(bucket, place.index)
            else:
                used[place.index] = True
        return used

    def _hand_back(self, used: Array, factor: float | None) -> None:
        # A parameter that no rank used has no gradient, as on one device.
        grads = {
            place.index: bucket.view(place) if used[place.index] else None
            for bucket in self._buckets
            for place in bucket.places
        }
        if self._masters is not None:
            self._masters.give([grads[index] for index in range(len(grads))], factor=factor)
            return
        if factor is not None:
            for bucket in self._buckets:
                bucket.flat.mul_(factor)
        for index, grad in grads.items():
            tensor = self._tensors[index]
            tensor.grad = None if grad is None else grad.to(tensor.dtype)

    def _weigh_alone(self) -> None:
        told = tell_all(self.setup.comm, [], [], self.setup.step)
        factor = told.factor()
        if self._masters is not None:
            self._masters.give([tensor.grad for tensor in self._tensors], factor=factor)
        elif factor is not None:
            multiply(None, self._tensors, factor)

    def timeline(self) -> Timeline:
        """Return when each bucket of the last backward pass was full, and when it travelled."""
        for span, handle in zip(self._spans, self._handles, strict=True):
            span.began, span.ended = handle.times() or (span.full, span.full)
        return Timeline(self._began, self._ended, self._spans)

    # ---- around the step

    def before_step(self) -> None:
        """Bring the averages to the master weights, if there are any."""
        if self._masters is not None:
            self._masters.ready()

    def step(self, own: Any, closure: Any) -> Any:
        """Step, with a model that has the masters' weights whenever a closure looks at it."""
        masters = self._masters
        if masters is None or closure is None:
            return own(closure)

        def fresh() -> Any:
            masters.hand_out()
            return closure()

        return own(fresh)

    def after_step(self) -> None:
        """Share rank 0's buffers, and after the first step put buckets into the order of use."""
        comm = self.setup.comm
        if self._masters is not None:
            self._masters.hand_out()
        if comm.size == 1:
            return
        share_buffers(self.setup)
        if not self._settled:
            self._settle()

    def _settle(self) -> None:
        seen = [*self._arrived, *(i for i in self._order if i not in set(self._arrived))]
        order = self.setup.comm.broadcast(np.array(seen, np.int64))
        self._settled = True
        if order.tolist() == self._order:
            return
        if self._masters is not None:
            self._masters.leave()
        for tensor in self._tensors if self._masters is None else ():
            if tensor.grad is not None:
                tensor.grad = tensor.grad.clone()  # its place is about to be another's
        self._order = [int(index) for index in order]
        self._lay_out()

    def forget(self) -> None:
        """Let go of all gradients."""
        drop(self._masters, self._tensors)

    def zero_grad(self, own: Any, *, set_to_none: bool) -> None:
        """Forget the gradients, or make them zero."""
        if self._masters is not None and not set_to_none:
            self._masters.zero()
        else:
            super().zero_grad(own, set_to_none=set_to_none)

    def grad_norm(self, norm_type: float) -> float:
        """Return the norm of the averages, which every rank has whole."""
        return norm_of(self._masters, self._tensors, norm_type)

    def clamp_grads(self, value: float) -> None:
        """Cut every element of the averages."""
        clamp(self._masters, self._tensors, value)

    def take_edits(self) -> None:
        """Bring what the user has written into the model to the masters."""
        if self._masters is not None:
            self._masters.take_edits()

    def loaded(self, index: int, values: torch.Tensor) -> None:
        """Bring what was loaded to the master, unrounded."""
        if self._masters is not None:
            self._masters.tensors[index].copy_(values)

    def scale_grads(self, factor: float) -> None:
        """Multiply the averages."""
        multiply(self._masters, self._tensors, factor)

    # ---- the ledger

    @property
    def _apart(self) -> bool:
        """Whether gradients lie elsewhere than in the buckets that brought them."""
        return self._wire is not None and self._masters is None

    def held(self) -> Held:
        """Count the model, its gradients and the optimizer's state; buckets hold the gradients."""
        masters = self._masters
        grads = [one.grad for one in self._tensors] if masters is None else masters.held()
        flats = [bucket.flat for bucket in self._buckets]
        apart = self._apart
        state = [
            value
            for one in self.setup.optimizer.state.values()
            for value in one.values()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        ]
        return Held(
            parameters=storage_bytes(self._tensors),
            gradients=storage_bytes(grads if apart else [*grads, *flats]),
            optimizer=storage_bytes([*state, *(self.setup.masters or [])]),
            transient=storage_bytes(flats) if apart else 0,
        )

    def predicted(self) -> tuple[Held, Volume]:
        """Say 2Ψ(N-1)/N for gradients, as priced, and the whole of everything held."""
        whole = sum(tensor.nbytes for tensor in self._tensors)
        comm = self.setup.comm
        sent = [
            exchanged(comm, "all_reduce", one.flat.nbytes, item=one.flat.itemsize)
            for one in self._buckets
        ]
        told = exchanged(comm, "all_reduce", told_bytes(len(self._tensors)), item=8)
        flats = sum(one.flat.nbytes for one in self._buckets)
        masters = sum(one.nbytes for one in self.setup.masters or [])
        kept = masters + state_bytes(self.setup.optimizer, self.setup.stepped)
        gradients = whole if self._apart else flats or whole
        held = Held(whole, gradients, kept, flats if self._apart else 0)
        return held, add_up([*sent, told])
