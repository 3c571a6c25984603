"""The process group: a communicator under the name and the manners that torch expects."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from roundelay.errors import InvalidArgumentError
from roundelay.torch._messages import Messages
from roundelay.torch._monitored import MonitoredBarrier
from roundelay.torch._move import Moves
from roundelay.torch._reduce import Reductions
from roundelay.torch._rendezvous import Connected, rendezvous_by_store
from roundelay.torch._shutdown import shut_down_at_exit
from roundelay.torch._work import Work

CPU = torch.device("cpu")


class ProcessGroup(Reductions, Moves, Messages, dist.ProcessGroup):  # type: ignore[misc] # one signature for all overloads
    """A `torch.distributed` process group on a communicator, which is `comm`.

    A subclass in Python has no C++ backend behind it, so what torch asks of one is answered here.
    """

    supports_splitting = True
    supports_coalescing = True
    supports_time_estimate = False

    def __init__(
        self, store: Store, connected: Connected, *, global_ranks: Sequence[int] | None = None
    ) -> None:
        comm = connected.comm
        dist.ProcessGroup.__init__(self, comm.rank, comm.size)  # type: ignore[call-arg] # one of two
        Reductions.__init__(self)
        self.comm, self.fail, self.token = comm, connected.fail, connected.token
        self.global_ranks = list(global_ranks or range(comm.size))
        self._store = store
        self._group_name = self._group_desc = ""
        self._monitored = MonitoredBarrier(comm)
        self._splits = 0
        shut_down_at_exit(self)

    # ---- who it is

    def rank(self) -> int:
        """Return this rank."""
        return self.comm.rank  # C++ would ask Python for it

    def size(self) -> int:
        """Return the number of ranks."""
        return self.comm.size

    @property
    def group_name(self) -> str:  # type: ignore[override] # torch has a type of its own for it
        """What torch calls this group."""
        return self._group_name

    @property
    def group_desc(self) -> str:
        """What the user calls this group."""
        return self._group_desc

    def _set_group_name(self, name: str) -> None:
        self._group_name = name
        super()._set_group_name(name)  # type: ignore[arg-type] # likewise

    def _set_group_desc(self, desc: str) -> None:
        self._group_desc = desc
        super()._set_group_desc(desc)

    def name(self) -> str:
        """Return the name of the backend."""
        return "roundelay"

    getBackendName = _get_backend_name = name  # noqa: N815 - as C++ asks for it

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU]

    def _get_backend(self, device: torch.device) -> Any:
        """Return itself, which answers what C++ backends do."""
        if torch.device(device).type != "cpu":
            raise InvalidArgumentError(
                f"The backend roundelay works on CPU tensors and has nothing for {device}. Make a "
                f'group for it: dist.new_group(backend="nccl").'
            )
        return self

    def failed_first(self) -> int | None:
        """Return the rank whose failure was told first in this group, if that is known."""
        return self.comm._engine.failed_first()  # noqa: SLF001 - our own

    # ---- memory

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Tell whether `allocate_tensor` has anything better than torch: on CPUs it has."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a flat tensor in the arena, which the other ranks read where it lies.

        FSDP2 asks for its buffers here after `set_allocate_memory_from_process_group_for_comm`.
        """
        self._get_backend(device)
        memory = self.comm._engine.own_memory(int(size) * dtype.itemsize)  # noqa: SLF001 - our own
        return torch.from_numpy(memory).view(dtype)

    def get_group_store(self) -> Store:
        """Return the store by which the ranks met."""
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls are numbered by the communicator."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _has_hooks(self) -> bool:
        return False

    # ---- time

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a call waits for a rank."""
        self.comm.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def run_monitored_barrier(
        self, timeout: timedelta | float | None = None, *, wait_all_ranks: bool = False
    ) -> None:
        """Return when every rank has come, or name those that have not; see dist."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        seconds = self.comm.timeout if seconds is None else seconds
        self._monitored.run(seconds, all_ranks=wait_all_ranks)

    monitored_barrier = run_monitored_barrier

    # ---- several calls as one

    def _start_coalescing(self, device: torch.device) -> None:
        self._get_backend(device)
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:  # noqa: ARG002 - checked before
        works, self._coalesced = self._coalesced or [], None
        tensors = [tensor for work in works for tensor in work.outputs]
        return Work("coalesced", [(work, None) for work in works], tensors)

    # ---- smaller groups, and the end

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: object = None,  # noqa: ARG002 - torch's, for other backends
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,  # noqa: ARG002 - there is one
    ) -> ProcessGroup | None:
        """Return a group of these ranks of this one; None for ranks that are not in it."""
        self._splits += 1
        if self.comm.rank not in new_ranks:
            return None
        name = group_name or f"{self._group_name}:split:{self._splits}:{new_ranks}"
        store = PrefixStore(f"{name}/", self._store)
        seconds = self.comm.timeout if timeout is None else timeout.total_seconds()
        rank = new_ranks.index(self.comm.rank)
        ranks = [self.global_ranks[r] for r in new_ranks]
        connected = rendezvous_by_store(store, rank, len(ranks), timeout=seconds, ranks=ranks)
        group = self._split(store, connected, name, ranks)
        group._set_group_name(name)  # noqa: SLF001 - our own
        group._set_group_desc(  # noqa: SLF001 - our own
            group_desc or f"{self._group_desc}:split:{self._splits}"
        )
        return group

    def _split(
        self,
        store: Store,
        connected: Connected,
        name: str,  # noqa: ARG002 - of groups for other devices too
        global_ranks: Sequence[int],
    ) -> ProcessGroup:
        return ProcessGroup(store, connected, global_ranks=global_ranks)

    def _wait_for_pending_works(self) -> None:
        self._finish_works()

    def _finish_works(self) -> Exception | None:
        """Wait for all works; return what went wrong with one, if nobody has heard of any."""
        works = list(self._under_way)
        heard = any(work.told for work in works)
        errors = []
        for work in works:
            try:
                work.wait()
            except Exception as error:  # noqa: BLE001 - whatever a call raises
                errors.append(error)
        return None if heard or not errors else errors[0]

    def shutdown(self, how: str = "closed") -> None:
        """Finish what is under way and say goodbye to the other ranks, by one of `ENDINGS`."""
        self._await_queued()
        lost = self._finish_works()
        # Ranks destroy torch's groups in any order: the last one to do so compares.
        self.comm.end(how, together=False)
        if lost is not None:
            raise lost

    def abort(self) -> None:
        """Give up what is under way, on every rank, and say goodbye."""
        self.fail("interrupted", "the group was aborted")
        self.shutdown()
