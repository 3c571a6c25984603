"""What activations are between ranks, read off the graph of the first pass: what must not meet.

Outside of cut layers a gradient is whole on every rank. Inside it is of this rank's part, and adds
up where the layers began. Values alone never tell which is meant, so a path around a cut layer
gives right outputs and wrong gradients. The graph tells: every crossing is a node of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils._pytree import tree_map_only

from roundelay.errors import InvalidArgumentError
from roundelay.parallel.cut_tensor import CutTensor, come_out, leaves_of, unmarked
from roundelay.parallel.sharding import sharding_of
from roundelay.parallel.staging import staging_of
from roundelay.parallel.tensor.axis import TensorAxis
from roundelay.parallel.whole_parts import OPENED
from roundelay.training.shards.operands import tensors_in

WHOLE = "whole"  # the same on all ranks, and so is its gradient
BROUGHT = "brought"  # the same on all ranks, with a gradient of this rank's part, which adds up
CUT = "cut"  # this rank's features
TOKENS = "tokens"  # this rank's share of the sequence
#: What each crossing takes and makes. Of an input without a graph nobody sees of which kind it is:
#: what parameters make of it is as they are, also brought.
CROSSINGS: dict[str, tuple[frozenset[str], str]] = {
    "copy": (frozenset({WHOLE}), BROUGHT),
    "all_gather": (frozenset({TOKENS, BROUGHT}), BROUGHT),
    "reduce": (frozenset({CUT, BROUGHT}), WHOLE),
    "reduce_scatter": (frozenset({CUT, BROUGHT}), TOKENS),
    "gather": (frozenset({CUT, TOKENS, BROUGHT}), WHOLE),
    OPENED: (frozenset({CUT, BROUGHT}), WHOLE),
    "split": (frozenset({WHOLE}), TOKENS),
    "summed": (frozenset({WHOLE}), BROUGHT),
    "cross_entropy": (frozenset({CUT, BROUGHT}), WHOLE),
}


class Placed(NamedTuple):
    """What a tensor is, and by which layer or parameter."""

    kind: str
    by: str
    crossing: str = ""


def look_at_first_pass(model: nn.Module, axis: TensorAxis) -> None:
    """Have the first pass of a model looked at that has a graph, and one that is wrong refused."""
    first, staging = FirstPass(model, axis), staging_of(model)
    if staging is not None:
        staging.looks.append(first.look)
        return
    model.register_forward_pre_hook(first.begin, with_kwargs=True, prepend=True)
    model.register_forward_hook(first, always_call=True)


class FirstPass:
    """Looks at the first output of a model that has a graph, and refuses it by name.

    An object and not a closure: a copy of the model has its own, and a pickle is refused by it.
    """

    def __init__(self, model: nn.Module, axis: TensorAxis) -> None:
        self._model, self._axis = model, axis
        #: Stages, in training and not, and which inputs have a graph; a model without is one stage.
        self._seen: set[tuple[int, bool, tuple[bool, ...]]] = set()
        self._graphs: tuple[bool, ...] = ()

    def begin(self, module: nn.Module, args: Any, options: Any) -> None:
        """Note that a pass begins."""
        axis, inputs = self._axis, tensors_in((args, options))
        self._graphs = tuple(one.requires_grad for one in inputs)
        axis.begin()
        axis.passing += 1
        axis.trusted = False
        axis.training, axis.gradients = module.training, torch.is_grad_enabled()
        if axis.dim is not None and axis.numbers is not None:  # each has tokens of its own
            for one in inputs[:1]:
                axis.numbers.leave("", one, training=module.training)

    def __call__(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Look, as a hook of the model."""
        self._axis.passing -= 1
        if self._axis.numbers is not None:
            self._axis.numbers.come_back()
        self.look(0, output, True)  # noqa: FBT003 - as a pipeline calls it

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001 - as torch marks its own
    def look(self, stage: int, output: Any, last: bool) -> Any:  # noqa: FBT001 - likewise
        """Refuse an output that is a shard, or a graph in which kinds meet that must not."""
        self._look(stage, output, last)
        if self._axis.cut_by:
            for source in self._axis.cut_by:
                source.end_pass()
            self._axis.cut_by.clear()
            self._axis.trusted = False
            if not last:
                return tree_map_only(CutTensor, unmarked, output)
            come_out(output)
        return output

    def _look(self, stage: int, output: Any, last: bool) -> None:  # noqa: FBT001 - likewise
        kind = stage, self._model.training, self._graphs
        if kind in self._seen or self._axis.comm.size == 1:
            return
        tensors = [one for one in leaves_of(output) if one.grad_fn is not None]
        if not tensors:
            return
        names = {id(one): name for name, one in self._model.named_parameters()}
        graph = _PassGraph(self._axis, names)
        for tensor in tensors:
            found = graph.placed(_behind_hooks(tensor.grad_fn, tensor.output_nr))
            if last and found is not None and found.kind in (BROUGHT, TOKENS):
                raise InvalidArgumentError(_unfinished(found, self._axis))
        self._seen.add(kind)
        self._axis.fits = self._axis.fits or last


