"""How a call of torch's becomes calls of the communicator: at once, or in the background."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import profiler

from roundelay.communicator import Communicator
from roundelay.errors import CollectiveTimeout, CommunicationError
from roundelay.processes.call_queue import CallQueue
from roundelay.torch._work import DONE, Done, Part, Work


class CommCall(NamedTuple):
    """One call of the communicator, and what to do once its result is there."""

    verb: str
    args: tuple[Any, ...]  # buffers, roots and names, as the verb takes them
    options: Mapping[str, Any] = MappingProxyType({})  # likewise
    after: Callable[[], object] | None = None
    asks: bool = False  # makes more than one call, so that it can't simply be started
    run: Callable[[], object] | None = None  # instead of the verb; asks


class Calls:
    """The part of a process group that runs steps in order."""

    comm: Communicator
    global_ranks: Sequence[int]

    def __init__(self) -> None:
        self._queue = CallQueue()
        self._coalesced: list[Work] | None = None
        self._under_way: WeakSet[Work] = WeakSet()

    def _call(
        self, name: str, steps: Sequence[CommCall], tensors: Sequence[Tensor], *, waits: bool
    ) -> Work:
        """Run the steps; `tensors` are those that hold the result."""
        with self._shown(name, tensors):
            if waits:
                self._at_once(steps)
                work: Work = DONE if self._coalesced is None else Done(tensors)
            else:
                work = self._later(name, steps, tensors)
        return self._kept(work)

    def _kept(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _at_once(self, steps: Sequence[CommCall]) -> None:
        self._await_queued()
        try:
            for step in steps:
                self._run(step)
                if step.after is not None:
                    step.after()
        except CommunicationError as error:
            self._say_who(error)
            raise

    def _later(self, name: str, steps: Sequence[CommCall], tensors: Sequence[Tensor]) -> Work:
        parts: list[Part] = []
        for step in steps:
            if step.asks or step.run is not None or self._queue.busy:
                parts.append((self._queue.start(partial(self._run, step)), step.after))
            else:
                started = getattr(self.comm.start, step.verb)(*step.args, **step.options)
                parts.append((started, step.after))
        return self._remembered(Work(name, parts, tensors, on_error=self._say_who))

    def _await_queued(self) -> None:
        """Return when no call stands in the queue any more."""
        if self._queue.busy:
            self._queue.run(lambda: None)

    def _run(self, step: CommCall) -> None:
        if step.run is not None:
            step.run()
        else:
            getattr(self.comm, step.verb)(*step.args, **step.options)

    def _remembered(self, work: Work) -> Work:
        self._under_way.add(work)
        return work

    def _say_who(self, error: Exception) -> None:
        """Say in torch's words what an error means: the ranks of all, and whose timeout it was."""
        if not isinstance(error, CommunicationError):
            return
        ranks, text = list(self.global_ranks), str(error)
        if isinstance(error, CollectiveTimeout):
            text += "\n  The timeout of a group is set by init_process_group and new_group."
        if ranks != list(range(len(ranks))):
            text += f"\n  Ranks 0 to {len(ranks) - 1} of this group are ranks {ranks} of all."
        error.args = (text,)

    def _shown(self, name: str, tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
        """Show a call in torch's profiler, if it runs."""
        if not profiler._is_profiler_enabled:  # noqa: SLF001 - what record_function reads
            return nullcontext()
        return _Annotation(f"roundelay:{name}", tensors)


class _Annotation(AbstractContextManager[object]):
    """A call in the profile, with the shapes of its tensors."""

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        self._name, self._tensors = name, tensors
        self._record: Any = None  # a handle of torch's

    def __enter__(self) -> object:
        enter = torch.autograd._record_function_with_args_enter  # type: ignore[attr-defined] # noqa: SLF001
        self._record = enter(self._name, *self._tensors)
        return self

    def __exit__(self, *_: object) -> None:
        torch.autograd._record_function_with_args_exit(self._record)  # type: ignore[attr-defined] # noqa: SLF001
