"""Python values as JSON that gives back the very same values; tensors go into files of their own.

JSON has no tuples, no infinities and no keys but strings. What it lacks is written as an object
with the key "!". What has no form at all is refused by its place.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from roundelay.errors import CheckpointError, UnsendableError
from roundelay.training.checkpoint._files import NAMES, refused
from roundelay.training.checkpoint._files import PAIRS as PAIRED
from roundelay.training.optimizer.state_tree import Slot

__all__ = ["pack", "unpack"]

SMALL = range(-(1 << 63), 1 << 63)
DEEPEST = 50
#: Dicts that are written as pairs, and their words.
PAIRS: dict[type, str] = {dict: "pairs", Counter: "counter", OrderedDict: "ordered"}


def pack(  # noqa: C901, PLR0911 - one per kind
    value: object, put: Callable[[torch.Tensor], str], what: str, *, depth: int = 0
) -> Any:
    """Return a value in words of JSON; `put` keeps a tensor and says by which name.

    >>> pack((1, float("inf")), str, "it")
    {'!': 'tuple', 'of': [1, {'!': 'float', 'of': 'inf'}]}
    """
    if depth > DEEPEST:
        raise UnsendableError(f"{what} is more than {DEEPEST} containers deep. Flatten it.")
    if isinstance(value, torch.Tensor):
        return {"!": "tensor", "of": put(_checked(value, what))}
    if isinstance(value, (np.ndarray, np.generic)):
        return _pack_numpy(value, put, what)
    if value is None or type(value) in (bool, str) or (type(value) is int and value in SMALL):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"!": "float", "of": repr(value)}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = [pack(one, put, f"{what}[{at}]", depth=depth + 1) for at, one in enumerate(value)]
        return items if type(value) is list else {"!": "tuple", "of": items}
    if isinstance(value, dict):
        return _pack_dict(value, put, what, depth)
    if isinstance(value, deque):
        items = [pack(one, put, f"{what}[{at}]", depth=depth + 1) for at, one in enumerate(value)]
        return {"!": "deque", "of": items, "most": value.maxlen}
    if isinstance(value, Slot):
        return {"!": "elements", "of": value.key, "shape": list(value.shape)}
    if type(value) is int:
        raise UnsendableError(f"{what} is a number of more than 64 bits. Give it as a string.")
    raise UnsendableError(
        f"{what} is a {type(value).__name__}, which a checkpoint has no form for. It takes "
        f"numbers, strings, lists, tuples, deques, dicts, arrays and tensors."
    )


def _checked(tensor: torch.Tensor, what: str) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        raise UnsendableError(f"{what} is a tensor of {tensor.layout}. Save it as to_dense().")
    if tensor.dtype not in (*NAMES, *PAIRED):
        raise UnsendableError(refused(what, tensor.dtype))
    return tensor


def _pack_dict(
    value: dict[Any, Any], put: Callable[[torch.Tensor], str], what: str, depth: int
) -> Any:
    items = {key: pack(one, put, f"{what}[{key!r}]", depth=depth + 1) for key, one in value.items()}
    if type(value) is dict and all(type(key) is str for key in items) and "!" not in items:
        return items
    if type(value) not in PAIRS:
        raise UnsendableError(
            f"{what} is a {type(value).__name__}; a checkpoint takes dicts, OrderedDicts and "
            f"Counters."
        )
    pairs = [[pack(key, put, f"a key of {what}", depth=depth + 1), one]
             for key, one in items.items()]  # fmt: skip
    return {"!": PAIRS[type(value)], "of": pairs}


def _pack_numpy(value: Any, put: Callable[[torch.Tensor], str], what: str) -> Any:
    if isinstance(value, np.generic):
        return pack(value.item(), put, what)  # a plain number does the same
    try:
        tensor = torch.from_numpy(np.array(value, order="C"))
    except TypeError:
        raise UnsendableError(
            f"{what} is an array of {value.dtype}, which a checkpoint has no form for."
        ) from None
    return {"!": "array", "of": put(tensor)}


def unpack(plain: Any, get: Callable[[str], Any]) -> Any:  # noqa: C901, PLR0911 - one per kind
    """Return the value that JSON stands for; `get` finds a tensor by its name.

    >>> unpack({"!": "tuple", "of": [1, {"!": "float", "of": "inf"}]}, None)
    (1, inf)
    """
    if isinstance(plain, list):
        return [unpack(one, get) for one in plain]
    if not isinstance(plain, dict):
        return plain
    if "!" not in plain:
        return {key: unpack(one, get) for key, one in plain.items()}
    kind: Any = plain["!"]
    of: Any = plain.get("of")
    if kind in ("tensor", "array") and isinstance(of, str):
        tensor = get(of)
        return tensor if kind == "tensor" else tensor.numpy()
    if kind == "elements":
        return Slot(of, tuple(plain["shape"]))
    if kind == "deque":
        return deque((unpack(one, get) for one in of), plain["most"])
    if kind == "tuple":
        return tuple(unpack(one, get) for one in of)
    if kind == "float" and of in ("nan", "inf", "-inf"):
        return float(of)
    for made, word in PAIRS.items():
        if kind == word:
            return made({unpack(key, get): unpack(one, get) for key, one in of})
    raise CheckpointError(f"The checkpoint has a value of the unknown kind {kind!r}.")
