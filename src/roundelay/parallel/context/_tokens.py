"""Which tensors have this rank's tokens, from attention on, and what nobody may do with them.

Attention gives tokens, and what is computed of them by single tokens has tokens, too. A function
that goes along them, or that is not known to leave them apart, is refused; a sum or a loss of all
of them is a number, which may be a term of the loss and meets no tokens again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from roundelay.errors import InvalidArgumentError
from roundelay.parallel._cut import Call, CutDim, name_of
from roundelay.parallel._cut_dim import (
    ELEMENTWISE,
    ENDS,
    LOSSES,
    MOVES,
    RESHAPES,
    cut_after,
    gives_none,
    tells_nothing,
    words,
)
from roundelay.parallel.context._mixing import NORMS, SLIDING, mixing

__all__ = ["Tokens", "mixed"]

TARGETS = words("cross_entropy nll_loss")
SUMS = words("sum mean nansum")
#: What gives one dim more, the last, and what goes by element of its first argument.
DEEPER, FIRST = words("embedding one_hot"), words("bucketize")
ASKED = words("backward grad __format__")  # that are right for a rank's own tokens


class _Number(NamedTuple):
    """What was added up over this rank's tokens."""

    loss: bool  # by a function for that, whose value may be read


def mixed(what: str) -> InvalidArgumentError:
    """Return the error of what would see some of the sequence."""
    return InvalidArgumentError(
        f"A model inside context_parallel mixes tokens by {what}, and would see this rank's piece "
        f"of the sequence alone: in the block, all but attention works on single tokens. Do it "
        f"outside of the block, on the whole sequence by rd.unshard_sequence, or leave it out."
    )


def _unknown(what: str) -> InvalidArgumentError:
    """Return the error of what may see some of it, and the way out if it does not."""
    told = mixed(f"{what}, or is not known not to")
    return InvalidArgumentError(
        f"{told} Where this works on single tokens after all, rd.local(x) is not looked at."
    )


class Tokens:
    """The tensors that have this rank's tokens."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._held: Any = WeakTensorKeyDictionary()  # Any: torch leaves out its types

    def given(self, x: torch.Tensor, dim: int = -2) -> torch.Tensor:
        """Know of a tensor that it has tokens in this dim."""
        if self.size > 1 and type(x) is torch.Tensor:
            self._held[x] = CutDim(dim, (x.size(dim),) * self.size, 0, tokens=True)
        return x

    def among(self, leaves: Sequence[Any]) -> bool:
        """Tell whether any of these has tokens."""
        return any(isinstance(one, torch.Tensor) and one in self._held for one in leaves)

    def run(self, func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Call a function, and know which of its results have tokens; or refuse it."""
        leaves = [one for one in tree_leaves((args, options)) if isinstance(one, torch.Tensor)]
        held = {id(one): self._held[one] for one in leaves if one in self._held}
        plain = all(type(one) in (torch.Tensor, torch.nn.Parameter) for one in leaves)
        if not held or not plain:
            return func(*args, **options)
        if name_of(func) == "register_hook":
            return func(args[0], self._watched(args[1], held.get(id(args[0]))))
        cuts = {key: one for key, one in held.items() if isinstance(one, CutDim)}
        call = Call(func, args, dict(options), cuts)
        if cuts and call.asks_lengths:
            return call.lengths(func(*args, **options))
        if tells_nothing(func) or (cuts and gives_none(call)):
            return func(*args, **options)
        numbers = [one for one in held.values() if isinstance(one, _Number)]
        found = self._after(call, numbers)
        result = func(*args, **options)
        if found is not None:
            self._hold(result, found, call)
        return result

    def _after(self, call: Call, numbers: list[_Number]) -> CutDim | _Number | list[CutDim] | None:
        """Return what a result has of the tokens; refuse what is not known to be right."""
        name = name_of(call.func)
        told = f"{call.name} of shape {[*call.cut[0].shape]}" if call.cuts else call.name
        if name in ENDS:
            if name not in ASKED and (call.cuts or not all(one.loss for one in numbers)):
                raise mixed(f"{name}() of what was computed of them" if numbers else told)
            return None
        if numbers:
            if call.cuts:
                raise mixed(f"{told}, beside a number that was computed of all of them")
            return _Number(all(one.loss for one in numbers))
        cut = call.cut[1]
        if call.name in LOSSES | TARGETS and call.options.get("reduction") != "none":
            return _Number(loss=True)
        if call.name in SUMS and len(call.args) == 1 and not {*call.options} - {"input", "dtype"}:
            return _Number(loss=False)
        self._beside(call, cut)
        found = _found(call)
        if found is None:
            raise _unknown(told)
        return found

    def _beside(self, call: Call, cut: CutDim) -> None:
        """Take what is as long along the dim for tokens, too: a residual from before attention."""
        if call.name not in ELEMENTWISE | MOVES | LOSSES | {"cosine_similarity"}:
            return
        for one in call.tensors():
            if isinstance(one, torch.nn.Parameter) or one.dim() < -cut.dim:
                continue
            if one.size(cut.dim) == cut.here > 1:
                call.cuts.setdefault(id(one), cut)

    def _hold(self, result: Any, found: CutDim | _Number | list[CutDim], call: Call) -> None:
        """Remember what a function has given."""
        given = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        every = found if isinstance(found, list) else [found] * len(given)
        for one, each in zip(given, every, strict=True):
            if isinstance(each, CutDim) and (
                one.dim() < -each.dim or one.size(each.dim) != each.here
            ):
                raise mixed(f"{call.name} of shape {[*call.cut[0].shape]}")
            self._held[one] = each

    def _watched(self, hook: Callable[[Any], Any], cut: CutDim | _Number | None) -> Any:
        """Return a hook that is looked at in backward, too: gradients of tokens are theirs."""
        if not isinstance(cut, CutDim):
            return hook

        def watched(gradient: torch.Tensor) -> Any:
            tokens = Tokens(self.size)
            with _TokenWatch(tokens):
                return hook(tokens.given(gradient.view_as(gradient), cut.dim))

        return watched


