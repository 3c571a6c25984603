"""Where weights lie under ZeRO: whole on every rank or in parts; and what is stepped on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from roundelay.communicator import Communicator
from roundelay.reductions import Array
from roundelay.training._buckets import Place, shared_tensor
from roundelay.training._setup import Parameter
from roundelay.training._zero_away import bring_back, send_away
from roundelay.training._zero_layout import Layout, Piece
from roundelay.training.precision import Precision, master_dtype

__all__ = ["Flat", "compute_dtype"]


def compute_dtype(tensor: torch.Tensor, precision: Precision) -> torch.dtype:
    """Return the dtype that the model has this parameter in."""
    if precision.compute is None or not tensor.is_floating_point():
        return tensor.dtype
    return precision.compute


class Flat:
    """Some parameters of one dtype in one row; this rank owns a part of it.

    `whole` is the row that the parameters are views of. Where it stays (`resident`), `part` is a
    view of it. Else `part` is memory of its own, and `whole` comes and goes: each time it is other
    memory, which goes when nobody holds a tensor in it any more. `master` is what the optimizer
    steps on: `part` itself, or a copy of higher precision.
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
    ) -> None:
        self.comm, self.resident, self.trained = comm, resident, trained
        self._parameters = {index: parameters[index] for index in indices}
        first = parameters[indices[0]].tensor
        self.dtype, device = compute_dtype(first, precision), first.device
        shapes = [tuple(parameters[index].tensor.shape) for index in indices]
        self.layout = Layout(indices, shapes, size=comm.size)
        self.whole = torch.zeros(self.layout.padded, dtype=self.dtype, device=device)
        numel = self.layout.part
        self.part = self.own if resident else shared_tensor(comm, numel, self.dtype, device)
        self.master = self.part
        if trained and precision.mixed:
            kind = master_dtype(first.dtype)
            self.master = torch.zeros(self.layout.part, dtype=kind, device=device)
        self.version = 0  # how often its weights have changed
        self.pieces: list[Piece] = list(self.layout.pieces(comm.rank))
        self._move_in()
        #: What the optimizer steps on, one for each piece.
        self.stepped = [
            torch.nn.Parameter(self.master[one.inside], requires_grad=trained)
            for one in self.pieces
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

    def view(self, place: Place, row: torch.Tensor | None = None) -> torch.Tensor:
        """Return one parameter where it lies, here or in another row of the same layout."""
        found = self.whole if row is None else row
        return found[place.start : place.start + place.numel].view(place.shape)

    def cut(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the pieces of what is laid out as this rank's part."""
        lengths = [piece.stop - piece.start for piece in self.pieces]
        padding = len(part) - sum(lengths)
        return part.split_with_sizes([*lengths, padding])[: len(lengths)]

    # ---- rows that come and go

    def free(self) -> None:
        """Let go of the whole row; its parameters refuse to be computed with until it is back."""
        self.send_away()
        self.whole = self.whole.new_empty(0)

    def send_away(self) -> None:
        """Have the parameters refuse to be computed with."""
        for place in self.layout.places:
            one = self._parameters[place.index]
            send_away(one.tensor, one.name)

    def make_room(self) -> tuple[Array | torch.Tensor, Array | torch.Tensor]:
        """Have memory for the whole row; return this rank's part and that, as bytes."""
        self.whole = self.whole.new_empty(self.layout.padded)
        return _as_bytes(self.part), _as_bytes(self.whole)

    def attach(self) -> None:
        """Give the parameters the whole row, which has come."""
        for place in self.layout.places:
            bring_back(self._parameters[place.index].tensor, self.view(place))

    @property
    def nbytes(self) -> int:
        """The bytes of the whole row."""
        return self.layout.padded * self.dtype.itemsize

    # ---- after a step

    def round_masters(self) -> None:
        """Bring what the optimizer changed into the dtype that the model computes in."""
        if self.has_masters:
            self.part.copy_(self.master)

    def touch(self) -> None:
        """Let autograd know that the parameters have changed."""
        self.version += 1
        torch.autograd.graph.increment_version([one.tensor for one in self._parameters.values()])

    def gather_masters(self) -> torch.Tensor:
        """Return the whole row in the optimizer's dtype. Every rank calls it."""
        if self.comm.size == 1:
            return self.master
        if self.resident and not self.has_masters:
            return self.whole
        row = self.master.new_empty(self.layout.padded)
        self.comm.all_gather(self.master, out=row, axis=0)
        return row


def _as_bytes(tensor: torch.Tensor) -> Array | torch.Tensor:
    flat = tensor.view(torch.uint8)
    return flat.numpy() if flat.device.type == "cpu" else flat