class _PassGraph:
    """The graph of one pass, with what every node makes."""

    def __init__(self, axis: TensorAxis, names: dict[int, str]) -> None:
        self._axis, self._names = axis, names
        self._known: dict[Any, Placed | None] = {}  # Any: torch's nodes; None: can't be told

    def placed(self, root: Any) -> Placed | None:
        """Return what a node makes, once all before it do."""
        stack = [root]
        while stack:
            node = stack[-1]
            before = [_behind_hooks(*each) for each in node.next_functions]
            before = [each for each in before if each is not None]
            left = [each for each in before if each not in self._known]
            if left:
                stack += left
                continue
            stack.pop()
            if node not in self._known:
                self._known[node] = self._made(node, [self._known[each] for each in before])
        return self._known[root]

    def _made(self, node: Any, given: list[Placed | None]) -> Placed | None:
        variable = getattr(node, "variable", None)
        if variable is not None:  # a leaf
            return self._leaf(variable)
        known = [one for one in given if one is not None]
        crossing = getattr(node, "crossing", None)
        if crossing in CROSSINGS and node.comm.shares_ranks(self._axis.comm):
            return self._crossed(crossing, getattr(node, "layer", ""), known)
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not _ours(node):
            return None  # what is done inside, nobody sees
        total: Placed | None = None
        for one in known:
            total = one if total is None else self._met(total, one)
        return total

    def _leaf(self, variable: torch.Tensor) -> Placed | None:
        name = self._names.get(id(variable))
        if name is None and self._axis.staged:
            return None  # what an earlier stage has sent, of any kind
        shape = tuple(variable.shape)
        by = (
            f"the parameter {name}"
            if name
            else f"a tensor of shape {shape} that is no parameter of the model"
        )
        if isinstance(variable, CutTensor):  # by another model, to be taken by a layer of this one
            return Placed(TOKENS if variable.mark.cut.tokens else CUT, by)
        sharding = sharding_of(variable)
        cut = sharding is not None and sharding.comm.shares_ranks(self._axis.comm)
        return Placed(CUT if cut else WHOLE, by)

    def _crossed(self, crossing: str, layer: str, given: list[Placed]) -> Placed:
        takes, makes = CROSSINGS[crossing]
        by = layer or crossing
        for one in given:
            if one.kind not in takes:
                raise InvalidArgumentError(_refused(by, crossing, one, self._axis))
        if crossing == OPENED and given:
            by = f"what {by} computes of {given[0].by}"
        return Placed(makes, by, crossing)

    def _met(self, one: Placed, other: Placed) -> Placed:
        """Return what two make together."""
        if one.kind == other.kind:
            return one
        for this, that in ((one, other), (other, one)):
            if this.kind == BROUGHT and that.kind in (CUT, TOKENS):
                return that
        raise InvalidArgumentError(_apart(one, other, self._axis))


