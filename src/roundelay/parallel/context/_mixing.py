"""What mixes the tokens of a sequence, of what torch is called for: it would see this rank's alone.

Along features, the last dim, layers do as they like. A dim before it, as long as this rank's piece
of the sequence, is taken for the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import torch

__all__ = ["Mixing", "mixing"]

RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
SLIDING = frozenset({
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
})  # fmt: skip
SOFTMAX = frozenset({"softmax", "log_softmax", "logsumexp"})
ALONG = SOFTMAX | {
    "sum", "mean", "amax", "amin", "max", "min", "prod", "std", "var", "median", "norm",
    "vector_norm", "argmax", "argmin", "any", "all", "cumsum", "cumprod", "cummax", "cummin",
    "logcumsumexp", "roll", "flip", "sort", "argsort", "topk",
}  # fmt: skip
PRODUCTS = frozenset({"matmul", "bmm", "__matmul__"})
NORMS = ("batch_norm", "instance_norm")
LEARNS = 5  # the place of `training` and `use_input_stats` among their arguments
TOKENS, SCORES, HEADS = 3, 3, 4  # dims at least: of tokens, of scores, of those with heads


class Mixing(NamedTuple):
    """A call that mixes tokens, if the sequence is so long; whatever its length if that is 0."""

    what: str
    length: int


def mixing(
    func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> Mixing | None:
    """Return in which way a call mixes tokens; None if it is not known to."""
    name = getattr(func, "__name__", "").removeprefix("special_")
    x = args[0] if args else options.get("input")
    found: Mixing | None = None
    if name in RECURRENT:
        found = Mixing("a recurrent layer", 0)
    elif name == "einsum":
        found = _contraction(args)
    elif not isinstance(x, torch.Tensor):
        return None
    elif name in ALONG:
        found = _along(name, x, args, options)
    elif name in PRODUCTS:
        found = _product(x, args[1] if len(args) > 1 else None)
    elif name == "__getitem__":
        found = _piece(x, args[1])
    elif name in SLIDING or name in NORMS:
        found = _layer(name, args, options)
    return found


def _layer(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> Mixing | None:
    """Tell of a layer that mixes what is beside one another, or all."""
    if name in SLIDING:
        weight = args[1] if len(args) > 1 else options["weight"]
        return Mixing("a convolution", 0) if max(weight.shape[2:], default=1) > 1 else None
    learns = args[LEARNS] if len(args) > LEARNS else options.get("training", name != NORMS[0])
    return Mixing(f"a {name} over tokens", 0) if learns else None


def _along(
    name: str, x: torch.Tensor, args: Sequence[Any], options: Mapping[str, Any]
) -> Mixing | None:
    """Tell of what goes along a dim before the last, or along a side of a square of scores."""
    at = 2 if name in ("roll", "topk", "norm", "vector_norm") else 1
    given = args[at] if len(args) > at else options.get("dim", options.get("dims"))
    dims = given if isinstance(given, (tuple, list)) else (given,)
    if not all(type(dim) is int and -x.dim() <= dim < x.dim() for dim in dims):
        return None
    square = x.dim() >= (SCORES if name in SOFTMAX else HEADS) and x.size(-1) == x.size(-2)
    for dim in dims:
        if square or dim % x.dim() != x.dim() - 1:
            return Mixing(f"{name} along dim {dim} of shape {list(x.shape)}", x.size(int(dim)))
    return None


def _product(a: torch.Tensor, b: object) -> Mixing | None:
    """Tell of a product of two activations that adds up over tokens."""
    if not isinstance(b, torch.Tensor) or min(a.dim(), b.dim()) < TOKENS or a.size(-1) == 1:
        return None
    return Mixing(f"a product of shapes {list(a.shape)} and {list(b.shape)}", a.size(-1))


def _contraction(args: Sequence[Any]) -> Mixing | None:
    """Tell of an einsum that adds up over a dim of two activations."""
    operands = [one for one in args[1:] if isinstance(one, torch.Tensor)]
    if not args or not isinstance(args[0], str) or "." in args[0] or "->" not in args[0]:
        return None
    given, kept = args[0].replace(" ", "").split("->")
    for letters, x in zip(given.split(","), operands, strict=False):
        for letter, length in zip(letters[:-1], x.shape, strict=False):
            if letter not in kept and x.dim() >= TOKENS:
                return Mixing(f"einsum {args[0]!r}", length)
    return None


def _piece(x: torch.Tensor, index: object) -> Mixing | None:
    """Tell of some tokens that are taken out: on one device they would be others."""
    at = x.dim() - 2  # of [batch, tokens, features] and [batch, heads, tokens, features]
    if at < 1 or not isinstance(index, tuple) or not x.is_floating_point():
        return None
    if any(not isinstance(one, (int, slice, EllipsisType)) for one in index):
        return None
    if ... in index:
        rest = [slice(None)] * (x.dim() - len(index) + 1)
        index = (*index[: index.index(...)], *rest, *index[index.index(...) + 1 :])
    if len(index) <= at:
        return None
    one, length = index[at], x.size(at)
    if isinstance(one, slice) and one.indices(length) == (0, length, 1):
        return None
    return Mixing(f"a piece of dim {at} of shape {list(x.shape)}", length)