class _TokenWatch(TorchFunctionMode):
    """Looks at functions outside of the block."""

    def __init__(self, tokens: Tokens) -> None:
        super().__init__()
        self.tokens = tokens

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # Any: torch's
        """Do what was called for."""
        del types
        return self.tokens.run(func, args, kwargs or {})


def _found(call: Call) -> CutDim | list[CutDim] | None:
    """Return where tokens are in a result; None if it is not known."""
    cut = call.cut[1]
    try:
        if call.name in RESHAPES and not isinstance(call.given("dtype", 1), torch.dtype):
            return _reshaped(call, cut)
        if call.name in TARGETS:
            return cut._replace(dim=-1) if call.cut[0].dim() == -cut.dim == 2 else None  # noqa: PLR2004
        if call.name in DEEPER:
            return cut._replace(dim=cut.dim - 1) if call.of(call.args[0]) else None
        if call.name in FIRST or call.name in SLIDING | {*NORMS}:
            alone = len(call.cuts) == 1 and call.of(call.given("input", 0)) is not None
            return cut if alone and mixing(call.func, call.args, call.options) is None else None
        return cut_after(call)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return None  # what torch itself refuses is told by it, where it is called


def _reshaped(call: Call, cut: CutDim) -> CutDim | None:
    """Return the dim that tokens are in, or theirs and rows before them, in another shape."""
    first = call.cut[0]
    like = torch.empty(first.shape, dtype=first.dtype, device="meta")
    new = [*call.again(lambda _: like).shape]
    behind, count = first.shape[cut.dim :].numel() // max(1, first.size(cut.dim)), cut.parts[0]
    fits = [at for at in range(len(new)) if math.prod(new[at + 1 :]) == behind]
    for lengths in ({cut.here}, {count * many for many in range(1, first.numel() + 1)}):
        for at in fits:
            if new[at] in lengths:
                return cut._replace(dim=at - len(new), outer=new[at] // max(1, count))
    return None
