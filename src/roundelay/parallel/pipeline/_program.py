"""Runs what a stage does: operations under the modes of the forward, and buffers that it sets."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import fx, nn

from roundelay.parallel.pipeline._stand_ins import rebind
from roundelay.parallel.pipeline._trace import MODES, Modes


class StageProgram(fx.Interpreter):
    """The operations of a stage, on the module that has its parts."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, graph=graph)
        self.extra_traceback = False  # errors stay as the model raised them
        here = {name for name, _ in root.named_buffers(remove_duplicate=False)}
        self._uses = here.intersection(node.target for node in graph.nodes if node.op == "get_attr")
        self._written: set[str] = set()  # of those, in place

    def run(self, *args: Any, **options: Any) -> Any:
        """Run all.

        What a micro-batch has used stays as it was until it goes back, whatever the next ones
        write into it.
        """
        for name in self._written if torch.is_grad_enabled() else ():
            self._set(name, self.module.get_buffer(name).clone())
        before = {name: self._mark(name) for name in self._uses}
        result = super().run(*args, **options)
        self._written.update(name for name in self._uses if self._mark(name) != before[name])
        return result

    def run_node(self, n: fx.Node) -> Any:
        """Run one operation."""
        if MODES not in n.meta:
            return super().run_node(n)
        modes: Modes | None = n.meta[MODES][self.module.training, torch.is_grad_enabled()]
        with nullcontext() if modes is None else modes.entered():
            return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, or set a buffer."""
        result = super().call_function(target, args, kwargs)
        if target is rebind:
            self._set(*result)
        return result

    def _set(self, name: str, value: torch.Tensor) -> None:
        where, _, last = name.rpartition(".")
        setattr(self.module.get_submodule(where), last, value)

    def _mark(self, name: str) -> tuple[int, int]:
        return buffer_mark(self.module.get_buffer(name))


def buffer_mark(buffer: torch.Tensor) -> tuple[int, int]:
    """Return what changes when a buffer is written into, or another one is put in its place."""
    return id(buffer), 0 if buffer.is_inference() else buffer._version  # noqa: SLF001 - autograd's
