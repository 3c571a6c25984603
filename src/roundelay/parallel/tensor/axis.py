"""How activations cross the border of what is cut: copied, summed, or as shards of the sequence."""

from __future__ import annotations

from typing import Any, Self

import torch

from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.parallel import functions
from roundelay.parallel._computed_again import computing_again
from roundelay.parallel._cut import CutDim
from roundelay.parallel.cut_tensor import CutSource, CutTensor, unmarked
from roundelay.parallel.tensor.random_numbers import RandomNumbers

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
        self._now: set[int] = set()  # those of the pass at hand
        self.staged = False  # whether the model is a stage of a pipeline
        self.begun_elsewhere = False  # whether an earlier stage divides sequences
        self.fits = False  # whether a whole pass was seen, and found to be right
        self.passing = 0  # forward passes of the model that are under way
        self.cut_by: set[CutSource] = set()  # layers that have left features cut in them
        self.training = True  # whether the pass at hand is one of a model in training
        self.gradients = True  # and whether it is one with gradients
        self._sources: dict[str, CutSource] = {}  # layers that leave the sequence divided
        self.trusted = False  # whether code of the model has asked for its part in this pass
        #: What regions, by their names, count on this rank.
        self.counted: dict[str | None, frozenset[int]] = {}
        self.numbers: RandomNumbers | None = None  # once ranks agree on a plan

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Stay the same: a copy of a model is on the same ranks."""
        return self

    def enter(self, x: torch.Tensor, layer: str, *, whole: bool = False) -> torch.Tensor:
        """Return what a cut layer computes on: all of the sequence, with gradients summed."""
        if self.dim is None or whole:
            return functions.by(layer, functions.copy(x, self.comm))
        self.expect_shard(x, layer)
        return functions.by(layer, functions.all_gather(x, self.comm, self.dim))

    def leave(self, x: torch.Tensor, layer: str, *, whole: bool = False) -> torch.Tensor:
        """Return the sum of what all ranks computed, or this rank's shard of it."""
        if self.dim is None and self.numbers is not None:
            self.numbers.come_back()
        if self.dim is None or whole:
            return functions.by(layer, functions.reduce(x, self.comm))
        self._divisible(x, layer)
        return self._share(
            functions.by(layer, functions.reduce_scatter(x, self.comm, self.dim)), layer
        )

    def taken(self, x: torch.Tensor, parts: tuple[int, ...], layer: str) -> torch.Tensor:
        """Return what a layer takes that has these parts of features; refuse what is another's."""
        if isinstance(x, CutTensor):
            x.refuse_unless(parts, layer)
        elif not torch.compiler.is_compiling():
            features = (one for one in self.cut_by if not one.cut.tokens)
            left = [one.label for one in features if one.given != one.taken]
            if left and not self.trusted and not computing_again():
                raise InvalidArgumentError(
                    f"{layer} gets a tensor of which nobody sees how it was made of what "
                    f"{', '.join(sorted(left))} leaves cut between the {self.comm.size} ranks of "
                    f"{self.name}: by a function that torch does not show, or in a tensor that "
                    f"was made elsewhere. Take functions of torch; or rd.local(x), in code that "
                    f"knows of the other ranks; or 'column gather' in the plan."
                )
        return unmarked(x, inside=True)

    def draw_apart(self, x: torch.Tensor, layer: str, *, training: bool) -> None:
        """Have this rank draw random numbers of its own, until features are whole again."""
        if self.dim is None and self.numbers is not None:
            self.numbers.leave(layer, x, training=training)

    def split(self, x: torch.Tensor, layer: str) -> torch.Tensor:
        """Return this rank's shard of a sequence that all ranks have."""
        if self.dim is None:
            return x
        self._expect_undivided(x, layer)
        self.began(x, layer)
        return self._share(functions.by(layer, functions.split(x, self.comm, self.dim)), layer)

    def _share(self, x: torch.Tensor, layer: str) -> torch.Tensor:
        """Mark this rank's share of the sequence, along which functions are not those of all."""
        if self.staged:  # what comes from another stage is not marked
            return x
        dim = self.dim or 0
        cut = CutDim(dim, (x.size(dim),) * self.comm.size, self.comm.rank, tokens=True)
        source = self._sources.setdefault(layer, CutSource(layer, self, cut))
        source.cut = cut
        return source.marked(x, training=self.training)

    def gather(self, x: torch.Tensor, layer: str) -> torch.Tensor:
        """Return the whole sequence, with which all ranks go on alike."""
        if self.dim is None:
            return x
        self.expect_shard(x, layer)
        return functions.by(layer, functions.gather(x, self.comm, self.dim))

    def began(self, x: torch.Tensor, layer: str) -> None:
        """Note that sequences of this length are divided from here on."""
        if self.dim is not None:
            self._divisible(x, layer)
            self._lengths.add(x.size(self.dim))
            self._now.add(x.size(self.dim))

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
        if self._looks_divided(x, layer):
            raise InvalidArgumentError(
                f"{layer} is 'replicate' in the plan, and gets this rank's shard of the sequence: "
                f"its gradient would be that of the shard alone. Say 'norm'."
            )

    def _expect_undivided(self, x: torch.Tensor, layer: str) -> None:
        """Refuse to divide a shard again, by which tokens would be lost."""
        if self._looks_divided(x, layer):
            raise InvalidArgumentError(
                f"{layer} divides the sequence, and gets this rank's share of one that is divided "
                f"already: {x.size(self.dim or 0)} tokens. Say 'split' once, for the first module "
                f"of the sequence-parallel part, or 'gather' between."
            )

    def begin(self) -> None:
        """Begin a forward pass, in which no sequence is divided yet."""
        self._now.clear()
        if not self.passing:  # what a checkpointed block has computed again is of another one
            for source in self.cut_by:
                source.forget()
            self.cut_by.clear()

    def _looks_divided(self, x: torch.Tensor, layer: str) -> bool:
        """Tell whether a tensor is as long as a shard; once a pass fits, none is one."""
        length = self._length(x, layer)
        return not self.fits and length not in self._now and length * self.comm.size in self._now

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
