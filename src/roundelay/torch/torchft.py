"""For torchft: a process group that is made anew, in the same processes, after a replica has died.

    from roundelay.torch.torchft import ProcessGroupRoundelay

    manager = torchft.Manager(pg=ProcessGroupRoundelay(), …)

is all that changes in a program that was written for `torchft.ProcessGroupGloo`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from roundelay.errors import MissingPackageError
from roundelay.torch._group import ProcessGroup
from roundelay.torch._rendezvous import rendezvous_by_store

if TYPE_CHECKING:
    Wrapper: Any = object  # torchft is optional: without types
else:
    try:
        from torchft.process_group import ProcessGroupWrapper as Wrapper
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torchft":
            raise
        raise MissingPackageError(
            "roundelay.torch.torchft", "torchft", also="torchft-nightly"
        ) from None

__all__ = ["ProcessGroupRoundelay"]


class ProcessGroupRoundelay(Wrapper):
    """What torchft's manager takes as `pg`: it asks for a group of whoever is alive."""

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> ProcessGroup:
        seconds = self._timeout.total_seconds()
        return ProcessGroup(store, rendezvous_by_store(store, rank, world_size, timeout=seconds))

    def getBackendName(self) -> str:  # noqa: N802 - as torchft asks for it
        """Return the name that torchft shows."""
        return "torchft-roundelay"

    def abort(self, errored: bool = True) -> None:  # noqa: FBT001, FBT002 - as torchft has it
        """Give up what is under way, on every rank; what went wrong before is known by then."""
        try:
            super().abort(errored)
        except RuntimeError:
            self._pg = None

    def shutdown(self) -> None:
        """Say goodbye to the other replicas."""
        self.abort(errored=False)
