"""Features of which every rank has its own part, as a tensor that knows it.

A function that goes along features gives another number for a part than for the whole, and nobody
sees it. So what a layer leaves cut says which of its dims is a part: functions that go along it are
refused by name, and what comes out of the model stays marked until `local` is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._pytree import tree_leaves, tree_map_only

from roundelay.errors import InvalidArgumentError
from roundelay.parallel._computed_again import CHECKPOINT, computing_again
from roundelay.parallel._cut import Call, CutDim, name_of
from roundelay.parallel._cut_dim import ENDS, RESHAPES, cut_after, gives_none, tells_nothing
from roundelay.parallel._cut_gradients import (
    HOOKED,
    gradients_marked,
    hook_marked,
    module_hooks_marked,
)
from roundelay.parallel._cut_reshape import MiscountedError
from roundelay.parallel.part import part_of

if TYPE_CHECKING:
    from roundelay.parallel.tensor.axis import TensorAxis

__all__ = ["CutSource", "CutTensor", "come_out", "local", "unmarked"]


GRADIENTS = frozenset({"register_hook", "grad", "grad_fn"})


class CutSource:
    """A layer that leaves features cut, or the sequence divided."""

    def __init__(self, label: str, axis: TensorAxis, cut: CutDim) -> None:
        self.label, self.axis, self.cut = label, axis, cut
        #: Passes in which other layers took all of its outputs, with gradients or without, also
        #: at this layer, in training or not: in others like them it is known to lie between
        #: layers, and its outputs are not looked at again.
        self._seen: set[tuple[bool, bool, bool]] = set()
        self._now: set[tuple[bool, bool, bool]] = set()
        self.given = self.taken = 0  # outputs in the pass at hand

    def marked(self, x: torch.Tensor, *, training: bool) -> torch.Tensor:
        """Return its output, marked."""
        grad = torch.is_grad_enabled()
        how = self.axis.gradients if self.axis.passing else grad, grad, training
        if how in self._seen or self.axis.comm.size == 1 or torch.compiler.is_compiling():
            return x
        self._now.add(how)
        self.given += 1
        self.axis.cut_by.add(self)
        return _marked(x, _Mark((_Output(self),), self.cut))

    def end_pass(self) -> None:
        """See whether others took all that it has given."""
        if self.given == self.taken:
            self._seen |= self._now
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._now.clear()
        self.given = self.taken = 0


class _Output:
    """What a layer has given once."""

    def __init__(self, source: CutSource) -> None:
        self.source, self.taken = source, False

    def take(self) -> None:
        self.source.taken += not self.taken
        self.taken = True


class _Mark(NamedTuple):
    """Of whose outputs a tensor was made, and what of it is this rank's part."""

    outputs: tuple[_Output, ...]
    cut: CutDim
    out: bool = False  # whether it has come out of the model

    @property
    def axis(self) -> TensorAxis:
        """The ranks that have the other parts."""
        return self.outputs[0].source.axis

    @property
    def under_way(self) -> bool:
        """Whether the pass in which it was made goes on."""
        return bool(self.axis.passing) or any(
            one.source in self.axis.cut_by for one in self.outputs
        )


class CutTensor(torch.Tensor):
    """A rank's part of what a cut layer gives."""

    mark: _Mark

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # Any: torch's
        """Run a function of torch, and say what of its result is cut; or refuse it."""
        del types
        options = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch's docs have it
            given = [one for one in tree_leaves((args, options)) if isinstance(one, CutTensor)]
            call = Call(func, args, options, {id(one): one.mark.cut for one in given})
            name = name_of(func)
            mapped = name in ("dim", "size") and _mapped()
            if given and name in GRADIENTS:
                seen = _of_gradients(func, name, args, options)
                if seen is not None:
                    return seen()
            if not mapped and given and call.asks_lengths:
                return call.lengths(func(*args, **options))
            if not mapped and (tells_nothing(func) or not given or gives_none(call)):
                return func(*args, **options)
            mark = _together([one.mark for one in given])
            if mapped:
                raise InvalidArgumentError(_refused("vmap", mark))
            if name in ENDS:
                if not _may_end(name, mark):
                    raise InvalidArgumentError(_refused(name, mark))
                if name != "backward":
                    return func(*args, **options)
            else:
                return _followed(call, name, mark)
        with torch.enable_grad():  # of which a node that goes back has none
            roots = tree_map_only(CutTensor, unmarked, args[0])  # hooks are looked at as ever
        return func(roots, *args[1:], **options)

    def refuse_unless(self, parts: tuple[int, ...], layer: str) -> None:
        """Refuse to be the input of a layer that has other parts of the last dim."""
        cut = self.mark.cut
        if (cut.dim, cut.parts, cut.outer, cut.piece) != (-1, parts, 1, None) or cut.tokens:
            raise InvalidArgumentError(_not_taken(self.mark, parts, layer))


