"""Every rank holds the whole model and trains on a part of the batch; gradients are averaged.

Gradients are copied into buckets in the shared arena the moment they are complete, and a bucket is
all-reduced in place as soon as it is full, while backward goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from roundelay.arguments import shown, truth, whole
from roundelay.communicator import Communicator, Traffic
from roundelay.communicator.start import Handle
from roundelay.errors import InvalidArgumentError
from roundelay.reductions import Array
from roundelay.training._buckets import Bucket, bucket_limit, make_buckets
from roundelay.training._exchange import refuse_broken, tell_all, told_bytes
from roundelay.training._intake import Intake
from roundelay.training._phases import of_bucket
from roundelay.training._setup import Setup, share_buffers, storage_bytes
from roundelay.training._sparse import add_up_rows, sparse_parameters
from roundelay.training._volume import (
    add_up,
    buffers_volume,
    exchanged,
    held_by,
    held_by_model,
    model_bytes,
    state_and_masters,
    traffic_of,
)
from roundelay.training._whole_gradients import WholeGradients, scale
from roundelay.training.optimizer.masters import make_masters
from roundelay.training.strategy import Held, Only, Strategy, StrategyState, Volume

__all__ = ["Ddp", "Span", "Timeline"]

#: Begins to average a bucket over the ranks, and returns what waits for it.
Hook = Callable[[Communicator, torch.Tensor], Callable[[], Any]]


@dataclass(frozen=True, slots=True)
class Ddp(Strategy):
    """Data parallel: the whole model on every rank, gradients averaged while backward runs."""

    names: ClassVar[dict[str, dict[str, Any]]] = {"ddp": {}}
    takes_odd: ClassVar[bool] = True

    bucket_bytes: int | None = None  # None: as the device likes it
    wire: torch.dtype | None = None  # on the way between ranks; None: as the gradients are
    hook: Hook | None = None  # replaces the all-reduce by an exchange of your own
    check_finite: bool = True

    def __post_init__(self) -> None:
        if self.bucket_bytes is not None:
            size = whole("bucket_bytes of Ddp", self.bucket_bytes, 1)
            object.__setattr__(self, "bucket_bytes", size)
        if self.wire is not None and not isinstance(self.wire, torch.dtype):
            raise InvalidArgumentError(f"wire of Ddp is a torch dtype, not {shown(self.wire)}.")
        if self.hook is not None and not callable(self.hook):
            raise InvalidArgumentError(f"hook of Ddp is a function, not {shown(self.hook)}.")
        object.__setattr__(self, "check_finite", truth("check_finite", self.check_finite))

    def take_experts(self, setup: Setup, name: str) -> None:
        """Have their gradients in buckets of their own; a hook would have to know of them.

        Those are sums that are divided by the ranks: an earlier pass would be divided again.
        """
        setup.step.once = True
        if self.hook is not None:
            raise InvalidArgumentError(
                f"Ddp(hook=…) gets buckets of all ranks, and {name} is divided along ep. Leave "
                f"out hook=, or ep."
            )

    def share(self, setup: Setup) -> StrategyState:
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


class _Averaging(WholeGradients):
    def __init__(self, options: Ddp, setup: Setup) -> None:
        self.options, self.setup = options, setup
        self._masters = make_masters(setup)
        self._wire = options.wire or setup.precision.reduce
        # A scaled loss may overflow: its step is skipped then, and nothing is wrong.
        self._intake = Intake(check=options.check_finite and setup.scaler is None)
        self._tensors = [parameter.tensor for parameter in setup.parameters]
        self.sparse = [] if setup.precision.mixed else sparse_parameters(setup)
        if self.sparse and options.hook is not None:
            raise InvalidArgumentError(
                f"The gradient of {setup.parameters[self.sparse[0]].name} is sparse and in no "
                f"bucket, so that Ddp(hook=…) would not see it. Build its module with sparse=False."
            )
        self._order = [at for at in reversed(range(len(self._tensors))) if at not in self.sparse]
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
        shapes = [tuple(tensor.shape) for tensor in self._tensors]
        kinds = [self._kind(tensor) for tensor in self._tensors]
        apart = self.setup.experts
        device = self._tensors[0].device if self._tensors else torch.device("cpu")
        most = bucket_limit(self.options.bucket_bytes, self._tensors)
        self._buckets = make_buckets(
            self.setup.comm, shapes, kinds, device, order=self._order, most_bytes=most,
            apart=apart, apart_comm=self.setup.same_experts if apart else None,
        )  # fmt: skip
        self._of = {place.index: bucket for bucket in self._buckets for place in bucket.places}

    def _kind(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a gradient travels."""
        return tensor.dtype if tensor.is_complex() or self._wire is None else self._wire

    # ---- while backward runs

    def begin_backward(self) -> None:
        """Expect every gradient anew."""
        if self._masters is not None:
            self._masters.refuse_more()
        self._next, self._waits, self._handles, self._arrived = 0, [], [], []
        self._began = time.monotonic()
        self._intake.clear()
        self._spans = []
        self._take_back()
        for bucket in self._buckets:
            bucket.expect_all()

    def grad_ready(self, index: int) -> None:
        """Copy the gradient into its bucket; send all buckets that are full, in their order."""
        if self.setup.comm.size == 1 or index in self.sparse:
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
        comm = self._ranks(bucket.places[0].index)
        self._spans.append(Span(self._next, bucket.flat.nbytes, time.monotonic()))
        self._next += 1
        if self.options.hook is not None:
            self._waits.append(self.options.hook(comm, bucket.flat))
            return
        op = "sum" if self.setup.step.weighed else "avg"
        flat = torch.view_as_real(bucket.flat) if bucket.flat.is_complex() else bucket.flat
        with of_bucket(comm.trace, self.setup.parameters, bucket.places):
            handle = comm.start.all_reduce(flat, op)
        self._handles.append(handle)
        self._waits.append(handle.wait)

    def _ranks(self, index: int) -> Communicator:
        """Return the ranks that bring the gradient of a parameter together."""
        experts = index in self.setup.experts
        return self.setup.same_experts if experts else self.setup.comm

    def backward_done(self) -> None:
        """Send what is left, wait for all, and give every parameter its average."""
        if self.setup.comm.size == 1:
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
        rows = self._add_up_rows()
        mine = [index in self._intake.broken for index in range(len(self._tensors))]
        told = tell_all(self.setup.comm, used, mine, self.setup.step)
        refuse_broken(self.setup.comm, told, mine, self.setup.parameters)
        factor = told.factor()
        if factor is not None and self.options.hook is not None:
            factor *= self.setup.comm.size  # a hook averages, where a sum is wanted
        self.setup.used = set(np.flatnonzero(told.used).tolist())
        self._hand_back(told.used, factor)
        mean = 1 / self.setup.comm.size if factor is None else factor
        for index, grad in rows.items():
            self._tensors[index].grad = grad.mul_(mean) if told.used[index] else None

    def _add_up_rows(self) -> dict[int, torch.Tensor]:
        """Bring sparse gradients together, of which no bucket knows."""
        self._look_at(self.sparse)
        tensors = self._tensors
        return {index: add_up_rows(self._ranks(index), tensors[index].grad, tensors[index])
                for index in self.sparse}  # fmt: skip

    def _look_at(self, indices: Iterable[int]) -> None:
        """See whether gradients are finite that go through no bucket."""
        for index in indices:
            grad = self._tensors[index].grad
            if grad is not None:
                values = grad.coalesce().values() if grad.is_sparse else grad
                self._intake.look(index, values)

    def _fill(self, bucket: Bucket, used: list[bool]) -> list[bool]:
        """Put in what did not arrive: zeros, or what earlier micro-batches have left."""
        for place in bucket.places:
            if place.index in bucket.missing:
                self._put(bucket, place.index)
            else:
                used[place.index] = True
        return used

    def _hand_back(self, used: Array, factor: float | None) -> None:
        if factor is None and self.setup.mesh is not None:
            # The mean over all ranks, though only those with the same experts have added up.
            for bucket in self._buckets:
                if bucket.places[0].index in self.setup.experts:
                    bucket.flat.div_(self.setup.mesh.experts.size)
        # A parameter that no rank used has no gradient, as on one device.
        grads = {
            # Each counts by itself what is written into it, and is no view for torch.
            place.index: bucket.view(place).data if used[place.index] else None
            for bucket in self._buckets
            for place in bucket.places
        }
        self._lent = {index: grad for index, grad in grads.items() if grad is not None}
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
        """Average nothing; ranks with other parts of the model learn what is not finite here."""
        if self.setup.mesh is not None and not self.setup.mesh.alone:
            self._look_at(range(len(self._tensors)))
        mine = [index in self._intake.broken for index in range(len(self._tensors))]
        told = tell_all(self.setup.comm, mine, mine, self.setup.step)
        refuse_broken(self.setup.comm, told, mine, self.setup.parameters)
        factor = told.factor()
        self.setup.used = {at for at, one in enumerate(self._tensors) if one.grad is not None}
        if self._masters is not None:
            self._masters.give([tensor.grad for tensor in self._tensors], factor=factor)
        elif factor is not None:
            scale(self._tensors, factor)

    def timeline(self) -> Timeline:
        """Return when each bucket of the last backward pass was full, and when it travelled."""
        for span, handle in zip(self._spans, self._handles, strict=True):
            span.began, span.ended = handle.times() or (span.full, span.full)
        return Timeline(self._began, self._ended, self._spans)

    # ---- around the step

    def step(self, own: Any, closure: Any, place: int = 0) -> Any:
        """Step, with a model that has the masters' weights whenever a closure looks at it."""
        masters, only = self._masters, self.setup.only(place)
        if masters is None or closure is None:
            return own(closure)

        def fresh() -> Any:
            masters.hand_out(only)
            return closure()

        return own(fresh)

    def after_step(self, only: Only = None) -> None:
        """Share rank 0's buffers, and after the first step put buckets into the order of use."""
        super().after_step(only)
        if self.setup.comm.size == 1:
            return
        share_buffers(self.setup, once=True)
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

    # ---- the ledger

    @property
    def _apart(self) -> bool:
        """Whether gradients lie elsewhere than in the buckets that brought them."""
        return self._wire is not None and self._masters is None

    def traffic(self) -> list[Traffic] | None:
        """Count the gradients of experts, too, which fewer ranks bring together."""
        setup = self.setup
        return traffic_of(setup.comm, [setup.same_experts] if setup.experts else [])

    def held(self) -> Held:
        """Count the model, its gradients and the optimizer's state; buckets hold the gradients."""
        masters = self._masters
        grads = [tensor.grad for tensor in self._tensors] if masters is None else masters.held()
        flats = [bucket.flat for bucket in self._buckets]
        apart = self._apart
        return Held(
            parameters=held_by_model(self.setup),
            gradients=storage_bytes(grads if apart else [*grads, *flats]),
            optimizer=storage_bytes([*held_by(self.setup.optimizer), *(self.setup.masters or [])]),
            transient=storage_bytes(flats) if apart else 0,
        )

    def predicted(self) -> tuple[Held, Volume]:
        """Say 2Ψ(N-1)/N for gradients, as priced, and the whole of everything held."""
        setup, comm = self.setup, self.setup.comm
        numel = [tensor.shape.numel() for tensor in self._tensors]
        kinds = [self._kind(tensor) for tensor in self._tensors]
        inside = [[place.index for place in bucket.places] for bucket in self._buckets]
        flats = [sum(numel[at] * kinds[at].itemsize for at in run) for run in inside]
        real = [kinds[run[0]].itemsize // (1 + kinds[run[0]].is_complex) for run in inside]
        sent = [exchanged(self._ranks(run[0]), "all_reduce", nbytes, item=item)
                for run, nbytes, item in zip(inside, flats, real, strict=True)]  # fmt: skip
        told = exchanged(comm, "all_reduce", told_bytes(len(self._tensors)), item=8)
        # In a bucket, or by themselves: on one rank, of a dtype of their own, and sparse ones.
        alone = (
            setup.used if comm.size == 1 or self._apart else setup.used.intersection(self.sparse)
        )
        own = sum(numel[at] * self._tensors[at].itemsize for at in alone)
        state, masters = state_and_masters(setup)
        held = Held(
            parameters=model_bytes(setup),
            gradients=own if self._apart else own + sum(flats),
            optimizer=masters + state,
            transient=sum(flats) if self._apart else 0,
        )
        return held, add_up([*sent, told, buffers_volume(setup)])
