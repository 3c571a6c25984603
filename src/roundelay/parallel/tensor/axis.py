"""How activations cross the border of what is cut: copied, summed, or as shards of the sequence."""

from __future__ import annotations

from typing import Any, Self

import torch

from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.parallel import functions

__all__ = ["TensorAxis"]


class TensorAxis:
    """The ranks that share layers, and how a tensor comes into a cut layer and out of it.

    Outside of cut layers every rank has the same activations. With sequence parallel it has its
    shard of the sequence there, and what was copied and summed is gathered and scattered.
    """

    def __init__(self, comm: Communicator, name: str, sequence_dim: int | None) -> None:
        self.comm, self.name = comm, name
        #: Counted from the end, as positions come without a batch; None: the sequence stays whole.
        self.dim = None if sequence_dim is None else sequence_dim - 3
        self._lengths: set[int] = set()  # of whole sequences that were divided
        self.begun_elsewhere = False  # whether an earlier stage of a pipeline divides them

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Stay the same: a copy of a model is on the same ranks."""
        return self

    def enter(self, x: torch.Tensor, layer: str, *, whole: bool = False) -> torch.Tensor:
        """Return what a cut layer computes on: all of the sequence, with gradients summed."""
        if self.dim is None or whole:
            return functions.copy(x, self.comm)
        self.expect_shard(x, layer)
        return functions.all_gather(x, self.comm, self.dim)

    def leave(self, x: torch.Tensor, layer: str, *, whole: bool = False) -> torch.Tensor:
        """Return the sum of what all ranks computed, or this rank's shard of it."""
        if self.dim is None or whole:
            return functions.reduce(x, self.comm)
        self._divisible(x, layer)
        return functions.reduce_scatter(x, self.comm, self.dim)

    def split(self, x: torch.Tensor, layer: str) -> torch.Tensor:
        """Return this rank's shard of a sequence that all ranks have."""
        if self.dim is None:
            return x
        self.began(x, layer)
        return functions.split(x, self.comm, self.dim)

    def gather(self, x: torch.Tensor, layer: str) -> torch.Tensor:
        """Return the whole sequence, with which all ranks go on alike."""
        if self.dim is None:
            return x
        self.expect_shard(x, layer)
        return functions.gather(x, self.comm, self.dim)

    def began(self, x: torch.Tensor, layer: str) -> None:
        """Note that sequences of this length are divided from here on."""
        if self.dim is not None:
            self._divisible(x, layer)
            self._lengths.add(x.size(self.dim))

    def expect_shard(self, x: torch.Tensor, layer: str) -> None:
        """Refuse what can't be a shard of a sequence, as none of such a length was divided."""
        length = self._length(x, layer)
        if self.begun_elsewhere:
            self._lengths.add(length * self.comm.size)
        if length * self.comm.size not in self._lengths:
            raise InvalidArgumentError(
                f"{layer} expects this rank's shard of the sequence, and gets {length} tokens of "
                f"{sorted(self._lengths)}. Outside of the sequence-parallel part say 'replicate' "
                f"for layers that stay whole, and 'whole' after 'column', 'row' and 'embedding'."
            )

    def expect_whole(self, x: torch.Tensor, layer: str) -> None:
        """Refuse what is a shard of a sequence."""
        length = self._length(x, layer)
        if length not in self._lengths and length * self.comm.size in self._lengths:
            raise InvalidArgumentError(
                f"{layer} is 'replicate' in the plan, and gets this rank's shard of the sequence: "
                f"its gradient would be that of the shard alone. Say 'norm'."
            )

    def _length(self, x: torch.Tensor, layer: str) -> int:
        if self.dim is None or x.dim() < -self.dim:
            raise InvalidArgumentError(
                f"{layer} gets a tensor of shape {tuple(x.shape)}, without a dim for the sequence: "
                f"sequence_dim counts in activations of three dims."
            )
        return x.size(self.dim)

    def _divisible(self, x: torch.Tensor, layer: str) -> None:
        length, ranks = self._length(x, layer), self.comm.size
        if length % ranks:
            raise InvalidArgumentError(
                f"{layer}: {length} tokens do not divide by the {ranks} ranks of {self.name}, "
                f"which share the sequence. Pad to {-(-length // ranks) * ranks}, or take "
                f"sequence_parallel=False."
            )
