"""From a model to its stages: what its forward calls, in order, cut where stages start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from roundelay.errors import InvalidArgumentError, UnknownNameError
from roundelay.parallel.pipeline._program import StageProgram
from roundelay.parallel.pipeline._stand_ins import IsOpen, PlainValue
from roundelay.parallel.pipeline._trace import MODES, Reading, read

USE_SPLIT = "Give split=, a function from the model to a list of its stages, each a module."
#: In which ways a forward is called: in training or not, with gradients or not.
WAYS = ((True, True), (False, True), (True, False), (False, False))
AGAIN = (
    "another thing each time it is read off: it has random numbers or counts of its own. Take "
    "random numbers in operations on tensors, such as torch.randn_like, or in a module."
)
EVALUATES = (
    "one thing in training and another in evaluation. Use modules for that, such as nn.Dropout."
)
WITHOUT = "one thing with gradients and another without. Decide so in a module."


@dataclass(frozen=True)
class ForwardGraph:
    """What a model's forward does, and the values of its modules that it was given for good."""

    graph: fx.Graph
    plain: list[PlainValue]


@dataclass(frozen=True)
class PipelineStage:
    """One stage: what it computes, and the names it uses of the whole model."""

    modules: tuple[str, ...]
    tensors: tuple[str, ...]  # parameters and buffers that it uses by themselves
    bind: Callable[[nn.Module], Callable[..., Any]]  # to the module that has them


def read_off(model: nn.Module, starts: Sequence[str]) -> ForwardGraph:
    """Return what the model's forward does; refuse one that can't be read off once for all.

    Calls of modules are seen as they are, but for sequences and for modules in which a stage
    starts.
    """
    name = type(model).__name__

    def is_open(module: nn.Module, where: str) -> bool:
        inside = any(start.startswith(f"{where}.") for start in starts)
        return inside or type(module) in (nn.Sequential, nn.ModuleList, nn.ModuleDict)

    def refused(why: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"Pipeline can't cut {name}: {why} {USE_SPLIT}")

    _refuse_hooks(model, is_open)
    found: list[Reading] = []
    try:
        for training, grad in ((True, True), *WAYS):
            found.append(read(model, is_open, training=training, grad=grad))
    except InvalidArgumentError as error:
        raise refused(f"its forward can't be read off. {error}") from error
    except Exception as error:
        raise refused(
            f"its forward is no chain that can be read off: {type(error).__name__}: {error}"
        ) from error
    texts = [str(each.graph) for each in found]
    for other, does in ((1, AGAIN), (2, EVALUATES), (3, WITHOUT), (4, WITHOUT)):
        if texts[other] != texts[0]:
            raise refused(f"its forward does {does}")
    first = found[1]
    for at, node in enumerate(first.graph.nodes):
        modes = {way: each.modes[at] for way, each in zip(WAYS, found[1:], strict=True)}
        node.meta = {MODES: modes} if any(modes.values()) else {}
    return ForwardGraph(first.graph, first.plain)


def _refuse_hooks(model: nn.Module, is_open: IsOpen) -> None:
    for where, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks)  # noqa: SLF001 - torch's names
        if (not where or is_open(module, where)) and any(hooks):
            raise InvalidArgumentError(
                f"Pipeline can't cut {where or type(model).__name__}, which has hooks on its "
                f"forward: they would not be called. Remove them, or put them on modules inside. "
                f"{USE_SPLIT}"
            )


def units(graph: fx.Graph) -> list[str]:
    """Return the modules that are called, in order: where stages may start."""
    return list(dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "call_module"))


def stages_of_graph(graph: fx.Graph, starts: Sequence[str]) -> list[PipelineStage]:
    """Cut a graph where stages start; what a later stage needs goes on from stage to stage."""
    known = units(graph)
    for start in starts:
        if start not in known:
            raise UnknownNameError("modules that the model calls", start, known)
    places = [known.index(start) for start in starts]
    if places != sorted(set(places)):
        raise InvalidArgumentError(
            f"Pipeline got stages={list(starts)}, which the model calls in another order: "
            f"{', '.join(known[place] for place in sorted(set(places)))}."
        )
    cut = _Cut(graph, [start for start, place in zip(starts, places, strict=True) if place])
    return [cut.stage(number) for number in range(cut.count)]


