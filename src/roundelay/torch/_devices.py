"""Groups for tensors on several devices: those on the CPU go by us, all others by their backends.

Torch takes a process group in Python for the whole group, whatever other devices the user named:
of `cpu:roundelay,cuda:nccl` it would never make NCCL. So ours has torch make a second group, of the
other devices, holds it, and hands it every call whose tensors are there.
"""
# ruff: noqa: SLF001 - what torch asks of groups, and how it makes them, has no public names

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from roundelay.communicator import Communicator
from roundelay.communicator.tracing import found_trace, is_traced_here, start_trace
from roundelay.errors import InvalidArgumentError
from roundelay.torch._group import CPU, ProcessGroup
from roundelay.torch._rendezvous import Connected, rendezvous_by_store

#: What goes by the device of its tensors, under every name by which torch calls it.
ROUTED = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
    "broadcast", "allgather", "allgather_coalesced", "gather", "all_gather_single",
    "all_gather_single_coalesced", "_allgather_base", "allgather_into_tensor_coalesced",
    "scatter", "alltoall", "all_to_all_single", "alltoall_base", "send", "recv", "recv_anysource",
)  # fmt: skip


class OtherDevices(NamedTuple):
    """What torch was asked for, beside what it tells a backend: the other devices' backends."""

    backends: Mapping[str, str]  # by device, as "nccl" for "cuda"
    options: Any = None  # of those, if the user gave any

    def __str__(self) -> str:
        return ",".join(f"{device}:{backend}" for device, backend in self.backends.items())


class DevicesGroup(ProcessGroup):
    """A process group whose tensors may also be on the devices of `others`, a group of torch's."""

    others: Any  # what torch asks of groups is not all in its types

    def __init__(
        self,
        store: Store,
        connected: Connected,
        others: Any,
        request: OtherDevices,
        global_ranks: Sequence[int] | None,
    ) -> None:
        super().__init__(store, connected, global_ranks=global_ranks)
        self.others, self._request = others, request

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU, *map(torch.device, self._request.backends)]

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type == "cpu":
            return self
        return self.others._get_backend(torch.device(device))

    def barrier(self, opts: Any = None, **more: Any) -> Any:  # type: ignore[override] # as Moves has it
        """Return when every rank has come; on another device, if torch names one."""
        device = getattr(opts or more.get("opts"), "device", None)
        if device is None or device.type == "cpu":
            return super().barrier(opts, **more)
        return self.others.barrier(opts, **more)

    def _start_coalescing(self, device: torch.device) -> None:
        if torch.device(device).type == "cpu":
            super()._start_coalescing(device)
        else:
            self.others._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        if torch.device(device).type == "cpu":
            return super()._end_coalescing(device)
        return self.others._end_coalescing(device)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Tell whether `allocate_tensor` has anything better than torch."""
        if torch.device(device).type == "cpu":
            return super().supports_tensor_alloc(device)
        return bool(self._get_backend(device).supports_tensor_alloc(device))

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a flat tensor that the device's backend sends without a copy."""
        if torch.device(device).type == "cpu":
            return super().allocate_tensor(size, dtype=dtype, device=device)
        made: Tensor = self._get_backend(device).allocate_tensor(size, dtype=dtype, device=device)
        return made

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a call waits for a rank, on every device."""
        super().set_timeout(timeout)
        for device in map(torch.device, self._request.backends):
            self.others._get_backend(device)._set_default_timeout(timeout)

    _set_default_timeout = set_timeout

    def _split(
        self, store: Store, connected: Connected, name: str, global_ranks: Sequence[int]
    ) -> ProcessGroup:
        others = _made(self._request, store, connected, name, global_ranks)
        return DevicesGroup(store, connected, others, self._request, global_ranks)

    def _wait_for_pending_works(self) -> None:
        super()._wait_for_pending_works()
        self.others._wait_for_pending_works()

    def shutdown(self, how: str = "closed") -> None:
        """Finish what is under way and say goodbye to the other ranks, on every device."""
        try:
            super().shutdown(how)
        finally:
            self.others.shutdown()

    def abort(self) -> None:
        """Give up what is under way, on every rank and device."""
        try:
            super().abort()
        finally:
            self.others.abort()


def _routed(name: str) -> Callable[..., Any]:
    ours = getattr(ProcessGroup, name)

    @functools.wraps(ours)
    def call(self: DevicesGroup, *given: Any, **more: Any) -> Any:
        for tensor in _tensors((*given, *more.values())):
            if not tensor.is_cpu:
                return getattr(self.others, name)(*given, **more)
            break
        return ours(self, *given, **more)

    return call


for _name in ROUTED:
    setattr(DevicesGroup, _name, _routed(_name))


def _tensors(given: Any) -> Iterator[Tensor]:
    """Go over the tensors of arguments, in lists of lists too."""
    for one in given:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)


def create(given: Any, options: object) -> ProcessGroup:  # torch's struct of options
    """Make the group of torch's request; every rank that is to be in it is asked."""
    request = _other_devices(options)
    ranks = given.global_ranks_in_group
    whole = dist.group.WORLD if dist.is_initialized() else None
    connected = rendezvous_by_store(
        given.store,
        given.group_rank,
        given.group_size,
        timeout=given.timeout.total_seconds(),
        ranks=ranks,
        world=whole.token if isinstance(whole, ProcessGroup) else "",
    )
    _trace(connected.comm)
    if request is None:
        return ProcessGroup(given.store, connected, global_ranks=ranks)
    others = _made(request, given.store, connected, given.group_id, ranks)
    return DevicesGroup(given.store, connected, others, request, ranks)


