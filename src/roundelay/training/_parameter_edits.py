"""Notices what a user writes into parameters that every rank has whole."""

from __future__ import annotations

from collections.abc import Collection

import torch

from roundelay.training._fingerprint import mark_of
from roundelay.training._setup import Setup

__all__ = ["ParameterEdits"]


class ParameterEdits:
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

    def found(self, doubtful: Collection[str] = ()) -> dict[str, int]:
        """Return which were written into since then, or are doubtful, and a number for what."""
        before, parameters = self._seen, self._parameters
        self.note()
        if before == self._seen and not doubtful:
            return {}
        return {
            one.name: _number(index, one.tensor)
            for index, (one, then, now) in enumerate(
                zip(parameters, before, self._seen, strict=True)
            )
            if then != now or one.name in doubtful
        }


@torch.no_grad()
def _number(index: int, tensor: torch.Tensor) -> int:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return index + int(mark_of(real.detach().reshape(-1)))