class _Cut:
    """A graph whose nodes are given to stages, in order."""

    def __init__(self, graph: fx.Graph, starts: Sequence[str]) -> None:
        self.count = len(starts) + 1
        self._nodes = list(graph.nodes)
        self._stage_of: dict[fx.Node, int] = {}
        now = 0
        for node in self._nodes:
            begins = node.op == "call_module" and now < len(starts) and node.target == starts[now]
            now += begins
            self._stage_of[node] = now

    def _crossing(self, stage: int) -> list[fx.Node]:
        """Return what is computed before a stage and used in it or after it."""
        return [
            node
            for node in self._nodes
            if self._stage_of[node] < stage
            and node.op != "get_attr"
            and any(self._stage_of[user] >= stage for user in node.users)
        ]

    def stage(self, number: int) -> PipelineStage:
        graph, env = fx.Graph(), {}
        first, last = number == 0, number == self.count - 1
        for node in [] if first else self._crossing(number):
            env[node] = graph.placeholder(node.name)
        for node in self._nodes:
            mine = self._stage_of[node] == number
            if node.op == "get_attr":  # wherever it is used
                mine = any(self._stage_of[user] == number for user in node.users)
            if (mine or (first and node.op == "placeholder")) and node.op != "output":
                env[node] = graph.node_copy(node, lambda each: env[each])
        if last:
            end = next(node for node in self._nodes if node.op == "output")
            graph.output(fx.map_arg(end.args[0], lambda each: env[each]))
        else:
            graph.output(tuple(env[node] for node in self._crossing(number + 1)))
        graph.lint()
        used = {op: _targets(graph, op) for op in ("call_module", "get_attr")}
        return PipelineStage(
            used["call_module"], used["get_attr"], lambda root: _bound(root, graph)
        )


def _targets(graph: fx.Graph, op: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(node.target) for node in graph.nodes if node.op == op))


def _bound(root: nn.Module, graph: fx.Graph) -> Callable[..., Any]:
    program = StageProgram(root, graph)
    takes = [str(node.target) for node in graph.nodes if node.op == "placeholder"]

    def run(*values: Any) -> Any:
        if len(values) != len(takes):
            raise InvalidArgumentError(
                f"The pipeline's model takes {', '.join(takes)}, and x has {len(values)}. "
                f"Arguments that have a default keep it. {USE_SPLIT}"
            )
        return program.run(*values)

    return run


def stages_of_modules(model: nn.Module, given: Any) -> list[PipelineStage]:
    """Return the stages that a user's function has made of the model, by the model's names."""
    if not isinstance(given, (list, tuple)) or not all(isinstance(m, nn.Module) for m in given):
        raise InvalidArgumentError(
            "split is a function from the model to a list of its stages, each a torch.nn.Module, "
            f"but it returned {type(given).__name__}."
        )
    modules = {module: name for name, module in model.named_modules() if name}
    tensors = {tensor: name for name, tensor in _tensors(model)}
    return [_stage_of_module(number, part, modules, tensors) for number, part in enumerate(given)]


def _stage_of_module(
    number: int, part: nn.Module, modules: dict[nn.Module, str], tensors: dict[torch.Tensor, str]
) -> PipelineStage:
    found: list[str] = []
    loose: list[str] = []
    around: list[nn.Module] = []  # what the user has put around the model's own

    def look(module: nn.Module) -> None:
        if module in modules:
            found.append(modules[module])
            return
        around.append(module)
        for name, tensor in _tensors(module, recurse=False):
            if tensor not in tensors:
                raise InvalidArgumentError(
                    f"split made a stage {number} that has {name}, a tensor that the model does "
                    f"not have. Make stages of the model's own modules."
                )
            loose.append(tensors[tensor])
        for child in module.children():
            look(child)

    def bind(root: nn.Module) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            for module in around:
                module.training = root.training
            return part(*values)

        return run

    look(part)
    return PipelineStage(tuple(found), tuple(loose), bind)


def _tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=recurse)
    yield from module.named_buffers(recurse=recurse)
