"""What ZeRO keeps in the host's memory, where a device computes: the optimizer's state, and parts.

With the parts go their gradients, which come here while backward runs.

The optimizer steps on the host, row by row: while it is at one, the gradients of the next ones come
and the new weights of those before go back. Memory is pinned, so that the device copies by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from roundelay.training._setup import Setup
    from roundelay.training._zero_flats import Flat

__all__ = ["OFFLOADS", "Host", "host_for"]

OFFLOADS = ("optimizer", "parameters")
#: Those of torch that have a kernel for CPUs which goes over memory once.
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


class Host:
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

    def take(self, stepped: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Begin to bring a gradient here; return where it will be at the step."""
        key = id(stepped)
        if key not in self._grads:
            self._grads[key] = self.empty(grad.numel(), grad.dtype).view(grad.shape)
        self._coming[key] = self.copy(self._grads[key], grad)
        return self._grads[key]

    def cast(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return gradients that are here in another dtype, each time in the same memory."""
        if part.dtype == dtype:
            return part
        key = id(part)
        if key not in self._grads:
            self._grads[key] = self.empty(part.numel(), dtype)
        return self._grads[key].copy_(part)

    def finish(self) -> None:
        """Wait for all that the device copies."""
        if self._stream is not None:
            torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, own: Any, flats: Sequence[Flat]) -> Any:
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
                    for key in mine & self._coming.keys():
                        self._coming.pop(key).finish()
                    for group, params in groups:
                        group["params"][:] = [one for one in params if id(one) in mine]
                    with torch.enable_grad():
                        result = own(None)
                    for flat in turn:
                        flat.round_masters()
        finally:
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


def host_for(setup: Setup, offload: str | None) -> Host | None:
    """Return the host, if something is to lie there that would else lie on another device."""
    devices = {one.tensor.device for one in setup.parameters}
    if offload is None or not devices or not moves(devices):
        return None
    return Host(next(iter(devices)), parameters=offload == "parameters")


def moves(devices: set[torch.device]) -> bool:
    """Tell whether there is a way to go: a model on the CPU is where it would be brought."""
    return len(devices) == 1 and all(one.type != "cpu" for one in devices)


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
