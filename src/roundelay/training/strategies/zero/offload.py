"""What ZeRO keeps in the host's memory, where a device computes: the optimizer's state, and parts.

With the parts go their gradients, which come here while backward runs.

The optimizer steps on the host, row by row: while it is at one, the gradients of the next ones come
and the new weights of those before go back. Memory is pinned, so that the device copies by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from roundelay.training._setup import Setup
    from roundelay.training.strategies.zero._flat_parameter import FlatParameter

__all__ = ["OFFLOADS", "HostMemory", "host_for"]

OFFLOADS = ("optimizer", "parameters")
#: Those of torch that have a kernel for CPUs which goes over memory once.
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


class HostMemory:
    """The host of one model on a device."""

    def __init__(self, device: torch.device, *, parameters: bool) -> None:
        self.device, self.parameters = device, parameters
        self._stream: Any = None  # Any: torch does not type its streams
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._grads: dict[int, torch.Tensor] = {}  # by what is stepped on, or cast from
        self._coming: dict[int, Copy] = {}

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the host, of zeros, that the device can reach."""
        pin = self.device.type == "cuda"
        return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=pin)

    def copy(self, there: torch.Tensor, here: torch.Tensor) -> Copy:
        """Begin to copy from device to host or back, beside what the device computes."""
        if self._stream is None:
            there.copy_(here)
            return Copy(self.device, None)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            there.copy_(here, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        for one in (there, here):
            if one.is_cuda:
                one.record_stream(self._stream)
        return Copy(self.device, event)

    def take(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Begin to bring gradients here, for what is stepped on; each will be there at its step.

        What lies in one memory comes as one: a device takes as long to be asked as to copy.
        """
        rows: dict[int, list[tuple[torch.Tensor, torch.Tensor, int]]] = {}
        for stepped, grad in pairs:
            at = int(grad.storage_offset())
            rows.setdefault(grad.data_ptr() - at * grad.itemsize, []).append((stepped, grad, at))
        for row in rows.values():
            start = min(at for _, _, at in row)
            stop = max(at + grad.numel() for _, grad, at in row)
            first, grad, _ = row[0]
            here = self._memory(first, stop - start, grad.dtype)
            coming = self.copy(here, grad.as_strided((stop - start,), (1,), start))
            for stepped, grad, at in row:
                stepped.grad = here.as_strided(grad.shape, grad.stride(), at - start)
                self._coming[id(stepped)] = coming

    def cast(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of gradients that are here in a dtype, each time in the same memory."""
        return self._memory(part, part.numel(), dtype).copy_(part)

    def _memory(self, of: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        found = self._grads.get(id(of))
        if found is None or found.numel() != numel or found.dtype != dtype:
            found = self._grads[id(of)] = self.empty(numel, dtype)
        return found

    def round(self, part: torch.Tensor, master: torch.Tensor) -> None:
        """Begin to bring masters that are here into the dtype of parts that are here, too.

        The device does it, which has the time while the optimizer is at the next row.
        """
        if self._stream is None or part.dtype == master.dtype:
            part.copy_(master)
            return
        with torch.cuda.stream(self._stream):
            rounded = master.to(self.device, non_blocking=True).to(part.dtype)
            part.copy_(rounded, non_blocking=True)

    def finish(self) -> None:
        """Wait for all that the device copies."""
        if self._stream is not None:
            torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def step(
        self, optimizer: torch.optim.Optimizer, own: Any, flats: Sequence[FlatParameter]
    ) -> Any:
        """Step row by row, or where that may not be the same, on all rows at once."""
        kind = getattr(type(optimizer), "own_class", type(optimizer))
        turns = [[one] for one in flats]
        if not kind.__module__.startswith("torch.optim"):  # which keep numbers by parameter alone
            turns = [list(flats)]
        groups = [(group, list(group["params"])) for group in optimizer.param_groups]
        result = None
        try:
            with _in_one_pass(optimizer, kind):
                for turn in turns:
                    mine = {id(one) for flat in turn for one in flat.stepped}
                    for coming in {self._coming.pop(key) for key in mine & self._coming.keys()}:
                        coming.finish()
                    for group, params in groups:
                        group["params"][:] = [param for param in params if id(param) in mine]
                    with torch.enable_grad():
                        result = own(None)
                    for flat in turn:
                        flat.round_masters()
        finally:
            if self.parameters:
                self.finish()
            for group, params in groups:
                group["params"][:] = params
        return result


class Copy:
    """A copy under way."""

    def __init__(self, device: torch.device, event: torch.cuda.Event | None) -> None:
        self._device, self._event = device, event

    def wait(self) -> None:
        """Have what the device is told from now on see the copy."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def finish(self) -> None:
        """Wait until the copy is done."""
        if self._event is not None:
            self._event.synchronize()


def host_for(setup: Setup, offload: str | None) -> HostMemory | None:
    """Return the host, if something is to lie there that would else lie on another device."""
    devices = {parameter.tensor.device for parameter in setup.parameters}
    if offload is None or not devices or not moves(devices):
        return None
    return HostMemory(next(iter(devices)), parameters=offload == "parameters")


def moves(devices: set[torch.device]) -> bool:
    """Tell whether there is a way to go: a model on the CPU is where it would be brought."""
    return len(devices) == 1 and all(device.type != "cpu" for device in devices)


@contextmanager
def _in_one_pass(optimizer: torch.optim.Optimizer, kind: type) -> Iterator[None]:
    """Have an optimizer of torch's use its quickest kernel for CPUs, where nobody chose another."""
    others = ("foreach", "differentiable", "capturable")
    chosen = [
        group
        for group in optimizer.param_groups
        if kind in FUSED
        and group.get("fused") is None
        and not any(group.get(word) for word in others)
        and not isinstance(group["lr"], torch.Tensor)
        and all(one.is_floating_point() for one in group["params"])
    ]
    for group in chosen:
        group["fused"] = True
    try:
        yield
    finally:
        for group in chosen:
            group["fused"] = None
