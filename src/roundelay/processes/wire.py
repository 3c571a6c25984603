"""Values on their way between processes: msgpack with arrays in it, and pickle only when asked.

What comes out has the type that went in: a tuple stays a tuple, a numpy scalar a numpy scalar. What
has no exact form is refused by name rather than changed. This is the one file that knows pickle.
"""

from __future__ import annotations

import importlib
import pickle
from typing import Any

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from roundelay.errors import UnsendableError
from roundelay.reductions import Array, Located

__all__ = ["decode", "encode"]

TUPLE, ARRAY, SCALAR, COMPLEX, INTEGER, LOCATED, DICT, PICKLED = range(1, 9)
EXACT = (type(None), bool, float, str, bytes)
SMALL = range(-(1 << 63), 1 << 64)  # the whole numbers of msgpack
DEEPEST = 100
EXTRA_DTYPES = "ml_dtypes"  # bfloat16 and its kin have no name of numpy's own


def encode(value: object, *, allow_pickle: bool = False, what: str = "this value") -> bytes:
    """Return `value` as bytes; what can't go without pickle is an error that names its place.

    >>> decode(encode({"loss": 0.5, "shape": (2, 3)}))
    {'loss': 0.5, 'shape': (2, 3)}
    """
    if allow_pickle:
        return b"\x01" + _pack(Ext(PICKLED, pickle.dumps(value)), what)
    return b"\x00" + _pack(_plain(value, what, 0), what)


def decode(data: bytes, *, allow_pickle: bool = False) -> Any:  # whatever was encoded
    """Return the value that `data` holds; a pickled one only when that is asked for."""
    if data[:1] != b"\x00" and not allow_pickle:
        raise UnsendableError("a pickled value came where none was asked for; pass allow_pickle.")
    return msgspec.msgpack.decode(data[1:], ext_hook=_unpickle if allow_pickle else _unpack)


def _pack(plain: object, what: str) -> bytes:
    try:
        return msgspec.msgpack.encode(plain)
    except (OverflowError, ValueError) as error:
        raise UnsendableError(f"{what} does not fit into one message: {error}.") from None


def _plain(value: object, what: str, depth: int) -> object:  # noqa: PLR0911 - one per kind
    """Return `value` in words of msgpack; `what` says where in the whole it is."""
    kind = type(value)
    if depth > DEEPEST:
        raise UnsendableError(f"{what} is more than {DEEPEST} containers deep. Flatten it.")
    if kind in EXACT:
        return value
    if isinstance(value, int) and kind is int:
        return value if value in SMALL else Ext(INTEGER, str(value).encode())
    if isinstance(value, (list, tuple)) and kind in (list, tuple, Located):
        items = [_plain(item, f"{what}[{n}]", depth + 1) for n, item in enumerate(value)]
        code = {tuple: TUPLE, Located: LOCATED}.get(kind)
        return items if code is None else Ext(code, _pack(items, what))
    if isinstance(value, dict) and kind is dict:
        # As pairs: keys of any sendable kind, and in the order they came.
        pairs = [
            [
                _plain(key, f"a key of {what}", depth + 1),
                _plain(item, f"{what}[{key!r}]", depth + 1),
            ]
            for key, item in value.items()
        ]
        return Ext(DICT, _pack(pairs, what))
    if isinstance(value, complex) and kind is complex:
        return Ext(COMPLEX, _pack([value.real, value.imag], what))
    if isinstance(value, np.ndarray) and kind is np.ndarray and not value.dtype.hasobject:
        return Ext(ARRAY, _array(value, what))
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return Ext(SCALAR, _array(np.asarray(value), what))
    raise UnsendableError(
        f"{what} is a {kind.__module__}.{kind.__qualname__}, which does not go from process to "
        f"process as it is. Return numbers, strings, bytes, lists, tuples, dicts and numpy arrays, "
        f"or pass allow_pickle=True."
    )


def _array(array: Array, what: str) -> bytes:
    descr: Any = array.dtype.descr if array.dtype.names else array.dtype.str
    if _dtype(descr) != array.dtype:
        descr = f"{EXTRA_DTYPES}.{array.dtype.name}"
        if array.dtype.names or _dtype(descr) != array.dtype:
            raise UnsendableError(f"{what} has dtype {array.dtype}, which has no exact short form.")
    # Rebuilding from bytes, not .npy: that format has no word for dtypes from elsewhere.
    return _pack([descr, list(array.shape), array.tobytes()], what)


def _unpack_array(data: bytes) -> Array:
    descr, shape, raw = msgspec.msgpack.decode(data)
    array = np.empty(shape, _dtype(descr))
    if array.nbytes:
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(raw, np.uint8)
    return array


def _dtype(descr: Any) -> np.dtype[Any]:
    """Return the dtype that a description gives: a string, or a list of fields."""
    if isinstance(descr, str):
        module, _, name = descr.partition(".")
        if module == EXTRA_DTYPES:
            extra: np.dtype[Any] = np.dtype(getattr(importlib.import_module(module), name))
            return extra
        return np.dtype(descr)
    fields = []
    for name, kind, *shape in descr:
        title = name if isinstance(name, str) else tuple(name)
        fields.append((title, _dtype(kind), *(tuple(each) for each in shape)))
    return np.dtype(fields)


def _unpack(code: int, memory: memoryview) -> object:
    data = bytes(memory)
    if code == INTEGER:
        return int(data)
    if code in (ARRAY, SCALAR):
        array = _unpack_array(data)
        return array if code == ARRAY else array[()]
    items = msgspec.msgpack.decode(data, ext_hook=_unpack)
    if code == DICT:
        return dict(items)
    return {COMPLEX: complex, LOCATED: Located}[code](*items) if code != TUPLE else tuple(items)


def _unpickle(code: int, memory: memoryview) -> object:
    return pickle.loads(memory) if code == PICKLED else _unpack(code, memory)  # noqa: S301 - asked
