"""Tensors that share memory on one rank, and no longer do so once they have come to another one.

A view and its base, for example. Whoever writes into one of them changes the other on one device,
and in a pipeline only if both are written into before they leave. That is seen where they arrive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from roundelay.errors import InvalidArgumentError
from roundelay.parallel.pipeline._messages import Form

__all__ = ["Received", "with_memories"]


def with_memories(form: Form, values: Sequence[torch.Tensor], received: Received) -> Form:
    """Return a form that says which tensors share memory, or did where they came from."""
    keys = [received.memories.get(_memory(value), _memory(value)) for value in values]
    often = Counter(key for key in keys if key)
    numbers: dict[int, int] = {}
    for key in keys:
        if often[key] > 1:
            numbers.setdefault(key, len(numbers) + 1)
    return tuple(
        each._replace(memory=numbers.get(key, 0)) for each, key in zip(form, keys, strict=True)
    )


class Received:
    """What came to a stage: as leaves, whose gradients go back, and as its program gets it."""

    def __init__(self, stage: int, leaves: Sequence[Any], form: Form | None) -> None:
        self._stage, self._leaves, self._form = stage, leaves, form or ()
        #: Below 0, so that they are no addresses.
        self.memories = {_memory(value): -each.memory
                         for value, each in zip(leaves, self._form, strict=False)
                         if each.memory}  # fmt: skip
        self._before = [_version(value) for value in leaves] if self.memories else []

    def given(self) -> Sequence[Any]:
        """Return what the program gets: what it may write into, as on one device."""
        if not torch.is_grad_enabled() or not self._form:
            return self._leaves
        return [_GivenTensor.apply(value) if value.requires_grad else value  # type: ignore[no-untyped-call]
                for value in self._leaves]  # fmt: skip

    def refuse_written(self) -> None:
        """Refuse a program that has written into what shared memory with something else."""
        for number, before in enumerate(self._before):
            each = self._form[number]
            if each.memory and _version(self._leaves[number]) != before:
                raise InvalidArgumentError(
                    f"Stage {self._stage} of the pipeline writes in place into a tensor of shape "
                    f"{each.shape} that shares memory with another one which stages hand on, as a "
                    f"view does, or detach(). On one device both would change; here they are two. "
                    f"Write x = x.mul(2) for x.mul_(2), make it a .clone() where the model means "
                    f"another tensor, or have the stage start before the view is made."
                )


class _GivenTensor(torch.autograd.Function):
    """A leaf as something that is none: torch refuses to write into leaves and their views."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - torch's; Any, too
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004 - likewise
        return grads[0]


def _memory(value: Any) -> int:
    """Return where a tensor's memory begins; 0 of what has none."""
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else 0


def _version(value: torch.Tensor) -> int:
    return 0 if value.is_inference() else value._version  # noqa: SLF001 - autograd's
