"""What a model's forward does, read off by calling it on stand-ins.

As torch.fx does, with its graphs, but without changing `torch.nn.Module` for the whole process
meanwhile: other ranks may be threads of it.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.proxy import GraphAppendingTracer
from torch.utils.checkpoint import checkpoint

from roundelay.errors import InvalidArgumentError
from roundelay.parallel.pipeline._stand_ins import IsOpen, PlainValue, StandIns

DEVICES = ("cpu", "cuda")  # that have an autocast of their own
MODES = "modes"  # of a node, where its own differ from those around the forward
#: What does more with its function than call it, which operations in it do not show.
AROUND: dict[CodeType, str] = {
    torch.autograd.Function.apply.__func__.__code__: "{cls.__name__}.apply",  # type: ignore[attr-defined]
    inspect.unwrap(checkpoint).__code__: "torch.utils.checkpoint",
}


class Modes(NamedTuple):
    """Under which of torch's modes an operation runs; autocast by device."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> Modes:
        """Return those that hold here."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one))
                  for one in DEVICES),
        )  # fmt: skip

    def since(self, around: Modes) -> Modes:
        """Return these, with autocast only where it is not as around them."""
        changed = (one for one in self.autocast if one not in around.autocast)
        return self._replace(autocast=tuple(changed))

    def entered(self) -> ExitStack:
        """Return what has them hold while it is entered."""
        stack = ExitStack()
        if self.inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(self.grad))
        for device, enabled, dtype in self.autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        return stack


@dataclass
class Reading:
    """What was read off once: the graph, the modes of its nodes, and numbers it depends on."""

    graph: fx.Graph
    modes: list[Modes | None]  # of every node, in order; None as around the forward
    plain: list[PlainValue] = field(default_factory=list)


def read(model: nn.Module, is_open: IsOpen, *, training: bool, grad: bool) -> Reading:
    """Return what the model's forward does; calls of modules that are not open are as they are.

    Arguments that have a default keep it.
    """
    graph = fx.Graph()
    reader = _Reader(graph, model)
    arguments = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InvalidArgumentError(f"It takes any number of arguments, as {name}.")
        if parameter.default is parameter.empty:
            arguments.append(reader.proxy(graph.placeholder(name)))
    stand_ins = StandIns(model, reader, is_open, training=training)
    with torch.inference_mode(mode=False), torch.set_grad_enabled(grad):
        around = Modes.now()
        try:
            result = stand_ins.of(model).forward(*arguments)
        finally:
            stand_ins.done()
            if reader.refused:  # even if the forward has caught it
                raise InvalidArgumentError(reader.refused[0])
    graph.output(reader.create_arg(result))
    graph.lint()
    modes = [None if one in (None, around) else one.since(around)
             for one in (node.meta.get(MODES) for node in graph.nodes)]  # fmt: skip
    return Reading(graph, modes, stand_ins.plain)


class _Reader(GraphAppendingTracer):
    """Notes operations, each with the modes it is under."""

    def __init__(self, graph: fx.Graph, model: nn.Module) -> None:
        super().__init__(graph)
        self.refused: list[str] = []
        self._names: dict[int, str] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._names.setdefault(id(tensor), name)

    def refuse(self, why: str) -> None:
        """Refuse the forward, which can't be read off."""
        self.refused.append(why)
        raise InvalidArgumentError(why)

    def create_node(self, *args: Any, **options: Any) -> fx.Node:
        """Note an operation; refuse one inside what does more than to call it."""
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - python's name
        while frame is not None and frame.f_code is not read.__code__:
            word = AROUND.get(frame.f_code)
            if word is not None:
                what = word.format(**frame.f_locals)
                self.refuse(f"It calls {what}, and stages would do the operations inside alone. "
                            f"Call it in a module of its own.")  # fmt: skip
            frame = frame.f_back
        node = super().create_node(*args, **options)
        node.meta[MODES] = Modes.now()
        return node

    def create_arg(self, a: Any) -> Any:
        """Return what a node is given; a tensor of the model is given by its name."""
        name = self._names.get(id(a))
        return super().create_arg(a) if name is None else self.create_node("get_attr", name, (), {})
