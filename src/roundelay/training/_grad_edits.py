"""What a user does to whole gradients between backward and step, which all ranks must do alike."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence

import torch

__all__ = ["GradEdits", "fingerprint"]

MOST = 1024  # elements of a gradient that are looked at
SOME = 16  # gradients that are looked at


class GradEdits:
    """The gradients of some parameters, as they were when the ranks brought them together."""

    def __init__(self, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        self._tensors, self._names = tensors, names
        self._seen: list[tuple[int, ...]] = [()] * len(tensors)

    def note(self, only: Collection[int] | None = None) -> None:
        """Take them as they are now for what they should be."""
        for index in range(len(self._tensors)) if only is None else only:
            self._seen[index] = _mark(self._tensors[index].grad)

    def found(self, only: Collection[int] | None = None) -> list[str]:
        """Say what was done to them since; gradients that are alike are said alike."""
        changed = [
            index
            for index, (one, seen) in enumerate(zip(self._tensors, self._seen, strict=True))
            if _mark(one.grad) != seen and (only is None or index in only)
        ]
        if not changed:
            return []
        gone = [self._names[index] for index in changed if self._tensors[index].grad is None]
        there = [index for index in changed if self._tensors[index].grad is not None]
        looked = there[:: max(1, -(-len(there) // SOME))]
        marks = [f"{self._names[index]} {fingerprint(self._tensors[index].grad):08x}"
                 for index in looked]  # fmt: skip
        told = [f"{len(there)} gradients changed: {', '.join(marks)}"] if there else []
        return [*told, *(f"the gradient of {name} let go" for name in gone)]


def _mark(grad: torch.Tensor | None) -> tuple[int, ...]:
    """Return what changes when a gradient is written into, or another one is put in its place."""
    if grad is None or grad.layout != torch.strided:
        return ()
    return id(grad), grad._version, grad.data_ptr()  # noqa: SLF001 - autograd's


def fingerprint(tensor: torch.Tensor | None) -> int:
    """Return a number that tensors share whose elements are the same, of many some."""
    if tensor is None or tensor.layout != torch.strided or not tensor.numel():
        return 0
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // MOST)].contiguous().cpu()
    return zlib.crc32(some.view(torch.uint8).numpy().tobytes())
