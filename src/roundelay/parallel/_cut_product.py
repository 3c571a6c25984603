"""Products along a dim that is cut: right if it is a dim of the result, and none is summed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from roundelay.parallel._cut import Call, CutDim

__all__ = ["ATTENTION", "PRODUCTS", "attended", "multiplied"]

ATTENTION = frozenset({"scaled_dot_product_attention"})
MATRICES = -3  # dims up to this one count matrices
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
Form = tuple[list[Any], list[str], str]  # operands, the letters of their dims, and of the result


def multiplied(call: Call) -> CutDim | None:
    """Return where a product is cut."""
    form = PRODUCTS[call.name](call)
    if form is None:
        return None
    operands, letters, result = form
    cut = product_of(call, operands, letters, result)
    added = (
        call.args[0]
        if call.name in ADDED
        else call.given("bias", 2)
        if call.name == "linear"
        else None
    )
    if cut is None or not isinstance(added, torch.Tensor):
        return cut
    other = call.of(added)
    if other is not None:
        return cut if cut.alike(other) else None
    return cut if added.dim() < -cut.dim or added.size(cut.dim) == 1 else None


def product_of(
    call: Call, operands: Sequence[Any], letters: Sequence[str], result: str
) -> CutDim | None:
    """Return the cut of a product that is written with a letter for each dim."""
    found: tuple[str, CutDim] | None = None
    for operand, word in zip(operands, letters, strict=True):
        cut = call.of(operand)
        if cut is None:
            continue
        one = word[cut.dim], cut._replace(dim=0)
        if found is not None and (found[0] != one[0] or not found[1].alike(one[1])):
            return None
        found = one
    if found is None or found[0] not in result:
        return None
    for operand, word in zip(operands, letters, strict=True):
        whole = call.of(operand) is None and found[0] in word
        if whole and operand.size(word.index(found[0])) != 1:
            return None
    return found[1]._replace(dim=result.index(found[0]) - len(result))


def attended(call: Call) -> CutDim | None:
    """Return where attention is cut: by heads, of which all that it is given has the same ones."""
    names = ("query", "key", "value", "attn_mask")
    query, *others = (call.given(name, at) for at, name in enumerate(names))
    cut = call.of(query)
    if cut is None or cut.dim > MATRICES:
        return None
    return cut if all(_goes_with(call, one, cut) for one in others) else None


def _goes_with(call: Call, one: Any, query: CutDim) -> bool:
    """Say whether keys, values or a mask are those of this rank's queries, or of all."""
    if not isinstance(one, torch.Tensor):
        return True
    cut = call.of(one)
    if cut is None:
        return one.dim() < -query.dim or one.size(query.dim) == 1
    grouped = all(
        mine * query.parts[0] == theirs * cut.parts[0]
        for mine, theirs in zip(cut.parts, query.parts, strict=True)
    )
    return grouped and cut.alike(query._replace(parts=cut.parts))


def _matmul(call: Call, at: int = 0) -> Form | None:
    left, right = call.args[at : at + 2]
    batch = LETTERS[: max(left.dim(), right.dim())]
    one = "Y" if left.dim() == 1 else batch[: left.dim() - 2][::-1] + "XY"
    other = "Y" if right.dim() == 1 else batch[: right.dim() - 2][::-1] + "YZ"
    longer = max(one[:-2], other[:-2], key=len)
    result = longer + ("X" if left.dim() > 1 else "") + ("Z" if right.dim() > 1 else "")
    return [left, right], [one, other], result


def _added(call: Call) -> Form | None:
    if len(call.args) < 3:  # noqa: PLR2004 - what is added, and both matrices
        return None
    return _matmul(call, 1)


def _linear(call: Call) -> Form | None:
    x, weight = call.given("input", 0), call.given("weight", 1)
    batch = LETTERS[: x.dim() - 1]
    return (
        [x, weight],
        [batch + "Y", "ZY" if weight.dim() > 1 else "Y"],
        batch + "Z" * (weight.dim() > 1),
    )


def _inner(call: Call) -> Form | None:
    left, right = call.args[:2]
    one, other = LETTERS[: left.dim() - 1], LETTERS[left.dim() : left.dim() + right.dim() - 1]
    return [left, right], [one + "Y", other + "Y"], one + other


def _outer(call: Call) -> Form | None:
    return [*call.args[:2]], ["X", "Y"], "XY"


def _tensordot(call: Call) -> Form | None:
    left, right = call.args[:2]
    dims = call.given("dims", 2, 2)
    if isinstance(dims, int):
        dims = [*range(left.dim() - dims, left.dim())], [*range(dims)]
    if isinstance(dims, torch.Tensor):
        return None
    one, other = [*LETTERS[: left.dim()]], [*LETTERS[left.dim() : left.dim() + right.dim()]]
    for here, there in zip(
        *([each] if isinstance(each, int) else each for each in dims), strict=True
    ):
        other[there] = one[here]
    both = {*one} & {*other}
    result = "".join(each for each in one + other if each not in both)
    return [left, right], ["".join(one), "".join(other)], result


def _einsum(call: Call) -> Form | None:
    equation, *operands = call.args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = [*operands[0]]
    if not isinstance(equation, str) or not all(isinstance(one, torch.Tensor) for one in operands):
        return None
    given, arrow, result = equation.replace(" ", "").partition("->")
    words = given.split(",")
    spare = "".join(each for each in LETTERS if each not in equation)
    dots = ""
    if len(words) != len(operands):
        return None
    for at, (word, operand) in enumerate(zip(words, operands, strict=True)):
        if "..." in word:
            own = spare[: operand.dim() - len(word) + 3][::-1]
            words[at], dots = word.replace("...", own), max(dots, own, key=len)
        elif len(word) != operand.dim():
            return None
    if not arrow:
        every = "".join(words)
        result = "..." + "".join(
            sorted(each for each in {*every} if every.count(each) == 1 and each not in dots)
        )
    if any(len({*word}) < len(word) for word in words):  # a diagonal
        return None
    return operands, words, result.replace("...", dots)


ADDED = frozenset({"addmm", "baddbmm", "addmv"})
PRODUCTS: dict[str, Callable[[Call], Form | None]] = {
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "vdot"), _matmul),
    **dict.fromkeys(ADDED, _added),
    "rmatmul": lambda call: _matmul(call._replace(args=call.args[::-1])),
    "linear": _linear, "inner": _inner, "outer": _outer, "ger": _outer,
    "tensordot": _tensordot, "einsum": _einsum,
}  # fmt: skip