def _trace(comm: Communicator) -> None:
    """Take down the calls of the first group, that of all ranks, where RD_TRACE asks for it.

    Other groups of torch's meet anew, and their calls have no numbers in common with these.
    """
    folder = found_trace(os.environ)
    if folder is not None and not dist.is_initialized() and not is_traced_here(folder, comm.rank):
        start_trace(comm, folder)


def _other_devices(options: object) -> OtherDevices | None:
    """Return what torch was asked for on other devices, if on any.

    Torch tells a backend nothing of it, so it is read where torch keeps it: in the function that
    makes groups and that has called us.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    config = None if frame is None else frame.f_locals.get("backend_config")
    if config is None:
        return None
    asked = dict(config.get_device_backend_map())
    ours = [device for device, backend in asked.items() if backend == "roundelay"]
    if ours != ["cpu"]:
        raise InvalidArgumentError(
            f"The backend roundelay works on CPU tensors, but {config} asks it for "
            f'{", ".join(ours)}. Name another backend there, as in "cpu:roundelay,cuda:nccl".'
        )
    del asked["cpu"]
    return OtherDevices(asked, options) if asked else None


def _made(
    request: OtherDevices,
    store: Store,
    connected: Connected,
    name: str,
    global_ranks: Sequence[int],
) -> Any:  # a group of torch's
    """Have torch make the group of the other devices, and forget it: we hold it."""
    made: Any
    inner: Any = f"{name}/others"  # newer torch has a type for names
    made, _ = c10d._new_process_group_helper(
        connected.comm.size, connected.comm.rank, list(global_ranks), str(request),
        PrefixStore("others/", store), inner, request.options,
        timedelta(seconds=connected.comm.timeout), group_desc="others of roundelay",
    )  # fmt: skip
    world = c10d._world
    for known in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag):
        known.pop(made, None)
    for kept in world.tags_to_pg.values():
        if made in kept:
            kept.remove(made)
    c10d._unregister_process_group(inner)  # type: ignore[attr-defined] # of torch._C
    return made


def in_batches(of_torch: Callable[..., list[dist.Work]]) -> Callable[..., list[dist.Work]]:
    """Return `batch_isend_irecv` that makes a batch of messages on our other devices too.

    Torch's own does so for groups in C++ only, and NCCL's messages one by one may wait for each
    other forever.
    """

    @functools.wraps(of_torch)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        group: Any = p2p_op_list[0].group if p2p_op_list else None
        group = group or dist.group.WORLD
        device = p2p_op_list[0].tensor.device if p2p_op_list else CPU
        batches = isinstance(group, DevicesGroup) and device.type != "cpu"
        if not batches or not group._get_backend(device).supports_coalescing:
            return of_torch(p2p_op_list)
        c10d._check_p2p_op_list(p2p_op_list)
        group._start_coalescing(device)
        of_torch(p2p_op_list)
        return [group._end_coalescing(device)]

    return batch_isend_irecv
