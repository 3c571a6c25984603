"""A save under way: files are written by a thread while training goes on."""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from roundelay import _core
from roundelay.communicator import Communicator
from roundelay.errors import CheckpointError, CommunicationError, RoundelayError

__all__ = ["Saves", "Saving", "beside_training", "together"]


SLOW_DISK_S = 3600.0  # for which the others wait beside training; who dies is told at once


class Saving:
    """A save that `rd.save(…, wait=False)` has begun, or one that is done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._problem: BaseException | None = None
        self._heard = False
        self._over = threading.Event()
        self._over.set()
        self.pid = os.getpid()

    def __repr__(self) -> str:
        how = "under way" if not self.done() else "failed" if self._problem else "done"
        return f"<Saving to {self.path}: {how}>"

    def done(self) -> bool:
        """Tell whether `wait` would return, or raise, at once."""
        return self._over.is_set()

    def wait(self) -> None:
        """Return when the checkpoint is complete; raise, on every rank, if it could not be."""
        self.finish()
        if self._problem is not None:
            self._heard = True
            raise self._problem

    def finish(self) -> None:
        """Return when nothing is under way any more, whatever came of it."""
        if not self.done() and self.pid != os.getpid():
            raise CheckpointError(
                f"The save to {self.path} is under way in process {self.pid}, of which this one "
                f"is a fork. Wait for it there."
            )
        self._over.wait()

    def unheard(self) -> BaseException | None:
        """Wait, and return what went wrong if nobody has heard of it; now somebody has."""
        self.finish()
        heard, self._heard = self._heard, True
        return None if heard else self._problem

    def begin(self, work: Callable[[], None], rank: int) -> None:
        """Do it on a thread; a script that ends waits for it."""
        name = f"roundelay-save-{rank}"
        place = _core.caller()  # the user's line, for what is said of calls beside
        thread = threading.Thread(target=self._work, args=(work, place), name=name, daemon=False)
        self._over.clear()
        _under_way.add(self)
        try:
            thread.start()
        except RuntimeError:  # there are no more threads to be had
            self._work(work, place)

    def _work(self, work: Callable[[], None], place: tuple[CodeType, int, int] | None) -> None:
        _core.work_for(place)
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by who waits
            if isinstance(error, CommunicationError):
                error.add_note(f"This was while saving to {self.path}, beside training.")
            _forget_frames(error)
            self._problem = error
        finally:
            _core.work_for(None)
            _under_way.discard(self)
            self._over.set()


_under_way: set[Saving] = set()  # of all ranks, where they are threads


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what the functions that raised have held: copies of the whole state."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Saves:
    """The saves of one model in training, one after the other."""

    def __init__(self, comm: Callable[[], Communicator]) -> None:
        self._ranks = comm  # which are fewer once workers of a parameter server are lost
        self._beside: Communicator | None = None
        self._last: list[Saving] = []  # at most one

    @property
    def _comm(self) -> Communicator:
        return self._ranks()

    def settle(self, path: Path) -> None:
        """Wait for what is under way, and raise what went wrong. All ranks call it."""
        for one in list(_under_way):
            if one.path == path and one.pid == os.getpid():  # also of another model
                one.finish()
        if self._last:
            problem = self._last.pop().unheard()
            told = self._comm.all_gather_object("" if problem is None else str(problem))
            if any(told):
                raise CheckpointError(next(filter(None, told)))

    def beside(self) -> Communicator:
        """Return the ranks once more, for a thread beside the one that trains. All call it."""
        if self._beside is None or self._beside.size != self._comm.size:
            self._beside = self._comm.group(range(self._comm.size))
            if self._beside is not None:
                self._beside.timeout = max(self._comm.timeout, SLOW_DISK_S)
            # The communicator lives longer than the model, which it shall not keep.
            self._comm.before_close(partial(_raise_unheard, self._last))
        return self._beside or self._comm

    def begin(self, saving: Saving, work: Callable[[], None]) -> None:
        """Begin one, when those before it are settled."""
        self._last[:] = [saving]
        saving.begin(work, self._comm.rank)


def _raise_unheard(last: list[Saving]) -> None:
    while last:
        problem = last.pop().unheard()
        if problem is not None:
            raise problem


@contextlib.contextmanager
def _on(stream: Any, ready: Any) -> Iterator[None]:  # Any: of CUDA
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        yield


def beside_training(
    tensors: Mapping[str, torch.Tensor],
) -> contextlib.AbstractContextManager[None]:
    """Return what has a thread read these without waiting for all that the device has to do.

    Only for what it has to do until now.
    """
    device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    if device is None:
        return contextlib.nullcontext()
    with torch.cuda.device(device):
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return _on(torch.cuda.Stream(), ready)  # type: ignore[no-untyped-call]


def together(comm: Communicator, what: str, work: Callable[[], Any]) -> list[Any]:
    """Do something on every rank and return what each gave; what fails anywhere raises on all."""
    result: Any = None
    problem: Exception | None = None
    try:
        result = work()
    except OSError as error:
        problem = CheckpointError(f"{error.strerror or error}: {error.filename or what}")
    except Exception as error:  # noqa: BLE001 - the others must not wait for this rank
        problem = error
    told = "" if problem is None else f"{problem}"
    every = comm.all_gather_object((told or ("" if problem is None else repr(problem)), result))
    failed = [(rank, one) for rank, (one, _) in enumerate(every) if one]
    if failed:
        text = "\n".join(f"  rank {rank}: {one}" for rank, one in failed)
        kept = "\nA checkpoint that was there before is as it was."
        message = f"Could not {what}:\n{text}{'' if what.startswith('load') else kept}"
        if problem is None or type(problem) is CheckpointError:
            raise CheckpointError(message)
        if isinstance(problem, RoundelayError):
            raise problem
        raise CheckpointError(message) from problem
    return [one for _, one in every]
