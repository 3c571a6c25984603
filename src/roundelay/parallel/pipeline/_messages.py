"""Tensors from stage to stage: their form is told once, and then only their bytes travel."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.parallel.scratch import plain

FIRST_TAG = 1 << 40  # out of the way of tags that people choose
MOST_TENSORS = 1 << 10  # from one stage to the next


class TensorForm(NamedTuple):
    """What a tensor between stages is: shape, dtype, and whether its gradient comes back."""

    shape: tuple[int, ...]
    dtype: str
    differentiable: bool
    memory: int = 0  # that it shares with others of this number; 0 if with none


Form = tuple[TensorForm, ...]


def form_of(stage: int, values: Any) -> Form:
    """Return the form of what a stage hands on; refuse what is no tensor."""
    listed = values if isinstance(values, (tuple, list)) else (values,)
    for value in listed:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            what = value.layout if isinstance(value, torch.Tensor) else type(value).__name__
            raise InvalidArgumentError(
                f"Stage {stage} of the pipeline hands on {what}, and only dense tensors go from "
                f"stage to stage. Let stages start elsewhere, or give split=, whose stages take "
                f"and return tensors or tuples of tensors."
            )
    if not 0 < len(listed) < MOST_TENSORS:
        raise InvalidArgumentError(f"Stage {stage} of the pipeline hands on {len(listed)} tensors.")
    return tuple(
        TensorForm(tuple(value.shape), str(value.dtype).removeprefix("torch."), value.requires_grad)
        for value in listed
    )


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class Mail:
    """What one rank sends and receives in one step."""

    def __init__(self, comm: Communicator, micro_batches: int, device: torch.device) -> None:
        self._comm, self._micro_batches, self._device = comm, micro_batches, device
        self._sent: list[Any] = []
        self._wanted: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        self.messages = 0
        self.nbytes = 0
        self.waited = 0.0  # seconds, for what was to come

    def _tag(self, edge: int, micro_batch: int, *, back: bool) -> int:
        place = (edge * self._micro_batches + micro_batch) * 2 + back
        return FIRST_TAG + place * MOST_TENSORS

    def send(
        self, values: Sequence[torch.Tensor], rank: int, edge: int, micro_batch: int, *, back: bool
    ) -> None:
        """Send tensors in the background; they are kept until they have gone."""
        self._sent = [message for message in self._sent if not message.done()]
        tag = self._tag(edge, micro_batch, back=back)
        for number, value in enumerate(values):
            data = value.detach().contiguous()
            self._sent.append(self._comm.start.send(plain(data), rank, tag + number))
            self.messages += 1
            self.nbytes += data.numel() * data.element_size()

    def expect(self, form: Form, rank: int, edge: int, micro_batch: int, *, back: bool) -> None:
        """Begin to receive, so that data travels while this rank computes."""
        tag = self._tag(edge, micro_batch, back=back)
        if tag in self._wanted:
            return
        self._wanted[tag] = [
            (self._comm.start.recv(plain(buffer), rank, tag + number), buffer)
            for number, buffer in enumerate(self._buffers(form))
        ]

    def _buffers(self, form: Form) -> list[torch.Tensor]:
        return [
            torch.empty(each.shape, dtype=_dtype(each.dtype), device=self._device) for each in form
        ]

    def zeros(self, form: Form) -> list[torch.Tensor]:
        """Return tensors of a form, all zero, for ranks that wait for something."""
        return [buffer.zero_() for buffer in self._buffers(form)]

    def receive(
        self, form: Form, rank: int, edge: int, micro_batch: int, *, back: bool
    ) -> list[torch.Tensor]:
        """Return tensors once they have come."""
        self.expect(form, rank, edge, micro_batch, back=back)
        under_way = self._wanted.pop(self._tag(edge, micro_batch, back=back))
        began = time.perf_counter()
        for message, _ in under_way:
            message.wait()
        self.waited += time.perf_counter() - began
        return [buffer for _, buffer in under_way]

    def tell(self, form: Form | None, rank: int, edge: int) -> None:
        """Tell the next stage in which form data will come, or that none will."""
        told = None if form is None else [list(each) for each in form]
        self._comm.send_object(told, rank, FIRST_TAG - 1 - edge)

    def hear(self, rank: int, edge: int) -> Form | None:
        """Return the form in which data will come; None if the stage before has failed."""
        told = self._comm.recv_object(rank, FIRST_TAG - 1 - edge)
        if told is None:
            return None
        return tuple(TensorForm(tuple(shape), *others) for shape, *others in told)

    def wait(self) -> None:
        """Wait until all has gone."""
        while self._sent:
            self._sent.pop().wait()
