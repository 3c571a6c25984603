"""How a process ends, told to the other ranks: a shutdown, or the exception that ended it."""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING
from weakref import WeakSet

from roundelay import _core
from roundelay.processes.death import raised
from roundelay.processes.launcher_line import tell_blame
from roundelay.torch._work import let_futures_complete

if TYPE_CHECKING:
    from roundelay.torch._group import ProcessGroup


class _End:
    """The end of this process, for all of its groups."""

    def __init__(self) -> None:
        self.groups: WeakSet[ProcessGroup] = WeakSet()
        self._pid = os.getpid()
        self._show = sys.excepthook
        sys.excepthook = self._tell_and_show
        atexit.register(self._leave)

    def _tell_and_show(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if os.getpid() == self._pid:
            self._tell_launcher(error)
            for group in self.groups:
                group.fail(*raised(kind, error))
        self._show(kind, error, trace)

    def _tell_launcher(self, error: BaseException) -> None:
        """Say whose failure came first; a rank is known by its number in the group of all."""
        groups = sorted(self.groups, key=lambda group: -group.comm.size)
        known = [(group, group.failed_first()) for group in groups]
        first = [group.global_ranks[at] for group, at in known if at is not None]
        if groups:
            tell_blame(groups[0].global_ranks[groups[0].comm.rank], error, next(iter(first), None))

    def _leave(self) -> None:
        if os.getpid() == self._pid:
            for group in list(self.groups):
                try:
                    group.shutdown("script")
                except Exception as error:  # noqa: BLE001 - of a call that nobody waited for
                    self._show(type(error), error, error.__traceback__)
                    _core.fail_at_exit()  # a job whose calls differed has not succeeded
            let_futures_complete()


_end: list[_End] = []  # a process ends once


def shut_down_at_exit(group: ProcessGroup) -> None:
    """Have the other ranks of a group told how this process ends."""
    if not _end:
        _end.append(_End())
    _end[0].groups.add(group)
