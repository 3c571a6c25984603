"""One rank of an NCCL process group: tensors on GPUs, with Gloo beside for all the rest."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np

from roundelay.engines._base import Engine
from roundelay.engines._call import CollectiveCall, MessageCall, MessageRequest, Status
from roundelay.engines._device_arrays import DeviceArray, on_device
from roundelay.engines._selector import Select
from roundelay.engines.gloo.calls import LibraryCalls, Work, library_word
from roundelay.engines.gloo.engine import Gloo, connected, cut_lines
from roundelay.engines.gloo.groups import HeldGroup, load_torch, seconds
from roundelay.errors import InvalidArgumentError, RendezvousError
from roundelay.processes.call_queue import QueuedCall
from roundelay.reductions import Array
from roundelay.rendezvous.by_store import StoreRendezvous

__all__ = ["Nccl"]

#: What NCCL takes; means of the narrow ones are added in float32.
TAKEN = ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
NARROW = ("float16", "bfloat16")


class Nccl(Gloo):
    """A rank with a GPU, among processes of one or many hosts.

    What NCCL has for a reduction and dtype, with our meaning, it does on the GPUs. The rest, and
    messages, go by way of the host's memory and Gloo; arrays that lie there do so too. All ranks
    must agree where their buffers lie. Calls return when the result is there, not before.

    `library` may be "gloo": the same code on the CPU, for machines without a GPU.
    """

    devices = True
    _gpus: Any  # a process group of torch

    def __init__(
        self,
        rendezvous: StoreRendezvous,
        select: Select,
        *,
        timeout: float,
        library: str = "nccl",
    ) -> None:
        self._library, self._gpus = library, None
        super().__init__(rendezvous, select, timeout=timeout)
        at = rendezvous.within("devices")
        try:
            self._gpus = _connected(self._torch, at, timeout, library)
        except BaseException:
            super().close()
            raise
        # Also when nobody closes a group that was split off: NCCL warns of those.
        self._leave = weakref.finalize(self, _leave, self._gpus, library)
        self._on_gpus = NcclCalls(self._torch, self.rank, self.size)

    @classmethod
    def can(cls, what: Literal["start", "join"]) -> bool:
        """Tell that launchers start these ranks: each must have its own GPU."""
        return what == "join"

    @classmethod
    def start(
        cls, size: int, body: Callable[[Engine], Any], *, select: Select, timeout: float
    ) -> list[Any]:
        """Fork the ranks, one for each GPU; NCCL takes no more."""
        torch = load_torch("nccl")
        count = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
        if size > count:
            raise InvalidArgumentError(
                f"The engine nccl needs a GPU for each of the {size} ranks, but this host has "
                f"{count} that torch can use. Use engine gloo, or fewer ranks."
            )

        def on_its_gpu(engine: Engine) -> Any:
            torch.cuda.set_device(engine.rank)
            return body(engine)

        return super().start(size, on_its_gpu, select=select, timeout=timeout)

    def begin(self, call: CollectiveCall, algorithm: str | None) -> QueuedCall:
        """Run the call on a thread, after what the caller has given the GPU to do so far."""
        if not _lies_there(call) or self._library != "nccl":
            return super().begin(call, algorithm)
        cuda = self._torch.cuda
        stream = cuda.current_stream()
        described = self._described(call, algorithm)

        def work() -> None:
            with cuda.stream(stream):
                self._do(described, algorithm)

        return self._queue.start(work)

    def _do(self, call: CollectiveCall, algorithm: str | None) -> None:
        # The root of a scatter alone knows where its buffer lies; so all go by the host.
        if call.collective == "scatter" or not _lies_there(call):
            self._by_host(call, algorithm)
            return
        self._open()
        with self._trouble.watched(self._timeout):
            if algorithm is None and self._on_gpus.run(self._gpus, call, seconds(self._timeout)):
                return
        self._by_host(call, algorithm)

    def _by_host(self, call: CollectiveCall, algorithm: str | None) -> None:
        given, output = call.input, call.output
        if not _lies_there(call):
            super()._do(call, algorithm)
            return
        brought = None if given is None else np.asarray(given).reshape(-1)
        on_host = None if output is None else np.empty(output.size, output.dtype)
        if on_host is not None and call.collective == "exscan":
            on_host[:] = np.asarray(output).reshape(-1)  # which stays as it is on rank 0
        super()._do(replace(call, input=brought, output=on_host), algorithm)
        if output is not None and on_host is not None:
            output[...] = on_host.reshape(output.shape)

    def post(self, message: MessageCall) -> MessageRequest:
        """Send a copy, or receive one and bring it to the device when it is waited for."""
        if not on_device(message.data):
            return super().post(message)
        host = np.ascontiguousarray(np.asarray(message.data))
        request = super().post(replace(message, data=host))
        return request if message.sends else _FromHost(request, host, message.data)

    def _at(self, rendezvous: StoreRendezvous) -> Self:
        return type(self)(rendezvous, self._select, timeout=self._timeout, library=self._library)

    def _cut(self, group: HeldGroup) -> None:
        gpus = self._gpus
        with contextlib.suppress(RuntimeError):
            if gpus is not None and self._library != "nccl":
                cut_lines(self._torch, gpus, self.rank, self.size)
            elif gpus is not None and (self._queue.busy or self._trouble.told is not None):
                self._leave.detach()
                gpus.abort()
        super()._cut(group)

    def _hang_up(self) -> None:
        super()._hang_up()
        if self._gpus is not None:
            self._gpus = None
            self._leave()  # once


def _leave(gpus: Any, library: str) -> None:
    if library == "nccl":
        with contextlib.suppress(RuntimeError):
            gpus.shutdown()


def _lies_there(call: CollectiveCall) -> bool:
    return on_device(call.input) or on_device(call.output)


def _connected(torch: Any, rendezvous: StoreRendezvous, timeout: float, library: str) -> Any:
    distributed = torch.distributed
    try:
        if library != "nccl":
            return connected(torch, rendezvous, timeout)
        if not torch.cuda.is_available() or not distributed.is_nccl_available():
            raise InvalidArgumentError(
                "The engine nccl needs a GPU and a torch that was built for CUDA, with NCCL; this "
                "process has no such thing. On CPUs use engine='gloo', or none."
            )
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = seconds(timeout)  # noqa: SLF001 - torch has no other name for it
        # Its threads ask the store when they like, so it gets torch's own.
        store = distributed.PrefixStore(rendezvous.store.corner, rendezvous.store.raw)
        return distributed.ProcessGroupNCCL(store, rendezvous.rank, rendezvous.size, options)
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {rendezvous.rank} of {rendezvous.size} could not join the others by {library}: "
            f"{str(error).splitlines()[0]}"
        ) from error


class _FromHost:
    """A message for a device, which comes by the host's memory."""

    def __init__(self, request: MessageRequest, host: Array, device: Any) -> None:
        self._request, self._host, self._device = request, host, device

    def done(self) -> bool:
        return self._request.done()

    def wait(self) -> None:
        self._request.wait()
        if isinstance(self._device, DeviceArray):
            self._device[...] = self._host

    def status(self) -> Status:
        return self._request.status()


