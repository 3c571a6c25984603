"""What a model's forward does, read off by calling it on stand-ins.

As torch.fx does, with its graphs, but without changing `torch.nn.Module` for the whole process
meanwhile: other ranks may be threads of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import GraphAppendingTracer

from roundelay.errors import InvalidArgumentError

IsOpen = Callable[[nn.Module, str], bool]


def trace(model: nn.Module, is_open: IsOpen, *, training: bool) -> fx.Graph:
    """Return the graph of the model's forward; calls of modules that are not open are as they are.

    Arguments that have a default keep it.
    """
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)
    arguments = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InvalidArgumentError(f"it takes any number of arguments, as {name}.")
        if parameter.default is parameter.empty:
            arguments.append(tracer.proxy(graph.placeholder(name)))
    stand_in = _StandIns(model, tracer, is_open, training=training).of(model)
    result = stand_in.forward(*arguments)
    graph.output(tracer.create_arg(result))
    graph.lint()
    return graph


class _StandIns:
    """Copies of open modules whose parts, in turn, only say that they are used."""

    def __init__(
        self, model: nn.Module, tracer: GraphAppendingTracer, is_open: IsOpen, *, training: bool
    ) -> None:
        self.tracer, self._is_open, self._training = tracer, is_open, training
        self._names: dict[nn.Module, str] = {}
        for name, module in model.named_modules():
            self._names.setdefault(module, name)
        self._made: dict[nn.Module, nn.Module] = {}

    def of(self, module: nn.Module) -> nn.Module:
        """Return what stands in for a module."""
        if module not in self._made:
            name = self._names[module]
            closed = bool(name) and not self._is_open(module, name)
            made = _Called(self, module, name) if closed else self._open(module, name)
            self._made[module] = made
        return self._made[module]

    def _open(self, module: nn.Module, name: str) -> nn.Module:
        made: nn.Module = object.__new__(type(module))
        vars(made).update(vars(module))
        prefix = f"{name}." if name else ""

        def used(part: str, value: Any) -> Any:
            if value is None:
                return None
            return self.tracer.create_proxy("get_attr", prefix + part, (), {})

        vars(made)["_modules"] = {
            part: None if child is None else self.of(child)
            for part, child in module._modules.items()  # noqa: SLF001 - torch has no other name
        }
        for kind in ("_parameters", "_buffers"):
            kept = vars(module)[kind]
            vars(made)[kind] = _Lazily({part: (used, value) for part, value in kept.items()})
        vars(made)["training"] = self._training
        return made


class _Lazily(dict[str, Any]):
    """Parameters of an open module: a use of one is noted when it is read."""

    def __getitem__(self, part: str) -> Any:
        used, value = super().__getitem__(part)
        return used(part, value)


class _Called(nn.Module):
    """Stands in for a module that is called as it is."""

    def __init__(self, stand_ins: _StandIns, module: nn.Module, name: str) -> None:
        super().__init__()
        vars(self)["_of"] = stand_ins, module, name

    def forward(self, *args: Any, **options: Any) -> Any:
        """Note the call."""
        stand_ins, _, name = vars(self)["_of"]
        return stand_ins.tracer.create_proxy("call_module", name, args, options)

    def __getattr__(self, name: str) -> Any:
        """Return something that the module has; the use of a tensor is noted."""
        stand_ins, module, where = vars(self)["_of"]
        value = getattr(module, name)
        if isinstance(value, nn.Module):
            return stand_ins.of(value)
        if isinstance(value, torch.Tensor):
            return stand_ins.tracer.create_proxy("get_attr", f"{where}.{name}", (), {})
        return value
