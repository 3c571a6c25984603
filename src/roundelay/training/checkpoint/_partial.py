"""A checkpoint of which a model takes a part: the rest of the model stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from roundelay.training._mesh_state import whole_tensors
from roundelay.training._run import Run
from roundelay.training.checkpoint._reader import Reader

__all__ = ["Partial", "present"]


class Partial:
    """What the checkpoint has, and beside it what the model has; strategies know it as `Saved`."""

    def __init__(
        self, saved: Reader, here: Mapping[str, torch.Tensor], *, with_state: bool
    ) -> None:
        self._saved, self._here, self._with_state = saved, here, with_state

    def values(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return some elements of a flattened parameter."""
        if name in self._here:
            return self._here[name].reshape(-1)[start:stop]
        return self._saved.values(name, start, stop)

    def state(self, name: str, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the optimizer's state on these elements, flat; none where it begins anew."""
        return {} if self._new(name) else self._saved.state(name, start, stop)

    def whole_state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state that belongs to the whole parameter; none likewise."""
        return {} if self._new(name) else self._saved.whole_state(name)

    def _new(self, name: str) -> bool:
        return not self._with_state or name in self._here


def present(run: Run, names: set[str]) -> dict[str, torch.Tensor]:
    """Return these parameters whole, as they are on all ranks together. Every rank calls it."""
    wanted = {name for name, _ in run.setup.model.named_parameters()} & names
    if not wanted:
        return {}
    tensors = whole_tensors(run.state)
    return {name: one.detach().clone() for name, one in tensors if name in wanted}