def _behind_hooks(node: Any, output: int) -> Any:
    """Return what made a tensor, but for what only tells a module's backward hooks of it."""
    while getattr(type(node), "_forward_cls", None) is BackwardHookFunction:
        node, output = node.next_functions[output]
    return node


def _ours(node: Any) -> bool:
    kind = getattr(type(node), "_forward_cls", None)
    return kind is not None and kind.__module__.startswith("roundelay.")


def _apart(one: Placed, other: Placed, axis: TensorAxis) -> str:
    """Say why two must not meet, and the way out."""
    kinds = {each.kind: each for each in (one, other)}
    ranks = f"the {axis.comm.size} ranks of {axis.name}"
    if kinds.keys() == {WHOLE, BROUGHT}:
        brought, whole = kinds[BROUGHT], kinds[WHOLE]
        if brought.crossing == "summed":
            return (
                f"The plan has gradients of {brought.by} summed over {ranks}, and what comes in "
                f"there is whole on each, by {whole.by}: they would count once for each rank. Say "
                f"'norm', or 'replicate', without 'sharded'."
            )
        return (
            f"What {brought.by} brings in for cut layers goes around them and meets what is whole, "
            f"by {whole.by}: its gradient would count once for each of {ranks}. A residual stays "
            f"outside of a 'region': say 'region' for the module inside of it, or leave it out, by "
            f"which each 'column' brings in its own input."
        )
    if WHOLE in kinds:
        whole = kinds.pop(WHOLE)
        (part,) = kinds.values()
        what = "features" if part.kind == CUT else "tokens"
        word = "'norm sharded'" if part.kind == CUT else "'norm'"
        return (
            f"{whole.by[0].upper()}{whole.by[1:]}, which {ranks} have whole, meets {what} of which "
            f"each has its own, by {part.by}: its gradient would be of this rank's part alone. Say "
            f"{word} for a layer of which all ranks have the parameters, and bring what is whole "
            f"in by a 'region', or by roundelay.parallel.functions.copy(x, mesh[{axis.name!r}])."
        )
    return (
        f"Features of which each of {ranks} has its own, by {kinds[CUT].by}, meet tokens of which "
        f"each has its own, by {kinds[TOKENS].by}."
    )


def _refused(layer: str, crossing: str, given: Placed, axis: TensorAxis) -> str:
    """Say what a layer can't take."""
    expects = {
        "copy": "activations that are whole", "split": "the whole sequence",
        "summed": "parameters that are whole", "all_gather": "this rank's share of the sequence",
        "cross_entropy": "this rank's part of the logits",
        "gather": "features or tokens of this rank",
    }.get(crossing, "features of this rank, to be summed")  # fmt: skip
    gets = {
        WHOLE: f"what is whole, by {given.by}",
        BROUGHT: f"what {given.by} has brought in for cut layers already",
        CUT: f"features that {given.by} has left cut",
        TOKENS: f"this rank's share of the sequence, by {given.by}",
    }[given.kind]
    return (
        f"{layer} expects {expects}, and gets {gets}: gradients over the {axis.comm.size} ranks of "
        f"{axis.name} would be wrong. Change the plan's word for one of the two."
    )


def _unfinished(found: Placed, axis: TensorAxis) -> str:
    """Say why a model can't end so."""
    if found.kind == TOKENS:
        return (
            f"The output of the model is this rank's share of the sequence, by {found.by}: every "
            f"one of the {axis.comm.size} ranks of {axis.name} would take the loss of other "
            f"tokens for that of all. Say 'gather' for the last module, 'norm gather' for a last "
            f"norm, or end with a 'column' layer."
        )
    return (
        f"What {found.by} brings in for cut layers is the output of the model, around all of them: "
        f"its gradient would count once for each of the {axis.comm.size} ranks of {axis.name}. "
        f"Leave out its 'region'."
    )
