"""Notices what a user writes into parameters and state that every rank has whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from roundelay.training._setup import Setup
from roundelay.training.fingerprint import mark_of
from roundelay.training.shards.operands import told


class ParameterEdits:
    """The parameters of one model as the ranks last agreed on them.

    What autograd counts is looked at, which costs nothing; `p.data.add_(…)` passes unseen.
    """

    def __init__(self, setup: Setup) -> None:
        self._parameters, self._experts = setup.parameters, setup.experts
        self._seen: list[tuple[int, int]] = []
        self.note()

    def note(self) -> None:
        """Take the parameters as they are for agreed."""
        tensors = [parameter.tensor for parameter in self._parameters]
        self._seen = [(tensor._version, tensor.data_ptr()) for tensor in tensors]  # noqa: SLF001 - autograd's

    def found(self, doubtful: Collection[str] = ()) -> dict[str, int]:
        """Return which were written into since then, or are doubtful, and a number for what."""
        before, parameters = self._seen, self._parameters
        self.note()
        if before == self._seen and not doubtful:
            return {}
        return {
            # Of experts every rank has others, and of them only that they were written into.
            parameter.name: index if index in self._experts else _number(index, parameter.tensor)
            for index, (parameter, then, now) in enumerate(
                zip(parameters, before, self._seen, strict=True)
            )
            if then != now or parameter.name in doubtful
        }


@torch.no_grad()
def _number(index: int, tensor: torch.Tensor) -> int:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return index + int(mark_of(real.detach().reshape(-1)))


class StateEdits:
    """What an optimizer keeps, as its last step left it; looked at once the user has asked for it.

    `look` gives what the user may have, each with its place in words.
    """

    def __init__(self, look: Callable[[], Iterable[tuple[str, Any]]], *, whole: bool) -> None:
        """Where `look` gives the `whole` state, another object was put there by the user."""
        self._look, self._whole = look, whole
        self._seen: dict[str, Any] = {}
        self.note()

    def note(self) -> None:
        """Take the state as it is for agreed."""
        self._seen = {place: _mark(value) for place, value in self._look()}

    def handed(self, place: str, value: Any) -> None:
        """Take something that was made since then for agreed, too."""
        mark = _mark(value)
        if place not in self._seen or self._seen[place][0] != mark[0]:
            self._seen[place] = mark

    def found(self) -> list[str]:
        """Say what was written since then; what is alike is said alike."""
        before, now = self._seen, dict(self._look())
        self._seen = {place: _mark(value) for place, value in now.items()}
        changed = sorted(place for place, mark in self._seen.items()
                         if self._differs(before.get(place), mark))  # fmt: skip
        gone = sorted(before.keys() - now.keys()) if self._whole else []
        return [
            *(f"writing {told(now[place])} into {place}" for place in changed),
            *(f"taking away {place}" for place in gone),
        ]

    def _differs(self, before: Any, now: Any) -> bool:
        if self._whole:
            return bool(before != now)
        return before is not None and before[0] == now[0] and before != now


def _mark(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return id(value), value._version  # noqa: SLF001 - autograd's
    return 0, told(value)