def _may_end(name: str, mark: _Mark) -> bool:
    """Say whether numbers may be handed out, or gradients: of what was seen inside."""
    if name == "backward" and computing_again():  # of a block, by torch's checkpoint
        return True
    return not mark.under_way and (not mark.out or name in ("backward", "grad"))


def _followed(call: Call, name: str, mark: _Mark) -> Any:
    """Call a function, and say what of its result is cut; or refuse it."""
    try:
        found = _tried(call, mark)
    except InvalidArgumentError:
        if not computing_again():
            raise
        for output in mark.outputs:
            output.take()
        return call.func(*call.args, **call.options)  # what was right before
    try:
        result = call.func(*call.args, **call.options)
    except (RuntimeError, ValueError, IndexError) as error:
        raise InvalidArgumentError(_beside(name, mark, call, str(error))) from error
    return _cut_as(result, found, name, mark)


def _of_gradients(
    func: Any, name: str, args: Any, options: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return how to let code see gradients of what is cut; None if it asks for others."""
    marking = _gradient_marked, CutTensor, unmarked
    if name == "register_hook":
        return lambda: func(args[0], hook_marked(args[1], args[0], marking), *args[2:])
    if func.__name__ == "__get__":
        if name == "grad" and _asker(3) == CHECKPOINT:  # which hands it on to what came before
            return lambda: func(*args, **options)
        if name == "grad":
            return lambda: _gradient_marked(func(*args, **options), args[0])
        if _asker(3).startswith(HOOKED):
            module_hooks_marked(marking)
        return None
    inputs = options.get("inputs", args[1] if len(args) > 1 else ())
    leaves = tree_leaves(inputs)
    if name == "grad" and any(
        isinstance(one, CutTensor) and not one.mark.under_way for one in leaves
    ):
        return lambda: gradients_marked(func(*args, **options), inputs, marking)
    return None


def _gradient_marked(gradient: Any, like: Any) -> Any:
    """Return the gradient of what is cut as a part that came out of the model."""
    if not isinstance(like, CutTensor) or not isinstance(gradient, torch.Tensor):
        return gradient
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - likewise
        return _marked(gradient.view_as(gradient), like.mark._replace(out=True))


def _asker(depth: int) -> str:
    """Return the module that asks."""
    return str(sys._getframe(depth).f_globals.get("__name__", ""))  # noqa: SLF001 - as above


def _mapped() -> bool:
    """Say whether vmap asks, whose functions get tensors of its own."""
    caller = sys._getframe(2).f_globals.get("__name__", "")  # noqa: SLF001 - torch shows no more
    return str(caller).startswith("torch._functorch")


def _cut_as(result: Any, found: CutDim | list[CutDim], name: str, mark: _Mark) -> Any:
    """Mark what a function has given; what is not as long as it should be is refused."""
    if isinstance(found, list):
        own = [mark._replace(cut=cut) for cut in found]
        return type(result)(_checked(*each, name) for each in zip(result, own, strict=True))
    own_mark = mark._replace(cut=found)
    return tree_map_only(torch.Tensor, lambda one: _checked(one, own_mark, name), result)


def _checked(x: torch.Tensor, mark: _Mark, name: str) -> torch.Tensor:
    cut = mark.cut
    if cut.piece is None and (x.dim() < -cut.dim or x.size(cut.dim) != cut.here):
        raise InvalidArgumentError(_refused(name, mark))
    return _marked(x, mark)


def local(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it lies here: of what is cut between ranks, this rank's part.

    That is features that stay cut, and parameters that are divided. For code that knows of the
    other ranks. What is whole stays the tensor that it is.
    """
    if part_of(x) is not None:
        from roundelay.parallel.whole_parts import local_of  # noqa: PLC0415 - needs this file

        return local_of(x)
    if isinstance(x, CutTensor):
        x.mark.axis.trusted = True
        return unmarked(x)
    if has_torch_function_unary(x):  # a block, which is told
        found: torch.Tensor = handle_torch_function(local, (x,), x)
        return found
    return x


def unmarked(x: torch.Tensor, *, inside: bool = False) -> torch.Tensor:
    """Return an ordinary tensor; `inside`: a layer takes it that knows what is cut."""
    if not isinstance(x, CutTensor):
        return x
    if inside:
        for output in x.mark.outputs:
            output.take()
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - likewise
        return x.as_subclass(torch.Tensor)


def come_out(output: Any) -> None:
    """Have what a model gives be known to be a part, and refuse a part of nobody knows what."""
    for one in leaves_of(output):
        if isinstance(one, CutTensor):
            if one.mark.cut.piece is not None or one.mark.cut.tokens:
                raise InvalidArgumentError(_refused("the output", one.mark))
            one.mark = one.mark._replace(out=True)


def leaves_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors of what a model gives, also those that an object has as attributes."""
    found = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, torch.nn.Module | type):
            found += [one for one in tree_leaves(vars(leaf)) if isinstance(one, torch.Tensor)]
    return found


def _together(marks: list[_Mark]) -> _Mark:
    """Return the mark of what is made of several."""
    return _Mark(
        tuple(dict.fromkeys(output for one in marks for output in one.outputs)),
        marks[0].cut,
        any(one.out for one in marks),
    )


def _marked(x: torch.Tensor, mark: _Mark) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - likewise
        own = x if isinstance(x, CutTensor) else x.as_subclass(CutTensor)
    own.mark = mark
    return own


def _tried(call: Call, mark: _Mark) -> CutDim | list[CutDim]:
    """Find how a result is cut; a shape that torch refuses counts the features of all ranks."""
    found = None
    try:
        found = cut_after(call)
    except MiscountedError as error:
        raise InvalidArgumentError(_miscounted(call, mark, str(error))) from error
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        if isinstance(error, RuntimeError):  # torch's own
            raise InvalidArgumentError(_miscounted(call, mark, str(error))) from error
    if found is None:
        if call.name in RESHAPES:
            what = "there each rank's part would not lie in one piece"
            raise InvalidArgumentError(_miscounted(call, mark, what))
        whole = _whole_beside(call, mark.cut)
        if whole:
            raise InvalidArgumentError(_beside(call.name, mark, call, whole))
        raise InvalidArgumentError(_refused(name_of(call.func), mark))
    return found


def _whole_beside(call: Call, cut: CutDim) -> str:
    """Say which tensor is as long as all parts together, or the same on all ranks."""
    for one in call.tensors():
        if call.of(one) is None and one.dim() and one.size(-1) == sum(cut.parts) * cut.outer:
            return f"beside it is a tensor of shape {tuple(one.shape)}"
    return ""


def _layers(mark: _Mark) -> str:
    return ", ".join(dict.fromkeys(output.source.label for output in mark.outputs))


def _ranks(mark: _Mark) -> str:
    axis = mark.axis
    return f"rank {axis.comm.rank} of {axis.comm.size} along {axis.name}"


def _miscounted(call: Call, mark: _Mark, what: str) -> str:
    """Say that code counts the heads of all ranks, and how it counts this one's."""
    cut = call.cut[1]
    return (
        f"{call.name}() on what {_layers(mark)} gives {_ranks(mark)}, {cut.here} "
        f"{'tokens' if cut.tokens else 'features or heads'} of {sum(cut.parts) * cut.outer}: "
        f"{what}. {_layers(mark)} leaves {_part(cut)}. Say 'column:head_dim' for it, so that heads "
        f"stay together, and 'region:num_heads' for the module around it, by which what counts "
        f"heads there counts this rank's; or write the dim of a head in the code, and -1 for heads."
    )


def _beside(name: str, mark: _Mark, call: Call, what: str) -> str:
    """Say that something whole meets a part."""
    cut = call.cut[1]
    return (
        f"{name}() on what {_layers(mark)} gives {_ranks(mark)}, {cut.here} of "
        f"{sum(cut.parts) * cut.outer}: {what}. {_layers(mark)} leaves {_part(cut)}, and a "
        f"parameter, buffer or layer beside it is that of all ranks, or is not known to be this "
        f"rank's part. Say 'column gather' in the plan, cut it by a layer of the plan, or take "
        f"rd.local(x) in code that knows of the others."
    )


def _not_taken(mark: _Mark, parts: tuple[int, ...], layer: str) -> str:
    """Say that a layer takes other parts than a tensor is."""
    cut = mark.cut
    return (
        f"{layer} on {_ranks(mark)} takes {parts} of {sum(parts)} features in the order of ranks, "
        f"and gets what {_layers(mark)} leaves otherwise: dim {cut.dim}, cut by {cut.parts}"
        f"{f', {cut.outer} times one after the other' if cut.outer > 1 else ''}. Heads that "
        f"'column:head_dim' keeps together 'row:head_dim' cuts alike; queries, keys and values in "
        f"one layer are 'qkv:head_dim', or 'column:head_dim*3' where each head has its own "
        f"three together. {_layers(mark)} leaves {_part(cut)}: 'column gather' makes it whole."
    )


def _part(cut: CutDim) -> str:
    return "the sequence divided" if cut.tokens else "features cut"


def _refused(name: str, mark: _Mark) -> str:
    """Say what is cut, and the ways out."""
    axis = mark.axis
    what = f"{name}()" if name.isidentifier() else name
    if mark.cut.tokens:
        return (
            f"{what} on {_ranks(mark)}: {_layers(mark)} leaves the sequence divided, and this "
            f"rank's tokens are not known to give the result of all of them. Say 'gather' for a "
            f"module before it, or 'norm gather'; or rd.local(x) for an ordinary tensor of this "
            f"rank's tokens, in code that knows of the others."
        )
    return (
        f"{what} on {_ranks(mark)}: {_layers(mark)} leaves features cut, and this rank's part is "
        f"not known to give the result of the whole. Say 'column gather' in the plan; or take "
        f"rd.cross_entropy(logits, targets, mesh[{axis.name!r}]) for logits; or rd.local(x) for an "
        f"ordinary tensor of this rank's part, in code that knows of the others."
    )
