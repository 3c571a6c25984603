"""What goes between processes comes out as it went in, or is refused by name."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from roundelay.errors import InvalidArgumentError, UnsendableError
from roundelay.processes.wire import decode, encode
from roundelay.reductions import Located

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner, max_size=4)
    ),
    max_leaves=20,
)
ARRAYS = hnp.arrays(
    hnp.scalar_dtypes() | hnp.array_dtypes(allow_subarrays=False),
    hnp.array_shapes(min_dims=0, min_side=0),
)


def same(found: Any, given: Any) -> None:
    assert type(found) is type(given)
    if isinstance(given, (list, tuple)):
        for one, other in zip(found, given, strict=True):
            same(one, other)
    elif isinstance(given, dict):
        same(list(found.items()), list(given.items()))
    else:
        assert found == given


@given(VALUES)
def test_values_keep_their_type_and_order(value: Any) -> None:
    same(decode(encode(value)), value)
    same(decode(encode(value, allow_pickle=True), allow_pickle=True), value)


@given(ARRAYS)
def test_arrays_keep_dtype_shape_and_bits(array: Any) -> None:
    found = decode(encode([array]))[0]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    assert found.flags.writeable


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4"])
def test_dtypes_from_elsewhere_keep_their_name(dtype: str) -> None:
    array = np.arange(4).astype(getattr(ml_dtypes, dtype))
    found = decode(encode(array))
    assert found.dtype == array.dtype
    assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize("scalar", [np.float32(0.5), np.int8(-3), np.bool_(True), np.complex64(1j)])  # noqa: FBT003
def test_numpy_scalars_stay_what_they_are(scalar: Any) -> None:
    same(decode(encode(scalar)), scalar)


def test_nan_and_pairs_of_values_and_places() -> None:
    assert math.isnan(decode(encode(math.nan)))
    found = decode(encode(Located(np.ones(2), np.arange(2))))
    assert type(found) is Located
    np.testing.assert_array_equal(found.locations, [0, 1])


class Pair(NamedTuple):
    a: int
    b: int


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"model": object()}, r"it\['model'\] is a builtins.object"),
        ([1, {2}], r"it\[1\] is a builtins.set"),
        ({frozenset(): 1}, "a key of it is a builtins.frozenset"),
        (OrderedDict(a=1), "it is a collections.OrderedDict"),
        (Pair(1, 2), "Pair"),
        (np.array([object()]), "it is a numpy.ndarray"),
        (np.ma.array([1]), "MaskedArray"),
        (nested(1000), "more than 100 containers deep"),
        (lambda: None, "function"),
    ],
)
def test_what_would_change_on_the_way_is_refused_with_its_place(value: Any, place: str) -> None:
    with pytest.raises(UnsendableError, match=place) as caught:
        encode(value, what="it")
    assert isinstance(caught.value, InvalidArgumentError)


def test_pickle_is_opened_only_when_asked_for() -> None:
    assert decode(encode({1, 2}, allow_pickle=True), allow_pickle=True) == {1, 2}
    with pytest.raises(UnsendableError, match="pickled"):
        decode(encode({1, 2}, allow_pickle=True))
    # A plain message that claims to hold a pickle is no way around.
    plain = b"\x00" + encode({1, 2}, allow_pickle=True)[1:]
    with pytest.raises(Exception):  # noqa: B017 - whatever, but no object
        decode(plain)
