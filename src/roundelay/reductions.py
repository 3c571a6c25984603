"""The thirteen reductions and your own: what they mean, for which dtypes, exactly.

Every fold goes from left to right in an accumulator (float32 for half types) and is rounded once.
Floating-point corner cases are fixed here, so that every engine can agree bit for bit: `min` and
`max` hand on NaN and keep the first of equal values, whatever the sign of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import PurePath
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from roundelay.arguments import shown
from roundelay.errors import InvalidArgumentError, UnknownNameError, UnsupportedReductionError

__all__ = [
    "CODES",
    "DTYPES",
    "LOGICAL",
    "OPS",
    "REDUCTIONS",
    "Array",
    "Located",
    "Op",
    "Reduction",
    "fold",
    "paired",
    "reduction",
]

#: By name, in an order that the native core is asked for when it is first used.
DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
]
CODES = {name: code for code, name in enumerate(DTYPES)}
Array: TypeAlias = npt.NDArray[Any]  # of any dtype: the reduction decides which it takes
Fold: TypeAlias = Callable[[Array, Array], Array]


class Located(NamedTuple):
    """Values with the place each came from: what `maxloc` and `minloc` take and return."""

    values: Array
    locations: Array


@dataclass(frozen=True, slots=True)
class Reduction:
    """A way to fold two arrays into one, element by element."""

    name: str
    summary: str
    fold: Fold
    kinds: str  # numpy dtype kinds it takes: b i u f c
    commutative: bool = True

    def check(self, dtype: np.dtype[Any] | str) -> None:
        """Refuse a dtype, or the name of one, for which this reduction has no meaning."""
        if _kind(dtype) not in self.kinds:
            takes = ", ".join(KINDS[kind] for kind in self.kinds)
            raise UnsupportedReductionError(f"{self.name} takes {takes}, not {dtype}.")


class Op:
    """A reduction of your own: `fn(left, right)` folds two arrays of equal shape and dtype.

    It must be associative. With `commutative=False` only algorithms proved `contiguous` or
    `rank_order` are taken.

    >>> first = Op(lambda left, right: left, commutative=False, name="first")
    >>> first.reduction.commutative
    False
    """

    def __init__(self, fn: Fold, *, commutative: bool = True, name: str | None = None) -> None:
        if not callable(fn):
            raise InvalidArgumentError(f"Op needs a function of two arrays, not {fn!r}.")
        name = name or str(getattr(fn, "__name__", "op"))

        def checked(left: Array, right: Array) -> Array:
            result = np.asarray(fn(left, right))
            if result.shape != left.shape or result.dtype != left.dtype:
                raise UnsupportedReductionError(
                    f"{name} made {result.dtype}{list(result.shape)} out of two arrays of "
                    f"{left.dtype}{list(left.shape)}; it must keep shape and dtype."
                )
            return result

        self.reduction = Reduction(name, "Your own.", checked, "biufc", commutative)
        #: The same in all processes that have made it of the same function.
        self.identity = f"{name} ({_origin(fn)}{'' if commutative else ', not commutative'})"


def _origin(fn: object) -> str:
    """Say which function it is: where it was written, and what it does there.

    >>> one, other = (lambda left, right: left), (lambda left, right: right)
    >>> _origin(one) == _origin(one), _origin(one) == _origin(other)
    (True, False)
    """
    while isinstance(fn, partial):
        fn = fn.func
    fn = getattr(fn, "__func__", fn)  # of a method
    code = getattr(fn, "__code__", None)
    name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", type(fn).__qualname__)
    if code is None:
        return f"{getattr(fn, '__module__', None) or type(fn).__module__}.{name}"
    # A path may differ from host to host, and so may how other constants are shown.
    plain = [
        const for const in code.co_consts if isinstance(const, (int, float, complex, str, bytes))
    ]
    content = repr((code.co_code, code.co_names, plain)).encode()
    line = f"{PurePath(code.co_filename).name}:{code.co_firstlineno}"
    return f"{name} at {line}, {blake2b(content, digest_size=3).hexdigest()}"


KINDS = {
    "b": "bool",
    "i": "signed integers",
    "u": "unsigned integers",
    "f": "floats",
    "c": "complex numbers",
}


def _kind(dtype: np.dtype[Any] | str) -> str:
    # bfloat16 is unknown to numpy, or a void of ml_dtypes; to us it is a float.
    if dtype == "bfloat16" or (isinstance(dtype, np.dtype) and dtype.name == "bfloat16"):
        return "f"
    dtype = np.dtype(dtype)
    if dtype.names == ("value", "location"):
        return _kind(dtype["value"])
    return dtype.kind


def _prod(left: Array, right: Array) -> Array:
    # numpy fuses complex products where the CPU can, so its last bit differs between machines.
    if left.dtype.kind != "c":
        return np.asarray(np.multiply(left, right))
    result = np.empty_like(left)
    result.real = left.real * right.real - left.imag * right.imag
    result.imag = left.real * right.imag + left.imag * right.real
    return result


def _min(left: Array, right: Array) -> Array:
    return np.where((right < left) | (right != right), right, left)  # noqa: PLR0124 - NaN


def _max(left: Array, right: Array) -> Array:
    return np.where((right > left) | (right != right), right, left)  # noqa: PLR0124 - NaN


def _logical(function: Callable[[Array, Array], Array]) -> Fold:
    return lambda left, right: function(left != 0, right != 0).astype(left.dtype)


def _located(beats: Callable[[Array, Array], Array]) -> Fold:
    """Choose the value that beats the other; of equal ones, the lowest location. NaN beats all."""

    def choose(left: Array, right: Array) -> Array:
        a, b = left["value"], right["value"]
        a_nan, b_nan = a != a, b != b  # noqa: PLR0124 - NaN
        better = beats(b, a) | (b_nan & ~a_nan)
        equal = (a == b) | (a_nan & b_nan)
        return np.where(better | (equal & (right["location"] < left["location"])), right, left)

    return choose


def paired(call: str, values: Array, locations: object) -> Array:
    """Return values and locations as one array of pairs: what `maxloc` and `minloc` fold."""
    try:
        places = np.asarray(locations)
    except (TypeError, ValueError, RuntimeError):
        places = np.empty(0)
    whole = places.dtype.kind in "iu" and np.can_cast(places.dtype, np.int64)
    if not whole or places.shape not in ((), values.shape):
        raise InvalidArgumentError(
            f"{call} takes locations that are whole numbers, one for each of the values "
            f"{list(values.shape)}, not {places.dtype}{list(places.shape)}."
        )
    pair = np.empty(values.shape, dtype=[("value", values.dtype), ("location", np.int64)])
    pair["value"], pair["location"] = values, places
    return pair


REDUCTIONS: Mapping[str, Reduction] = {
    made.name: made
    for made in (
        Reduction("sum", "Add; integers wrap, bools saturate.", np.add, "biufc"),
        Reduction("prod", "Multiply; integers wrap.", _prod, "biufc"),
        Reduction("min", "Keep the smallest; NaN wins.", _min, "biuf"),
        Reduction("max", "Keep the largest; NaN wins.", _max, "biuf"),
        Reduction("avg", "Add, then divide by the number of ranks.", np.add, "fc"),
        Reduction("land", "1 where all are non-zero.", _logical(np.logical_and), "biufc"),
        Reduction("lor", "1 where any is non-zero.", _logical(np.logical_or), "biufc"),
        Reduction("lxor", "1 where an odd number is non-zero.", _logical(np.logical_xor), "biufc"),
        Reduction("band", "Keep the bits set in all.", np.bitwise_and, "biu"),
        Reduction("bor", "Keep the bits set in any.", np.bitwise_or, "biu"),
        Reduction("bxor", "Keep the bits set in an odd number.", np.bitwise_xor, "biu"),
        Reduction("maxloc", "Keep the largest and where it was.", _located(np.greater), "biuf"),
        Reduction("minloc", "Keep the smallest and where it was.", _located(np.less), "biuf"),
    )
}
OPS = {name: code for code, name in enumerate(REDUCTIONS)}  # in such an order too
LOGICAL = ("land", "lor", "lxor")  # which give 0 and 1 whatever comes


#: What others call them.
ALSO_CALLED = {
    "add": "sum", "mean": "avg", "average": "avg", "product": "prod", "mul": "prod",
    "multiply": "prod", "minimum": "min", "amin": "min", "maximum": "max", "amax": "max",
    "and": "land", "all": "land", "or": "lor", "any": "lor", "xor": "lxor", "bitwise_and": "band",
    "bitwise_or": "bor", "bitwise_xor": "bxor", "argmax": "maxloc", "argmin": "minloc",
}  # fmt: skip


def reduction(op: str | Op) -> Reduction:
    """Return the reduction that `op` names or is.

    >>> reduction("sum").name
    'sum'
    """
    if isinstance(op, Op):
        return op.reduction
    if not isinstance(op, str):
        raise InvalidArgumentError(
            f"op is the name of a reduction, such as 'sum', or an rd.Op, not {shown(op)}."
        )
    if op not in REDUCTIONS:
        raise UnknownNameError("reductions", op, REDUCTIONS, meant=ALSO_CALLED.get(op.lower()))
    return REDUCTIONS[op]


def fold(made: Reduction, operands: Sequence[Array], *, divide_by: int | None = None) -> Array:
    """Fold operands from left to right in the accumulator, and round once.

    >>> fold(REDUCTIONS["avg"], [np.array([1.0]), np.array([2.0])], divide_by=2)
    array([1.5])
    """
    dtype = operands[0].dtype
    half = dtype.name in ("float16", "bfloat16")
    with np.errstate(all="ignore"):  # overflow and invalid give inf and NaN, as on every engine
        result = operands[0].astype(np.float32) if half else operands[0]
        for operand in operands[1:]:
            result = made.fold(result, operand.astype(result.dtype) if half else operand)
        if divide_by is not None:
            # A complex number is divided as the two reals it is: one rounding each.
            real = result.view(result.real.dtype)
            result = (real / real.dtype.type(divide_by)).view(result.dtype)
        return result.astype(dtype, copy=False)
