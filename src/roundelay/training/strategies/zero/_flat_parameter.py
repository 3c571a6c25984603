"""Where weights lie under ZeRO: whole on every rank or in parts; and what is stepped on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from roundelay.communicator import Communicator
from roundelay.communicator.start import Handle
from roundelay.training._buckets import BucketPlace, shared_tensor
from roundelay.training._setup import Parameter
from roundelay.training.fingerprint import sums_of
from roundelay.training.optimizer.masters import merge
from roundelay.training.precision import Precision, master_dtype
from roundelay.training.shards.home import Home, as_bytes
from roundelay.training.shards.shard import Shard
from roundelay.training.shards.sharded_parameter import (
    Absence,
    absence,
    reshard_parameter,
    unshard_parameter,
)
from roundelay.training.strategies.zero._layout import FlatLayout, Piece
from roundelay.training.strategies.zero._row_pool import RowPool

if TYPE_CHECKING:
    from roundelay.training.strategies.zero.offload import Copy, HostMemory


def compute_dtype(tensor: torch.Tensor, precision: Precision) -> torch.dtype:
    """Return the dtype that the model has this parameter in."""
    if precision.compute is None or not tensor.is_floating_point():
        return tensor.dtype
    return precision.compute


class FlatParameter:
    """Some parameters of one dtype in one row; this rank owns a part of it.

    `whole` is the row that the parameters are views of. Where it stays (`resident`), `part` is a
    view of it. Else `part` is memory of its own, and `whole` comes and goes: each time it is memory
    that nobody holds a tensor in. `master` is what the optimizer steps on: `part` itself, or a copy
    of higher precision.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[Parameter],
        indices: Sequence[int],
        precision: Precision,
        *,
        resident: bool,
        trained: bool = True,
        cut: bool = True,
        host: HostMemory | None = None,
    ) -> None:
        self.comm, self.resident, self.trained = comm, resident, trained
        self._parameters = {index: parameters[index] for index in indices}
        first = parameters[indices[0]].tensor
        self.dtype, device = compute_dtype(first, precision), first.device
        shapes = [tuple(parameters[index].tensor.shape) for index in indices]
        self.cuts = cut  # or else a rank owns parameters whole
        self.layout = FlatLayout(indices, shapes, size=comm.size, cut=cut)
        self.whole = torch.zeros(self.layout.padded, dtype=self.dtype, device=device)
        self._none = self.whole.new_empty(0)
        numel, self._host = self.layout.part, host
        self._apart = host if host is not None and host.parameters and not resident else None
        if resident:
            self.part = self.own
        elif self._apart is None:
            self.part = shared_tensor(comm, numel, self.dtype, device)
        else:
            self.part = self._apart.empty(numel, self.dtype)
        self.master = self.part
        if trained and (precision.mixed or (host is not None and self._apart is None)):
            kind = master_dtype(first.dtype) if precision.mixed else first.dtype
            self.master = (torch.zeros(numel, dtype=kind, device=device) if host is None
                           else host.empty(numel, kind))  # fmt: skip
        self.version = 0  # how often its weights have changed
        #: Hears which parameters the user writes into, and how.
        self.told: Callable[[str, str], object] = max
        self._attached: list[int] = []  # how often each parameter had changed when the row came
        self._sums = torch.zeros(0)  # by which changes of the part are noticed
        self.pieces: list[Piece] = list(self.layout.pieces(comm.rank))
        names = [parameter.name for parameter in parameters]
        self.homes = {
            place.index: Home(comm, self.layout.counts(place), place.index, names,
                              parameters[place.index].tensor)
            for place in self.layout.places
        }  # fmt: skip
        self._inside = {piece.index: piece.inside for piece in self.pieces}
        self._absent: list[tuple[torch.nn.Parameter, Absence]] = []  # what they are while away
        self._move_in()
        #: What the optimizer steps on, one for each piece.
        self.stepped = [
            torch.nn.Parameter(one, requires_grad=trained) for one in self.cut(self.master)
        ]

    @property
    def own(self) -> torch.Tensor:
        """What this rank owns, in the whole row."""
        return self.whole[self.layout.own(self.comm.rank)]

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer steps on weights of its own."""
        return self.master is not self.part

    def _move_in(self) -> None:
        """Copy the parameters here, and have them be views of this row."""
        if self.has_masters:
            for piece in self.pieces:
                values = self._parameters[piece.index].tensor.detach().reshape(-1)
                self.master[piece.inside].copy_(values[piece.start : piece.stop])
        for place in self.layout.places:
            parameter = self._parameters[place.index].tensor
            there = self.view(place)
            there.copy_(parameter.detach())
            parameter.grad = None
            parameter.data = there
        if not self.resident:
            self.part.copy_(self.own)
            self.free()
        elif self._host is not None:
            self._sums = sums_of(self.part)

    def view(self, place: BucketPlace, row: torch.Tensor | None = None) -> torch.Tensor:
        """Return one parameter where it lies, here or in another row of the same layout."""
        return place.view(self.whole if row is None else row)

    def shape(self, index: int) -> torch.Size:
        """Return the shape of one of the parameters."""
        return self._parameters[index].tensor.shape

    def cut(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the pieces of what is laid out as this rank's part."""
        lengths = [piece.stop - piece.start for piece in self.pieces]
        padding = len(part) - sum(lengths)
        pieces = part.split_with_sizes([*lengths, padding])[: len(lengths)]
        if self.cuts:
            return pieces
        return [piece.view(self._parameters[one.index].tensor.shape)
                for one, piece in zip(self.pieces, pieces, strict=True)]  # fmt: skip

    # ---- rows that come and go

    def free(self) -> torch.Tensor:
        """Let go of the whole row, and return it; its parameters are away until it is back."""
        self.reshard_parameter()
        row, self.whole = self.whole, self._none
        return row

    def reshard_parameter(self) -> None:
        """Have the parameters compute as their shards."""
        if not self._absent:
            ones = [(place, self._parameters[place.index]) for place in self.layout.places]
            self._absent = [
                (one.tensor, absence(one.tensor, one.name, shard=self._shard(place)))
                for place, one in ones
            ]
        for tensor, absent in self._absent:
            reshard_parameter(tensor, absent)

    def _shard(self, place: BucketPlace) -> Shard:
        """Return what a parameter computes as while it is away."""
        return Shard(
            self.homes[place.index], self.piece(self.part, place.index), place.shape,
            kind="parameter", wrote=partial(self._edited, place.index),
        )  # fmt: skip

    def piece(self, row: torch.Tensor, index: int) -> torch.Tensor:
        """Return what this rank has of a parameter, in what is laid out as its part."""
        return row[self._inside.get(index, slice(0, 0))]

    def _edited(self, index: int, what: str) -> None:
        """Hear that the user has written into the part."""
        self.told(self._parameters[index].name, what)
        if self.has_masters:
            part = self.piece(self.part, index).to(self.master.device)
            merge(self.piece(self.master, index), part)
        self.touch()

    @torch.no_grad()
    def publish(self, index: int) -> None:
        """Bring what the user has written for the optimizer to the model. All ranks call it."""
        mine = self.piece(self.part, index)
        if self.has_masters:
            mine.copy_(self.piece(self.master, index))
        if self.whole.numel():
            place = next(one for one in self.layout.places if one.index == index)
            self.view(place).copy_(self.homes[index].gather(mine).view(place.shape))
        if self.resident and self._host is not None:
            self._sums = sums_of(self.part)
        self.touch()

    def gather(self, comm: Communicator, label: int, row_pool: RowPool) -> Handle | Copy:
        """Begin to bring the whole row; return what waits for it."""
        self.whole = row_pool.take(self.whole, self.layout.padded)
        if self._apart is not None and comm.size == 1:
            return self._apart.copy(self.whole, self.part)
        mine = self.part.to(self.whole.device, non_blocking=True)  # as it is, if it is there
        return comm.start.all_gather(as_bytes(mine), out=as_bytes(self.whole), axis=0, label=label)

    def attach(self) -> None:
        """Give the parameters the whole row, which has come."""
        for place in self.layout.places:
            unshard_parameter(self._parameters[place.index].tensor, place.view(self.whole))
        self._attached = [parameter.tensor._version for parameter in self._parameters.values()]  # noqa: SLF001 - autograd's

    def written(self) -> str | None:
        """Return the name of a parameter that was written into since the row came, if there is."""
        for parameter, version in zip(self._parameters.values(), self._attached, strict=True):
            if parameter.tensor._version != version:  # noqa: SLF001 - likewise
                return parameter.name
        return None

    @property
    def nbytes(self) -> int:
        """The bytes of the whole row."""
        return self.layout.padded * self.dtype.itemsize

    # ---- after a step

    def round_masters(self) -> None:
        """Bring what the optimizer changed into the dtype that the model computes in."""
        if self._apart is not None and self.has_masters:
            self._apart.round(self.part, self.master)
        elif self.has_masters:
            # Cast on the device: what the host would cast first could not be copied beside it.
            self.part.copy_(self.master.to(self.part.device, non_blocking=True))
            if self.resident and self._host is not None:
                self._sums = sums_of(self.part)

    @property
    def edited(self) -> bool:
        """Whether the user may have written into a part that has masters."""
        if self._host is None or not self.resident:
            return True
        return not torch.equal(self._sums, sums_of(self.part))

    def touch(self) -> None:
        """Let autograd know that the parameters have changed."""
        self.version += 1
        torch.autograd.graph.increment_version(
            [parameter.tensor for parameter in self._parameters.values()]
        )

    def gather_masters(self) -> torch.Tensor:
        """Return the whole row in the optimizer's dtype. Every rank calls it."""
        if self.comm.size == 1:
            return self.master.to(self.whole.device)
        if self.resident and not self.has_masters:
            return self.whole
        row = self.master.new_empty(self.layout.padded)
        self.comm.all_gather(self.master, out=row, axis=0)
        return row.to(self.whole.device)
