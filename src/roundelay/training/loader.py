"""`rd.loader`: a dataset in global batches, each rank's share cut into micro-batches that fit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from roundelay.arguments import whole
from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.training._run import Run, run_of
from roundelay.training._step import Turn

__all__ = ["Loader", "loader"]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a global batch becomes micro-batches of one rank."""

    batch_size: int
    size: int
    micro_batch: int
    accumulation: int

    def __str__(self) -> str:
        return (
            f"batch of {self.batch_size} = {self.size} ranks x {self.accumulation} micro-batches x "
            f"{self.micro_batch} rows"
        )


class Loader:
    """Yields this rank's micro-batches, epoch after epoch in another order; `len` counts them."""

    def __init__(
        self, data: Dataset[Any], plan: _Plan, comm: Communicator, run: Run | None, **options: Any
    ) -> None:
        self.plan, self._comm, self._run = plan, comm, run
        self._shuffle, self._seed = options.pop("shuffle"), options.pop("seed")
        self._rows = len(data)  # type: ignore[arg-type]
        self._epoch = self._done = 0
        self._left = False  # whether a loop over this epoch has begun, and not come to its end
        #: Of the micro-batch at hand: whether it begins a batch, and whether it ends one.
        self.first_of_step = self.last_of_step = True
        self._inner = DataLoader(data, batch_sampler=_Sampler(self), **options)

    def __len__(self) -> int:
        """Return the micro-batches of one epoch."""
        return self._rows // self.plan.batch_size * self.plan.accumulation

    def indices(self) -> Iterator[list[int]]:
        """Yield the rows of this rank's micro-batches, the same order of the epoch on all ranks."""
        plan = self.plan
        order = torch.arange(self._rows)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.randperm(self._rows, generator=generator)
        share = plan.micro_batch * plan.accumulation
        begin = self.done * plan.batch_size
        for start in range(begin, self._rows - plan.batch_size + 1, plan.batch_size):
            first = start + self._comm.rank * share
            for at in range(first, first + share, plan.micro_batch):
                yield order[at : at + plan.micro_batch].tolist()

    def __iter__(self) -> Iterator[Any]:
        """Go through the dataset once; steps happen after the last micro-batch of each batch.

        A loop that was left early is over: the next one begins another epoch. A batch that was
        left in the middle is given up, and its gradients are forgotten.
        """
        if self._left:
            self.epoch, self.done = self._epoch + 1, 0
        self._left = True
        turn = Turn(self.plan.accumulation)
        step = None if self._run is None else self._run.step
        try:
            for number, batch in enumerate(self._inner):
                self.first_of_step = number % turn.parts == 0
                self.last_of_step = (number + 1) % turn.parts == 0
                self._done += self.last_of_step
                turn.more = not self.last_of_step
                if step is not None and turn.parts > 1:
                    step.turns = [*(one for one in step.turns if one is not turn), turn]
                yield batch
        finally:
            if self._run is not None:
                self._run.leave(turn)
        self.epoch, self.done = self._epoch + 1, 0

    @property
    def epoch(self) -> int:
        """Which pass over the data this is, from 0; set it, and `done`, to go on from there."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch, self._left = epoch, False

    @property
    def done(self) -> int:
        """Whole batches of this epoch that were handed out."""
        return self._done

    @done.setter
    def done(self, done: int) -> None:
        self._done, self._left = done, False


class _Sampler:
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.indices()

    def __len__(self) -> int:
        return len(self._loader)


def loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    comm: Communicator,
    model: torch.nn.Module | None = None,
    micro_batch: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    quiet: bool = False,
    **options: Any,
) -> Loader:
    """Return this rank's share of the dataset, in micro-batches of a global batch.

    `batch_size` is that of all ranks together: the result of training does not depend on their
    number. With `micro_batch` rows at most at a time, a batch takes several backward passes; then
    pass the prepared `model`, and its `optimizer.step()` and `zero_grad()` act only after the last.
    Rows that fill no whole batch are left out of an epoch. More options are DataLoader's.
    """
    run = None if model is None else run_of("loader", model)
    group = comm if run is None else run.comm
    plan = _planned(batch_size, group.size, micro_batch)
    if plan.accumulation > 1 and run is None:
        raise InvalidArgumentError(
            f"loader: a {plan} needs the model: pass model=, which rd.prepare has returned, so "
            f"that optimizer.step() waits for the last micro-batch."
        )
    rows = len(dataset)  # type: ignore[arg-type]
    if rows < batch_size:
        raise InvalidArgumentError(
            f"loader: the dataset has {rows} rows, fewer than one batch of {batch_size}."
        )
    if group.rank == 0 and not quiet:
        left = rows % batch_size
        rest = f"; the last {left} of {rows} rows are left out" if left else ""
        sys.stderr.write(f"roundelay: {plan}{rest}\n")
    return Loader(dataset, plan, group, run, shuffle=shuffle, seed=seed, **options)


def _planned(batch_size: int, size: int, micro_batch: int | None) -> _Plan:
    batch_size = whole("loader: batch_size", batch_size, 0)
    if batch_size < 1 or batch_size % size:
        raise InvalidArgumentError(
            f"loader: a batch of {batch_size} rows can't be shared evenly by {size} ranks; take a "
            f"multiple of {size}."
        )
    share = batch_size // size
    most = share if micro_batch is None else whole("loader: micro_batch", micro_batch, 1)
    # The largest micro-batch that divides the share: all of them weigh the same.
    fitting = next(rows for rows in range(min(most, share), 0, -1) if share % rows == 0)
    return _Plan(batch_size, size, fitting, share // fitting)