class NcclCalls(LibraryCalls):
    """Runs calls on a process group for devices, for one rank."""

    def __init__(self, torch: Any, rank: int, size: int) -> None:
        super().__init__(torch, rank, size)
        self._calls["reduce_scatter"] = self._reduce_scatter

    def _all_reduce(self, group: Any, call: CollectiveCall) -> Work:
        return self._reduced(
            call, lambda tensor, op: group.allreduce([tensor], self._options("Allreduce", op))
        )

    def _reduce(self, group: Any, call: CollectiveCall) -> Work:
        return self._reduced(
            call,
            lambda tensor, op: group.reduce([tensor], self._options("Reduce", op, call.root)),
        )

    def _reduced(self, call: CollectiveCall, begin: Callable[[Any, str], Any]) -> Work:
        """Reduce a copy of what is given, in a dtype that the library adds, and hand it back."""
        word = _word(call)
        if word is None:
            return None
        given = _flat(call.input)
        copy = self._shown(given, word[0])
        copy = copy.clone() if copy.data_ptr() == given.data_ptr() else copy
        return begin(copy, word[1]), lambda: self._hand_back(call, copy)

    def _reduce_scatter(self, group: Any, call: CollectiveCall) -> Work:
        word = _word(call)
        if word is None or call.counts:
            return None
        given = self._shown(_flat(call.input), word[0])
        share = given.new_empty(given.numel() // self._size)
        options = self._options("ReduceScatter", word[1])
        work = group._reduce_scatter_base(share, given, options)  # noqa: SLF001 - torch's name
        return work, lambda: self._hand_back(call, share)

    def _shown(self, tensor: Any, kind: str) -> Any:
        """Return a tensor as one of the dtype that the library is shown."""
        wanted = getattr(self._torch, kind)
        if tensor.dtype is wanted:
            return tensor
        if str(tensor.dtype).removeprefix("torch.") in NARROW:
            return tensor.to(wanted)  # so that a mean can't overflow before it is divided
        return tensor.view(wanted)

    def _hand_back(self, call: CollectiveCall, result: Any) -> None:
        if call.output is None:
            return
        output = _flat(call.output)
        if call.op == "avg":
            result.div_(self._size)
        same = result.dtype is output.dtype or call.dtype in NARROW
        output.copy_(result if same else result.view(output.dtype))

    def _octets(self, array: Any) -> Any:
        return None if array is None else _flat(array).view(self._torch.uint8)


def _flat(array: Any) -> Any:
    # One element counts as contiguous whatever its stride, but is not seen as two floats then.
    return array.tensor.reshape(-1).contiguous().as_strided((array.tensor.numel(),), (1,))


def _word(call: CollectiveCall) -> tuple[str, str] | None:
    return library_word(call.dtype, call.op, TAKEN, narrow=NARROW, bitwise=False)
