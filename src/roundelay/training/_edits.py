"""Notices what a user writes into parameters that every rank has whole."""

from __future__ import annotations

import torch

from roundelay.training._setup import Setup

__all__ = ["Edits"]

WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Edits:
    """The parameters of one model as the ranks last agreed on them.

    What autograd counts is looked at, which costs nothing; `p.data.add_(…)` passes unseen.
    """

    def __init__(self, setup: Setup) -> None:
        self._parameters = setup.parameters
        self._seen: list[tuple[int, int]] = []
        self.note()

    def note(self) -> None:
        """Take the parameters as they are for agreed."""
        self._seen = [(one.tensor._version, one.tensor.data_ptr()) for one in self._parameters]  # noqa: SLF001 - autograd's

    def found(self) -> dict[str, int]:
        """Return which were written into since then, with a number that tells what."""
        before, parameters = self._seen, self._parameters
        self.note()
        if before == self._seen:
            return {}
        return {
            one.name: _sum_of_bits(one.tensor)
            for one, then, now in zip(parameters, before, self._seen, strict=True)
            if then != now
        }


@torch.no_grad()
def _sum_of_bits(tensor: torch.Tensor) -> int:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = real.detach().contiguous().view(WIDTHS[real.itemsize])
    return int(bits.sum(dtype=torch.int64))
