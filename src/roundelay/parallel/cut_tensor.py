"""Features of which every rank has its own part, as a tensor that knows it.

A function that goes along features gives another number for a part than for the whole, and nobody
sees it. So what a layer leaves cut says which of its dims is a part: functions that go along it are
refused by name, and what comes out of the model stays marked until `local` is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from roundelay.errors import InvalidArgumentError
from roundelay.parallel._cut_dim import (
    ENDS,
    MIXED,
    RESHAPES,
    Call,
    cut_dim_after,
    name_of,
    tells_nothing,
)

if TYPE_CHECKING:
    from roundelay.parallel.tensor.axis import TensorAxis

__all__ = ["CutSource", "CutTensor", "come_out", "local", "unmarked"]


class CutSource:
    """A layer that leaves features cut, so many of which stay together."""

    def __init__(self, label: str, axis: TensorAxis, dim: int | None, unit: int = 1) -> None:
        self.label, self.axis, self.dim, self.unit = label, axis, dim, unit
        #: Until a pass in which other layers take all of its outputs: from then on it is known to
        #: lie between them, and its outputs are not looked at again.
        self.open = axis.comm.size > 1
        self.given = self.taken = 0  # outputs in the pass at hand

    def marked(self, x: torch.Tensor) -> torch.Tensor:
        """Return its output, marked."""
        if not self.open or torch.compiler.is_compiling():
            return x
        self.given += 1
        self.axis.cut_by.add(self)
        return _marked(x, _Mark((_Output(self),), self.dim))

    def end_pass(self) -> None:
        """See whether others took all that it has given."""
        self.open = self.given != self.taken
        self.given = self.taken = 0


class _Output:
    """What a layer has given once."""

    def __init__(self, source: CutSource) -> None:
        self.source, self.taken = source, False

    def take(self) -> None:
        self.source.taken += not self.taken
        self.taken = True


class _Mark(NamedTuple):
    """Of whose outputs a tensor was made, and along which dim, from the end, it is a part."""

    outputs: tuple[_Output, ...]
    dim: int | None
    by: str = ""  # the function behind which the dim can't be told
    out: bool = False  # whether it has come out of the model

    @property
    def axis(self) -> TensorAxis:
        """The ranks that have the other parts."""
        return self.outputs[0].source.axis


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
            if tells_nothing(func):
                return func(*args, **options)
            name = name_of(func)
            cut = [one for one in tree_leaves((args, options)) if isinstance(one, CutTensor)]
            mark = _together([one.mark for one in cut])
            dim = None
            if mark.dim is not None and name not in ENDS:
                dims = [(one, one.mark.dim or 0) for one in cut]
                dim = _tried(cut_dim_after, Call(func, args, options, dims), mark)
            if dim == MIXED or _leaves(name, mark, dim):
                raise InvalidArgumentError(_refused(name, mark))
            result = func(*args, **options)
            if mark.dim == -1 and dim is not None and dim < -1 and name in RESHAPES:
                _check_units(name, mark, cut[0].size(-1), result.size(dim))
        mark = mark._replace(dim=dim, by=mark.by or ("" if dim else name))
        return tree_map_only(torch.Tensor, lambda one: _marked(one, mark), result)


def local(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it lies here: of features that stay cut, this rank's part.

    For losses that know of the other ranks. What is whole stays the tensor that it is.
    """
    return unmarked(x)


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
            if one.mark.dim is None:
                raise InvalidArgumentError(_refused(one.mark.by or "the output", one.mark))
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
    dims = {one.dim for one in marks}
    return _Mark(
        tuple(dict.fromkeys(output for one in marks for output in one.outputs)),
        None if None in dims else marks[0].dim,
        next((one.by for one in marks if one.by), ""),
        any(one.out for one in marks),
    )


def _marked(x: torch.Tensor, mark: _Mark) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - likewise
        own = x if isinstance(x, CutTensor) else x.as_subclass(CutTensor)
    own.mark = mark
    return own


def _leaves(name: str, mark: _Mark, dim: int | None) -> bool:
    """Say whether a function takes a part away to where nothing can be told of it any more."""
    if name in ("backward", "grad") and mark.dim is not None:
        return False  # from a gradient of the part itself
    if mark.out:
        return dim is None
    return name in ENDS and mark.dim is None and not mark.axis.passing


def _tried(find: Callable[[Call], int | None], call: Call, mark: _Mark) -> int | None:
    """Find a dim; a shape that torch refuses is one that counts the features of all ranks."""
    try:
        return find(call)
    except RuntimeError as error:
        source, features = mark.outputs[0].source, call.cut[0][0].size(-1)
        raise InvalidArgumentError(_miscounted(call.name, source, features, str(error))) from error


def _check_units(name: str, mark: _Mark, features: int, pieces: int) -> None:
    """Refuse to count as many heads on a rank as there are on all of them."""
    for source in (output.source for output in mark.outputs):
        together = features // max(1, pieces)
        if together % source.unit:
            what = f"{pieces} heads of {together}, and {source.unit} stay together"
            raise InvalidArgumentError(_miscounted(name, source, features, what))


def _miscounted(name: str, source: CutSource, features: int, what: str) -> str:
    """Say that code counts the heads of all ranks, and how it counts this one's."""
    axis = source.axis
    return (
        f"{name}() on what {source.label} gives rank {axis.comm.rank} of {axis.comm.size} along "
        f"{axis.name}, {features} features: {what}. Say 'column:head_dim' for it, so that heads "
        f"stay together, and 'region:num_heads' for the module around it, by which what counts "
        f"heads there counts this rank's; or write the dim of a head in the code, and -1 for heads."
    )


def _refused(name: str, mark: _Mark) -> str:
    """Say what is cut, and the ways out."""
    axis = mark.axis
    layers = ", ".join(dict.fromkeys(output.source.label for output in mark.outputs))
    what = f"{name}()" if name.isidentifier() else name
    after = f" after {mark.by}()" if mark.by and mark.by != name else ""
    return (
        f"{what}{after} on rank {axis.comm.rank} of {axis.comm.size} along {axis.name}: {layers} "
        f"leaves features cut, and this rank's part gives another result than the whole. Say "
        f"'column gather' in the plan; or take rd.cross_entropy(logits, targets, "
        f"mesh[{axis.name!r}]) for logits; or rd.local(x) for an ordinary tensor of this rank's "
        f"part, in code that knows of the others."
    )
