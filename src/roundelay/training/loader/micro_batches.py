"""A loader at work: which micro-batch is at hand, and what the step hears of it."""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from roundelay.arguments import whole
from roundelay.communicator import Communicator
from roundelay.errors import InvalidArgumentError
from roundelay.training._origins import Turn
from roundelay.training._run import Run, live_runs, run_of
from roundelay.training.loader._batches import Collate, Cut, Drawn, Order, Plan, RowStream, emptied
from roundelay.training.loader._options import checked_state

__all__ = ["Loader"]

MOST = 1 << 40  # epochs and batches that anybody counts
Handed = Generator[tuple[Cut, int, Any]]
#: Loops with worker processes that threads of this process are in. A child that is forked loses all
#: threads but one, with all they hold, and would end the others' workers; these it keeps.
_serving: set[Any] = set()
_forking = threading.Lock()  # so that none is half made when another thread forks


class Loader:
    """Yields this rank's micro-batches, epoch after epoch in another order; `len` counts them."""

    def __init__(
        self,
        data: Any,
        plan: Plan,
        source: Order | Drawn | RowStream,
        run: Run | None,
        comm: Communicator,
        state: dict[str, Any],
        **options: Any,
    ) -> None:
        self.plan, self.comm, self._source, self._run = plan, comm, source, run
        self._state = state  # what goes into `state_dict`, beside the place
        self._epoch = self._done = 0
        self._latest = -1  # epoch that was begun
        self._said: tuple[int, int] | None = None  # where the user wants to go on
        self._loops = 0  # that are under way
        self._mark: int | None = 0  # of all indices of this epoch that are done, if it is known
        self._due: int | None = None  # the same, of a state that was loaded
        #: Of the micro-batch at hand: whether it begins a batch, whether it ends one, and how many
        #: rows this rank has of it.
        self.first_of_step = self.last_of_step = True
        self.rows = 0
        self._pending: deque[list[Any]] = deque()  # indices that the inner loader has yet to take
        self._collate = options.pop("collate_fn", None) or torch.utils.data.default_collate
        if isinstance(source, RowStream):
            collate: Any = Collate(self._collate)  # of what the stream gives, no list
            self._inner = DataLoader(source, batch_size=None, collate_fn=collate, **options)
        else:
            sampler: Any = _Pending(self)
            self._inner = DataLoader(
                data, batch_sampler=sampler, collate_fn=self._collate, **options
            )

    def __len__(self) -> int:
        """Return the micro-batches of one epoch."""
        rows, batch_size = self._state["rows"], self.plan.batch_size
        if rows is None or (batch_size is None and self.plan.micro_batch is not None):
            raise TypeError("The length of this loader shows when its rows have come to an end.")
        if batch_size is None:
            return int(rows)  # batches, of a batch_sampler
        full, left = divmod(rows, batch_size)
        last = 0 if self._state["drop_last"] or not left else self.plan.parts(left)
        return int(full * self.plan.parts(batch_size) + last)

    @property
    def leaves_out(self) -> bool:
        """Whether there may be rows that no epoch has."""
        rows, batch_size = self._state["rows"], self.plan.batch_size
        return bool(self._state["drop_last"] and (rows is None or rows % (batch_size or 1)))

    @property
    def _uneven(self) -> bool:
        """Whether there may be batches that can't be divided evenly between the ranks."""
        rows, batch = self._state["rows"], self.plan.batch_size
        if batch is None or not self.plan.divides(batch):
            return True
        if self._state["drop_last"]:
            return False
        return rows is None or not self.plan.divides(rows % batch)

    def __iter__(self) -> Iterator[Any]:
        """Go through the dataset once; steps happen after the last micro-batch of each batch.

        A loop that was left early is over: the next one begins another epoch. A batch that was
        left in the middle is given up, and its gradients are forgotten.
        """
        return self.loop()

    def loop(self, *, filled: bool = False) -> Iterator[Any]:
        """Do the same; where a batch has no rows for this rank, `filled` gives one of the others'.

        It must not be counted: `rows` is 0.
        """
        epoch, done = self._begin()
        turn = Turn(uneven=self._uneven, dealt=(self.plan.rank, self.plan.size))
        runs = self._trained()
        others = [one for one in live_runs() if one not in runs]
        if isinstance(self._source, RowStream):
            handed = self._streamed(self._source, epoch, done, filled=filled)
        else:
            handed = self._indexed(self._source, epoch, done, filled=filled)
        self._loops += 1
        try:
            for cut, mark, batch in handed:
                self.first_of_step, self.last_of_step = cut.part == 0, cut.part + 1 == cut.parts
                done += self.last_of_step
                self._epoch, self._done, self.rows = epoch, done, cut.rows
                self._mark = mark if self.last_of_step else self._mark
                turn.parts, turn.factor, turn.more = cut.parts, cut.factor, not self.last_of_step
                turn.place = epoch, done - self.last_of_step, cut.part
                turn.asked.clear()
                for run in others:
                    run.step.foreign = turn if cut.parts > 1 else None
                even = self.plan.divides(cut.total)
                for run in runs:
                    run.take_turn(turn, batch, () if even else (cut.total, cut.parts, cut.part))
                yield batch
        finally:
            handed.close()
            self._loops -= 1
            for run in runs:
                run.leave(turn)
            for run in others:
                run.step.foreign = None
        self._epoch, self._done, self._mark = self._latest + 1, 0, 0

    def _trained(self) -> list[Run]:
        """Return who is told of micro-batches: the model that was named, as it is prepared now."""
        if self._run is None:
            return live_runs()
        self._run = run_of("loader", self._run.setup.model)
        return [self._run]

    def _begin(self) -> tuple[int, int]:
        if self._loops and self._inner.persistent_workers:
            raise InvalidArgumentError(
                "loader: its worker processes serve one loop at a time, and another one is under "
                "way. Leave out persistent_workers=True, or make a second loader."
            )
        place = self._said or (self._latest + 1, 0)
        self._said, self._latest = None, place[0]
        return place

    def _streamed(self, stream: RowStream, epoch: int, done: int, *, filled: bool) -> Handed:
        stream.place.copy_(torch.tensor([epoch, done, filled]))
        with self._served() as inner:
            for batch, cut in inner:
                yield Cut(*cut), 0, batch

    def _indexed(self, source: Order | Drawn, epoch: int, done: int, *, filled: bool) -> Handed:
        batches, mark = self._replayed(source.batches(epoch, self._state["seed"]), done)
        # Worker processes are so far ahead. Batches are drawn when one device would draw them, and
        # in the same moment on every rank, whoever has rows of them.
        ahead = (self._inner.prefetch_factor or 0) * self._inner.num_workers
        waiting: deque[tuple[Cut, int, Any]] = deque()
        pending: deque[list[Any]] = deque()

        def draw() -> bool:
            nonlocal mark
            while len(waiting) <= ahead and (batch := next(batches, None)) is not None:
                if self._state["drop_last"] and len(batch) < (self.plan.batch_size or 0):
                    break
                mark = _marked(mark, batch)
                for piece, cut in self.plan.cut(len(batch)):
                    waiting.append((cut, mark, batch[0]))
                    pending.append(batch[piece] or batch[:1])
            return bool(waiting)

        if not draw():
            return
        self._pending = pending
        with self._served() as inner:
            while draw():
                cut, now, index = waiting.popleft()
                found = next(inner)
                if not cut.rows and not filled:
                    found = emptied(self._collate, self._row(index))
                yield cut, now, found

    @contextmanager
    def _served(self) -> Iterator[Iterator[Any]]:
        """Begin a loop of the inner loader; unless they stay, its worker processes end with it."""
        if self._inner.num_workers == 0:
            yield iter(self._inner)
            return
        process = os.getpid()
        with _forking:
            inner: Any = iter(self._inner)
            stays = inner in _serving  # it was begun before
            _serving.add(inner)
        if not self._inner.persistent_workers:
            try:
                yield inner
            finally:
                _end(inner, process)
        else:
            if not stays:
                weakref.finalize(self, _end, inner, process)
            yield inner

    def _replayed(self, batches: Iterator[Any], done: int) -> tuple[Iterator[Any], int]:
        """Pass over batches that are done, and see that they are those that were done."""
        mark, due = 0, self._due
        for batch in islice(batches, done):
            mark = _marked(mark, batch)
        self._due = None
        if due not in (None, mark):
            raise InvalidArgumentError(
                "loader: the sampler draws other rows than it did before the state was taken. Seed "
                "it in its set_epoch, or give it a generator."
            )
        return batches, mark

    def _row(self, index: Any) -> Any:
        data: Any = self._inner.dataset
        return data.__getitems__([index])[0] if hasattr(data, "__getitems__") else data[index]

    # ---- where it is

    @property
    def epoch(self) -> int:
        """Which pass over the data this is, from 0; set it, and `done`, to go on from there."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._done = self._said[1] if self._said else 0
        self._epoch = whole("loader.epoch", epoch, 0, MOST)
        self._said = self._epoch, self._done
        self._mark = None if self._done else 0

    def set_epoch(self, epoch: int) -> None:
        """Have the next loop be this epoch, from its beginning."""
        self.epoch, self.done = epoch, 0

    @property
    def done(self) -> int:
        """Whole batches of this epoch that were handed out."""
        return self._done

    @done.setter
    def done(self, done: int) -> None:
        self._done = whole("loader.done", done, 0, MOST)
        self._said = self._epoch, self._done
        self._mark = None if done else 0

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader is, for `rd.save(…, extra=…)`: the next whole batch.

        It is the same on every rank, and good for any number of them.
        """
        return {**self._state, "epoch": self._epoch, "done": self._done, "mark": self._mark}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next loop go on from there, with the rows that were still to come."""
        seed = checked_state(state, self._state)
        self._state["seed"] = seed
        self.epoch, self.done = state["epoch"], state["done"]
        self._mark = self._due = state["mark"]


def _end(inner: Any, process: int) -> None:
    if os.getpid() == process:
        with _forking:
            inner._shutdown_workers()  # noqa: SLF001 - what its __del__ does, but now
            _serving.discard(inner)


def _marked(mark: int, batch: Any) -> int:
    return zlib.crc32(repr(batch).encode(), mark)


class _Pending:
    """Gives the inner loader the indices that are next."""

    def __init__(self, loader: Loader) -> None:
        self._loader = weakref.ref(loader)  # which is kept by none of its worker processes

    def __iter__(self) -> Iterator[list[Any]]:
        loader = self._loader()
        pending = deque() if loader is None else loader._pending  # noqa: SLF001 - its other half
        del loader
        while pending:
            yield pending.popleft()
