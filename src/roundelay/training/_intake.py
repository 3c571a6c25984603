"""Gradients on their way to where they are sent from, and which of them are not finite."""

from __future__ import annotations

import math

import torch

from roundelay import _core
from roundelay.reductions import Array

SMALL = 1 << 16  # elements that one thread copies as quickly as several


class Intake:
    """Brings gradients to where they are sent from, and remembers which are not finite.

    On a device many small steps take longer to ask for than to do, so that they are asked for
    together: gradients wait for `flush`, and what was found is looked at once, in `broken`.
    """

    def __init__(self, *, check: bool) -> None:
        self._check = check
        self._broken: set[int] = set()
        self._waiting: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._largest: list[tuple[int, torch.Tensor]] = []

    def put(self, index: int, there: torch.Tensor, grad: torch.Tensor) -> None:
        """Copy the gradient of a parameter to its place, by the next `flush` at the latest."""
        if there.device.type != "cpu":
            self._waiting.append((index, there, grad))
        elif self._check and _in_one_pass(there, grad):
            name = str(there.dtype).removeprefix("torch.")
            if not _core.copy_checked(bits_of(there), bits_of(grad), name):
                self._broken.add(index)
        else:
            there.copy_(grad, non_blocking=not self._check)  # to the host, if it is not there
            self.look(index, there)

    def flush(self) -> None:
        """See that all gradients are in their places."""
        if not self._waiting:
            return
        numbers, places, grads = zip(*self._waiting, strict=True)
        self._waiting.clear()
        torch._foreach_copy_(list(places), list(grads))
        some = [
            (number, place) for number, place in zip(numbers, places, strict=True) if place.numel()
        ]
        if self._check and some:
            sizes = torch._foreach_norm([one for _, one in some], math.inf)  # noqa: SLF001
            self._largest += zip((number for number, _ in some), sizes, strict=True)

    def look(self, index: int, there: torch.Tensor) -> None:
        """See whether a gradient that is in its place already is finite."""
        if not self._check or there.numel() == 0:
            return
        if there.device.type != "cpu":
            self._largest.append((index, torch.linalg.vector_norm(there, math.inf)))
        elif not finite(there):
            self._broken.add(index)

    @property
    def broken(self) -> set[int]:
        """Parameters whose gradients were not finite, since `clear`."""
        if self._largest:
            kinds = {one.dtype for _, one in self._largest}
            for kind in kinds:  # one question for each dtype, which is mostly one
                some = [(index, one) for index, one in self._largest if one.dtype == kind]
                good = torch.isfinite(torch.stack([one for _, one in some])).tolist()
                pairs = zip(some, good, strict=True)
                self._broken.update(index for (index, _), fine in pairs if not fine)
            self._largest.clear()
        return self._broken

    def clear(self) -> None:
        """Forget what was not finite."""
        self._broken.clear()
        self._largest.clear()


def _in_one_pass(there: torch.Tensor, grad: torch.Tensor) -> bool:
    """Tell whether the native core copies and looks at once, which pays where one thread works."""
    return (
        there.dtype == grad.dtype
        and there.device.type == grad.device.type == "cpu"
        and there.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        and there.is_contiguous()
        and grad.layout is torch.strided
        and grad.is_contiguous()
        and (there.numel() <= SMALL or torch.get_num_threads() == 1)
    )


def bits_of(tensor: torch.Tensor) -> Array:
    """Return memory that the native core takes."""
    plain = tensor.detach()
    # Where numpy has not the dtype, another one of its width: bits are bits.
    bits: Array = (plain.view(torch.int16) if plain.dtype is torch.bfloat16 else plain).numpy()
    return bits


def finite(tensor: torch.Tensor) -> bool:
    """Tell whether all elements are finite; a sum that overflows is looked at again."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())
