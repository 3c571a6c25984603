"""For torchft: a process group that is made anew, in the same processes, after a replica has died.

    from roundelay.torch.torchft import process_group

    manager = torchft.Manager(pg=process_group(), …)

is all that changes in a program that was written for `torchft.ProcessGroupGloo`.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import Any

from torch._C._distributed_c10d import Store

from roundelay.errors import MissingPackageError
from roundelay.torch._group import ProcessGroup
from roundelay.torch._rendezvous import rendezvous_by_store

__all__ = ["process_group"]


def process_group(timeout: timedelta = timedelta(seconds=60)) -> Any:  # a ProcessGroup of torchft's
    """Return what torchft's manager takes as `pg`: it asks it for groups of whoever is alive."""
    return _kind()(timeout)


@functools.cache
def _kind() -> Any:  # a class; torchft is optional: without types
    try:
        wrapper: Any = import_module("torchft.process_group").ProcessGroupWrapper
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torchft":
            raise
        raise MissingPackageError(
            "roundelay.torch.torchft", "torchft", also="torchft-nightly"
        ) from None

    class ProcessGroupRoundelay(wrapper):  # type: ignore[misc] # likewise
        """Groups on Roundelay, one after the other."""

        def _create_pg(self, store: Store, rank: int, world_size: int) -> ProcessGroup:
            seconds = self._timeout.total_seconds()
            connected = rendezvous_by_store(store, rank, world_size, timeout=seconds)
            return ProcessGroup(store, connected)

        def getBackendName(self) -> str:  # noqa: N802 - as torchft asks for it
            return "torchft-roundelay"

        def abort(self, *given: Any, **more: Any) -> None:
            with suppress(RuntimeError):  # what went wrong before, which the manager knows by now
                super().abort(*given, **more)
            self._pg = None

        def shutdown(self) -> None:
            self.abort(errored=False)

    return ProcessGroupRoundelay
