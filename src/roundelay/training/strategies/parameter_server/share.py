"""Which server keeps which parameters, and how these lie side by side in a message."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["Share"]


class Share:
    """The parameters of one server, one after the other in a buffer for each dtype."""

    def __init__(
        self,
        indexes: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
    ) -> None:
        self.indexes = list(indexes)  # of the parameters; shapes and dtypes are theirs alone
        self.device = device
        self._places: list[tuple[int, int, tuple[int, ...]]] = []  # buffer, start, shape
        self._kinds = list(dict.fromkeys(dtypes))
        self._lengths = [0] * len(self._kinds)
        for shape, dtype in zip(shapes, dtypes, strict=True):
            buffer = self._kinds.index(dtype)
            self._places.append((buffer, self._lengths[buffer], shape))
            self._lengths[buffer] += math.prod(shape)

    @property
    def nbytes(self) -> int:
        """How much all of them take."""
        return sum(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """The bytes of each buffer."""
        return [kind.itemsize * length
                for kind, length in zip(self._kinds, self._lengths, strict=True)]  # fmt: skip

    def make(self) -> list[torch.Tensor]:
        """Return buffers for all of them."""
        return [torch.zeros(length, dtype=kind, device=self.device)
                for kind, length in zip(self._kinds, self._lengths, strict=True)]  # fmt: skip

    def views(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return each parameter's part of the buffers."""
        return [
            buffers[buffer][start : start + math.prod(shape)].view(shape)
            for buffer, start, shape in self._places
        ]
