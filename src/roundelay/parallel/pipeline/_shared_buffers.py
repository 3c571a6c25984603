"""Buffers that several stages use: each has a copy, so that no stage may write into one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from roundelay.errors import InvalidArgumentError
from roundelay.parallel.pipeline._cut import PipelineStage
from roundelay.parallel.pipeline._program import buffer_mark


class SharedBuffers:
    """Those that are here, each with the stages that use it."""

    def __init__(
        self, holder: nn.Module, model: nn.Module, stages: Sequence[PipelineStage]
    ) -> None:
        self._holder = holder
        here = dict(holder.named_buffers(remove_duplicate=False))
        #: By name: who uses what is called so, or is the same under another name.
        self._users: dict[str, list[int]] = {}
        users: dict[torch.Tensor, list[int]] = {}
        named = dict(model.named_buffers(remove_duplicate=False))
        for number, stage in enumerate(stages):
            inside = tuple(f"{module}." for module in stage.modules)
            uses = {value for name, value in named.items()
                    if name.startswith(inside) or name in stage.tensors}  # fmt: skip
            for value in uses:
                users.setdefault(value, []).append(number)
        for name, value in named.items():
            if name in here and len(users.get(value, ())) > 1:
                self._users[name] = users[value]

    def marks(self) -> dict[str, tuple[int, int]]:
        """Return what changes when one is written into, or set."""
        return {name: buffer_mark(self._holder.get_buffer(name)) for name in self._users}

    def refuse_written(self, before: dict[str, tuple[int, int]]) -> None:
        """Refuse a pass in which one was."""
        for name, mark in self.marks().items():
            if mark != before[name]:
                users = " and ".join(map(str, self._users[name]))
                raise InvalidArgumentError(
                    f"Stages {users} of the pipeline use the buffer {name}, each a copy of its "
                    f"own, and a forward pass has written into one: the others would not see it. "
                    f"Let stages start elsewhere, so that one has all of its uses, or have no "
                    f"module in several that writes into its buffers, as batch norms do."
                )
