"""What a user does to whole gradients between backward and step, which all ranks must do alike."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence

import torch

from roundelay.training.shards.operands import digest

__all__ = ["GradEdits"]

FEW = 4  # changed gradients that are looked at whole
MOST = 1024  # elements that are looked at of each of more, as whoever clips changes all of them
SOME = 16  # gradients that are told by name


class GradEdits:
    """The gradients of some parameters, as they were when the ranks brought them together."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], names: Sequence[str], but: Collection[int] = ()
    ) -> None:
        """Look at all of them but those of which every rank has others."""
        self._tensors, self._names, self._but = tensors, names, but
        self._seen: list[tuple[int, ...]] = [()] * len(tensors)

    def note(self, only: Collection[int] | None = None) -> None:
        """Take them as they are now for what they should be."""
        for index in range(len(self._tensors)) if only is None else only:
            self._seen[index] = _mark(self._tensors[index].grad)

    def found(self, only: Collection[int] | None = None) -> list[str]:
        """Say what was done to them since; gradients that are alike are said alike."""
        changed = [
            index
            for index, (tensor, seen) in enumerate(zip(self._tensors, self._seen, strict=True))
            if _mark(tensor.grad) != seen
            and (only is None or index in only)
            and index not in self._but
        ]
        if not changed:
            return []
        gone = [self._names[index] for index in changed if self._tensors[index].grad is None]
        there = [index for index in changed if self._tensors[index].grad is not None]
        found = (self._tensors[index].grad for index in there)
        numbers = _numbers([one for one in found if one is not None])
        marks = [f"{self._names[index]} {number:08x}"
                 for index, number in zip(there, numbers, strict=True)]  # fmt: skip
        named = ", ".join(marks[:: max(1, -(-len(there) // SOME))])
        every = f", all {zlib.crc32(' '.join(marks).encode()):08x}" if len(there) > SOME else ""
        told = [f"{len(there)} gradients changed: {named}{every}"] if there else []
        return [*told, *(f"the gradient of {name} let go" for name in gone)]


def _mark(grad: torch.Tensor | None) -> tuple[int, ...]:
    """Return what changes when a gradient is written into, or another one is put in its place."""
    if grad is None or grad.layout != torch.strided:
        return ()
    return id(grad), grad._version, grad.data_ptr()  # noqa: SLF001 - autograd's


def _numbers(grads: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for each; of many gradients some elements are looked at, at one stroke."""
    if len(grads) <= FEW or any(grad.layout != torch.strided for grad in grads):
        return [digest(grad) for grad in grads]
    flats = [grad.detach().reshape(-1) for grad in grads]
    some = [flat[:: max(1, flat.numel() // MOST)] for flat in flats]
    rows = torch.cat(some).cpu().split_with_sizes([len(one) for one in some])
    return [zlib.crc32(row.view(torch.uint8).numpy().tobytes()) for row in rows]
