"""Global batches: where their rows come from, and how the ranks cut them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from roundelay.arguments import shown
from roundelay.communicator import Communicator
from roundelay.errors import CollectiveMismatch, CommunicationError, InvalidArgumentError
from roundelay.schedule.layout import split


class Cut(NamedTuple):
    """One rank's micro-batch: its place in a batch of all ranks, and how much it weighs there."""

    rows: int  # that this rank has of it
    part: int
    parts: int  # micro-batches of the batch, on every rank alike
    factor: float  # of the gradient of a mean over its rows, where all parts would weigh the same
    total: int  # rows of the whole batch, on all ranks


@dataclass(frozen=True, slots=True)
class Plan:
    """How a batch of all ranks becomes micro-batches of one."""

    batch_size: int | None  # None where a sampler says it
    rank: int
    size: int
    micro_batch: int | None

    @property
    def accumulation(self) -> int:
        """How many micro-batches a whole batch has."""
        return self.parts(self.batch_size or 1)

    def parts(self, rows: int) -> int:
        """Return how many micro-batches a batch of so many rows has."""
        share = -(-rows // self.size)
        return 1 if self.micro_batch is None else max(1, -(-share // self.micro_batch))

    def divides(self, rows: int) -> bool:
        """Tell whether all micro-batches of so many rows, on all ranks, have as many."""
        return rows % (self.size * self.parts(rows)) == 0

    def cut(self, rows: int) -> Iterator[tuple[slice, Cut]]:
        """Yield this rank's micro-batches of a batch of so many rows, as even as can be.

        >>> [(rows, cut.rows) for rows, cut in Plan(5, rank=1, size=2, micro_batch=2).cut(5)]
        [(slice(3, 4, None), 1), (slice(4, 5, None), 1)]
        """
        parts, share = self.parts(rows), split(rows, self.size)[self.rank]
        for part, piece in enumerate(split(share.stop - share.start, parts)):
            mine = piece.stop - piece.start
            factor = mine * self.size * parts / rows
            where = slice(share.start + piece.start, share.start + piece.stop)
            yield where, Cut(mine, part, parts, factor, rows)

    def __str__(self) -> str:
        ranks = f"{self.size} ranks x "
        if self.batch_size is None:
            return f"batches of the batch_sampler, on {self.size} ranks"
        parts = self.accumulation
        even = self.batch_size % (self.size * parts) == 0
        rows = -(-self.batch_size // (self.size * parts))
        most = f"{rows} rows" if even else f"at most {rows} rows"
        return f"batch of {self.batch_size} = {ranks}{parts} micro-batches x {most}"


class Order:
    """The rows of a dataset in their order, or shuffled for each epoch; alike on every rank."""

    def __init__(self, rows: int, batch_size: int, *, shuffle: bool) -> None:
        self._rows, self._batch_size, self._shuffle = rows, batch_size, shuffle

    def batches(self, epoch: int, seed: int) -> Iterator[list[Any]]:
        """Yield the rows of every batch of an epoch."""
        order = torch.arange(self._rows)
        if self._shuffle:
            generator = torch.Generator().manual_seed(seed + epoch)
            order = torch.randperm(self._rows, generator=generator)
        for start in range(0, self._rows, self._batch_size):
            yield order[start : start + self._batch_size].tolist()


class Drawn:
    """Batches that the user's sampler says: all ranks take what rank 0's has drawn."""

    def __init__(self, sampler: Any, batch_size: int | None, comm: Communicator) -> None:
        self._sampler, self._batch_size = sampler, batch_size
        self._comm = comm

    def batches(self, epoch: int, seed: int) -> Iterator[list[Any]]:
        """Yield the indices of every batch of an epoch. Every rank calls it, batch for batch."""
        own = self._own(epoch, seed) if self._comm.rank == 0 else iter(())
        while (batch := self._next(own)) is not None:
            yield batch

    def _next(self, own: Iterator[list[Any]]) -> list[Any] | None:
        comm, batch = self._comm, None
        if comm.rank == 0:
            try:
                batch = next(own, None)
                comm.broadcast_object(("", batch))
            except Exception as error:
                if not isinstance(error, CommunicationError):
                    comm.broadcast_object((f"{type(error).__name__}: {error}", None))
                raise
            return batch
        told, batch = comm.broadcast_object(None)
        if told:
            raise CollectiveMismatch(f"loader: the sampler failed on rank 0: {told}")
        return batch  # type: ignore[no-any-return] # rank 0's

    def _own(self, epoch: int, seed: int) -> Iterator[list[Any]]:
        both = self._sampler, getattr(self._sampler, "sampler", None)
        unseeded = [one for one in both if getattr(one, "generator", self) is None]
        for one in both:
            tell_epoch(one, epoch)
        for one in unseeded:
            vars(one)["generator"] = torch.Generator().manual_seed(seed + epoch)
        try:
            yield from self._batches(iter(self._sampler))
        finally:
            for one in unseeded:
                vars(one)["generator"] = None

    def _batches(self, found: Iterator[Any]) -> Iterator[list[Any]]:
        if self._batch_size is None:
            for batch in found:
                if not isinstance(batch, Iterable):
                    raise InvalidArgumentError(
                        f"loader: the batch_sampler gave {shown(batch)}, not the rows of a batch. "
                        f"One that gives single rows is a sampler="
                    )
                if not (indices := [_plain(index) for index in batch]):
                    raise InvalidArgumentError("loader: the batch_sampler gave a batch of no rows.")
                yield indices
            return
        while batch := [_plain(index) for index in islice(found, self._batch_size)]:
            yield batch


def _plain(index: Any) -> Any:  # Any: whatever a dataset is asked with
    return index.item() if isinstance(index, (torch.Tensor, np.generic)) else index


def tell_epoch(thing: object, epoch: int) -> None:
    """Tell a sampler or a stream which epoch begins, if it wants to know."""
    tell = getattr(thing, "set_epoch", None)
    if tell is not None:
        tell(epoch)


class RowStream(IterableDataset[Any]):
    """One rank's micro-batches of rows that come one after the other.

    Every rank, and each of its worker processes, reads the stream and takes what is its own: all
    rows come once, in the batches that one device would have.
    """

    def __init__(self, data: IterableDataset[Any], plan: Plan, *, drop_last: bool) -> None:
        self.data, self._plan, self._drop_last = data, plan, drop_last
        #: Epoch, batches that are done, and whether batches of no rows are filled: where worker
        #: processes that stay see it too.
        self.place = torch.zeros(3, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._worker: Any = None

    def __iter__(self) -> Iterator[tuple[list[Any], Any, Cut]]:
        """Yield rows, one that stands in where there are none, and the cut."""
        worker = self._worker = self._worker or get_worker_info()
        number, of = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if worker is not None:
            # A stream that divides itself between workers would be divided twice.
            torch_worker._worker_info = None  # noqa: SLF001 - torch has no other name
        epoch, done, filled = self.place.tolist()
        tell_epoch(self.data, epoch)
        batch_size, numbers = self._plan.batch_size or 1, count()
        rows = islice(iter(self.data), done * batch_size, None)
        while batch := list(islice(rows, batch_size)):
            if self._drop_last and len(batch) < batch_size:
                return
            for piece, cut in self._plan.cut(len(batch)):
                if next(numbers) % of == number:
                    yield batch[piece] or batch[:filled], batch[0], cut

    def __getattr__(self, name: str) -> Any:
        """Give what the user's dataset has, to the user's `worker_init_fn` for example."""
        if name == "data":  # not there yet, when this is unpickled
            raise AttributeError(name)
        return getattr(self.data, name)


class Collate:
    """Makes batches of a stream's rows; the cut goes along."""

    def __init__(self, own: Any) -> None:  # Any: the user's function, or torch's
        self.own = own

    def __call__(self, item: tuple[list[Any], Any, Cut]) -> tuple[Any, Cut]:
        """Return a batch, with or without rows."""
        rows, sample, cut = item
        return self.own(rows) if rows else emptied(self.own, sample), cut


def emptied(collate: Any, row: Any) -> Any:  # Any: the user's rows, and what he makes of them
    """Return a batch of no rows as `collate` would give it: the same form, dtypes and other dims.

    It shows by how a batch of two differs from a batch of one.

    >>> emptied(torch.utils.data.default_collate, (torch.ones(3), "a"))
    [tensor([], size=(0, 3)), ()]
    """
    return _less(collate([row]), collate([row, row]), "the batch")


def _less(one: Any, two: Any, what: str) -> Any:
    if isinstance(one, (torch.Tensor, np.ndarray)):
        if one.ndim == two.ndim:
            sizes = zip(one.shape, two.shape, strict=True)
            fewer = tuple(slice(max(0, 2 * now - more)) for now, more in sizes)
            if one.ndim or bool(one == two):
                return one[fewer]
    elif isinstance(one, Mapping):
        items = {key: _less(one[key], two[key], f"{what}[{key!r}]") for key in one}
        return type(one)(items)  # type: ignore[call-arg] # a dict, or like one
    elif isinstance(one, (list, tuple)):
        if len(one) != len(two):
            return one[: max(0, 2 * len(one) - len(two))]
        pairs = enumerate(zip(one, two, strict=True))
        fields = [_less(*pair, f"{what}[{at}]") for at, pair in pairs]
        return type(one)(*fields) if hasattr(one, "_fields") else type(one)(fields)
    elif one is None or (isinstance(one, (str, bytes, bool, int, float)) and one == two):
        return one
    raise InvalidArgumentError(
        f"loader: this rank has no rows of a batch, and {what}, a {type(one).__name__} that "
        f"collate_fn has made, can't be made empty. Take drop_last=True, or batches with a row for "
        f"every rank."
    )
