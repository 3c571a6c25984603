"""Gradients under ZeRO: summed up while backward runs, each rank keeping the part that it owns.

A row of gradients is reduce-scattered when the last of them has come. Stage 1 keeps the whole rows;
stages 2 and 3 fill a few rows in turn, and hold only this rank's parts. In stage 3 a row also goes
when backward has left its unit: who waited for gradients that don't come would hold the rows of all
units after it, and keep waiting the ranks that have sent it. What still comes then is late: it is
kept aside, and added by one more row when the pass is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from roundelay.communicator.start import Handle
from roundelay.planning.rows import MOST_GOING, TURNS
from roundelay.training._buckets import shared_tensor
from roundelay.training._intake import Intake
from roundelay.training._phases import of_bucket
from roundelay.training._setup import Setup
from roundelay.training.shards.shard import Shard
from roundelay.training.strategies.zero._flat_parameter import FlatParameter

OVERTAKEN = 2  # rows whose units backward has left: no longer is the one before them waited for


class GradBucket:
    """The gradients of one flat: where they are filled in, and this rank's part of their sum."""

    def __init__(self, flat: FlatParameter, dtype: torch.dtype) -> None:
        self.flat, self.dtype = flat, dtype
        self.places = {place.index: place for place in flat.layout.places}
        self.missing: set[int] = set()
        self.over = False  # whether backward has left its unit
        self.sent = False  # in this pass
        self.buffer: torch.Tensor | None = None  # that is being filled
        self.part = torch.empty(0)  # of the sum; has one where `filled`
        self.filled = False
        self.before: torch.Tensor | None = None  # the part of earlier passes, if it must be saved
        self.stays: torch.Tensor | None = None  # memory that is always this row's
        self._views: dict[int, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of the whole row."""
        return self.flat.layout.padded * self.dtype.itemsize

    @property
    def share(self) -> int:
        """The bytes of this rank's part of it, when it is sent."""
        return self.flat.layout.part * self.dtype.itemsize

    def view(self, index: int, buffer: torch.Tensor) -> torch.Tensor:
        """Return the place of one gradient; where rows stay in their memory, made only once."""
        if buffer is not self.stays:
            return self.flat.view(self.places[index], buffer)
        if index not in self._views:
            self._views[index] = self.flat.view(self.places[index], buffer)
        return self._views[index]


@dataclass(slots=True)
class _Sending:
    bucket: GradBucket
    memory: torch.Tensor | None  # that the row was filled in, if it is used in turn
    result: torch.Tensor
    handle: Handle


class GradBuckets:
    """All rows of one model, sent in the same order on every rank."""

    def __init__(
        self, setup: Setup, flats: Sequence[FlatParameter], *, keep: bool, check: bool
    ) -> None:
        self._setup, self._keep = setup, keep
        self.comm, self._replicas = setup.within, setup.replicas
        self._tensors = [parameter.tensor for parameter in setup.parameters]
        self._device = flats[0].whole.device if flats else torch.device("cpu")
        self._host = setup.host if setup.host is not None and setup.host.parameters else None
        self.all = [self._make_bucket(flat) for flat in flats]
        self.order = list(self.all)
        self._of = {index: bucket for bucket in self.all for index in bucket.places}
        kept = keep or self.comm.size == 1
        largest = sorted((bucket.nbytes for bucket in self.all), reverse=True)[
            : 0 if kept else TURNS
        ]
        #: Memory that rows are filled in by turns; more is taken for as long as it is not enough.
        self._turns = [self._memory(nbytes) for nbytes in largest]
        self._free = list(self._turns)
        self._results: list[torch.Tensor] = []  # memory for results that can't go to their place
        self._sending: deque[_Sending] = deque()
        self._across: list[_Sending] = []  # sums on their way to and from replicas
        self._next = 0
        self._late: dict[int, torch.Tensor] = {}  # gradients that came when their row had gone
        self.used: set[int] = set()  # parameters with a gradient on this rank, in this step
        self.intake = Intake(check=check)

    def _make_bucket(self, flat: FlatParameter) -> GradBucket:
        bucket = GradBucket(flat, self._setup.precision.reduce or flat.dtype)
        layout = flat.layout
        if self._keep:
            bucket.buffer = self._memory(bucket.nbytes).view(bucket.dtype)
            bucket.part = bucket.buffer[layout.own(self.comm.rank)]
            bucket.stays = bucket.buffer
        else:
            host, part = self._host, layout.part
            # On the host as the optimizer wants them: the device casts, beside backward.
            if host is None:
                bucket.part = torch.zeros(part, dtype=bucket.dtype, device=self._device)
            else:
                bucket.part = host.empty(part, flat.master.dtype)
            bucket.stays = bucket.part if self.comm.size == 1 and host is None else None
        return bucket

    def _memory(self, nbytes: int) -> torch.Tensor:
        return shared_tensor(self.comm, nbytes, torch.uint8, self._device)

    # ---- while backward runs

    def begin(self) -> None:
        """Expect every gradient anew."""
        self._next = 0
        self._late.clear()
        for bucket in self.all:
            bucket.missing = set(bucket.places)
            bucket.over = bucket.sent = False
            if self._keep and bucket.filled:
                bucket.before = bucket.part.clone()  # since the buffer is filled again

    def take(self, index: int) -> None:
        """Copy a gradient into its row, and send all rows that are complete, in their order."""
        bucket = self._of[index]
        if bucket.sent:
            self._set_aside(index)
            return
        self._put(bucket, index)
        bucket.missing.discard(index)
        self._send_ready()

    def leave(self, flats: Iterable[FlatParameter]) -> None:
        """Hear that backward has left a unit, so that its rows are not waited for."""
        gone = {id(flat) for flat in flats}
        for bucket in self.all:
            bucket.over = bucket.over or id(bucket.flat) in gone
        self._send_ready()

    def _send_ready(self) -> None:
        while self._next < len(self.order):
            bucket = self.order[self._next]
            if bucket.missing and not bucket.over:
                later = self.order[self._next + 1 :]
                if sum(one.over for one in later) < OVERTAKEN:
                    return
            self._send_next()

    def _set_aside(self, index: int) -> None:
        tensor = self._tensors[index]
        grad = tensor.grad
        if grad is None or isinstance(grad, Shard):  # it went with its row
            return
        self.intake.look(index, grad)
        self._late[index], tensor.grad = grad, None
        self.used.add(index)

    @property
    def late(self) -> bool:
        """Whether gradients of this rank wait for `add_late`."""
        return bool(self._late)

    def add_late(self) -> None:
        """Add gradients that came too late for their rows. All ranks call it, if one has some."""
        flags = [float(not self._late.keys().isdisjoint(bucket.places)) for bucket in self.order]
        results = list(self._results)
        for bucket, some in zip(
            self.order, self._setup.comm.all_reduce(np.array(flags)), strict=True
        ):
            if some:
                bucket.buffer = self._empty_bucket(bucket).zero_()
                for index in bucket.places.keys() & self._late.keys():
                    bucket.view(index, bucket.buffer).copy_(self._late.pop(index))
                self._send(bucket, bucket.buffer)
        self._wait_all()
        self._settle()
        self._results = results

    def _put(self, bucket: GradBucket, index: int) -> None:
        if bucket.buffer is None:
            direct = bucket.stays is not None and not bucket.filled
            bucket.buffer = bucket.part if direct else self._empty_bucket(bucket)
        tensor = self._tensors[index]
        there, grad = bucket.view(index, bucket.buffer), tensor.grad
        if grad is None or isinstance(grad, Shard):  # of an earlier pass, in which there was one
            there.zero_()
            return
        self.intake.put(index, there, grad)
        tensor.grad = None
        self.used.add(index)

    def _empty_bucket(self, bucket: GradBucket) -> torch.Tensor:
        memory = self._fitting(bucket.nbytes)
        while memory is None and any(one.memory is not None for one in self._sending):
            self._wait()
            memory = self._fitting(bucket.nbytes)
        if memory is None:
            memory = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
        buffer = memory[: bucket.nbytes].view(bucket.dtype)
        for gap in bucket.flat.layout.gaps:
            buffer[gap].zero_()
        return buffer

    def _fitting(self, nbytes: int) -> torch.Tensor | None:
        """Take the smallest free memory that is large enough."""
        large = [one for one in self._free if one.nbytes >= nbytes]
        found = min(large, key=lambda one: one.nbytes, default=None)
        if found is not None:
            self._free = [one for one in self._free if one is not found]
        return found

    def finish(self) -> None:
        """Fill in what did not come, send what is left, and wait for all of it."""
        while self._next < len(self.order):
            self._send_next()
        self._wait_all()
        self._settle()

    def _settle(self) -> None:
        """Wait for what the device copies to the host, if gradients lie there."""
        if self._host is not None:
            self._host.finish()

    def give_up(self) -> Callable[[], None]:
        """Send zeros for all rows that are not on their way; return what waits for that."""
        rest, self._next = self.order[self._next :], len(self.order)
        op, most = self._op(), max((bucket.nbytes for bucket in rest), default=0)
        zeros = torch.zeros(most, dtype=torch.uint8, device=self._device)
        lost = torch.empty_like(zeros)  # what they add up to
        handles = []
        for bucket in rest:
            bucket.missing.clear()
            bucket.buffer = None
            mine, result = (
                one.view(bucket.dtype) for one in (zeros[: bucket.nbytes], lost[: bucket.share])
            )
            handles.append(self.comm.start.reduce_scatter(mine, op, out=result, axis=0))

        def wait() -> None:
            self._wait_all()
            for bucket, handle in zip(rest, handles, strict=True):
                handle.wait()
                if self._replicas is not None and not self._has_experts(bucket):
                    self._replicas.all_reduce(lost[: bucket.share].view(bucket.dtype), op)
            self._free = list(self._turns)

        return wait

    def _op(self) -> str:
        step = self._setup.step
        return "sum" if step.weighed or step.offered is not None else "avg"

    def _send_next(self) -> None:
        """Send a row, with zeros where no gradient has come."""
        bucket = self.order[self._next]
        for index in sorted(bucket.missing):
            self._put(bucket, index)
        bucket.missing.clear()
        bucket.sent = True
        self._next += 1
        if bucket.buffer is not None:  # no parameter at all: not possible in a row
            self._send(bucket, bucket.buffer)

    def _send(self, bucket: GradBucket, buffer: torch.Tensor) -> None:
        self.intake.flush()
        if self.comm.size == 1:
            self._keep_local(bucket, buffer)
        else:
            self._reduce_scatter(bucket, buffer)
        if not self._keep:
            bucket.buffer = None

    def _keep_local(self, bucket: GradBucket, buffer: torch.Tensor) -> None:
        """Do without a message: on one rank a row is the sum, but for earlier passes."""
        if bucket.before is not None:
            buffer.add_(bucket.before)
            bucket.before = None
        elif self._host is not None and not bucket.filled:
            self._host.copy(bucket.part, buffer.to(bucket.part.dtype))
        elif not self._keep and buffer is not bucket.part:
            bucket.part.add_(buffer.to(bucket.part.device))
        bucket.filled = True

    def _reduce_scatter(self, bucket: GradBucket, buffer: torch.Tensor) -> None:
        if len(self._sending) >= MOST_GOING:
            self._wait()
        direct = not self._keep and not bucket.filled and self._host is None
        result = bucket.part if direct else self._result(bucket)
        with of_bucket(self.comm.trace, self._setup.parameters, bucket.flat.layout.places):
            handle = self.comm.start.reduce_scatter(buffer, self._op(), out=result, axis=0)
        memory = next((turn for turn in self._turns if _same(turn, buffer)), None)
        self._sending.append(_Sending(bucket, memory, result, handle))

    def _result(self, bucket: GradBucket) -> torch.Tensor:
        nbytes = bucket.share
        fitting = next((one for one in self._results if one.nbytes >= nbytes), None)
        if fitting is None:
            fitting = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        else:
            self._results = [one for one in self._results if one is not fitting]
        return fitting[:nbytes].view(bucket.dtype)

    def _wait(self) -> None:
        """Wait for the row that was sent first; where it has replicas, it goes on to them."""
        one = self._sending.popleft()
        one.handle.wait()
        if one.memory is not None:
            self._free.append(one.memory)
        if self._replicas is None or self._has_experts(one.bucket):
            if self._replicas is not None and self._op() == "avg":  # over those with others, too
                one.result.div_(self._replicas.size)
            self._add(one)
        else:
            one.handle = self._replicas.start.all_reduce(one.result, self._op())
            self._across.append(one)

    def _has_experts(self, bucket: GradBucket) -> bool:
        """Tell whether a row has experts, which the replicas divide between them."""
        return not self._setup.experts.isdisjoint(bucket.places)

    def _wait_all(self) -> None:
        while self._sending:
            self._wait()
        for one in self._across:  # not before: who waits here keeps others from gathering units
            one.handle.wait()
            self._add(one)
        self._across.clear()

    def _add(self, sending: _Sending) -> None:
        """Add a sum that has come to what there is."""
        bucket = sending.bucket
        if sending.result is not bucket.part:
            if self._keep:
                bucket.part.copy_(sending.result)
                if bucket.before is not None:
                    bucket.part.add_(bucket.before)
                    bucket.before = None
            elif bucket.filled:
                bucket.part.add_(sending.result.to(bucket.part.device))
            else:
                bucket.part.copy_(sending.result.to(bucket.part.dtype), non_blocking=True)
            self._results.append(_all_bytes(sending.result))
        bucket.filled = True

    # ---- afterwards

    def forget(self, indices: Iterable[int] | None = None) -> None:
        """Drop the sums of all parameters, or of these."""
        if indices is None:
            for bucket in self.all:
                bucket.filled, bucket.before = False, None
            self.used.clear()
            self.intake.clear()
            return
        gone = set(indices)
        for bucket in self.all:
            if gone.issuperset(bucket.places):
                bucket.filled = False
            for piece in bucket.flat.pieces:
                if piece.index in gone:
                    bucket.part[piece.inside].zero_()

    def scale(self, factor: float) -> None:
        """Multiply the sums."""
        for bucket in self.all:
            bucket.part.mul_(factor)

    @property
    def held(self) -> list[torch.Tensor]:
        """The memory that gradients stay in."""
        return [bucket.buffer if self._keep and bucket.buffer is not None else bucket.part
                for bucket in self.all]  # fmt: skip

    @property
    def transient(self) -> list[torch.Tensor]:
        """The memory that gradients pass through."""
        return [*self._turns, *self._results]


def _same(memory: torch.Tensor, view: torch.Tensor) -> bool:
    return memory.data_ptr() == view.data_ptr()


def _all_bytes(result: torch.Tensor) -> torch.Tensor:
    """Return the memory that a result is the first part of."""
    made = torch.empty(0, dtype=torch.uint8, device=result.device)
    return made.set_(result.untyped_storage())
